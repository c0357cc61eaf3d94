"""Step 4 of 9: encode, normalise, run the network, mask, sample. A policy in NumPy.

The fastest way to act with a small network, and the reference that other backends are checked against.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np
import optree
from gymnasium import spaces

from inchworm.backends.numpy import distributions
from inchworm.backends.numpy.network import ACTIVATIONS, Memory
from inchworm.core.errors import RolloutError, SpaceError
from inchworm.core.padding import DIMENSIONS_KEY
from inchworm.core.seeding import make_stream
from inchworm.core.spaces import MASK_KEY, PLACE, WORLD
from inchworm.core.types import Array, Evaluation, Minibatch, PolicyStep, Tree, Weights
from inchworm.policy.file import Predicts, check_shapes, rescaled_value_head, weight_shapes
from inchworm.policy.layout import ActionLayout, ObservationLayout
from inchworm.policy.spec import LOG_STD, NO_GLOBAL_STATE, TANH_LOG_STD_RANGE, VERSION, PolicySpec, initial_weights
from inchworm.policy.statistics import PolicyStatistics
from inchworm.rollout.rollout import Rollout


def encode_observations(layout: ObservationLayout, observations: Tree, num_leading: int = 1) -> np.ndarray:
    """Observations [..., *obs] as the flat input [..., F] f32: boxes flattened, categories one-hot, bytes scaled to 0…1."""
    if len(layout.parts) == 1 and layout.parts[0].kind == "box" and layout.parts[0].scale == 1.0:  # the most common space
        values: Any = reduce(getitem, layout.parts[0].path, observations)
        if values.ndim == num_leading + 1 and values.dtype == np.float32:  # already flat
            return values  # type: ignore[no-any-return]
        return np.asarray(values, np.float32).reshape(*values.shape[:num_leading], layout.size)
    pieces = []
    for part in layout.flat:
        values = np.asarray(reduce(getitem, part.path, observations))
        leading = values.shape[:num_leading]
        if part.kind == "box":
            pieces.append(values.astype(np.float32).reshape(*leading, part.size) * np.float32(part.scale))
            continue
        entries = values.reshape(*leading, len(part.sizes)).astype(np.int64) - np.asarray(part.starts)  # [..., entries]
        pieces += [(np.arange(size) == entries[..., index, None]).astype(np.float32) for index, size in enumerate(part.sizes)]
    return np.concatenate(pieces, axis=-1)


def encode_mask(layout: ActionLayout, mask: Tree, num_leading: int = 1) -> np.ndarray:
    """A tree of action masks as one bool array [..., C], in the order of the logits."""
    pieces = [np.asarray(part).reshape(*np.shape(part)[:num_leading], -1) != 0 for part in layout.mask_leaves(mask)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=-1)


def encode_legal(spec: PolicySpec, observations: Tree, num_leading: int = 1) -> np.ndarray | None:
    """The action mask [..., C] of observations, with the dimensions that their agents have [..., C + D] where they tell; else None."""
    mask = encode_mask(spec.actions, observations[MASK_KEY], num_leading) if spec.observations.has_mask else None
    if not spec.has_dimensions:
        return mask
    has = np.asarray(observations[DIMENSIONS_KEY]) != 0  # [..., D]
    mask = np.ones((*has.shape[:-1], spec.actions.num_logits), bool) if mask is None else mask
    return np.concatenate([mask, has], axis=-1)


def flatten_actions(layout: ActionLayout, actions: Tree, num_leading: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """A tree of actions as choices [..., G] counted from 0 and Gaussian values [..., D]."""
    leading = np.shape(reduce(getitem, layout.parts[0].path, actions))[:num_leading]
    choices, gaussians = [np.zeros((*leading, 0), np.int64)], [np.zeros((*leading, 0), np.float32)]
    for part in layout.parts:
        values = np.asarray(reduce(getitem, part.path, actions)).reshape(*leading, part.width)
        if part.kind == "categorical":
            choices.append(values.astype(np.int64) - part.starts)
        else:
            gaussians.append(values.astype(np.float32))
    return np.concatenate(choices, axis=-1), np.concatenate(gaussians, axis=-1)


def flat_worlds(spec: PolicySpec, rollout: Rollout) -> np.ndarray | None:
    """The states of all copies as a central critic's inputs [T, E, G], for statistics, which ignore places; else None."""
    if spec.global_state is None:
        return None
    copies = optree.tree_leaves(rollout.global_state)[0].shape[:2]
    return encode_observations(spec.global_state, {WORLD: rollout.global_state, PLACE: np.zeros(copies, np.int64)}, 2)


VALUE_CHUNK = 16_384
"""Rows that the critic reads at once, so that a long rollout does not need the memory of all its activations."""


class NumpyPolicy(Predicts):
    """A policy from its spec and weights: an MLP, whose state is `()`, or with an LSTM or GRU, whose state belongs to the caller."""

    backend = "numpy"
    builtin = True

    def __init__(self, spec: PolicySpec, weights: Mapping[str, np.ndarray] | None = None, *, seed: int = 0) -> None:
        if spec.observations.images:
            raise SpaceError(f'convolutions do not run in NumPy; use the torch backend for policy.kind="{spec.config.kind}" on images')
        self.spec, self.central_critic = spec, spec.global_state is not None
        self.policy_version = 0
        self.statistics, self._shapes = PolicyStatistics(spec), weight_shapes(spec)
        self._activation = ACTIVATIONS[spec.config.activation].apply
        self.set_weights(weights if weights is not None else fresh_weights(spec, seed))

    def initial_state(self, num_lanes: int) -> Tree:
        """The initial memory: {"hidden": [B, layers, size]}, with "cell" for an LSTM; `()` without memory."""
        return () if self._memory is None else self._memory.empty(num_lanes)

    def act(
        self, observations: Tree, state: Tree, episode_starts: Array, rng: np.random.Generator, *, deterministic: bool = False
    ) -> PolicyStep:
        """One action per lane, without running the critic. Where an episode starts, the lane's memory is reset first."""
        outputs, state = self.action_outputs(observations, state, episode_starts)
        mask = encode_legal(self.spec, observations)
        return choose(self.spec, outputs, self._log_std, mask, state, rng, deterministic=deterministic)

    def action_outputs(self, observations: Tree, state: Tree, episode_starts: Array) -> tuple[np.ndarray, Tree]:
        """What actions are chosen from: logits and means [B, C + D] before masks; and the next memory."""
        rows, _ = self.encode(observations, 1)
        if self._memory is None:
            features = self._features(rows)
        elif self.spec.memory_is_last:
            features, state = self._memory.step(self._features(rows), state, episode_starts)
        else:
            features, state = self._memory.step(rows, state, episode_starts)
            features = self._features(features)
        return self._network("actor", features), state

    def value(
        self, observations: Tree, state: Tree = (), episode_starts: Array = (), global_state: Tree = (), valid: Array | None = None
    ) -> Array:
        """The values [L, N] of observations [L, N, *obs], in reward units; `()` is an empty memory, and no resets.

        A central critic also reads `global_state` (`lane_states` [L, N, …]), and where `valid` is false nothing else.
        """
        rows, leading = self.encode(observations, 2)
        world = self._world(global_state)
        alive = np.ones(len(rows), bool) if valid is None else np.asarray(valid).reshape(len(rows))
        if self._memory is not None:
            return self._values(self._remembered(rows, leading, state, episode_starts), world, alive).reshape(leading)
        parts = [slice(start, start + VALUE_CHUNK) for start in range(0, len(rows), VALUE_CHUNK)]
        chunks = [self._values(self._features(rows[part]), None if world is None else world[part], alive[part]) for part in parts]
        return np.concatenate(chunks).reshape(leading) if chunks else np.zeros(leading, rows.dtype)

    def evaluate(self, minibatch: Minibatch) -> Evaluation:
        """Log-probs, entropy and values of a minibatch, without gradients: the reference for other backends."""
        layout, (rows, leading) = self.spec.actions, self.encode(minibatch.observations, 2)
        past = (minibatch.policy_state, minibatch.episode_starts)
        features = self._features(rows) if self._memory is None else self._remembered(rows, leading, *past)
        outputs = self._network("actor", features).reshape(*leading, layout.num_outputs)
        mask = encode_legal(self.spec, minibatch.observations, 2)
        choices, gaussians = flatten_actions(layout, minibatch.actions, 2)
        return Evaluation(
            *distributions.log_prob_and_entropy(layout, outputs, self._log_std, mask, choices, gaussians),
            self._values(features, self._world(minibatch.global_state), minibatch.valid.reshape(-1)).reshape(leading),
            outputs.dtype.type(self.statistics.value_std),
        )

    def update_statistics(self, rollout: Rollout, returns: Array) -> None:
        """Add a rollout to the normalisers, keeping values in reward units as they were (PopArt)."""
        before = (self.statistics.value_mean, self.statistics.value_std)
        flat = encode_observations(self.spec.observations, rollout.observations, 2)
        self.statistics.update(flat, np.asarray(returns), rollout.valid, flat_worlds(self.spec, rollout))
        self._weights |= rescaled_value_head(self._weights, before, (self.statistics.value_mean, self.statistics.value_std))
        self._prepare()

    def get_weights(self) -> Weights:
        """Copies of the parameters and statistics, with the version."""
        copies = {name: np.array(value) for name, value in self._weights.items()}
        return {**copies, **self.statistics.to_weights(), VERSION: np.array(self.policy_version, np.int64)}

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Set parameters, statistics and version; names and shapes must be the spec's."""
        check_shapes(weights, self._shapes)
        self._weights = {name: np.array(weights[name]) for name in self.spec.layers}
        self.statistics.from_weights(weights)
        self.policy_version = int(weights[VERSION])
        self._prepare()

    def _prepare(self) -> None:
        """Arrange the weights for acting: one (matrix [in, out], bias) per layer, statistics as f32 vectors."""
        self._layers: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        for name in self.spec.layers:
            if name.endswith(".weight") and not name.startswith("memory."):
                stack = self._layers.setdefault(name.split(".")[0], [])
                stack.append((np.ascontiguousarray(self._weights[name].T), self._weights[name.removesuffix("weight") + "bias"]))
        self._memory = None if self.spec.memory is None else Memory(self.spec.memory, self._weights)
        log_std = self._weights.get(LOG_STD, np.zeros(0, np.float32))
        self._log_std = np.clip(log_std, *TANH_LOG_STD_RANGE) if self.spec.config.action_bounds == "tanh" else log_std
        dtype, scales = self._weights["actor.head.weight"].dtype, (self.statistics.observation_scale, self.statistics.global_scale)
        self._scale, self._world_scale = (None if scale is None else (scale[0].astype(dtype), scale[1].astype(dtype)) for scale in scales)
        self._clip = np.asarray(self.spec.config.observation_clip, dtype)

    def encode(self, observations: Tree, num_leading: int) -> tuple[np.ndarray, tuple[int, ...]]:
        """The network's input, encoded and normalised, as rows [N, F], and the leading axes that it had."""
        flat = encode_observations(self.spec.observations, observations, num_leading)
        leading = flat.shape[:-1]
        rows = flat if num_leading == 1 else flat.reshape(math.prod(leading), flat.shape[-1])
        return rows if self._scale is None else self._normalized(rows, *self._scale), leading

    def _normalized(self, rows: np.ndarray, center: np.ndarray, inverse_std: np.ndarray) -> np.ndarray:
        rows = (rows - center) * inverse_std
        np.minimum(rows, self._clip, out=rows)
        np.maximum(rows, -self._clip, out=rows)
        return rows

    def _world(self, global_state: Tree) -> np.ndarray | None:
        """A central critic's input [L·N, G] from `lane_states` [L, N, …]; None without one."""
        layout = self.spec.global_state
        if layout is None:
            return None
        if isinstance(global_state, tuple) and not global_state:
            raise RolloutError(NO_GLOBAL_STATE)
        rows: np.ndarray = encode_observations(layout, global_state, 2).reshape(-1, layout.size)
        return rows if self._world_scale is None else self._normalized(rows, *self._world_scale)

    def _features(self, rows: np.ndarray) -> np.ndarray:
        """The layers that actor and critic share."""
        for layer in self._layers.get("trunk", ()):
            rows = self._hidden(rows, *layer)
        return rows

    def _remembered(self, rows: np.ndarray, leading: tuple[int, ...], state: Tree, episode_starts: Array) -> np.ndarray:
        """The same [L·N, width] for sequences [L, N] of a policy with memory."""
        assert self._memory is not None
        state = self.initial_state(leading[1]) if isinstance(state, tuple) else state
        starts = np.zeros(leading, bool) if isinstance(episode_starts, tuple) else episode_starts
        rows = self._features(rows) if self.spec.memory_is_last else rows
        features = self._memory.over(rows.reshape(*leading, -1), state, starts)
        rows = features.reshape(leading[0] * leading[1], features.shape[-1])
        return rows if self.spec.memory_is_last else self._features(rows)

    def _network(self, name: str, rows: np.ndarray) -> np.ndarray:
        *hidden, (head, head_bias) = self._layers[name]
        for layer in hidden:
            rows = self._hidden(rows, *layer)
        outputs: np.ndarray = rows.dot(head)
        np.add(outputs, head_bias, outputs)
        return outputs

    def _hidden(self, rows: np.ndarray, matrix: np.ndarray, bias: np.ndarray) -> np.ndarray:
        """One hidden layer, in a new array: reused arrays save nothing, and two threads would share them."""
        outputs: np.ndarray = rows.dot(matrix)
        np.add(outputs, bias, outputs)
        self._activation(outputs, outputs)
        return outputs

    def _values(self, rows: np.ndarray, world: np.ndarray | None, alive: Array) -> np.ndarray:
        if world is not None:  # [N, F + G]: an invalid agent's own features are 0
            rows = np.concatenate([rows * alive[:, None], world], 1)
        normalized = self._network("critic", rows)[:, 0]
        values: np.ndarray = normalized * self.statistics.value_std + self.statistics.value_mean
        return values


def fresh_weights(spec: PolicySpec, seed: int) -> Weights:
    """Initial parameters and statistics, the same for every backend and seed."""
    parameters = initial_weights(spec, make_stream(seed, "weights"))
    return {**parameters, **PolicyStatistics(spec).to_weights(), VERSION: np.array(0, np.int64)}


def choose(
    spec: PolicySpec,
    outputs: np.ndarray,
    log_std: np.ndarray,
    mask: np.ndarray | None,
    state: Tree,
    rng: np.random.Generator,
    *,
    deterministic: bool,
) -> PolicyStep:
    """Sample actions from a network's outputs [B, C + D]; every backend's acting ends here."""
    layout = spec.actions
    if deterministic:
        choices, gaussians, log_probs = distributions.mode(layout, outputs, log_std, mask)
    else:
        choices, gaussians, log_probs = distributions.sample(layout, outputs, log_std, mask, rng)
    actions = _as_tree(layout, choices, gaussians, sampled=True)
    env_actions = _as_tree(layout, choices, distributions.to_env(layout, gaussians)) if layout.num_gaussians else actions
    return PolicyStep(actions, env_actions, log_probs, state)


def _as_tree(layout: ActionLayout, choices: np.ndarray, gaussians: np.ndarray, *, sampled: bool = False) -> Tree:
    """`layout.unflatten`, with a shortcut for the two most common spaces."""
    space = layout.space
    if type(space) is spaces.Discrete and space.start == 0 and space.dtype == choices.dtype:
        return choices[:, 0]
    if type(space) is spaces.Box and space.dtype == gaussians.dtype and len(space.shape) == 1:
        return gaussians
    return layout.unflatten(choices, gaussians, sampled=sampled)
