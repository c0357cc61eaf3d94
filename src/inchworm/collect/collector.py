"""Step 3 of 9: act, step, write the row. Collects rollouts; never learns, never runs the critic."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np
import optree

from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Actor, Policy, VectorEnv, complete_vector_env
from inchworm.core.seeding import make_stream, restore_stream, stream_state
from inchworm.core.spaces import leaf, leaf_dtype, leaves, path_name, tree_leaves
from inchworm.core.types import RECENT_EPISODES, EnvStep, EpisodeRecord, ProfilePoint, Tree
from inchworm.policy.composite import CompositePolicy
from inchworm.policy.file import fingerprint
from inchworm.rollout.buffer import INFO, RolloutBuffer, hold_memory, own_turns
from inchworm.rollout.fields import bad_number
from inchworm.rollout.rollout import Rollout


class RolloutCollector:
    """Collects rollouts from a vector env with any `Actor`. Episodes continue from one call to the next.

    It owns the current observation, the policy's memory, and one sampling stream derived from `seed`. `sequence_length` is how often
    the memory is recorded, which is where training sequences may begin. `follows` is the policy of which `policy` is a copy that acts:
    every `collect` begins with its current weights, whatever changed them.
    """

    def __init__(
        self, vector_env: VectorEnv, policy: Actor, *, seed: int = 0, sequence_length: int = 1, follows: Actor | None = None
    ) -> None:
        self.vector_env, self._policy = complete_vector_env(vector_env), policy
        if isinstance(policy, CompositePolicy) and self.vector_env.agent_spaces:
            policy.fit(self.vector_env)
        self.env_steps = 0
        self.episodes = 0
        self.env_seconds = 0.0
        """Seconds between sending actions and receiving the steps, in this process."""
        self.recent: deque[EpisodeRecord] = deque(maxlen=RECENT_EPISODES)
        self._turn_based = self.vector_env.turn_based
        self._state_every = 1 if self._turn_based else sequence_length  # rows between two records of the memory
        self._stream = make_stream(seed, "sampling")
        self._lanes_per_copy, self._agents_leave = self.vector_env.lanes_per_copy, self.vector_env.agents_leave
        self._float_paths = [path for path, space in leaves(vector_env.observation_space) if leaf_dtype(space).kind == "f"]
        self._unseen_infos = bool(self.vector_env.kept_infos)  # a misspelt name is reported after the first rollout
        self._step_pending = False  # between send and recv
        self._reset_episode_state()
        self._trained = policy if isinstance(policy, Policy) else None  # asked once: isinstance with a protocol is slower than an act
        self.follows = follows if isinstance(follows, Policy) else self._trained
        self._followed = 0  # fingerprint of its weights when they were last read
        self._version = 0
        self._fingerprint: int | None = None  # of the weights that act; None until it is needed
        self._follow()

    @property
    def policy(self) -> Actor:
        """The actor, with the current weights of the policy that it follows."""
        self._follow()
        return self._policy

    @property
    def share_collected(self) -> float:
        """How much of the running or last `collect` is done, 0 to 1. Another thread may ask."""
        buffer = self._buffer
        return 0.0 if buffer is None else len(buffer) / buffer.num_steps

    def _follow(self) -> None:
        """Copy the weights of the followed policy if they changed, and compute the version and fingerprint of the weights that act.

        The weights themselves are compared, not versions or torch's counters, which not every change moves.
        """
        if self.follows is None or self._trained is None:
            return
        weights = self.follows.get_weights()
        found = fingerprint(weights)
        if found != self._followed:
            if self.follows is not self._trained:
                self._trained.set_weights(weights)
            self._followed = self._fingerprint = found
        elif self._fingerprint is None:
            self._fingerprint = fingerprint(self._trained.get_weights())
        self._version = self._trained.policy_version

    def restart(self) -> None:
        """Begin new episodes in all lanes with the next `collect`; those that are running are dropped."""
        self._reset_episode_state()

    def _reset_episode_state(self) -> None:
        """Reset per-episode state; drain and discard any pending env step."""
        lanes = self.vector_env.num_lanes
        self._buffer: RolloutBuffer | None = None  # holds no arrays between two calls
        self._now: EnvStep | None = None  # what to act on next
        self._state = self._policy.initial_state(lanes)  # [B, *mem] the memory before that is read
        self._returns = np.zeros(lanes, np.float64)  # [B] of the running episodes
        self._lengths = np.zeros(lanes, np.int64)  # [B]
        if self._step_pending:
            self._step_pending = False
            with contextlib.suppress(Exception):  # the first error is the one to report
                self.vector_env.recv()

    def collect(self, num_steps: int) -> Rollout:
        """The next `num_steps` steps of every lane; where agents take turns, the lanes' own moves among `num_steps` moves in every copy."""
        if num_steps < 1:
            raise ConfigError(f"collect needs 1 step or more, not {num_steps}")
        env, policy = self.vector_env, self.policy  # with its current weights
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._reset_episode_state)  # after half a step the lanes' positions are unknown: begin new episodes
            now = self._now
            if now is None:
                now = env.reset()
                self._check_finite(now, moved=0)
                self._now = now
            buffer = self._buffer
            if buffer is None:
                more: dict[str, Any] = {"state": self._state, "state_every": self._state_every}
                more |= {"global_state": now.global_state, "infos": env.kept_infos}
                spaces = (env.observation_space, env.action_space)
                self._buffer = buffer = RolloutBuffer.create(num_steps, env.num_lanes, *spaces, **more)
            else:
                buffer.reset(num_steps)
            episodes: list[EpisodeRecord] = []
            for _ in range(num_steps):
                observations, episode_starts, valid = buffer.begin_row(now, self._state)
                acted = policy.act(observations, self._state, episode_starts, self._stream)
                sent = perf_counter()
                env.send(acted.env_actions)
                self._step_pending = True
                buffer.add_action(acted)  # while workers step
                self._step_pending = False
                after = env.recv()
                self.env_seconds += perf_counter() - sent
                self._check_finite(after, moved=1)
                buffer.end_row(after)
                self._returns += after.rewards
                self._lengths += valid
                self.env_steps += int(np.count_nonzero(valid))
                self._state = hold_memory(acted.state, self._state, valid) if self._turn_based else acted.state
                self._now = now = after
                if self._agents_leave:
                    self._add_leaving_agents(after, buffer)
                if after.ended:
                    episodes += self._end_episodes(after, buffer)
            rollout = buffer.get(
                last_observations=now.observations,
                last_state=self._state_at(now),
                last_valid=now.valid,
                last_global_state=now.global_state,
                policy_version=self._version,
                weights_fingerprint=self._fingerprint or 0,
                episodes=episodes,
            )
            on_error.pop_all()
        if self._unseen_infos:
            absent = [repr(name) for name in env.kept_infos if np.isnan(rollout.extras[f"{INFO}{name}"]).all()]
            if absent:
                text = f"no info of the first {num_steps} steps has {', '.join(absent)} (collect.keep_infos): the columns are NaN"
                warnings.warn(text, stacklevel=2)
            self._unseen_infos = False
        return own_turns(rollout) if self._turn_based else rollout

    def _add_leaving_agents(self, step: EnvStep, buffer: RolloutBuffer) -> None:
        """Record the true successors of agents that left while their copy's episode continues: their lanes show them only once."""
        ended = {entry.lane for entry in step.ended}
        for lane in np.flatnonzero(step.terminated | step.truncated).tolist():
            if lane not in ended:
                shown, shared = _lane(step.observations, lane), _lane(step.global_state, lane // self._lanes_per_copy)
                truncated = bool(step.truncated[lane])  # a truncated agent would have lived on
                buffer.add_cut(lane, shown, _lane(self._state, lane), shared, valid=truncated)

    def _end_episodes(self, step: EnvStep, buffer: RolloutBuffer) -> list[EpisodeRecord]:
        """Record the true successors of the rows where episodes ended, and the episodes themselves."""
        records = []
        for ended in step.ended:
            lane = ended.lane
            buffer.add_cut(lane, ended.final_observation, _lane(self._state, lane), ended.final_global_state, valid=ended.valid)
            if self._lengths[lane]:  # an agent that was never alive in the episode has no record of it
                records.append(EpisodeRecord(float(self._returns[lane]), int(self._lengths[lane]), lane, ended.seed, dict(ended.info)))
            self._returns[lane] = self._lengths[lane] = 0
        self.episodes += len(records)
        self.recent.extend(records)
        return records

    def _state_at(self, now: EnvStep) -> Tree:
        """The memory [B, *mem] with which `now` will be read: an agent that has just joined has none."""
        joined = np.flatnonzero(now.episode_starts) if self._agents_leave else np.zeros(0, np.int64)
        if not len(joined) or not tree_leaves(self._state):
            return self._state

        def reset_joined(kept: np.ndarray, initial: np.ndarray) -> np.ndarray:
            result = np.array(kept)
            result[joined] = initial[joined]
            return result

        return optree.tree_map(reset_joined, self._state, self._policy.initial_state(self.vector_env.num_lanes))

    def _check_finite(self, step: EnvStep, *, moved: int) -> None:
        """Raise unless every number of a step is finite, before any of it is kept; `moved` is 1 after a step, 0 after a reset."""
        # `0 in np.isfinite(x).tobytes()` is `not np.isfinite(x).all()` in half the time: some byte of the answer is 0.
        if 0 in np.isfinite(step.rewards).tobytes():
            lane = _first_bad(step.rewards)
            raise bad_number("reward", lane, int(self._lengths[lane]) + moved, step.rewards[lane])
        if type(step.global_state) is not tuple or step.global_state:
            self._check_global_state(step)
        for path in self._float_paths:
            for ended in step.ended:
                values = leaf(ended.final_observation, path)
                if 0 in np.isfinite(values).tobytes():
                    number = int(self._lengths[ended.lane]) + moved
                    raise bad_number(f"final observation {path_name(path)!r}", ended.lane, number, values)
            values = leaf(step.observations, path) if path else step.observations
            if 0 in np.isfinite(values).tobytes():
                lane = _first_bad(values)
                number = 0 if step.episode_starts[lane] else int(self._lengths[lane]) + moved
                raise bad_number(f"observation {path_name(path)!r}", lane, number, values[lane])

    def _check_global_state(self, step: EnvStep) -> None:
        """The same check of what a central critic will see, also before a reset."""
        for values in tree_leaves(step.global_state):
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                copy = _first_bad(values)
                lane = copy * self._lanes_per_copy
                raise bad_number("global state", lane, int(self._lengths[lane]), values[copy])
        for ended in step.ended[:: self._lanes_per_copy]:
            for values in map(np.asarray, tree_leaves(ended.final_global_state)):
                if values.dtype.kind == "f" and not np.isfinite(values).all():
                    raise bad_number("final global state", ended.lane, int(self._lengths[ended.lane]), values)

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Act with these weights from the next `collect` on, until a policy that is followed changes."""
        if self._trained is None:
            raise ConfigError(f"{type(self._policy).__name__} is an actor without weights; it cannot be given any")
        self._trained.set_weights(weights)
        self._fingerprint = None

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next `collect` depends on besides the weights."""
        lanes, now = self.vector_env.num_lanes, self._now
        return {
            "stream": stream_state(self._stream),
            "returns": self._returns.copy(),
            "lengths": self._lengths.copy(),
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "recent": [[e.episode_return, e.length, e.lane, e.seed, dict(e.info)] for e in self.recent],
            "policy_state": optree.tree_map(np.array, self._state),
            "started": now is not None,
            "starts": np.zeros(lanes, np.bool_) if now is None else np.array(now.episode_starts),
            "vector_env": self.vector_env.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; the environments are restored by replay."""
        if "scan" in state:
            raise ConfigError(
                "the state is of environments that were stepped inside a compiled program (run.backend=jax); resume it with the settings "
                "that it was saved with, or start a new run from its policy (run.init_from)"
            )
        if "ranks" in state:
            raise ConfigError(
                f"the state is of {len(state['ranks'])} processes that learned together; resume it with torchrun --nproc-per-node "
                f"{len(state['ranks'])}, or start a new run from its policy (run.init_from)"
            )
        if "collectors" in state:
            collectors = state["collectors"]
            if len(collectors) > 1 or state["begun"]:
                raise ConfigError(
                    f"the state is of {len(collectors)} collector{'s' if len(collectors) > 1 else ''} with {len(state['begun'])} rollouts "
                    "begun ahead; set collect.num_collectors and collect.staleness as they were"
                )
            state = {**collectors[0], "recent": state["recent"]}
        if isinstance(state["vector_env"], list):
            raise ConfigError(
                f"the state is of {len(state['vector_env'])} alternating groups of environments (collect.groups), which were removed; "
                "resume it with the version that wrote it, or start a new run from its policy file"
            )
        self._reset_episode_state()
        self._stream = restore_stream(state["stream"])
        self.env_steps, self.episodes = int(state["env_steps"]), int(state["episodes"])
        records = (EpisodeRecord(total, length, lane, seed, info) for total, length, lane, seed, info in state["recent"])
        self.recent = deque(records, maxlen=RECENT_EPISODES)
        self._returns, self._lengths = np.array(state["returns"]), np.array(state["lengths"])
        self._state = optree.tree_map(np.array, state["policy_state"])
        self.vector_env.load_state_dict(state["vector_env"])
        if state["started"]:
            now = self.vector_env.reset(indices=())
            self._check_finite(now, moved=0)
            self._now = now
            # A copy whose replay failed begins a new episode: all its lanes start now, and not all did when it was saved. Where all did,
            # the copy was at its beginning and has no return yet, or all of its visible agents had just joined.
            starts = state["starts"] if "starts" in state else np.zeros(len(self._returns), np.bool_)  # older checkpoints lack them
            starts_now, started_then = (each.reshape(-1, self._lanes_per_copy).all(1) for each in (now.episode_starts, starts))  # [E]
            fresh = np.repeat(starts_now & ~started_then, self._lanes_per_copy)
            self._returns[fresh] = self._lengths[fresh] = 0

    def profile_points(self) -> list[ProfilePoint]:
        """The sections of a collect, for a profile; the remainder is the writing."""
        envs: list[ProfilePoint] = [("env", self.vector_env, method) for method in ("reset", "send", "recv")]
        return [*envs, ("act", self._policy, "act")]

    def close(self) -> None:
        """Close the environments."""
        self.vector_env.close()


def _first_bad(values: np.ndarray) -> int:
    """The first lane of [B, …] with a number that is not finite."""
    return int(np.argwhere(~np.isfinite(values))[0, 0])


def _lane(tree: Tree, lane: int) -> Tree:
    """One lane of a tree [B, …]."""
    return tree if isinstance(tree, tuple) and not tree else optree.tree_map(lambda leaf: leaf[lane], tree)
