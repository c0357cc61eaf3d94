"""Serves steps 6 and 8 of 9: what a central critic reads, in torch: a lane's own features beside the state of its world."""

from __future__ import annotations

from typing import NamedTuple

import optree
import torch
from torch import Tensor

from inchworm.backends.numpy.central import NO_GLOBAL_STATE
from inchworm.backends.torch.encoding import encode_observations, to_tensor, to_tensors
from inchworm.errors import RolloutError
from inchworm.policy.observation_layout import ObservationLayout
from inchworm.types import Array, Tree


class Central(NamedTuple):
    """Observations with what only a central critic sees, as one tree: whatever cuts or flattens the one does it to all."""

    observations: Tree
    global_state: Tree
    valid: Tensor


def with_world(observations: Tree, global_state: Tree, valid: Array | None) -> Central:
    """Observations [L, N, *obs] beside `lane_states` [L, N, …] and who lives [L, N]; all do unless it is said."""
    first = optree.tree_leaves(observations)[0]
    if isinstance(global_state, tuple) and not global_state:
        raise RolloutError(NO_GLOBAL_STATE)
    alive = torch.ones(first.shape[:2], dtype=torch.bool, device=first.device) if valid is None else to_tensor(valid, first.device)
    return Central(observations, to_tensors(global_state, first.device), alive)


def beside(features: Tensor, seen: Tree, layout: ObservationLayout, center: Tensor, inverse_std: Tensor, limit: float | None) -> Tensor:
    """[N, F + G]: a lane's own features, nothing of them where its agent does not live, and the world's, normalised if `limit` is given."""
    if not isinstance(seen, Central):
        raise RolloutError(NO_GLOBAL_STATE)
    world = encode_observations(layout, seen.global_state, 1).to(features.dtype)
    if limit is not None:
        world = ((world - center) * inverse_std).clamp(-limit, limit)
    return torch.cat([features * seen.valid[:, None], world], -1)
