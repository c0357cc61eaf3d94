"""Step 3 of 9: act, step, write the row. Brings back rollouts; never learns, never asks the critic."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optree

from inchworm.collect.group import LaneGroup, vector_envs_of
from inchworm.errors import ConfigError
from inchworm.policy.weights import fingerprint
from inchworm.protocols import Actor, Policy, VectorEnv
from inchworm.rollout.buffer import LaneRows, RolloutBuffer
from inchworm.rollout.rollout import Rollout
from inchworm.seeding import make_stream, restore_stream, stream_state
from inchworm.types import EnvStep, EpisodeRecord, Seam, Tree

RECENT_EPISODES = 100
"""How many last episodes are kept for running means."""


class RolloutCollector:
    """Collects rollouts from a vector env with any `Actor`. Episodes go on from one call to the next.

    It owns the current observation, the memory, and one sampling stream derived from `seed`. `sequence_length` is how often a
    policy's memory is recorded, which is where sequences may begin.

    Several vector envs of one world are groups that take turns: one steps while the policy acts for the next. Their lanes stand side by
    side in the rollout. The policy acts for one group at a time, always in the same order, so no number depends on who had to wait.
    """

    def __init__(self, vector_env: VectorEnv | Sequence[VectorEnv], policy: Actor, *, seed: int = 0, sequence_length: int = 1) -> None:
        self.vector_envs = vector_envs_of(vector_env)
        self.policy = policy
        self.env_steps = 0
        self.episodes = 0
        self.recent: deque[EpisodeRecord] = deque(maxlen=RECENT_EPISODES)
        self._sequence_length = sequence_length
        self._stream = make_stream(seed, "sampling")
        self._buffer: RolloutBuffer | None = None  # between two calls it holds no arrays
        self._groups: list[LaneGroup] = []
        for env in self.vector_envs:
            self._groups.append(LaneGroup(env, first_lane=sum(group.num_lanes for group in self._groups)))
        self._forget()
        self._trained = policy if isinstance(policy, Policy) else None  # asked once: comparing with a protocol takes longer than an act
        self._version, self._fingerprint = 0, 0
        if self._trained is not None:
            self._version, self._fingerprint = self._trained.policy_version, fingerprint(self._trained.get_weights())

    @property
    def vector_env(self) -> VectorEnv:
        """The vector env, if there is one; `vector_envs` has all."""
        if len(self.vector_envs) > 1:
            raise ConfigError(f"this collector has {len(self.vector_envs)} groups of environments; use vector_envs, which has one for each")
        return self.vector_envs[0]

    def collect(self, num_steps: int) -> Rollout:
        """The next `num_steps` steps of every lane."""
        if num_steps < 1:
            raise ConfigError(f"collect needs 1 step or more, not {num_steps}")
        try:
            return self._collect(num_steps)
        except BaseException:  # after half a step nobody knows where the lanes stand: the next call begins new episodes
            self._forget()
            raise

    def _collect(self, num_steps: int) -> Rollout:
        for group in self._groups:
            if group.now is None:
                self._see(group, group.env.reset())
        self._know_weights()
        buffer = self._fresh_buffer(num_steps)
        episodes: list[EpisodeRecord] = []
        for turn in range(num_steps + 1):  # a step begins in one turn and ends in the next: meanwhile it is the other groups' turn
            for group, rows in zip(self._groups, buffer.rows):
                if turn > 0:
                    episodes += self._receive(group, rows)
                if turn < num_steps:
                    self._act(group, rows)
        return buffer.get(
            last_observations=_side_by_side([group.now.observations for group in self._groups if group.now]),
            last_state=_side_by_side([group.last_state(self.policy) for group in self._groups]),
            last_valid=_side_by_side([group.now.valid for group in self._groups if group.now]),
            last_global_state=_side_by_side([group.now.global_state for group in self._groups if group.now]),
            policy_version=self._version,
            weights_fingerprint=self._fingerprint,
            episodes=episodes,
        )

    def _act(self, group: LaneGroup, rows: LaneRows) -> None:
        """Act on what was seen, and begin the step. The row is written while the environments move, where they are elsewhere."""
        assert group.now is not None
        observations, episode_starts, group.valid = rows.seen(group.now, group.state)
        step = self.policy.act(observations, group.state, episode_starts, self._stream)
        group.env.send(step.env_actions)
        group.acted = step
        rows.acted(step)

    def _receive(self, group: LaneGroup, rows: LaneRows) -> Sequence[EpisodeRecord]:
        """Finish the step and its row; returns the episodes that ended in it."""
        step, group.acted = group.acted, None
        assert step is not None
        after = group.env.recv()
        group.check(after, moved=1)
        rows.moved(after)
        self.env_steps += group.count(after.rewards, group.valid)
        group.now, group.state = after, step.state
        if group.agents_leave:
            self._part(group, rows)
        return self._finish(group, rows) if after.ended else ()

    def _part(self, group: LaneGroup, rows: LaneRows) -> None:
        """Write the true successors of agents that left a running episode: their lanes show them once."""
        assert group.now is not None
        for lane in group.left(group.now):
            shown, shared = _lane(group.now.observations, lane), _lane(group.now.global_state, lane // group.lanes_per_copy)
            rows.add_cut(lane, shown, _lane(group.state, lane), shared, valid=bool(group.now.truncated[lane]))  # cut off, it would live on

    def _finish(self, group: LaneGroup, rows: LaneRows) -> list[EpisodeRecord]:
        """Write the true successors of the rows where episodes ended, and book the episodes."""
        assert group.now is not None
        for ended in group.now.ended:
            state = _lane(group.state, ended.lane)
            rows.add_cut(ended.lane, ended.final_observation, state, ended.final_global_state, valid=ended.valid)
        # An agent that did not once live in the episode has no record of it.
        records = [record for record in map(group.finish, group.now.ended) if record.length]
        self.episodes += len(records)
        self.recent.extend(records)
        return records

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Act with these weights from the next `collect` on."""
        if self._trained is None:
            raise ConfigError(f"{type(self.policy).__name__} is an actor without weights; it cannot be given any")
        self._trained.set_weights(weights)
        self._version, self._fingerprint = self._trained.policy_version, fingerprint(weights)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next `collect` depends on besides the weights; `vector_env` is a list if there are groups."""
        states = [env.state_dict() for env in self.vector_envs]
        return {
            "stream": stream_state(self._stream),
            "returns": np.concatenate([group.returns for group in self._groups]),
            "lengths": np.concatenate([group.lengths for group in self._groups]),
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "recent": [[e.episode_return, e.length, e.lane, e.seed, dict(e.info)] for e in self.recent],
            "policy_state": optree.tree_map(np.array, _side_by_side([group.state for group in self._groups])),
            "started": self._groups[0].now is not None,
            "starts": np.concatenate([group.starts for group in self._groups]),
            "vector_env": states if len(states) > 1 else states[0],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` described: the environments are brought back by replay."""
        states = state["vector_env"] if isinstance(state["vector_env"], list) else [state["vector_env"]]
        if len(states) != len(self._groups):
            raise ConfigError(
                f"the state is of {len(states)} groups of environments, but there are {len(self._groups)}; set collect.groups={len(states)}"
            )
        self._forget()
        self._stream = restore_stream(state["stream"])
        starts = state["starts"] if "starts" in state else np.zeros(len(state["returns"]), np.bool_)  # older ones lack them
        self.env_steps, self.episodes = int(state["env_steps"]), int(state["episodes"])
        self.recent = deque((EpisodeRecord(*_five(entry)) for entry in state["recent"]), maxlen=RECENT_EPISODES)
        for group, env_state in zip(self._groups, states):
            lanes = slice(group.first_lane, group.first_lane + group.num_lanes)
            group.returns, group.lengths = np.array(state["returns"][lanes]), np.array(state["lengths"][lanes])
            group.state = optree.tree_map(lambda leaf, lanes=lanes: np.array(leaf[lanes]), state["policy_state"])
            group.env.load_state_dict(env_state)
            if state["started"]:
                now = group.env.reset(indices=())
                self._see(group, now)
                fresh = group.fresh_lanes(now, starts[lanes])
                group.returns[fresh] = group.lengths[fresh] = 0  # copies that replay did not bring back

    def seams(self) -> list[Seam]:
        """The sections of a collect, for a profile; what is left of it is the writing."""
        envs: list[Seam] = [("env", env, method) for env in self.vector_envs for method in ("reset", "send", "recv")]
        return [*envs, ("act", self.policy, "act")]

    def close(self) -> None:
        """Close the environments."""
        with contextlib.ExitStack() as stack:  # all of them, also if one fails
            for env in self.vector_envs:
                stack.callback(env.close)

    def _fresh_buffer(self, num_steps: int) -> RolloutBuffer:
        if self._buffer is not None and self._buffer.num_steps == num_steps:
            self._buffer.reset()
            return self._buffer
        env, sizes = self.vector_envs[0], tuple(group.num_lanes for group in self._groups)
        self._buffer = RolloutBuffer.create(
            num_steps,
            sum(sizes),
            env.observation_space,
            env.action_space,
            state=_side_by_side([group.state for group in self._groups]),
            state_every=self._sequence_length,
            global_state=_side_by_side([group.now.global_state for group in self._groups if group.now]),
            group_sizes=sizes,
        )
        return self._buffer

    def _know_weights(self) -> None:
        """A policy that acts and learns in one object has moved without `set_weights`: look at it again."""
        if self._trained is not None and self._trained.policy_version != self._version:
            self._version, self._fingerprint = self._trained.policy_version, fingerprint(self._trained.get_weights())

    def _forget(self) -> None:
        """Know nothing of any running episode; a step that is still under way is waited for and dropped."""
        self._buffer = None
        under_way = [group.env for group in self._groups if group.acted is not None]
        for group in self._groups:
            group.forget(self.policy.initial_state(group.num_lanes))
        for env in under_way:
            with contextlib.suppress(Exception):  # the first error is the one that is told
                env.recv()

    def _see(self, group: LaneGroup, step: EnvStep) -> None:
        group.check(step, moved=0)
        group.now = step


def _five(entry: Sequence[Any]) -> tuple[Any, Any, Any, Any, Any]:
    """A saved episode, with all its fields."""
    episode_return, length, lane, seed, info = entry
    return episode_return, length, lane, seed, info


def _lane(state: Tree, lane: int) -> Tree:
    """A lane's memory."""
    return state if isinstance(state, tuple) and not state else optree.tree_map(lambda leaf: leaf[lane], state)


def _side_by_side(trees: Sequence[Tree]) -> Tree:
    """Trees [b, …] of all groups as one [B, …]."""
    return trees[0] if len(trees) == 1 else optree.tree_map(lambda *leaves: np.concatenate(leaves), *trees)
