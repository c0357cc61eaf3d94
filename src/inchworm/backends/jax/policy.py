"""Steps 4 and 8 of 9: a policy in JAX. It learns, and acts where NumPy cannot."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from inchworm.backends.jax import network
from inchworm.backends.jax.network import Params, Past, Scales
from inchworm.backends.numpy.distributions import HALF_LOG_2PI, MASKED_LOGIT, QUADRATURE_NODES, QUADRATURE_WEIGHTS
from inchworm.backends.numpy.policy import choose, flat_worlds, fresh_weights
from inchworm.backends.numpy.policy import encode_legal as encode_legal_numpy
from inchworm.backends.numpy.policy import encode_observations as encode_observations_numpy
from inchworm.core.errors import RolloutError
from inchworm.core.spaces import MASK_KEY
from inchworm.core.types import Evaluation, Minibatch, PolicyStep, Tree, Weights
from inchworm.policy.file import Predicts, check_shapes, rescaled_value_head, weight_shapes
from inchworm.policy.layout import ActionLayout
from inchworm.policy.spec import NO_GLOBAL_STATE, VERSION, PolicySpec
from inchworm.policy.statistics import PolicyStatistics
from inchworm.rollout.rollout import Rollout

# Actions, log-probs and entropies from a network's outputs, formula for formula as in `backends/numpy/distributions`. Random numbers are
# arguments, so that one call can draw those of a whole rollout.


def sample(
    layout: ActionLayout, outputs: Array, log_std: Array, mask: Array | None, uniforms: Array, normals: Array
) -> tuple[Array, Array, Array]:
    """Choices [..., G] i32 and Gaussian values [..., D] f32 from outputs [..., C + D], and the log-probs [...] of what was drawn.

    `uniforms` [..., G] are from 0 to 1, without 1; `normals` [..., D] are standard normal.
    """
    logits, picks = mask_logits(layout, outputs, mask), []
    for index, group in enumerate(layout.groups):
        shifted = logits[..., group] - logits[..., group].max(-1, keepdims=True)
        cumulative = jnp.cumsum(jnp.exp(shifted), -1)
        # Inverse of the cumulative distribution: a masked choice adds nothing to it and can never be the first one above.
        below = cumulative[..., :-1] <= uniforms[..., index, None] * cumulative[..., -1:]
        picks.append(below.sum(-1, dtype=jnp.int32))
    choices = jnp.stack(picks, -1) if picks else jnp.zeros((*outputs.shape[:-1], 0), jnp.int32)
    gaussians = (outputs[..., layout.num_logits :] + jnp.exp(log_std) * normals).astype(jnp.float32)  # as it is stored
    has = own_dimensions(layout, mask)
    gaussians = gaussians if has is None else jnp.where(has, gaussians, 0)
    return choices, gaussians, log_prob(layout, outputs, log_std, mask, choices, gaussians)


def most_likely(layout: ActionLayout, outputs: Array, mask: Array | None) -> tuple[Array, Array]:
    """The most likely choices [..., G] i32 and the Gaussian means [..., D] f32."""
    logits = mask_logits(layout, outputs, mask)
    picks = [logits[..., group].argmax(-1).astype(jnp.int32) for group in layout.groups]
    choices = jnp.stack(picks, -1) if picks else jnp.zeros((*outputs.shape[:-1], 0), jnp.int32)
    means, has = outputs[..., layout.num_logits :].astype(jnp.float32), own_dimensions(layout, mask)
    return choices, means if has is None else jnp.where(has, means, 0)


def env_action(layout: ActionLayout, gaussians: Array) -> Array:
    """Gaussian values [..., D] as the environment gets them: clipped into the bounds, or squashed into them."""
    low, high = (jnp.asarray(bound, gaussians.dtype) for bound in (layout.low, layout.high))
    if layout.bounds == "tanh":
        gaussians = low + (jnp.tanh(gaussians) + 1) * (0.5 * (high - low))
    return jnp.minimum(jnp.maximum(gaussians, low), high)


def mask_logits(layout: ActionLayout, outputs: Array, mask: Array | None) -> Array:
    """The logits [..., C] with a finite constant, and so probability 0, for every illegal choice."""
    logits = outputs[..., : layout.num_logits]
    return logits if mask is None or not layout.num_logits else jnp.where(mask[..., : layout.num_logits], logits, MASKED_LOGIT)


def own_dimensions(layout: ActionLayout, mask: Array | None) -> Array | None:
    """The dimensions [..., D] that agents have, if the mask tells; None if they have all."""
    return None if mask is None or mask.shape[-1] == layout.num_logits else mask[..., layout.num_logits :]


def log_prob(layout: ActionLayout, outputs: Array, log_std: Array, mask: Array | None, choices: Array, gaussians: Array) -> Array:
    """log pi(action) [...] for outputs [..., C + D]."""
    logits, parts = mask_logits(layout, outputs, mask), []
    for index, group in enumerate(layout.groups):
        parts.append(_chosen(jax.nn.log_softmax(logits[..., group]), choices[..., index]))
    if layout.num_gaussians:
        parts.append(_gaussian_log_prob(layout, outputs[..., layout.num_logits :], log_std, gaussians, own_dimensions(layout, mask)))
    return sum(parts[1:], parts[0])


def log_prob_and_entropy(
    layout: ActionLayout, outputs: Array, log_std: Array, mask: Array | None, choices: Array, gaussians: Array
) -> tuple[Array, Array]:
    """log pi(action) and entropy, each [...], for outputs [..., C + D]; a mask is [..., C], or [..., C + D] if agents lack dimensions."""
    logits, log_probs, entropies = mask_logits(layout, outputs, mask), [], []
    for index, group in enumerate(layout.groups):
        log_p = jax.nn.log_softmax(logits[..., group])
        log_probs.append(_chosen(log_p, choices[..., index]))
        entropies.append(-(jnp.exp(log_p) * log_p).sum(-1))
    if layout.num_gaussians:
        means, has = outputs[..., layout.num_logits :], own_dimensions(layout, mask)
        log_probs.append(_gaussian_log_prob(layout, means, log_std, gaussians, has))
        entropies.append(_gaussian_entropy(layout, means, log_std, has))
    return sum(log_probs[1:], log_probs[0]), sum(entropies[1:], entropies[0])


def _chosen(log_p: Array, choice: Array) -> Array:
    """The log-prob [...] of one choice [...] among [..., k]; a sum, because the gradient of a gather is a scatter, which is slow."""
    return jnp.where(choice[..., None] == jnp.arange(log_p.shape[-1]), log_p, 0).sum(-1)


def _gaussian_log_prob(layout: ActionLayout, means: Array, log_std: Array, gaussians: Array, has: Array | None) -> Array:
    """log pi [...] of Gaussian values [..., D], of the dimensions that agents have; with "tanh", of what they are squashed into."""
    values = gaussians.astype(means.dtype)
    standard = (values - means) * jnp.exp(-log_std)
    total = _sum_own(-0.5 * standard * standard - log_std - HALF_LOG_2PI, has)
    return total - _sum_own(log_tanh_slope(values), has) if layout.bounds == "tanh" else total


def _gaussian_entropy(layout: ActionLayout, means: Array, log_std: Array, has: Array | None) -> Array:
    """The entropy [...] of the dimensions that agents have; under tanh by Gauss-Hermite quadrature."""
    terms = jnp.broadcast_to(log_std + (HALF_LOG_2PI + 0.5), means.shape)
    if layout.bounds == "tanh":
        nodes, weights = (jnp.asarray(array, means.dtype) for array in (QUADRATURE_NODES, QUADRATURE_WEIGHTS))
        points = means[..., None] + jnp.exp(log_std)[:, None] * nodes  # [..., D, nodes]
        terms = terms + (log_tanh_slope(points) * weights).sum(-1)
    return _sum_own(terms, has)


def _sum_own(terms: Array, has: Array | None) -> Array:
    """The sum over dimensions [..., D], of those that the agent has."""
    return (terms if has is None else jnp.where(has, terms, 0)).sum(-1)


def log_tanh_slope(x: Array) -> Array:
    """log(1 - tanh(x)²), exact where tanh has saturated."""
    return 2 * (math.log(2) - x - jax.nn.softplus(-2 * x))


class Static:
    """A value that decides which program is compiled: two with equal keys share one."""

    def __init__(self, key: Any) -> None:
        self.key, self._hash = key, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and (self is other or self.key == other.key)


class StaticSpec(Static):
    """A spec as an argument that decides the program."""

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__(repr(spec.to_dict()))
        self.spec = spec


def evaluate(spec: PolicySpec, params: Params, scales: Scales, minibatch: Minibatch) -> Evaluation:
    """Log-probs, entropy and values [L, N] of a minibatch: a pure function, with gradients by the weights."""
    seen, world, valid = without_mask(spec, minibatch.observations), minibatch.global_state, minibatch.valid
    leading = minibatch.log_probs.shape
    flat = network.merge_leading((seen, world, valid))
    past = None if spec.memory is None else Past(minibatch.policy_state, minibatch.episode_starts)
    outputs, normalized = network.forward(spec, params, network.encode(spec, scales, *flat), past)
    choices, gaussians = network.flatten_actions(spec.actions, minibatch.actions, 2)
    legal = network.encode_legal(spec, minibatch.observations, 2)
    outputs = outputs.reshape(*leading, spec.actions.num_outputs)
    log_probs, entropy = log_prob_and_entropy(spec.actions, outputs, network.log_std_of(spec, params), legal, choices, gaussians)
    return Evaluation(log_probs, entropy, network.reward_units(scales, normalized).reshape(leading), scales.value_std)


def without_mask(spec: PolicySpec, observations: Tree) -> Tree:
    """The observation without its mask, which networks do not read."""
    if not spec.observations.has_mask:
        return observations
    return {key: value for key, value in observations.items() if key != MASK_KEY}


@partial(jax.jit, static_argnums=0)
def _evaluate(static: StaticSpec, params: Params, scales: Scales, fields: Mapping[str, Tree]) -> tuple[Any, ...]:
    evaluation = evaluate(static.spec, params, scales, Minibatch(**fields))
    return evaluation.log_probs, evaluation.entropy, evaluation.values, evaluation.value_scale


@partial(jax.jit, static_argnums=0)
def _act(static: StaticSpec, params: Params, scales: Scales, observations: Tree, past: Past | None) -> tuple[Array, Tree, Array]:
    outputs, after = network.action_outputs(static.spec, params, scales, observations, past)
    return outputs, after, network.log_std_of(static.spec, params)


@partial(jax.jit, static_argnums=0)
def _values(static: StaticSpec, params: Params, scales: Scales, rows: tuple[Tree, Tree, Array], past: Past | None) -> Array:
    observations, world, valid = network.merge_leading(rows)
    return network.values(static.spec, params, scales, observations, past, world, valid).reshape(rows[2].shape)


class JaxPolicy(Predicts):
    """A trainable policy from its spec and weights. `params` and `scales` are what the pure functions of this backend read.

    Weights in float64 are computed in float64, whatever JAX's global setting is.
    """

    backend = "jax"
    builtin = True

    def __init__(self, spec: PolicySpec, weights: Mapping[str, np.ndarray] | None = None, *, seed: int = 0) -> None:
        self.spec, self.central_critic = spec, spec.global_state is not None
        self.statistics, self._shapes = PolicyStatistics(spec), weight_shapes(spec)
        self.policy_version = 0
        self._static = StaticSpec(spec)
        self._params: Params | None = None
        self._scales: Scales | None = None
        self.set_weights(weights if weights is not None else fresh_weights(spec, seed))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the weights."""
        return self._weights["actor.head.weight"].dtype

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, JAX computes in the dtype of the weights."""
        return jax.enable_x64(True) if self.dtype == np.float64 else contextlib.nullcontext()

    @property
    def params(self) -> Params:
        """The weights on the device; made when they are first read after a change."""
        if self._params is None:
            with self.precision():
                self._params = {name: jnp.asarray(weight) for name, weight in self._weights.items()}
        return self._params

    @property
    def scales(self) -> Scales:
        """The normalisers' current numbers."""
        if self._scales is None:
            self._scales = network.scales_of(self.spec, self.statistics, self.dtype.type)
        return self._scales

    def initial_state(self, num_lanes: int) -> Tree:
        """The initial memory: {"hidden": [B, layers, size]}, with "cell" for an LSTM; `()` without memory."""
        return () if self.spec.memory is None else self.spec.memory.empty(num_lanes, self.dtype)

    def act(
        self, observations: Tree, state: Tree, episode_starts: Any, rng: np.random.Generator, *, deterministic: bool = False
    ) -> PolicyStep:
        """One action per lane; sampling is done in NumPy, as in every backend."""
        seen = without_mask(self.spec, observations)
        past = None if self.spec.memory is None else self._past(state, np.asarray(episode_starts)[None], acting=True)
        with self.precision():
            outputs, after, log_std = _act(self._static, self.params, self.scales, seen, past)
        state = {name: np.asarray(part) for name, part in after.items()} if past is not None else state
        mask = encode_legal_numpy(self.spec, observations)
        return choose(self.spec, np.asarray(outputs), np.asarray(log_std), mask, state, rng, deterministic=deterministic)

    def value(self, observations: Tree, state: Tree = (), episode_starts: Any = (), global_state: Tree = (), valid: Any = None) -> Array:
        """The values [L, N] of observations [L, N, *obs], in reward units; `()` is an empty memory.

        A central critic also reads `global_state` (`lane_states` [L, N, …]), and where `valid` is false nothing else.
        """
        seen = without_mask(self.spec, observations)
        shape = jax.tree.leaves(seen)[0].shape[:2]
        if self.central_critic and isinstance(global_state, tuple) and not global_state:
            raise RolloutError(NO_GLOBAL_STATE)
        world = global_state if self.central_critic else ()
        starts = np.zeros(shape, bool) if isinstance(episode_starts, tuple) else episode_starts
        past = None if self.spec.memory is None else self._past(state, starts)
        with self.precision():
            rows = (seen, world, np.ones(shape, bool) if valid is None else valid)
            found: Array = _values(self._static, self.params, self.scales, rows, past)
        return found

    def evaluate(self, minibatch: Minibatch) -> Evaluation:
        """Log-probs, entropy and values of a minibatch under the current weights."""
        names = ("observations", "actions", "log_probs", "advantages", "returns", "values", "valid", "episode_starts")
        fields = {name: getattr(minibatch, name) for name in (*names, "policy_state", "global_state")}
        with self.precision():
            return Evaluation(*_evaluate(self._static, self.params, self.scales, fields))

    def with_params(self, params: Params, scales: Scales) -> Self:
        """This policy with other weights, which may be traced: what a custom loss is given. `get_weights` then returns those."""
        other = copy.copy(self)
        other._params, other._scales, other._weights = params, scales, cast(Any, dict(params))
        return other

    @property
    def host_weights(self) -> Mapping[str, np.ndarray]:
        """The weights in NumPy, not copied: another object after every change."""
        return self._weights

    def adopt(self, weights: Mapping[str, np.ndarray]) -> None:
        """Take over weights without a copy; nothing may write to them."""
        self._weights, self._params = dict(weights), None

    def update_statistics(self, rollout: Rollout, returns: Any) -> None:
        """Add a rollout to the normalisers."""
        if self.statistics.parts:
            layout = self.spec.observations
            flat = encode_observations_numpy(layout, rollout.observations, 2) if layout.size else np.zeros(0)
            self.add_to_statistics(flat, np.asarray(returns), np.asarray(rollout.valid), flat_worlds(self.spec, rollout))

    def add_to_statistics(self, flat: np.ndarray, returns: np.ndarray, valid: np.ndarray, worlds: np.ndarray | None = None) -> None:
        """Add the flat arrays of a rollout (see `PolicyStatistics.update`), keeping values in reward units as they were (PopArt)."""
        before = (self.statistics.value_mean, self.statistics.value_std)
        self.statistics.update(flat, returns, valid, worlds)
        changed = rescaled_value_head(self._weights, before, (self.statistics.value_mean, self.statistics.value_std))
        self._scales = None
        if changed:
            self.adopt(self._weights | changed)

    def get_weights(self) -> Weights:
        """Copies of the parameters and statistics, with the version."""
        copies = {name: value.copy() for name, value in self._weights.items()}
        return {**copies, **self.statistics.to_weights(), VERSION: np.array(self.policy_version, np.int64)}

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Set parameters, statistics and version; names and shapes must be the spec's."""
        check_shapes(weights, self._shapes)
        self._weights = {name: np.array(weights[name]) for name in self.spec.layers}
        self._params, self._scales = None, None
        self.statistics.from_weights(weights)
        self.policy_version = int(weights[VERSION])

    def _past(self, state: Tree, starts: Any, *, acting: bool = False) -> Past:
        """The memory of sequences [L, N]; an empty tuple as state is an empty memory, except for acting."""
        layout = self.spec.memory
        assert layout is not None
        lanes = starts.shape[1]
        state = layout.empty(lanes, self.dtype) if isinstance(state, tuple) and not state and not acting else state
        if not layout.fits(state, (lanes,)):
            raise layout.refusal(state, lanes)
        return Past({name: state[name] for name in layout.names}, starts)
