"""Steps 3 to 5 of 9 in JAX, behind the `Collector` contract: one compiled call collects a rollout from a JAX-native environment.

T steps of B lanes are one `lax.scan`, a pure function of weights and state. What does not depend on the step before is outside of the
scan: all random numbers are drawn before it, log-probs are computed after it, and the critic is not run at all. New episodes are computed
only in steps before which one ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from inchworm.backends.jax.native import (
    JaxVectorEnv,
    Lanes,
    NativeEnv,
    begin_lanes,
    derive_seeds,
    most_truncations,
    replace_lanes,
    step_lanes,
    typed_keys,
)
from inchworm.backends.jax.network import (
    COMPILER_OPTIONS,
    Params,
    Past,
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
from inchworm.backends.jax.policy import JaxPolicy, StaticSpec, env_action, log_prob, sample, without_mask
from inchworm.backends.jax.samples import Cuts, Steps
from inchworm.backends.registry import acting_policy
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Actor, Policy
from inchworm.core.seeding import derive_seed
from inchworm.core.spaces import MASK_KEY, build_tree, leaf, leaf_dtype, leaves, path_name
from inchworm.core.types import RECENT_EPISODES, EpisodeRecord, ProfilePoint, Tree
from inchworm.policy.file import fingerprint
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.fields import action_dtype, bad_number, freeze
from inchworm.rollout.rollout import Rollout
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


@partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=COMPILER_OPTIONS)
def _scan(
    env: NativeEnv, static: StaticSpec, num_steps: int, params: Params, scales: Scales, state: ScanState, lanes: Array
) -> tuple[ScanState, Scanned, Tree]:
    """A rollout, and its actions as the space's tree. Of the module, so that equal runs of a process share it."""
    after, scanned = scan_rollout(env, static.spec, num_steps, params, scales, state, lanes)
    return after, scanned, unflatten_actions(static.spec.actions, scanned.choices, scanned.gaussians)


class ScanCollector:
    """Collects rollouts from a JAX-native environment with a `JaxPolicy`: the environment, the actor and the writing are one program.

    It has the place of a `RolloutCollector`. Its `state` is on the device, and is what the fused loop moves instead of it.
    """

    def __init__(self, vector_env: JaxVectorEnv, policy: JaxPolicy, *, seed: int = 0, sequence_length: int = 1) -> None:
        self.vector_env, self.follows, self.native = vector_env, policy, vector_env.native
        self.env_steps = self.episodes = 0
        self.recent: deque[EpisodeRecord] = deque(maxlen=RECENT_EPISODES)
        self.share_collected = 0.0
        """Always 0: a rollout is one call, of which nothing is known before it is over."""
        self._spec, self._state_every = policy.spec, sequence_length
        self._actor: Actor = acting_policy(policy)
        self._actor_weights = 0  # their fingerprint
        lanes = vector_env.first_copy + np.arange(vector_env.num_lanes)
        self.lane_numbers = lanes.astype(np.uint32)
        self._seeds = np.array([derive_seed(seed, "episode"), derive_seed(seed, "sampling")], np.uint32)
        self._static = StaticSpec(policy.spec)
        self._state: ScanState | None = None  # until it is first read

    @property
    def state(self) -> ScanState:
        """The state of all lanes; on the device, except before the first rollout."""
        if self._state is None:
            memory = jax.tree.map(np.asarray, self.follows.initial_state(len(self.lane_numbers)))
            with self.follows.precision():
                self._state = first_state(self.native, self._seeds, self.lane_numbers, memory)
        return self._state

    @property
    def policy(self) -> Actor:
        """An actor with the policy's current weights that acts from the host, such as for evaluations."""
        if isinstance(self._actor, Policy) and self._actor is not self.follows:
            weights = self.follows.get_weights()
            found = fingerprint(weights)
            if found != self._actor_weights:
                self._actor.set_weights(weights)
                self._actor_weights = found
        return self._actor

    def collect(self, num_steps: int) -> Rollout:
        """The next `num_steps` steps of every lane."""
        if num_steps < 1:
            raise ConfigError(f"collect needs 1 step or more, not {num_steps}")
        policy, before = self.follows, self.state
        with policy.precision():
            after, scanned, actions = _scan(self.native, self._static, num_steps, policy.params, policy.scales, before, self.lane_numbers)
        host: Any = jax.tree.map(np.asarray, scanned)
        self._check_finite(host)
        ended = host.terminated | host.truncated
        records = self.records(ended, host.returns, host.lengths, np.asarray(before.episodes))
        self.advance(after, num_steps * len(self.lane_numbers), len(records), records)
        return self._rollout(host, actions, records)

    def records(self, ended: np.ndarray, returns: np.ndarray, lengths: np.ndarray, numbers: np.ndarray) -> list[EpisodeRecord]:
        """The episodes that ended in [T, B] steps, in order; `numbers` [B] are those of the lanes' episodes before them."""
        rows, lanes = ended.nonzero()
        earlier = (np.cumsum(ended, 0) - 1)[rows, lanes]  # how many ended before in the same lane
        seeds = derive_seeds(np.asarray(self.state.seeds)[:1], self.lane_numbers[lanes], (numbers[lanes] + earlier).astype(np.uint32))
        columns = (returns[rows, lanes].tolist(), lengths[rows, lanes].tolist(), lanes.tolist(), seeds.tolist())
        return [EpisodeRecord(float(total), length, lane, seed) for total, length, lane, seed in zip(*columns)]

    def advance(self, state: ScanState, steps: int, episodes: int, records: Sequence[EpisodeRecord]) -> None:
        """Continue from another state, after `steps` steps in which this number of episodes ended; `records` are at least the last."""
        self._state = state
        self.env_steps += steps
        self.episodes += episodes
        self.recent.extend(records)

    def _rollout(self, host: Any, actions: Tree, records: Sequence[EpisodeRecord]) -> Rollout:
        """The rollout in NumPy, with the types of its spaces."""
        env, spec, num_steps = self.vector_env, self._spec, len(host.rewards)
        lanes = np.arange(env.num_lanes)
        # The slots of each lane are filled in order; those of the last row are among the last successors.
        slot, lane = (host.slots.rows < num_steps - 1).nonzero()
        row = host.slots.rows[slot, lane]
        order = np.lexsort((lane, row))
        slot, lane, row = slot[order], lane[order], row[order]
        cut_rows = np.concatenate([np.stack([row, lane], 1), np.stack([np.full_like(lanes, num_steps - 1), lanes], 1)]).astype(np.int32)

        def at_cuts(of_slots: Tree, of_last: Tree) -> Tree:
            return jax.tree.map(lambda kept, last: np.concatenate([kept[slot, lane], last]), of_slots, of_last)

        memory = host.memory if spec.memory is not None else ()
        arrays: dict[str, Any] = {
            "observations": _with_space(env.observation_space, host.observations, leaf_dtype),
            "actions": _with_space(env.action_space, actions, action_dtype),
            "log_probs": host.log_probs,
            "rewards": host.rewards,
            "terminated": host.terminated,
            "truncated": host.truncated,
            "episode_starts": host.starts,
            "valid": np.ones(host.rewards.shape, np.bool_),
            "policy_state": jax.tree.map(lambda array: array[:: self._state_every], memory),
            "cut_rows": cut_rows,
            "cut_observations": _with_space(env.observation_space, at_cuts(host.slots.observations, host.last), leaf_dtype),
            "cut_state": at_cuts(host.slots.memory, host.last_memory) if spec.memory is not None else (),
            "cut_valid": np.ones(len(cut_rows), np.bool_),
            "policy_version": np.full(len(lanes), self.follows.policy_version, np.int32),
            "weights_fingerprint": np.full(len(lanes), fingerprint(self.follows.get_weights()), np.uint64),
        }
        return Rollout(**freeze(arrays), state_every=self._state_every if spec.memory is not None else 0, episodes=tuple(records))

    def _check_finite(self, host: Any) -> None:
        """Raise unless every number is finite, before any of it is kept."""
        rows, last = host.slots.rows, len(host.rewards) - 1
        at_slots = np.take_along_axis(host.lengths, np.minimum(rows, last), 0)  # [S, B]
        shown = [("observation", host.observations, host.lengths - 1), ("final observation", host.slots.observations, at_slots)]
        found: list[tuple[str, np.ndarray, np.ndarray]] = [("reward", host.rewards, host.lengths)]
        for path, space in leaves(self.vector_env.observation_space):
            if leaf_dtype(space).kind == "f":
                found += [(f"{name} {path_name(path)!r}", leaf(tree, path), steps) for name, tree, steps in shown]
        for what, values, steps in found:
            if not np.isfinite(values).all():
                row, lane = np.argwhere(~np.isfinite(values))[0, :2]
                raise bad_number(what, int(lane), int(steps[row, lane]), values[row, lane])

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Act with these weights from the next `collect` on."""
        self.follows.set_weights(weights)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next `collect` depends on besides the weights; `scan` holds the state's arrays in order."""
        parts = [] if self._state is None else jax.tree.leaves(self._state)
        return {
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "recent": [[e.episode_return, e.length, e.lane, e.seed, dict(e.info)] for e in self.recent],
            "scan": {f"part{index:03}": np.asarray(part) for index, part in enumerate(parts)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        if "scan" not in state:
            raise ConfigError(
                "the state is of environments that were stepped from the host, not by a compiled scan; set env.jax_native and "
                "run.backend as "
                "they were when it was saved"
            )
        self.env_steps, self.episodes = int(state["env_steps"]), int(state["episodes"])
        records = (EpisodeRecord(total, length, lane, seed, info) for total, length, lane, seed, info in state["recent"])
        self.recent = deque(records, maxlen=RECENT_EPISODES)
        self._state = None
        if state["scan"]:
            parts, form = jax.tree.flatten(self.state)
            saved = [np.asarray(state["scan"][f"part{index:03}"]) for index in range(len(state["scan"]))]
            shapes, expected = ([(part.shape, part.dtype) for part in each] for each in (saved, parts))
            if shapes != expected:
                raise ConfigError(f"the saved lanes do not fit these environments: {shapes} and {expected}; set env.num_envs as it was")
            with self.follows.precision():
                self._state = jax.tree.unflatten(form, [jnp.asarray(part) for part in saved])

    def profile_points(self) -> list[ProfilePoint]:
        """The sections of a collect, for a profile: it is one call."""
        return []

    def close(self) -> None:
        """Close the environments."""
        self.vector_env.close()


def _with_space(space: Any, tree: Tree, dtype: Any) -> Tree:
    """Arrays in the types of a space, whose whole numbers may have 64 bits."""
    return build_tree(space, lambda path, own: np.asarray(leaf(tree, path)).astype(dtype(own), copy=False))
