"""Serves steps 6 to 8 of 9: the global state, which a rollout holds once for each env copy, as a central critic reads it, for each lane."""

from __future__ import annotations

import numpy as np
import optree

from inchworm.rollout.rollout import Rollout
from inchworm.types import Tree

WORLD, PLACE = "world", "place"
"""What a central critic is told: the state of a lane's copy, and which of the copy's lanes it is."""


def lane_states(rollout: Rollout) -> Tree:
    """What a central critic reads for each lane: {world: [T, B, *] the state of its copy, place: [T, B] its number there}, or `()`.

    Leaves are only indexed, so a backend's tensors pass, too; places are an array.
    """
    if not optree.tree_leaves(rollout.global_state):
        return ()
    copies, places = np.divmod(np.arange(rollout.num_lanes), rollout.lanes_per_copy)  # [B]
    world = optree.tree_map(lambda leaf: leaf[:, copies], rollout.global_state)
    return {WORLD: world, PLACE: np.tile(places, (rollout.num_steps, 1))}


def cut_lane_states(rollout: Rollout) -> Tree:
    """The same at the true successors of the cut rows, each leaf [K, …]."""
    if not optree.tree_leaves(rollout.global_state):
        return ()
    return {WORLD: rollout.cut_global_state, PLACE: rollout.cut_rows[:, 1] % rollout.lanes_per_copy}
