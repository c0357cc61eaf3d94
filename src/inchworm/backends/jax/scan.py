"""Steps 3 to 5 of 9 in JAX: T steps of B lanes as one `lax.scan`, a pure function of weights and state.

What does not depend on the step before is outside of the scan: all random numbers are drawn before it, log-probs are computed after it, and
the critic is not run at all. New episodes are computed only in steps before which one ended.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from inchworm.backends.jax.distributions import env_action, log_prob, sample
from inchworm.backends.jax.memory import Past
from inchworm.backends.jax.native import Lanes, NativeEnv, begin_lanes, derive_seeds, most_truncations, replace_lanes, step_lanes
from inchworm.backends.jax.network import (
    Params,
    Scales,
    action_outputs,
    encode_legal,
    encode_mask,
    encode_observations,
    log_std_of,
    paused_garbage_collection,
    unflatten_actions,
    with_reversed_layers,
)
from inchworm.backends.jax.policy import without_mask
from inchworm.backends.jax.samples import Cuts, Steps
from inchworm.backends.jax.threefry import typed_keys
from inchworm.core.spaces import MASK_KEY, leaf
from inchworm.core.types import Tree
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.sequences import sequence_states

MOST_SLOTS = 16
"""Truncations of a lane in a rollout up to which their successors are kept in slots; of more, the successors of all rows are kept."""


class ScanState(NamedTuple):
    """What the next rollout of B lanes depends on besides the weights: arrays only, so that it can be saved, and vmapped over seeds."""

    lanes: Lanes
    episodes: Any
    """[B] u32: the numbers of the running episodes, or of those that begin next."""
    returns: Any
    """[B] f32: of the running episodes."""
    memory: Tree
    """[B, layers, size] each; `()` without memory."""
    rollouts: Any
    """u32: how many rollouts were collected; with `seeds`, what the random numbers of the next one are drawn from."""
    seeds: Any
    """[2] u32: of episodes, and of sampling."""


class Slots(NamedTuple):
    """The successors of truncated rows, up to S of each lane."""

    observations: Tree
    """[S, B, *obs]"""
    memory: Tree
    """[S, B, layers, size] each, after reading the row."""
    rows: Array
    """[S, B] i32: the row, or T if the slot is empty."""


class Scanned(NamedTuple):
    """T steps of B lanes, on the device; every leaf [T, B, …] if nothing else is said."""

    observations: Tree
    choices: Array
    gaussians: Array
    log_probs: Array
    rewards: Array
    terminated: Array
    truncated: Array
    starts: Array
    memory: Tree
    """Before reading the row."""
    returns: Array
    """Of the episode, with this step."""
    lengths: Array
    """Of the episode, with this step."""
    slots: Slots
    """The true successors of truncated rows."""
    last: Tree
    """[B, *obs] the true successors of the last row, before any reset."""
    last_memory: Tree
    """[B, layers, size] after reading the last row."""

    @property
    def ended(self) -> Array:
        """[T, B] bool: an episode ended with this step."""
        return self.terminated | self.truncated


def episode_keys(seeds: Array, lanes: Array, episodes: Array) -> Array:
    """The keys [B, 2] u32 of episodes."""
    derived = derive_seeds(seeds[0], lanes, episodes)
    return jnp.stack([jnp.zeros_like(derived), derived], -1)


def first_state(env: NativeEnv, seeds: np.ndarray, lanes: np.ndarray, memory: Tree) -> ScanState:
    """The state at the start of a run, in NumPy: no episode has begun; `lanes` [B] u32 are their numbers, `memory` is empty."""
    with paused_garbage_collection():
        shapes = jax.eval_shape(partial(begin_lanes, env), np.zeros((len(lanes), 2), np.uint32))
    nowhere: Lanes = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    nowhere = nowhere._replace(lengths=np.full(lanes.shape, -1, np.int32))
    return ScanState(nowhere, np.zeros_like(lanes), np.zeros(lanes.shape, np.float32), memory, np.zeros((), np.uint32), seeds)


class _Carry(NamedTuple):
    """What one step of the scan hands to the next."""

    lanes: Lanes
    episodes: Array
    returns: Array
    memory: Tree
    slots: Slots
    filled: Array
    """[B] i32: slots in use."""
    last: Tree
    """What the last step showed, before any reset."""
    truncated: Array
    """[B] bool: by the last step of this rollout."""


def scan_rollout(
    env: NativeEnv, spec: PolicySpec, num_steps: int, params: Params, scales: Scales, state: ScanState, lane_numbers: Any
) -> tuple[ScanState, Scanned]:
    """Act and step `num_steps` times; `lane_numbers` [B] u32 are those of the run."""
    layout, num_lanes = spec.actions, lane_numbers.shape[0]
    key = typed_keys(jnp.stack([state.seeds[1], state.rollouts]))
    uniform_key, normal_key = jax.random.split(key)
    uniforms = normals = jnp.zeros((num_steps, num_lanes, 0))
    if layout.groups:
        uniforms = jax.random.uniform(uniform_key, (num_steps, num_lanes, len(layout.groups)), jnp.float32)
    if layout.num_gaussians:
        normals = jax.random.normal(normal_key, (num_steps, num_lanes, layout.num_gaussians), jnp.float32)
    params, log_std, most = with_reversed_layers(spec, params), log_std_of(spec, params), most_truncations(env, num_steps)
    keeps_all = most > MOST_SLOTS

    def begin_episodes(before: _Carry, row: Array) -> tuple[Lanes, Slots, Array]:
        """Keep the successors of truncated rows, and begin the next episodes."""
        slots, filled = before.slots, before.filled
        if not keeps_all:
            here = before.truncated & (jnp.arange(most)[:, None] == filled)  # [S, B]

            def put(old: Array, new: Array) -> Array:
                return jnp.where(here.reshape(*here.shape, *(1,) * (new.ndim - 1)), new, old)

            seen = jax.tree.map(put, slots.observations, before.last)
            slots = Slots(seen, jax.tree.map(put, slots.memory, before.memory), jnp.where(here, row - 1, slots.rows))
            filled = filled + before.truncated
        fresh = begin_lanes(env, episode_keys(state.seeds, lane_numbers, before.episodes))
        return replace_lanes(before.lanes.lengths < 0, fresh, before.lanes), slots, filled

    def step(before: _Carry, given: tuple[Array, Array, Array]) -> tuple[_Carry, Any]:
        row, uniform, normal = given
        over = (before.lanes.lengths < 0).any()
        lanes, slots, filled = lax.cond(over, begin_episodes, lambda same, _: (same.lanes, same.slots, same.filled), before, row)
        starts = lanes.lengths == 0
        past = None if spec.memory is None else Past(before.memory, starts[None])
        outputs, memory = action_outputs(spec, params, scales, lanes.observations, past)
        legal = encode_legal(spec, lanes.observations, 1)
        choices, gaussians, _ = sample(layout, outputs, log_std, legal, uniform, normal)
        moved, outcome = step_lanes(env, lanes, unflatten_actions(layout, choices, env_action(layout, gaussians)))
        returns = before.returns + outcome.rewards
        ended = outcome.terminated | outcome.truncated
        after = _Carry(
            moved._replace(lengths=jnp.where(ended, -1, moved.lengths)), before.episodes + ended, jnp.where(ended, 0, returns), memory,
            slots, filled, outcome.observations, outcome.truncated,
        )  # fmt: skip
        told = (outcome.rewards, returns, moved.lengths, outcome.terminated, outcome.truncated)  # as one array: fewer kernels in a step
        numbers = jnp.stack([jnp.asarray(number, outcome.rewards.dtype) for number in told], -1)  # [B, 5]
        kept = (outcome.observations, memory) if keeps_all else ()
        return after, (lanes.observations, outputs, choices, gaussians, numbers, before.memory, kept)

    def slots_like(tree: Tree) -> Tree:
        return jax.tree.map(lambda array: jnp.zeros((0 if keeps_all else most, *array.shape), array.dtype), tree)

    seen = state.lanes.observations
    slots = Slots(slots_like(seen), slots_like(state.memory), jnp.full((0 if keeps_all else most, num_lanes), num_steps, jnp.int32))
    begin = _Carry(*state[:4], slots, jnp.zeros(num_lanes, jnp.int32), seen, jnp.zeros(num_lanes, bool))
    rows = jnp.arange(num_steps, dtype=jnp.int32)
    end, columns = lax.scan(step, begin, (rows, uniforms, normals))
    observations, outputs, choices, gaussians, numbers, memory, kept = columns
    rewards, returns, lengths, *ends = (numbers[..., index] for index in range(numbers.shape[-1]))
    terminated, truncated = (flag != 0 for flag in ends)
    log_probs = log_prob(layout, outputs, log_std, encode_legal(spec, observations, 2), choices, gaussians)
    slots = end.slots if not keeps_all else Slots(kept[0], kept[1], jnp.where(truncated, rows[:, None], num_steps))
    scanned = Scanned(
        observations, choices, gaussians, log_probs.astype(jnp.float32), rewards, terminated, truncated, lengths == 1, memory, returns,
        lengths.astype(jnp.int32), slots, end.last, end.memory,
    )  # fmt: skip
    return ScanState(end.lanes, end.episodes, end.returns, end.memory, state.rollouts + 1, state.seeds), scanned


MEASURES = ("observation_scale", "truncated_share", "forced_share", "memory_spread")


def rollout_measures(spec: PolicySpec, scanned: Scanned) -> tuple[Array, ...]:
    """The metrics `MEASURES` of a rollout, as `rollout_metrics` computes them on the host; -1 for one that has no meaning."""
    absent, num_steps = jnp.full((), -1, jnp.float32), scanned.rewards.shape[0]
    seen = without_mask(spec, scanned.observations)
    numeric = [part for part in jax.tree.leaves(seen) if jnp.issubdtype(part.dtype, jnp.floating) and part.ndim <= 3 and part.size]
    scales = [jnp.sqrt(jnp.square(part).mean((0, 1))).max() for part in numeric]
    ended, truncated = jnp.stack([scanned.ended, scanned.truncated]).sum((1, 2), dtype=jnp.float32)
    forced = spread = absent
    if spec.observations.has_mask:
        allowed = encode_mask(spec.actions, scanned.observations[MASK_KEY], 2).sum(-1)  # [T, B]
        forced = jnp.zeros(()) if spec.actions.num_gaussians else (allowed <= len(spec.actions.groups)).mean()
    if spec.memory is not None:  # of the cut rows, as a rollout has them
        used = jnp.concatenate([(scanned.slots.rows < num_steps - 1).reshape(-1), jnp.ones(scanned.rewards.shape[1], bool)])  # [K]
        spreads = []
        for of_slots, last in zip(jax.tree.leaves(scanned.slots.memory), jax.tree.leaves(scanned.last_memory)):
            rows = jnp.concatenate([of_slots.reshape(-1, *last.shape[1:]), last])  # [K, layers, size]
            chosen = used.reshape(-1, *(1,) * (rows.ndim - 1))
            mean = rows.mean(0, where=chosen)
            spreads.append(jnp.sqrt(jnp.square(rows - mean).mean(0, where=chosen)).mean())
        spread = jnp.where(used.sum() > 1, jnp.stack(spreads).max(), absent)
    share = jnp.where(ended > 0, truncated / jnp.maximum(ended, 1), absent)
    return jnp.stack(scales).max() if scales else absent, share, forced, spread


def steps_on_device(spec: PolicySpec, scanned: Scanned, length: int) -> Steps:
    """The rollout as learning reads it, without leaving the device; the successors are the slots' and those of the last rows."""
    layout, shape = spec.observations, scanned.rewards.shape
    num_steps, num_lanes = shape

    def flat(observations: Tree, leading: tuple[int, ...]) -> Array:
        empty = jnp.zeros((*leading, 0), jnp.float32)
        return encode_observations(layout, observations, len(leading)) if layout.size else empty

    def successors(of_slots: Tree, of_last: Tree) -> Tree:
        return jax.tree.map(lambda slot, last: jnp.concatenate([slot.reshape(-1, *last.shape[1:]), last]), of_slots, of_last)  # [K, …]

    rows = jnp.concatenate([scanned.slots.rows, jnp.full((1, num_lanes), num_steps - 1, jnp.int32)])  # [S + 1, B]
    places = jnp.where(rows < num_steps, rows * num_lanes + jnp.arange(num_lanes, dtype=jnp.int32), num_steps * num_lanes).reshape(-1)
    seen = successors(scanned.slots.observations, scanned.last)
    count = places.shape[0]
    cuts = Cuts(
        places=places,
        flat=flat(seen, (count,)),
        images=tuple(leaf(seen, part.path) for part in layout.images),
        world=jnp.zeros((count, 0), jnp.float32),
        valid=jnp.ones(count, bool),
        memory=successors(scanned.slots.memory, scanned.last_memory),
    )
    return Steps(
        flat=flat(scanned.observations, shape),
        images=tuple(leaf(scanned.observations, part.path) for part in layout.images),
        world=jnp.zeros((*shape, 0), jnp.float32),
        choices=scanned.choices,
        gaussians=scanned.gaussians,
        legal=encode_legal(spec, scanned.observations, 2),
        log_probs=scanned.log_probs,
        rewards=scanned.rewards,
        terminated=scanned.terminated,
        truncated=scanned.truncated,
        valid=jnp.ones(shape, bool),
        starts=() if spec.memory is None else scanned.starts,
        cuts=cuts,
        memory=() if spec.memory is None else sequence_states(scanned.memory, num_steps, length, 1),
    )
