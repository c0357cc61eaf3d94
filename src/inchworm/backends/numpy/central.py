"""Serves step 6 of 9: what a central critic reads, in NumPy: a lane's own features beside the state of its world."""

from __future__ import annotations

import numpy as np
import optree

from inchworm.backends.numpy.encoding import encode_observations
from inchworm.errors import RolloutError
from inchworm.policy.observation_layout import ObservationLayout
from inchworm.policy.spec import PolicySpec
from inchworm.policy.statistics import PolicyStatistics
from inchworm.rollout.lane_states import PLACE, WORLD
from inchworm.rollout.rollout import Rollout
from inchworm.types import Array, Tree

NO_GLOBAL_STATE = (
    "policy.central_critic reads a global state, and there is none; collect from a vector env that was made with global_state=True"
)


class GlobalStateReader:
    """Encodes and normalises the global state. It holds copies of the statistics: make another when they have moved."""

    def __init__(self, layout: ObservationLayout, spec: PolicySpec, statistics: PolicyStatistics, dtype: np.dtype) -> None:
        self._layout, self._limit = layout, np.asarray(spec.config.observation_clip, dtype)
        self._scale: tuple[np.ndarray, np.ndarray] | None = None
        if statistics.global_state is not None:
            self._scale = statistics.global_center.astype(dtype), statistics.global_inverse_std.astype(dtype)

    def rows(self, global_state: Tree) -> np.ndarray:
        """`lane_states` [L, N, …] as rows [L·N, G]."""
        if isinstance(global_state, tuple) and not global_state:
            raise RolloutError(NO_GLOBAL_STATE)
        rows: np.ndarray = encode_observations(self._layout, global_state, 2).reshape(-1, self._layout.size)
        if self._scale is None:
            return rows
        center, inverse_std = self._scale
        normalized: np.ndarray = np.clip((rows - center) * inverse_std, -self._limit, self._limit)
        return normalized


def flat_worlds(spec: PolicySpec, rollout: Rollout) -> np.ndarray | None:
    """The states of all copies as a central critic's inputs [T, E, G], for statistics, which do not look at places; else None."""
    if spec.global_state is None:
        return None
    copies = optree.tree_leaves(rollout.global_state)[0].shape[:2]
    return encode_observations(spec.global_state, {WORLD: rollout.global_state, PLACE: np.zeros(copies, np.int64)}, 2)


def beside(features: np.ndarray, world: np.ndarray, alive: Array) -> np.ndarray:
    """[N, F + G]: a lane's own features, nothing of them where its agent does not live [N], and the world's."""
    return np.concatenate([features * alive[:, None], world], 1)
