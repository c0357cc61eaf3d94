"""Serves steps 6 to 8 of 9: rows where no agent lived are made harmless before any network reads them."""

from __future__ import annotations

import dataclasses

import numpy as np
import optree

from inchworm.rollout.rollout import Rollout
from inchworm.types import Tree


def harmless(rollout: Rollout) -> Rollout:
    """The rollout with a living row's observation, action and log-prob wherever no agent lived: no forward pass meets garbage.

    Zeros would not do: a space need not contain them (`Discrete(3, start=1)`), and a mask of zeros forbids every action.
    Rewards stay there, if they are numbers: a recursion may run through such rows.
    """
    valid = rollout.valid
    if valid.all() or not valid.any():
        return rollout
    alive = tuple(np.argwhere(valid)[0])  # (t, b) of the first living row
    read_at_cuts = valid[rollout.cut_rows[:, 0], rollout.cut_rows[:, 1]] | rollout.cut_valid  # [K] an agent may join there
    read = {name: getattr(rollout, name) for name in ("observations", "actions", "log_probs")}
    rows = {name: optree.tree_map(lambda leaf: leaf[alive], tree) for name, tree in read.items()}
    changed = {name: _filled(tree, valid, rows[name]) for name, tree in read.items()}
    changed["cut_observations"] = _filled(rollout.cut_observations, read_at_cuts, rows["observations"])
    changed["rewards"] = np.where(valid | np.isfinite(rollout.rewards), rollout.rewards, np.float32(0))
    return dataclasses.replace(rollout, **changed)


def _filled(tree: Tree, keep: np.ndarray, row: Tree) -> Tree:
    """The tree with `row` wherever `keep` is false."""
    return optree.tree_map(lambda leaf, fill: np.where(keep.reshape(*keep.shape, *[1] * np.ndim(fill)), leaf, fill), tree, row)
