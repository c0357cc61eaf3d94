"""Facts of a rollout as metrics: the scale of observations, how episodes ended, how far masks and memories are used."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import optree

from inchworm.core.spaces import MASK_KEY
from inchworm.core.types import Tree
from inchworm.rollout.rollout import Rollout


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """The metrics that need nothing but the rollout; each is absent where it has no meaning, such as `memory_spread` without memory."""
    seen, mask = rollout.observations, None
    if isinstance(seen, Mapping) and MASK_KEY in seen:
        mask = seen[MASK_KEY]
        seen = {key: inner for key, inner in seen.items() if key != MASK_KEY}
    metrics: dict[str, float] = {}
    rows = None if rollout.valid.all() else rollout.valid
    scales = [_largest_scale(leaf, rows) for leaf in optree.tree_leaves(seen) if leaf.dtype.kind == "f" and leaf.ndim <= 3 and leaf.size]
    if scales and rollout.num_valid:
        metrics["observation_scale"] = max(scales)
    ended = rollout.dones & rollout.valid  # [T, B]
    if ended.any():
        metrics["truncated_share"] = float(1.0 - rollout.terminated[ended].mean())
    if mask is not None and rollout.num_valid:
        metrics["forced_share"] = forced_share(mask, rollout.actions, rollout.valid)
    memories = [leaf for leaf in optree.tree_leaves(rollout.cut_state) if len(leaf) > 1]
    if memories:  # [K, *mem] each
        metrics["memory_spread"] = max(float(leaf.std(axis=0).mean()) for leaf in memories)
    return metrics


def _largest_scale(leaf: np.ndarray, rows: np.ndarray | None) -> float:
    """The largest root mean square of a feature of [T, B, *obs], over all rows or the valid ones."""
    values = leaf.reshape(leaf.shape[0] * leaf.shape[1], -1) if rows is None else leaf[rows].reshape(int(rows.sum()), -1)  # [N, features]
    if not len(values):
        return 0.0
    return float(np.sqrt(np.einsum("nf,nf->f", values, values, dtype=np.float64) / len(values)).max())


def forced_share(mask: Tree, actions: Tree, valid: np.ndarray) -> float:
    """The share of valid rows [T, B] whose mask leaves one action; 0 where a part of the action is continuous."""
    parts = optree.tree_leaves(actions)
    if any(part.dtype.kind == "f" for part in parts):
        return 0.0
    choices = sum(int(np.prod(part.shape[2:])) for part in parts)  # a Discrete action is one choice, MultiDiscrete one of each part
    allowed = sum(np.asarray(leaf != 0).reshape(*valid.shape, -1).sum(-1) for leaf in optree.tree_leaves(mask))  # [T, B]
    return float((np.asarray(allowed) <= choices)[valid].mean())
