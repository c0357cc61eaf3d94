"""Serves step 3 of 9: the lanes of one vector env, where they stand between two steps, and whether what comes back can be kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import optree

from inchworm.abilities import agents_leave, lanes_per_copy
from inchworm.env.memory import tree_leaves
from inchworm.errors import BadNumberError, ConfigError
from inchworm.protocols import Actor, VectorEnv
from inchworm.spaces import leaf, leaf_dtype, leaves, path_name
from inchworm.types import EndedEpisode, EnvStep, EpisodeRecord, PolicyStep, Tree


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
