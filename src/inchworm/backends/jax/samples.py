"""Step 7 of 9: a rollout as encoded arrays of fixed shape, and its sequences packed so that an epoch gathers few arrays.

`Steps` is made on the host from a `Rollout` (`steps_of`), or on the device, by what collects there. From it on, all is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from inchworm.backends.jax.network import Inputs, Scales, merge_leading, normalized_inputs
from inchworm.backends.numpy.policy import encode_legal, encode_observations, flatten_actions
from inchworm.core.spaces import leaf
from inchworm.core.types import Tree
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.rollout import Rollout
from inchworm.rollout.sequences import cut_lane_states, lane_states, sequence_states, split_into_sequences


class Cuts(NamedTuple):
    """The true successors of cut rows, padded to a number K that depends on few things, so that few programs are compiled."""

    places: Any
    """[K] i32: t · B + b; T · B for padding."""
    flat: Any
    """[K, F] encoded, not normalised."""
    images: tuple[Any, ...]
    world: Any
    """[K, G]"""
    valid: Any
    """[K] bool"""
    memory: Tree = ()
    """[K, layers, size] each; `()` without memory."""


class Steps(NamedTuple):
    """A rollout [T, B], encoded but not normalised, with its invalid rows filled."""

    flat: Any
    """[T, B, F] f32"""
    images: tuple[Any, ...]
    """[T, B, *image] each, raw."""
    world: Any
    """[T, B, G] f32 a central critic's input; G is 0 without one."""
    choices: Any
    """[T, B, G] integers, counted from 0."""
    gaussians: Any
    """[T, B, D] f32"""
    legal: Any
    """[T, B, C] or [T, B, C + D] bool; None if there is no mask."""
    log_probs: Any
    rewards: Any
    terminated: Any
    truncated: Any
    valid: Any
    starts: Any
    """[T, B] bool; `()` without memory, which alone reads it."""
    cuts: Cuts
    memory: Tree = ()
    """[N, layers, size] each, before the first row of every sequence; `()` without memory."""
    raw: Tree = ()
    """What custom losses may ask for, by the fields of a minibatch, each [T, B, …]; `()` without them."""
    log_ratios: Any = ()
    """[T, B] f32 log p / b, by which advantages are V-trace's; `()` for GAE."""
    weights: Any = ()
    """[T, B] f32 by which the decoupled objective weights advantages; `()` without it."""


MIN_CUTS = 64


def padded_cuts(num_cuts: int, num_lanes: int) -> int:
    """The number of cut rows after padding: lanes times a power of two, at least two per lane and `MIN_CUTS` in all.

    It depends on the rollout alone, and few different numbers mean few compilations.
    """
    per_lane = max(2, -(-max(num_cuts, MIN_CUTS) // max(1, num_lanes)))
    return num_lanes * (1 << (per_lane - 1).bit_length())


def steps_of(spec: PolicySpec, rollout: Rollout, length: int, raw: Mapping[str, Tree] | None = None) -> Steps:
    """The encoded arrays of a rollout whose invalid rows are filled, in NumPy; they are only read."""
    layout, observations = spec.observations, rollout.observations
    steps, lanes = rollout.rewards.shape
    choices, gaussians = flatten_actions(spec.actions, rollout.actions, 2)
    missing = padded_cuts(len(rollout.cut_rows), lanes) - len(rollout.cut_rows)

    def padded(array: np.ndarray, value: Any = 0) -> np.ndarray:
        return np.concatenate([array, np.full((missing, *array.shape[1:]), value, array.dtype)])

    def flat(tree: Tree, num_leading: int) -> np.ndarray:
        leading = np.shape(jax.tree.leaves(tree)[0])[:num_leading]
        return encode_observations(layout, tree, num_leading) if layout.size else np.zeros((*leading, 0), np.float32)

    world, cut_world = np.zeros((steps, lanes, 0), np.float32), np.zeros((len(rollout.cut_rows), 0), np.float32)
    if spec.global_state is not None:
        world = encode_observations(spec.global_state, lane_states(rollout), 2)
        cut_world = encode_observations(spec.global_state, cut_lane_states(rollout), 1)
    cuts = Cuts(
        places=padded(rollout.cut_rows[:, 0] * lanes + rollout.cut_rows[:, 1], steps * lanes),
        flat=padded(flat(rollout.cut_observations, 1)),
        images=tuple(padded(leaf(rollout.cut_observations, part.path)) for part in layout.images),
        world=padded(cut_world),
        valid=padded(rollout.cut_valid),
        memory=() if spec.memory is None else jax.tree.map(padded, rollout.cut_state),
    )
    return Steps(
        flat=flat(observations, 2),
        images=tuple(leaf(observations, part.path) for part in layout.images),
        world=world,
        choices=choices,
        gaussians=gaussians,
        legal=encode_legal(spec, observations, 2),
        log_probs=rollout.log_probs,
        rewards=rollout.rewards,
        terminated=rollout.terminated,
        truncated=rollout.truncated,
        valid=rollout.valid,
        starts=() if spec.memory is None else rollout.episode_starts,
        cuts=cuts,
        memory=() if spec.memory is None else sequence_states(rollout.policy_state, steps, length, rollout.state_every),
        raw=() if raw is None else dict(raw),
    )


class Samples(NamedTuple):
    """A rollout's sequences in order; an epoch selects rows of every leaf, and nothing else."""

    packed: Array
    """[N, L, k] all numbers of a step, in the order of `columns`."""
    images: tuple[Array, ...]
    """[N, L, *image] each."""
    memory: Tree
    """[N, layers, size] each."""
    raw: Tree
    """[N, L, …] each."""


class Columns(NamedTuple):
    """What `Samples.packed` holds, each a slice of its last axis."""

    flat: slice
    world: slice
    gaussians: slice
    choices: slice
    legal: slice
    log_probs: slice
    advantages: slice
    returns: slice
    values: slice
    valid: slice
    starts: slice


def columns_of(spec: PolicySpec) -> Columns:
    """The layout of the packed numbers of a spec."""
    layout = spec.actions
    legal = 0 if not spec.observations.has_mask and not spec.has_dimensions else layout.num_logits
    legal += layout.num_gaussians if spec.has_dimensions else 0
    world = 0 if spec.global_state is None else spec.global_state.size
    widths = (spec.observations.size, world, layout.num_gaussians, len(layout.groups), legal, 1, 1, 1, 1, 1, int(spec.memory is not None))
    ends = np.cumsum((0, *widths)).tolist()
    return Columns._make(slice(start, stop) for start, stop in pairwise(ends))


def by_sequence(array: Array, length: int) -> Array:
    """[T, B, …] -> [N, L, …], every sequence in one row; a short last chunk is padded with its last row."""
    return split_into_sequences(array, length).swapaxes(0, 1)  # type: ignore[no-any-return]


def make_samples(spec: PolicySpec, scales: Scales, steps: Steps, advantages: Any, values: Array, returns: Array, length: int) -> Samples:
    """The sequences of a rollout, normalised and packed; in invalid rows the advantage is 0 and the return is the value."""
    num_steps, num_lanes = steps.rewards.shape
    inputs = normalized_inputs(spec, scales, steps.flat, (), steps.world, steps.valid)
    dtype = inputs.flat.dtype
    valid = jnp.asarray(steps.valid)
    scalars = [steps.log_probs, jnp.where(valid, advantages, 0), jnp.where(valid, returns, values), values, valid]
    scalars += [] if spec.memory is None else [steps.starts]
    pieces = [inputs.flat, inputs.world, steps.gaussians, steps.choices, *([] if steps.legal is None else [steps.legal])]
    pieces += [jnp.asarray(scalar)[..., None] for scalar in scalars]
    packed = by_sequence(jnp.concatenate([jnp.asarray(piece).astype(dtype) for piece in pieces], -1), length)  # [N, L, k]
    if num_steps % length:  # what was padded is not valid
        real = np.ones(packed.shape[:2], bool)
        real[-num_lanes:, num_steps % length :] = False
        at = columns_of(spec).valid
        packed = packed.at[..., at].multiply(real[..., None].astype(dtype))
    images, raw = jax.tree.map(lambda array: by_sequence(jnp.asarray(array), length), (steps.images, steps.raw))
    return Samples(packed, images, jax.tree.map(jnp.asarray, steps.memory), raw)


class Batch(NamedTuple):
    """A minibatch of n sequences as the loss reads it, time first: every array [L, n, …]."""

    inputs: Inputs
    """[L · n, …]"""
    choices: Array
    gaussians: Array
    legal: Array | None
    log_probs: Array
    advantages: Array
    returns: Array
    values: Array
    valid: Array
    """[L, n] bool"""
    starts: Array
    """[L, n] bool; [L, n, 0] without memory."""
    memory: Tree
    """[n, layers, size] each."""
    raw: Tree


def unpack(spec: PolicySpec, rows: Samples) -> Batch:
    """The minibatch of selected rows [n, L, …]."""
    at, packed = columns_of(spec), rows.packed.swapaxes(0, 1)  # [L, n, k]

    def one(name: slice) -> Array:
        return packed[..., name.start]

    valid = one(at.valid) != 0
    images = tuple(merge_leading(image.swapaxes(0, 1)) for image in rows.images)
    return Batch(
        inputs=Inputs(merge_leading(packed[..., at.flat]), images, merge_leading(packed[..., at.world]), valid.reshape(-1)),
        choices=packed[..., at.choices].astype(jnp.int32),
        gaussians=packed[..., at.gaussians],
        legal=packed[..., at.legal] != 0 if at.legal.stop > at.legal.start else None,
        log_probs=one(at.log_probs),
        advantages=one(at.advantages),
        returns=one(at.returns),
        values=one(at.values),
        valid=valid,
        starts=packed[..., at.starts.start] != 0 if spec.memory is not None else packed[..., :0],
        memory=rows.memory,
        raw=jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), rows.raw),
    )
