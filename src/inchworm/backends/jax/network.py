"""The built-in network as pure functions, and the flat arrays that it reads and writes (steps 4 and 8 of 9), as in `backends/numpy/policy`.

Weights are a mapping under the spec's names, as in policy files; statistics are arrays (`Scales`), so that a change of them compiles
nothing. Every function can be jitted, differentiated, scanned and vmapped.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from inchworm.core.errors import RolloutError
from inchworm.core.padding import DIMENSIONS_KEY
from inchworm.core.spaces import MASK_KEY, build_tree, leaf
from inchworm.core.types import Tree
from inchworm.policy.layout import ActionLayout, MemoryLayout, ObservationLayout, ObservationPart, channels_first
from inchworm.policy.spec import LOG_STD, NO_GLOBAL_STATE, TANH_LOG_STD_RANGE, PolicySpec
from inchworm.policy.statistics import PolicyStatistics

# LSTM and GRU: one `lax.scan` over the rows of all sequences, with the equations of `backends/numpy/network`. What a layer reads of its
# input, W x + b, is one product for all rows; only the product with the state is left inside the scan.


class Past(NamedTuple):
    """The memory of sequences [L, N]."""

    state: Tree
    """[N, layers, size] before the first row."""
    starts: Array
    """[L, N] bool: reset before reading this row."""


def run_memory(layout: MemoryLayout, params: Mapping[str, Array], rows: Array, past: Past) -> tuple[Array, Tree]:
    """Features [L, N, size] of sequences [L, N, in] that begin with `past`, and the state [N, layers, size] after the last row."""
    after: dict[str, list[Array]] = {name: [] for name in layout.names}
    advance = _lstm if layout.kind == "lstm" else _gru
    for layer in range(layout.layers):
        w, b, u, d = (params[f"memory.{layer}.{part}"] for part in ("input.weight", "input.bias", "state.weight", "state.bias"))
        begin = tuple(past.state[name][:, layer].astype(rows.dtype) for name in layout.names)
        of_input = rows @ w.T + b  # [L, N, gates · size]

        def step(state: tuple[Array, ...], row: tuple[Array, Array], u: Array = u, d: Array = d) -> tuple[tuple[Array, ...], Array]:
            read, starts = row
            state = advance(read, tuple(jnp.where(starts[:, None], 0, part) for part in state), u, d)
            return state, state[0]

        if len(rows) == 1:  # acting, and the successors of cut rows
            end, features = step(begin, (of_input[0], past.starts[0]))
            rows = features[None]
        else:
            end, rows = lax.scan(step, begin, (of_input, past.starts))
        for name, part in zip(layout.names, end):
            after[name].append(part)
    return rows, {name: jnp.stack(parts, 1) for name, parts in after.items()}


def _lstm(of_input: Array, state: tuple[Array, ...], u: Array, d: Array) -> tuple[Array, ...]:
    """(h', c') from W x + b [N, 4 size] and (h, c)."""
    hidden, cell = state
    into, forget, new, out = jnp.split(of_input + (hidden @ u.T + d), 4, axis=-1)
    cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(into) * jnp.tanh(new)
    return jax.nn.sigmoid(out) * jnp.tanh(cell), cell


def _gru(of_input: Array, state: tuple[Array, ...], u: Array, d: Array) -> tuple[Array, ...]:
    """(h',) from W x + b [N, 3 size] and (h,)."""
    (hidden,) = state
    size = hidden.shape[-1]
    of_memory = hidden @ u.T + d
    opened = jax.nn.sigmoid(of_input[:, : 2 * size] + of_memory[:, : 2 * size])
    reset, update = opened[:, :size], opened[:, size:]
    new = jnp.tanh(of_input[:, 2 * size :] + reset * of_memory[:, 2 * size :])
    return (new + update * (hidden - new),)


Params = Mapping[str, Array]
"""The weights by the spec's names: dense [out, in], convolution [out, in, kernel, kernel], bias [out]."""

COMPILER_OPTIONS = {} if "xla_backend_optimization_level" in os.environ.get("XLA_FLAGS", "") else {"xla_backend_optimization_level": 1}
"""With XLA's first level, not its third, the programs here were as fast and took a fifth less time to compile."""

REVERSED = ".reversed"
"""What `with_reversed_layers` adds to a name."""

ACTIVATIONS: dict[str, Any] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "elu": jax.nn.elu,
    "leaky_relu": jax.nn.leaky_relu,
    "silu": jax.nn.silu,
}


@contextlib.contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Collect no cycles inside: tracing a program makes so many objects that looking through all of them took a sixth of the time."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


class Scales(NamedTuple):
    """The normalisers' numbers; 0 and 1 where one is off."""

    center: Any
    """[F] what is subtracted from the flat observation."""
    inverse_std: Any
    """[F] what the result is multiplied with."""
    world_center: Any
    """[G] the same for the flat global state; empty without a central critic."""
    world_inverse_std: Any
    value_mean: Any
    """What the value head's output, times `value_std`, is moved by."""
    value_std: Any


def scales_of(spec: PolicySpec, statistics: PolicyStatistics, dtype: Any = np.float32) -> Scales:
    """The current numbers of a policy's normalisers, as NumPy arrays."""
    widths = (spec.observations.size, 0 if spec.global_state is None else spec.global_state.size)
    found = (statistics.observation_scale, statistics.global_scale)
    pairs = [(np.zeros(width), np.ones(width)) if scale is None else scale for width, scale in zip(widths, found)]
    numbers = (*pairs[0], *pairs[1], statistics.value_mean, statistics.value_std)
    return Scales._make(np.asarray(number, dtype) for number in numbers)


class Inputs(NamedTuple):
    """What a network reads: N rows, encoded and normalised."""

    flat: Array
    """[N, F]"""
    images: tuple[Array, ...]
    """[N, *image] each, raw."""
    world: Array
    """[N, G] for a central critic; else [N, 0]."""
    valid: Array
    """[N] bool: a central critic reads nothing else of an agent that is not."""


def encode_observations(layout: ObservationLayout, observations: Tree, num_leading: int) -> Array:
    """Observations [..., *obs] as the flat input [..., F] f32."""
    pieces: list[Array] = []
    for part in layout.flat:
        values: Any = reduce(getitem, part.path, observations)
        leading = values.shape[:num_leading]
        if part.kind == "box":
            flat = values.astype(jnp.float32).reshape(*leading, part.size)
            pieces.append(flat if part.scale == 1.0 else flat * np.float32(part.scale))
            continue
        entries = values.reshape(*leading, len(part.sizes))
        for index, (start, size) in enumerate(zip(part.starts, part.sizes)):
            pieces.append((entries[..., index, None] == jnp.arange(start, start + size)).astype(jnp.float32))
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=-1)


def encode_mask(layout: ActionLayout, mask: Tree, num_leading: int) -> Array:
    """A tree of action masks as one bool array [..., C]."""
    pieces = [part.reshape(*part.shape[:num_leading], -1) != 0 for part in layout.mask_leaves(mask)]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=-1)


def encode_legal(spec: PolicySpec, observations: Tree, num_leading: int) -> Array | None:
    """The action mask [..., C] of observations, with the dimensions that their agents have [..., C + D] where they tell; else None."""
    mask = encode_mask(spec.actions, observations[MASK_KEY], num_leading) if spec.observations.has_mask else None
    if not spec.has_dimensions:
        return mask
    has = observations[DIMENSIONS_KEY] != 0  # [..., D]
    return jnp.concatenate([jnp.ones((*has.shape[:-1], spec.actions.num_logits), bool) if mask is None else mask, has], axis=-1)


def flatten_actions(layout: ActionLayout, actions: Tree, num_leading: int) -> tuple[Array, Array]:
    """A tree of actions as choices [..., G] counted from 0 and Gaussian values [..., D]."""
    leading = reduce(getitem, layout.parts[0].path, actions).shape[:num_leading]
    choices, gaussians = [jnp.zeros((*leading, 0), jnp.int32)], [jnp.zeros((*leading, 0), jnp.float32)]
    for part in layout.parts:
        values = leaf(actions, part.path).reshape(*leading, part.width)
        if part.kind == "categorical":
            choices.append(values.astype(jnp.int32) - part.starts.astype(np.int32))
        else:
            gaussians.append(values.astype(jnp.float32))
    return jnp.concatenate(choices, -1), jnp.concatenate(gaussians, -1)


def unflatten_actions(layout: ActionLayout, choices: Array, gaussians: Array) -> Tree:
    """Flat actions [..., G] and [..., D] as the space's tree, integers and floats in 32 bits."""
    leading, pieces = choices.shape[:-1], {}
    group = dimension = 0
    for part in layout.parts:
        if part.kind == "categorical":
            flat = choices[..., group : group + part.width] + part.starts.astype(np.int32)
            group += part.width
        else:
            flat = gaussians[..., dimension : dimension + part.width]
            dimension += part.width
        pieces[part.path] = flat.reshape(*leading, *part.shape)
    return build_tree(layout.space, lambda path, _: pieces[path])


def merge_leading(tree: Tree) -> Tree:
    """[L, N, …] as [L·N, …], which is what networks read."""
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), tree)


def encode(spec: PolicySpec, scales: Scales, observations: Tree, world: Tree = (), valid: Array | None = None) -> Inputs:
    """Observations [N, *obs] as a network reads them; a central critic's `world` is `lane_states` [N, …], and `valid` [N]."""
    layout = spec.observations
    images = tuple(leaf(observations, part.path) for part in layout.images)
    first = jax.tree.leaves(observations)[0]
    flat = encode_observations(layout, observations, 1) if layout.size else jnp.zeros((len(first), 0), jnp.float32)
    seen = jnp.zeros((len(first), 0), jnp.float32)
    if spec.global_state is not None:
        if isinstance(world, tuple) and not world:
            raise RolloutError(NO_GLOBAL_STATE)
        seen = encode_observations(spec.global_state, world, 1)
    return normalized_inputs(spec, scales, flat, images, seen, jnp.ones(len(first), bool) if valid is None else valid)


def normalized_inputs(spec: PolicySpec, scales: Scales, flat: Array, images: tuple[Array, ...], world: Array, valid: Array) -> Inputs:
    """Encoded rows, normalised where the policy does that, in the dtype of its weights."""
    limit, dtype = spec.config.observation_clip, scales.center.dtype
    flat, world = flat.astype(dtype), world.astype(dtype)
    if spec.config.normalize_observations:
        flat = jnp.clip((flat - scales.center) * scales.inverse_std, -limit, limit)
        world = jnp.clip((world - scales.world_center) * scales.world_inverse_std, -limit, limit)
    return Inputs(flat, images, world, valid)


def action_outputs(spec: PolicySpec, params: Params, scales: Scales, observations: Tree, past: Past | None = None) -> tuple[Array, Tree]:
    """[N, C + D] logits of all discrete choices, then means, of observations [N, *obs]; and the memory after the last row, or ().

    With a memory, rows [L·N, …] are flattened sequences, and `past` is their memory.
    """
    layout = spec.observations
    images = tuple(leaf(observations, part.path) for part in layout.images)
    first = jax.tree.leaves(observations)[0]
    flat = encode_observations(layout, observations, 1) if layout.size else jnp.zeros((len(first), 0), jnp.float32)
    nothing = jnp.zeros((len(first), scales.world_center.shape[0]), jnp.float32)  # the actor does not read it
    inputs = normalized_inputs(spec, scales, flat, images, nothing, jnp.ones(len(first), bool))
    features, after = shared_features(spec, params, inputs, past)
    return dense_stack(spec, params, "actor", features), after


def values(
    spec: PolicySpec,
    params: Params,
    scales: Scales,
    observations: Tree,
    past: Past | None = None,
    world: Tree = (),
    valid: Array | None = None,
) -> Array:
    """[N] in reward units, of observations [N, *obs]; a central critic also reads `world` (`lane_states` [N, …]) and `valid` [N]."""
    inputs = encode(spec, scales, observations, world, valid)
    return reward_units(scales, critic(spec, params, inputs, shared_features(spec, params, inputs, past)[0]))


def forward(spec: PolicySpec, params: Params, inputs: Inputs, past: Past | None = None) -> tuple[Array, Array]:
    """Action outputs [N, C + D] and the value head's output [N], from one pass through the layers that they share."""
    features, _ = shared_features(spec, params, inputs, past)
    return dense_stack(spec, params, "actor", features), critic(spec, params, inputs, features)


def reward_units(scales: Scales, normalized: Array) -> Array:
    """Values from the value head's output."""
    values: Array = normalized * scales.value_std + scales.value_mean
    return values


def log_std_of(spec: PolicySpec, params: Params) -> Array:
    """The log standard deviations [D], within their range if actions are squashed."""
    if LOG_STD not in params:
        return jnp.zeros(0, jnp.float32)
    log_std = params[LOG_STD]
    if spec.config.action_bounds != "tanh":
        return log_std
    low, high = TANH_LOG_STD_RANGE
    # A log std within its range, bounds included, has a gradient; `clip` would halve it at a bound.
    return jnp.where((log_std >= low) & (log_std <= high), log_std, lax.stop_gradient(jnp.clip(log_std, low, high)))


def critic(spec: PolicySpec, params: Params, inputs: Inputs, features: Array) -> Array:
    """The value head's output [N]; a central critic reads the global state too, and features of 0 for invalid agents."""
    if spec.global_state is not None:
        features = jnp.concatenate([features * inputs.valid[:, None], inputs.world], -1)  # [N, F + G]
    return dense_stack(spec, params, "critic", features)[:, 0]


def shared_features(spec: PolicySpec, params: Params, inputs: Inputs, past: Past | None) -> tuple[Array, Tree]:
    """[N, width] the features that actor and critic share, and the memory after the last row: convolutions, memory, trunk."""
    pieces = [inputs.flat] if spec.observations.size else []
    for part, image in zip(spec.observations.images, inputs.images):
        pieces.append(convolve(spec, params, part, image, inputs.flat.dtype))
    rows = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, -1)  # [N, F]
    after: Tree = ()
    if past is not None and not spec.memory_is_last:
        rows, after = _remember(spec, params, rows, past)
    rows = hidden_layers(spec, params, "trunk", rows.T).T
    if past is not None and spec.memory_is_last:
        rows, after = _remember(spec, params, rows, past)
    return rows, after


def _remember(spec: PolicySpec, params: Params, rows: Array, past: Past) -> tuple[Array, Tree]:
    assert spec.memory is not None
    features, after = run_memory(spec.memory, params, rows.reshape(*past.starts.shape, rows.shape[-1]), past)
    return features.reshape(-1, features.shape[-1]), after


def hidden_layers(spec: PolicySpec, params: Params, name: str, columns: Array) -> Array:
    """The hidden layers of a stack, each with its activation; none if the spec has none of that name: [in, N] -> [width, N].

    Rows of a minibatch are columns here, because of the gradients of the weights: XLA's CPU products over the first axis of both operands
    took 1.5 times as long with 64 inputs, and 8 times with 4. Units are computed in reverse order, because XLA would write activations
    over the sums that they are made of, and its loop emitters make scalar code of loops that write where they read.
    """
    activation = ACTIVATIONS[spec.config.activation]
    for layer in hidden_names(spec, name):
        weight, bias = (reversed_units(params, f"{layer}.{kind}") for kind in ("weight", "bias"))
        columns = activation((weight @ columns + bias[:, None])[::-1])
    return columns


def hidden_names(spec: PolicySpec, stack: str) -> list[str]:
    """The names of the hidden layers of a stack."""
    names = (f"{stack}.{index}" for index in itertools.count())
    return list(itertools.takewhile(lambda name: f"{name}.weight" in spec.layers, names))


def reversed_units(params: Params, name: str) -> Array:
    """A layer's weight or bias, its units in reverse order."""
    found = params.get(name + REVERSED)
    return params[name][::-1] if found is None else found


def with_reversed_layers(spec: PolicySpec, params: Params) -> Params:
    """The weights with what `hidden_layers` makes of them: a loop that calls it makes it once, before the first step."""
    layers = [layer for stack in ("trunk", "actor", "critic") for layer in hidden_names(spec, stack)]
    names = [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    return {**params, **{name + REVERSED: reversed_units(params, name) for name in names}}


def dense_stack(spec: PolicySpec, params: Params, name: str, rows: Array) -> Array:
    """The hidden layers of actor or critic, and its head: [N, in] -> [N, out]."""
    columns = hidden_layers(spec, params, name, rows.T)
    outputs = params[f"{name}.head.weight"] @ columns + params[f"{name}.head.bias"][:, None]
    # Without the barrier, XLA computes the loss's slope by an output once more for every number that reads it.
    kept: Array = lax.optimization_barrier(outputs)  # type: ignore[no-untyped-call]
    return kept.T


def convolve(spec: PolicySpec, params: Params, part: ObservationPart, images: Array, dtype: Any) -> Array:
    """[N, features] of raw images [N, *image]. Channels are last inside, which XLA's CPU convolutions are made for."""
    name, scale = spec.image_name(part), part.scale
    hidden = (images.transpose(0, 2, 3, 1) if channels_first(part.shape) else images).astype(dtype)  # [N, height, width, channels]
    for index, (_, _, stride) in enumerate(spec.config.cnn_filters):
        kernel = params[f"{name}.{index}.weight"].transpose(2, 3, 1, 0)  # [kernel, kernel, in, out]
        kernel = kernel * scale if index == 0 and scale != 1.0 else kernel
        hidden = lax.conv_general_dilated(hidden, kernel, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        hidden = jax.nn.relu(hidden + params[f"{name}.{index}.bias"])
    if not spec.config.cnn_filters:
        hidden = hidden * scale
    flat = hidden.transpose(0, 3, 1, 2).reshape(len(hidden), -1)  # the order of the weights: channel by channel
    return jax.nn.relu(flat @ params[f"{name}.head.weight"].T + params[f"{name}.head.bias"])
