"""Serves the rollout, between steps 5 and 6: whether rollouts can stand side by side, refused in words where they cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optree

from inchworm.errors import RolloutError
from inchworm.rollout.checks import check_structure, named_leaves


def check_alike(rollouts: Sequence[Mapping[str, Any]]) -> None:
    """Refuse rollouts that cannot stand side by side: all but the number of lanes and of cut rows must agree."""
    if not rollouts:
        raise RolloutError("there is no rollout to combine; give at least one")
    first = rollouts[0]
    for number, other in enumerate(rollouts[1:], 1):
        if other["rewards"].shape[0] != first["rewards"].shape[0]:
            steps = f"{other['rewards'].shape[0]} steps, not {first['rewards'].shape[0]} as rollout 0"
            raise RolloutError(f"rollout {number} has {steps}; combine rollouts of equal length")
        for name in ("observations", "actions", "policy_state", "global_state", "cut_state", "cut_global_state"):
            _check_alike(other, first, name, f"rollout {number}: {name}")
        check_structure(other["context"], first["context"], f"rollout {number}: context", "rollout 0")
        if _lanes_per_copy(other) != _lanes_per_copy(first):
            raise RolloutError(
                f"rollout {number}: global_state has {_lanes_per_copy(other)} lanes per env copy, rollout 0 {_lanes_per_copy(first)}"
            )
    spacings = {fields["state_every"] for fields in rollouts} - {0}
    if len(spacings) > 1:
        raise RolloutError(f"memory is recorded every {sorted(spacings)} rows; combine rollouts of one ppo.sequence_length")


def _check_alike(other: Mapping[str, Any], first: Mapping[str, Any], name: str, words: str) -> None:
    lane_axis = 0 if name.startswith("cut_") else 1
    check_structure(other[name], first[name], words, "rollout 0")
    for (leaf_name, leaf), (_, model) in zip(named_leaves(other[name], words), named_leaves(first[name], words)):
        shape, expected = list(leaf.shape), list(model.shape)
        shape[lane_axis] = expected[lane_axis] = 0
        if shape != expected or leaf.dtype != model.dtype:
            raise RolloutError(f"{leaf_name}: {leaf.dtype}{list(leaf.shape)} does not fit {model.dtype}{list(model.shape)} of rollout 0")


def _lanes_per_copy(fields: Mapping[str, Any]) -> int:
    found = optree.tree_leaves(fields["global_state"])
    return int(fields["rewards"].shape[1] // max(1, found[0].shape[1])) if found else 0
