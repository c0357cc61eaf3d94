"""Serves step 7 of 9: what each step of a rollout led to, for losses that ask."""

from __future__ import annotations

import numpy as np
import optree

from inchworm.rollout.rollout import Rollout
from inchworm.types import Array, Tree


def successor_observations(rollout: Rollout) -> Tree:
    """What each step led to, [T, B, *obs]: the next row's observation, and at cut rows the true successor.

    Where a row is terminated and not its lane's last, this is the first observation of the lane's next episode: nothing
    followed, so nothing there may be used. Leaves are only indexed, so a backend's tensors pass as arrays do.
    """
    time, lane = rollout.cut_rows[:, 0], rollout.cut_rows[:, 1]
    following = np.minimum(np.arange(1, rollout.num_steps + 1), rollout.num_steps - 1)  # [T]

    def shifted(leaf: Array, cuts: Array) -> Array:
        successors = leaf[following]  # [T, B, *obs]: indexing by an array makes a copy
        successors[time, lane] = cuts
        return successors

    return optree.tree_map(shifted, rollout.observations, rollout.cut_observations)
