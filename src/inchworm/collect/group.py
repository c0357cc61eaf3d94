"""Serves step 3 of 9: the lanes of one vector env, where they stand between two steps, and whether what comes back can be kept."""

from __future__ import annotations

from typing import Any

import numpy as np

from inchworm.errors import BadNumberError
from inchworm.protocols import VectorEnv
from inchworm.spaces import leaf, leaf_dtype, leaves, path_name
from inchworm.types import EndedEpisode, EnvStep, EpisodeRecord, PolicyStep, Tree


class LaneGroup:
    """One vector env with what a collector knows of its lanes; the first of them is lane `first_lane` of the rollout."""

    def __init__(self, env: VectorEnv, first_lane: int) -> None:
        self.env, self.first_lane, self.num_lanes = env, first_lane, env.num_lanes
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


def _all_finite(values: np.ndarray) -> bool:
    """`np.isfinite(values).all()`, in half the time: no byte of the answer is 0."""
    return 0 not in np.isfinite(values).tobytes()


def _first_bad(values: np.ndarray) -> int:
    """The first lane of [B, …] with a number that is not finite."""
    return int(np.argwhere(~np.isfinite(values))[0, 0])
