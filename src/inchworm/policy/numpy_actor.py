"""A policy as a NumPy program of one screen: the source of `actor.py`, written for one spec, and the weights that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import numpy as np
from gymnasium import spaces

from inchworm.core.padding import DIMENSIONS_KEY
from inchworm.core.spaces import MASK_KEY, Path, Space
from inchworm.policy.layout import ObservationPart, channels_first
from inchworm.policy.spec import LOG_STD, TANH_LOG_STD_RANGE, PolicySpec
from inchworm.policy.statistics import PolicyStatistics

_CENTER, _INVERSE_STD, _LOW, _HIGH = "center", "inverse_std", "low", "high"

_ACTIVATIONS = {
    "tanh": "np.tanh(x)",
    "relu": "np.maximum(x, 0)",
    "elu": "np.where(x > 0, x, np.expm1(np.minimum(x, 0)))",
    "leaky_relu": "np.where(x > 0, x, x * x.dtype.type(0.01))",
    "silu": "x * sigmoid(x)",
}
_SIGMOID = '''
def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow."""
    return (np.tanh(x * x.dtype.type(0.5)) + 1) * x.dtype.type(0.5)
'''
_ONE_HOT = '''
def one_hot(values, sizes, starts):
    """[B, entries] -> [B, sum of sizes]"""
    entries = np.asarray(values).reshape(len(values), -1).astype(np.int64) - starts
    return np.concatenate([np.arange(size) == entries[:, i, None] for i, size in enumerate(sizes)], 1).astype(np.float32)
'''
_DENSE = """
def dense(x, name):
    return x @ W[name + ".weight"].T + W[name + ".bias"]


def hidden(x, name):
    x = dense(x, name)
    return {activation}
"""
_CONVOLVE = '''
def convolve(x, name, stride):
    """[B, channels, height, width] -> the same, with a ReLU."""
    kernel, bias = W[name + ".weight"], W[name + ".bias"]
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[2:], (2, 3))[:, :, ::stride, ::stride]
    return np.maximum(np.einsum("bchwij,ocij->bohw", windows, kernel, optimize=True) + bias[:, None, None], 0)
'''
_LSTM = '''
def remember(x, before, name):
    """One step of an LSTM: gates in the order input, forget, cell, output."""
    h, c = before
    i, f, g, o = np.split(dense(x, name + ".input") + dense(h, name + ".state"), 4, 1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c
'''
_GRU = '''
def remember(x, before, name):
    """One step of a GRU: gates in the order reset, update, new."""
    (h,) = before
    (r, z, n), (hr, hz, hn) = np.split(dense(x, name + ".input"), 3, 1), np.split(dense(h, name + ".state"), 3, 1)
    n = np.tanh(n + sigmoid(r + hr) * hn)
    return (n + sigmoid(z + hz) * (h - n),)
'''
_CHOOSE = '''
def choose(logits, uniform):
    """[B] the most likely choice, or the one that a uniform number draws."""
    if uniform is None:
        return logits.argmax(1)
    total = np.cumsum(np.exp(logits - logits.max(1, keepdims=True)), 1)
    return (total[:, :-1] <= uniform[:, None] * total[:, -1:]).sum(1)
'''


def actor_weights(spec: PolicySpec, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What `actor.py` reads: the actor's weights, the observation normaliser as two vectors, and the bounds of continuous actions."""
    kept = {name: np.asarray(weights[name]) for name in spec.layers if not name.startswith("critic.")}
    dtype = kept["actor.head.weight"].dtype
    if LOG_STD in kept and spec.config.action_bounds == "tanh":
        kept[LOG_STD] = np.clip(kept[LOG_STD], *TANH_LOG_STD_RANGE)
    statistics = PolicyStatistics(spec)
    statistics.from_weights(weights)
    if (scale := statistics.observation_scale) is not None:
        kept |= {_CENTER: scale[0].astype(dtype), _INVERSE_STD: scale[1].astype(dtype)}
    if spec.actions.num_gaussians:
        kept |= {_LOW: spec.actions.low, _HIGH: spec.actions.high}
    return kept


def actor_source(spec: PolicySpec) -> str:
    """The text of `actor.py`. Whatever comes from the spec, such as the key of an observation, enters it as a literal."""
    forward, actions = _outputs(spec), _act(spec)
    body = "\n".join(forward + actions)
    used = [_SIGMOID] if spec.memory is not None or spec.config.activation == "silu" else []
    used += [_ONE_HOT] if "one_hot(" in body else []
    used += [_DENSE.replace("{activation}", _ACTIVATIONS[spec.config.activation])]
    used += [_CONVOLVE] if "convolve(" in body else []
    used += [{"lstm": _LSTM, "gru": _GRU}[spec.memory.kind]] if spec.memory is not None else []
    used += [_CHOOSE] if spec.actions.num_logits else []
    return "\n".join([_head(spec), *used, "\n".join(forward), "\n".join(actions), ""])


def _head(spec: PolicySpec) -> str:
    """The docstring, the weights and the initial memory."""
    if spec.memory is None:
        begin, call = "return ()", "action, _ = act(observation)"
    else:
        zeros = f'np.zeros((batch, {spec.memory.layers}, {spec.memory.size}), W["actor.head.weight"].dtype)'
        begin = "return {" + ", ".join(f'"{name}": {zeros}' for name in spec.memory.names) + "}"
        call = "action, state = act(observation, state)  # None, or zeros in its rows, where an episode starts"
    return f'''"""A policy that inchworm exported: this file and weights.npz need NumPy and nothing else.

    {call}
    action, state = act(observation, state, np.random.default_rng(0))  # sampled; the most likely one without a generator

Observations are batches: arrays [B, ...] in the structure of the observation space, and so are actions.
"""

from pathlib import Path

import numpy as np

W = dict(np.load(Path(__file__).with_name("weights.npz")))


def initial_state(batch):
    """The memory at the start of an episode."""
    {begin}
'''


def _at(root: str, path: Path) -> str:
    """The expression of a leaf of a tree."""
    return root + "".join(f"[{key!r}]" for key in path)


def _outputs(spec: PolicySpec) -> list[str]:
    """The function from observations to logits, means and the next memory."""
    layout, lines = spec.observations, ["", "def outputs(observation, state=None):"]
    lines += ['    """The logits [B, C], with -1e8 where a mask forbids, the means [B, D], log_std [D], and the next state."""']
    lines += [f"    batch = len({_at('observation', layout.parts[0].path)})"]
    pieces = [_flat_piece(part) for part in layout.flat]
    if layout.flat:
        lines += [f"    x = np.concatenate([{', '.join(pieces)}], 1)" if len(pieces) > 1 else f"    x = {pieces[0]}"]
        lines += ['    x = x.astype(W["actor.head.weight"].dtype)']
        if PolicyStatistics(spec).observations is not None:
            clip = spec.config.observation_clip
            lines += [f'    x = np.clip((x - W["{_CENTER}"]) * W["{_INVERSE_STD}"], -{clip!r}, {clip!r})']
    images = []
    for index, part in enumerate(layout.images):
        lines += _image_lines(spec, part, f"image{index}")
        images.append(f"image{index}")
    if images:
        whole = ["x", *images] if layout.flat else images
        lines += [f"    x = np.concatenate([{', '.join(whole)}], 1)" if len(whole) > 1 else f"    x = {whole[0]}"]
    lines += _layers(spec)
    lines += ['    x = dense(x, "actor.head")', *_legal_lines(spec)]
    log_std = f'W["{LOG_STD}"]' if spec.actions.num_gaussians else "np.zeros(0, np.float32)"
    logits = spec.actions.num_logits
    return [*lines, f'    return {{"logits": x[:, :{logits}], "means": x[:, {logits}:], "log_std": {log_std}, "state": state}}', ""]


def _flat_piece(part: ObservationPart) -> str:
    """The expression of a part of the flat input."""
    value = _at("observation", part.path)
    if part.kind == "one_hot":
        return f"one_hot({value}, {part.sizes!r}, {part.starts!r})"
    scaled = "" if part.scale == 1.0 else f" * np.float32({part.scale!r})"
    return f"np.asarray({value}, np.float32).reshape(batch, {part.size}){scaled}"


def _image_lines(spec: PolicySpec, part: ObservationPart, to: str) -> list[str]:
    """The convolutions of an image, and the dense layer after them."""
    raw = f"np.asarray({_at('observation', part.path)}, np.float32)"
    if not channels_first(part.shape):
        raw += ".transpose(0, 3, 1, 2)"
    name = spec.image_name(part)
    lines = [f"    {to} = {raw}" + ("" if part.scale == 1.0 else f" * np.float32({part.scale!r})")]
    for index, (_, _, stride) in enumerate(spec.config.cnn_filters):
        lines += [f"    {to} = convolve({to}, {f'{name}.{index}'!r}, {stride})"]
    return [*lines, f"    {to} = np.maximum(dense({to}.reshape(batch, -1), {f'{name}.head'!r}), 0)"]


def _layers(spec: PolicySpec) -> list[str]:
    """The memory and the hidden layers, in their order."""

    def stack(prefix: str) -> list[str]:
        count = sum(name.startswith(f"{prefix}.") and name.endswith(".weight") and ".head." not in name for name in spec.layers)
        if count < 3:
            return [f'    x = hidden(x, "{prefix}.{index}")' for index in range(count)]
        return [f"    for layer in range({count}):", f'        x = hidden(x, f"{prefix}.{{layer}}")']

    own = [*stack("trunk")], [*stack("actor")]
    if spec.memory is None:
        return ["    state = ()", *own[0], *own[1]]
    names = spec.memory.names
    remembered = [
        "    state = initial_state(batch) if state is None else state",
        "    after = []",
        f"    for layer in range({spec.memory.layers}):",
        f'        after.append(remember(x, [state[name][:, layer] for name in {names!r}], f"memory.{{layer}}"))',
        "        x = after[-1][0]",
        f"    state = {{name: np.stack(parts, 1) for name, parts in zip({names!r}, zip(*after))}}",
    ]
    return [*own[0], *remembered, *own[1]] if spec.memory_is_last else [*remembered, *own[0], *own[1]]


def _legal_lines(spec: PolicySpec) -> list[str]:
    """What masks forbid: choices, and dimensions that an agent does not have."""
    lines = []
    if spec.observations.has_mask:
        paths = [(MASK_KEY, *part.path) for part in spec.actions.parts if part.kind == "categorical"]
        masks = [f"np.asarray({_at('observation', path)}).reshape(batch, -1)" for path in paths]
        mask = f"np.concatenate([{', '.join(masks)}], 1)" if len(masks) > 1 else masks[0]
        logits = spec.actions.num_logits
        lines += [f"    legal = {mask} != 0", f"    x[:, :{logits}] = np.where(legal, x[:, :{logits}], x.dtype.type(-1e8))"]
    return lines


def _act(spec: PolicySpec) -> list[str]:
    """The function from observations to actions."""
    layout = spec.actions
    lines = ["", "def act(observation, state=None, rng=None):"]
    lines += [
        '    """The actions of a batch as the environment takes them, and the next state."""',
        "    out = outputs(observation, state)",
    ]
    if layout.num_logits:
        groups = [0, *accumulate(layout.group_sizes)]
        count = len(layout.group_sizes)
        lines += [
            '    logits = out["logits"]',
            f"    uniform = [None] * {count} if rng is None else rng.random((len(logits), {count})).T",
            f"    ends = {groups!r}",
            "    choice = np.stack([choose(logits[:, a:b], u) for a, b, u in zip(ends, ends[1:], uniform)], 1)",
        ]
    if layout.num_gaussians:
        lines += ['    value = out["means"]', "    if rng is not None:"]
        lines += ['        value = value + np.exp(out["log_std"]) * rng.standard_normal(value.shape, np.float32)']
        lines += ["    value = value.astype(np.float32)"]
        if spec.has_dimensions:  # those that an agent lacks are 0
            lines += [f"    value = np.where(np.asarray(observation[{DIMENSIONS_KEY!r}]) != 0, value, np.float32(0))"]
        if layout.bounds == "tanh":
            lines += [f'    value = W["{_LOW}"] + (np.tanh(value) + 1) * (0.5 * (W["{_HIGH}"] - W["{_LOW}"]))']
        lines += [f'    value = np.clip(value, W["{_LOW}"], W["{_HIGH}"])']
    return [*lines, f'    return {_action_tree(spec)}, out["state"]']


def _action_tree(spec: PolicySpec) -> str:
    """The expression of the action in the structure of its space."""
    expressions: dict[Path, str] = {}
    choices = values = 0
    for part in spec.actions.parts:
        shape = "".join(f", {size}" for size in part.shape)
        if part.kind == "categorical":
            start = part.starts.tolist()
            added = "" if not any(start) else f" + np.array({start!r})"
            expressions[part.path] = f"(choice[:, {choices}:{choices + part.width}]{added})"
            choices += part.width
        else:
            expressions[part.path] = f"value[:, {values}:{values + part.width}]"
            values += part.width
        expressions[part.path] += f".reshape(-1{shape}).astype({part.dtype.name!r})"

    def walk(space: Space, path: Path = ()) -> str:
        if isinstance(space, spaces.Dict):
            return "{" + ", ".join(f"{key!r}: {walk(space.spaces[key], (*path, key))}" for key in sorted(space.spaces)) + "}"
        if isinstance(space, spaces.Tuple):
            return "(" + "".join(f"{walk(inner, (*path, index))}, " for index, inner in enumerate(space.spaces)) + ")"
        return expressions[path]

    return walk(spec.action_space)
