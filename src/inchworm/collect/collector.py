"""Step 3 of 9: act, step, write the row. Brings back rollouts; never learns, never asks the critic."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optree

from inchworm.core.errors import BadNumberError, ConfigError
from inchworm.core.protocols import Actor, Policy, VectorEnv, agents_leave, lanes_per_copy
from inchworm.core.seeding import make_stream, restore_stream, stream_state
from inchworm.core.spaces import leaf, leaf_dtype, leaves, path_name
from inchworm.core.types import EndedEpisode, EnvStep, EpisodeRecord, PolicyStep, Seam, Tree
from inchworm.env.step_arrays import tree_leaves
from inchworm.policy.file import fingerprint
from inchworm.rollout.buffer import LaneRows, RolloutBuffer
from inchworm.rollout.rollout import Rollout


class LaneGroup:
    """One vector env with what a collector knows of its lanes; the first of them is lane `first_lane` of the rollout."""

    def __init__(self, env: VectorEnv, first_lane: int) -> None:
        self.env, self.first_lane, self.num_lanes = env, first_lane, env.num_lanes
        self.lanes_per_copy, self.agents_leave = lanes_per_copy(env), agents_leave(env)
        self._float_paths = [path for path, space in leaves(env.observation_space) if leaf_dtype(space).kind == "f"]
        self.forget(())

    def forget(self, state: Tree) -> None:
        """Know nothing of any running episode; `state` is a memory that has seen nothing."""
        self.now: EnvStep | None = None  # what to act on next
        self.state = state  # [B, *mem] the memory before that is read
        self.acted: PolicyStep | None = None  # while a step is under way
        self.valid = np.ones(self.num_lanes, np.bool_)  # [B] whose agents live in it
        self.returns = np.zeros(self.num_lanes, np.float64)  # [B] of the running episodes
        self.lengths = np.zeros(self.num_lanes, np.int64)  # [B]

    def check(self, step: EnvStep, *, moved: int) -> None:
        """Make sure that every number of a step is finite, before any of it is kept; `moved` is 1 after a step, 0 after a reset."""
        if not _all_finite(step.rewards):
            lane = _first_bad(step.rewards)
            raise self._bad_number("reward", lane, int(self.lengths[lane]) + moved, step.rewards[lane])
        if type(step.global_state) is not tuple or step.global_state:
            self._check_global_state(step)
        for path in self._float_paths:
            for ended in step.ended:
                values = leaf(ended.final_observation, path)
                if not _all_finite(values):
                    number = int(self.lengths[ended.lane]) + moved
                    raise self._bad_number(f"final observation {path_name(path)!r}", ended.lane, number, values)
            values = leaf(step.observations, path)
            if not _all_finite(values):
                lane = _first_bad(values)
                number = 0 if step.episode_starts[lane] else int(self.lengths[lane]) + moved
                raise self._bad_number(f"observation {path_name(path)!r}", lane, number, values[lane])

    def _check_global_state(self, step: EnvStep) -> None:
        """The same of what a central critic will see, also before a reset."""
        for values in tree_leaves(step.global_state):
            if values.dtype.kind == "f" and not _all_finite(values):
                copy = _first_bad(values)
                raise self._bad_number(
                    "global state", copy * self.lanes_per_copy, int(self.lengths[copy * self.lanes_per_copy]), values[copy]
                )
        for ended in step.ended[:: self.lanes_per_copy]:
            for values in map(np.asarray, tree_leaves(ended.final_global_state)):
                if values.dtype.kind == "f" and not _all_finite(values):
                    raise self._bad_number("final global state", ended.lane, int(self.lengths[ended.lane]), values)

    def fresh_lanes(self, step: EnvStep, saved_starts: np.ndarray) -> np.ndarray:
        """[B] whose copies begin an episode in place of the saved one: all their lanes do, and not all did so in `saved_starts`.

        Where all did, the copy either stood at its beginning, and has no return yet, or all that we see of its agents joined just then.
        """
        now, before = (starts.reshape(-1, self.lanes_per_copy).all(1) for starts in (step.episode_starts, saved_starts))
        return np.repeat(now & ~before, self.lanes_per_copy)

    @property
    def starts(self) -> np.ndarray:
        """[B] whose next observation opens an episode, or is the first of an agent that joins."""
        return np.zeros(self.num_lanes, np.bool_) if self.now is None else np.array(self.now.episode_starts)

    def last_state(self, policy: Actor) -> Tree:
        """The memory [b, *mem] with which what is shown will be read: who has just joined has none."""
        assert self.now is not None
        joined = np.flatnonzero(self.now.episode_starts) if self.agents_leave else np.zeros(0, np.int64)
        if not len(joined) or not tree_leaves(self.state):
            return self.state
        empty = policy.initial_state(self.num_lanes)
        return optree.tree_map(lambda kept, none: _replaced(kept, none, joined), self.state, empty)

    def left(self, step: EnvStep) -> list[int]:
        """The lanes whose agents left in this step while the episodes of their copies go on."""
        flagged = np.flatnonzero(step.terminated | step.truncated).tolist()
        ended = {entry.lane for entry in step.ended}
        return [lane for lane in flagged if lane not in ended]

    def count(self, rewards: np.ndarray, valid: np.ndarray) -> int:
        """Add one step to the running episodes; says how many living agents took it."""
        self.returns += rewards
        self.lengths += valid
        return int(np.count_nonzero(valid))

    def finish(self, ended: EndedEpisode) -> EpisodeRecord:
        """The record of an episode that has ended; its lane counts from zero again."""
        lane = ended.lane
        record = EpisodeRecord(float(self.returns[lane]), int(self.lengths[lane]), self.first_lane + lane, ended.seed, dict(ended.info))
        self.returns[lane] = self.lengths[lane] = 0
        return record

    def _bad_number(self, what: str, lane: int, step: int, value: Any) -> BadNumberError:
        number = np.array2string(np.asarray(value), threshold=20)
        return BadNumberError(
            f"the {what} of lane {self.first_lane + lane} is not finite at step {step} of its episode: {number}; "
            "nothing of this step was stored. Run `inchworm check-env` on the environment to find out why"
        )


def vector_envs_of(given: VectorEnv | Sequence[VectorEnv]) -> tuple[VectorEnv, ...]:
    """One vector env or several; those are parts of one rollout, so they must show the same world."""
    envs = given if isinstance(given, Sequence) else [given]
    if not envs:
        raise ConfigError("a collector needs a vector env, or one for each group; it was given none")
    for number, env in enumerate(envs):
        for name in ("observation_space", "action_space"):
            if getattr(env, name) != getattr(envs[0], name):
                raise ConfigError(
                    f"group {number} has the {name} {getattr(env, name)}, but group 0 {getattr(envs[0], name)}; make them alike"
                )
    return tuple(envs)


def _all_finite(values: np.ndarray) -> bool:
    """`np.isfinite(values).all()`, in half the time: no byte of the answer is 0."""
    return 0 not in np.isfinite(values).tobytes()


def _replaced(kept: np.ndarray, other: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """[b, …] with the rows of some lanes taken from another."""
    result = np.array(kept)
    result[lanes] = other[lanes]
    return result


def _first_bad(values: np.ndarray) -> int:
    """The first lane of [B, …] with a number that is not finite."""
    return int(np.argwhere(~np.isfinite(values))[0, 0])


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
