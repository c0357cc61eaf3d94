"""Steps 3 to 5 of 9 in JAX, behind the `Collector` contract: one compiled call collects a rollout from a JAX-native environment."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inchworm.backends.jax.native import NativeEnv, derive_seeds
from inchworm.backends.jax.network import COMPILER_OPTIONS, Params, Scales, unflatten_actions
from inchworm.backends.jax.policy import JaxPolicy, StaticSpec
from inchworm.backends.jax.scan import Scanned, ScanState, first_state, scan_rollout
from inchworm.backends.jax.vector_env import JaxVectorEnv
from inchworm.backends.registry import acting_policy
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Actor, Policy
from inchworm.core.seeding import derive_seed
from inchworm.core.spaces import build_tree, leaf, leaf_dtype, leaves, path_name
from inchworm.core.types import RECENT_EPISODES, Array, EpisodeRecord, ProfilePoint, Tree
from inchworm.policy.file import fingerprint
from inchworm.rollout.fields import action_dtype, bad_number, freeze
from inchworm.rollout.rollout import Rollout


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
