"""Serves the rollout, between steps 5 and 6: what its fields must look like, refused in words where they do not.

Works on plain dicts of fields; `rollout.py` puts the class on top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optree
from gymnasium import spaces

from inchworm.core.errors import BadNumberError, RolloutError
from inchworm.core.spaces import Space, build_tree, leaf_dtype, leaf_shape, leaves
from inchworm.core.types import EpisodeRecord, Tree

FLAGS = ("terminated", "truncated", "episode_starts", "valid")
"""Each [T, B] bool."""
FLOATS = ("log_probs", "rewards")
"""Each [T, B] f32."""
PLAIN = ("episodes", "state_every")
"""What of a rollout is no array."""


def freeze(tree: Tree) -> Tree:
    """The same arrays, read-only."""
    for leaf in optree.tree_leaves(tree):
        leaf.flags.writeable = False
    return tree


def valid_at_cuts(fields: Mapping[str, Any]) -> np.ndarray:
    """[K] whether an agent lived in each cut row: what is known of its successor where nobody has told."""
    cut_rows, truncated = fields["cut_rows"], fields["truncated"]
    expect_array("valid", fields["valid"], truncated.shape, np.bool_)
    _check_cut_rows(cut_rows, truncated)
    alive: np.ndarray = fields["valid"][cut_rows[:, 0], cut_rows[:, 1]]
    return alive


def action_dtype(leaf_space: Space) -> np.dtype[Any]:
    """The dtype that a sampled action is stored in: a Gaussian's sample is real, whatever its Box rounds it to."""
    if isinstance(leaf_space, spaces.Box):
        return np.dtype(np.float64 if leaf_space.dtype == np.float64 else np.float32)
    return leaf_dtype(leaf_space)


def named_leaves(tree: Tree, name: str) -> list[tuple[str, Any]]:
    """Every leaf with its full name, such as `observations.camera`."""
    paths, values, _ = optree.tree_flatten_with_path(tree)
    return [(".".join(map(str, (name, *path))), value) for path, value in zip(paths, values)]


def expect_array(name: str, array: Any, shape: Sequence[Any], dtype: Any = None) -> None:
    """Refuse an array whose leading axes or dtype differ; `shape` may hold letters for sizes that are free."""
    fits = len(array.shape) >= len(shape) and all(isinstance(want, str) or have == want for have, want in zip(array.shape, shape))
    if dtype is not None:
        fits = fits and len(array.shape) == len(shape) and array.dtype == dtype
    if not fits or array.dtype.kind not in "biuf":
        expected = ", ".join(map(str, shape)) + ("" if dtype is not None else ", …")
        raise RolloutError(
            f"{name}: got {array.dtype}{list(array.shape)}, expected {np.dtype(dtype).name if dtype else 'numbers'}[{expected}]"
        )


def check_fields(fields: Mapping[str, Any]) -> None:
    """Refuse fields whose structure, shapes or dtypes do not make a rollout."""
    expect_array("rewards", fields["rewards"], ("T", "B"), np.float32)
    steps, lanes = fields["rewards"].shape
    for name in (*FLOATS, *FLAGS):
        expect_array(name, fields[name], (steps, lanes), np.float32 if name in FLOATS else np.bool_)
    for name in ("observations", "actions"):
        if not optree.tree_leaves(fields[name]):
            raise RolloutError(f"{name}: there is no array in it")
        for leaf_name, leaf in named_leaves(fields[name], name):
            expect_array(leaf_name, leaf, (steps, lanes))
    for leaf_name, leaf in named_leaves(fields["policy_state"], "policy_state"):
        expect_array(leaf_name, leaf, ("T/S", lanes))
    _check_spacing(fields["state_every"], fields["policy_state"], steps)
    expect_array("policy_version", fields["policy_version"], (lanes,), np.int32)
    expect_array("weights_fingerprint", fields["weights_fingerprint"], (lanes,), np.uint64)
    _check_cut_rows(fields["cut_rows"], fields["truncated"])
    expect_array("cut_valid", fields["cut_valid"], (len(fields["cut_rows"]),), np.bool_)
    _check_cuts(fields, "cut_observations", "observations")
    _check_cuts(fields, "cut_state", "policy_state")
    _check_global_state(fields["global_state"], steps, lanes)
    _check_cuts(fields, "cut_global_state", "global_state")
    _check_context(fields["context"], steps, lanes)
    _check_episodes(fields["episodes"], lanes)


def _check_spacing(every: Any, policy_state: Tree, steps: int) -> None:
    if type(every) is not int or every < 0:
        raise RolloutError(
            f"state_every: got {every!r:.80}, expected every how many rows policy_state was recorded, or 0 if that is not known"
        )
    for name, leaf in named_leaves(policy_state, "policy_state"):
        if every and len(leaf) != -(-steps // every):
            raise RolloutError(f"{name}: {len(leaf)} rows are not one for every {every} (state_every) of {steps} steps")


def _check_cut_rows(cut_rows: np.ndarray, truncated: np.ndarray) -> None:
    expect_array("cut_rows", cut_rows, ("K", 2), np.int32)
    steps, lanes = truncated.shape
    if ((cut_rows < 0) | (cut_rows >= (steps, lanes))).any():
        raise RolloutError(f"cut_rows: a row lies outside the rollout of {steps} steps and {lanes} lanes")
    count = np.zeros((steps, lanes), np.int64)  # [T, B]
    np.add.at(count, (cut_rows[:, 0], cut_rows[:, 1]), 1)
    needed = truncated.copy()
    needed[-1:] = True
    for wrong, words in ((count > 1, "stands there twice"), (needed & (count == 0), "is missing: it is truncated or its lane's last row")):
        if wrong.any():
            row, lane = np.argwhere(wrong)[0].tolist()
            raise RolloutError(f"cut_rows: (t={row}, b={lane}) {words}")


def _check_cuts(fields: Mapping[str, Any], name: str, like: str) -> None:
    """Cut leaves are [K, *x] where the field they belong to is [T, B, *x]."""
    rows = len(fields["cut_rows"])
    check_structure(fields[name], fields[like], name, like)
    for (leaf_name, leaf), (_, model) in zip(named_leaves(fields[name], name), named_leaves(fields[like], like)):
        expect_array(leaf_name, leaf, (rows, *model.shape[2:]), model.dtype)


def check_structure(tree: Tree, model: Tree, name: str, like: str) -> None:
    """Refuse a tree of another form than that of `model`."""
    got, expected = optree.tree_structure(tree), optree.tree_structure(model)
    if got != expected:
        raise RolloutError(f"{name}: its tree {_words(got)} differs from that of {like}, {_words(expected)}")


def _words(structure: Any) -> str:
    return str(structure).removeprefix("PyTreeSpec(").removesuffix(")").split(", NoneIsLeaf")[0]


def _check_global_state(global_state: Tree, steps: int, lanes: int) -> None:
    for name, leaf in named_leaves(global_state, "global_state"):
        expect_array(name, leaf, (steps, "E"))
        copies = leaf.shape[1]
        if (copies == 0 and lanes) or (copies and lanes % copies):
            raise RolloutError(f"{name}: {copies} env copies do not divide {lanes} lanes")


def _check_context(context: Tree, steps: int, lanes: int) -> None:
    if isinstance(context, tuple) and context == ():
        return
    if not isinstance(context, tuple) or len(context) != 2 or not optree.tree_leaves(context[0]):
        raise RolloutError("context: expected (table [C, …], index [T, B])")
    table, index = context
    expect_array("context index", index, (steps, lanes), index.dtype)
    rows = min(leaf.shape[0] for leaf in optree.tree_leaves(table))
    if index.dtype.kind not in "iu" or (index.size and (index.min() < 0 or index.max() >= rows)):
        raise RolloutError(f"context: the index must hold whole numbers from 0 to {rows - 1}, the rows of the table")


def _check_episodes(episodes: Any, lanes: int) -> None:
    for episode in episodes:
        if not isinstance(episode, EpisodeRecord) or not 0 <= episode.lane < lanes:
            raise RolloutError(f"episodes: {episode!r} is no EpisodeRecord of one of {lanes} lanes")


def check_space(tree: Tree, space: Space, name: str) -> None:
    """Refuse a tree [T, B, …] that does not hold values of `space`, by structure, shape and kind of dtype."""
    dtype_of = action_dtype if name == "actions" else leaf_dtype
    model = build_tree(space, lambda _, leaf: np.empty(leaf_shape(leaf), dtype_of(leaf)))
    check_structure(tree, model, name, "its space")
    for (leaf_name, leaf), (_, row) in zip(named_leaves(tree, name), named_leaves(model, name)):
        if leaf.shape[2:] != row.shape or not np.can_cast(leaf.dtype, row.dtype, "same_kind"):
            raise RolloutError(
                f"{leaf_name}: got {leaf.dtype}{list(leaf.shape)}, expected {row.dtype}{['T', 'B', *row.shape]}".replace("'", "")
            )


def check_choices(actions: Tree, space: Space, valid: np.ndarray) -> None:
    """Refuse a discrete action that its space does not have."""
    for (_, leaf_space), (name, leaf) in zip(leaves(space), named_leaves(actions, "actions")):
        if isinstance(leaf_space, spaces.Box):
            continue
        low, high = _choices(leaf_space)
        wrong = ((leaf < low) | (leaf > high)).any(tuple(range(2, leaf.ndim))) & valid  # [T, B]
        if wrong.any():
            row, lane = np.argwhere(wrong)[0].tolist()
            raise RolloutError(f"{name}: {leaf[row, lane]} at (t={row}, b={lane}) is not in {leaf_space}")


def _choices(space: Space) -> tuple[Any, Any]:
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return 0, 1


def check_finite(fields: Mapping[str, Any]) -> None:
    """Refuse a number that is not finite in a row that counts."""
    valid, cut_rows = fields["valid"], fields["cut_rows"]
    for name in ("observations", "actions", "log_probs", "rewards"):
        for leaf_name, leaf in named_leaves(fields[name], name):
            _check_finite_rows(leaf_name, leaf, valid, None)
    alive = valid[cut_rows[:, 0], cut_rows[:, 1]] | fields["cut_valid"]  # [K]
    for leaf_name, leaf in named_leaves(fields["cut_observations"], "cut_observations"):
        _check_finite_rows(leaf_name, leaf, alive, cut_rows)
    for leaf_name, leaf in named_leaves(fields["global_state"], "global_state"):
        _check_finite_rows(leaf_name, leaf, np.ones(leaf.shape[:2], np.bool_), None)
    for leaf_name, leaf in named_leaves(fields["cut_global_state"], "cut_global_state"):
        _check_finite_rows(leaf_name, leaf, np.ones(len(cut_rows), np.bool_), cut_rows)


def _check_finite_rows(name: str, leaf: np.ndarray, counts: np.ndarray, cut_rows: np.ndarray | None) -> None:
    if leaf.dtype.kind != "f" or np.isfinite(leaf).all():
        return
    wrong = ~np.isfinite(leaf).all(tuple(range(counts.ndim, leaf.ndim))) & counts
    if wrong.any():
        first = np.argwhere(wrong)[0]
        row, lane = (first if cut_rows is None else cut_rows[first[0]]).tolist()
        raise BadNumberError(f"{name} at (t={row}, b={lane}) is not finite")


def lane_numbers(lanes: Any, num_lanes: int) -> np.ndarray:
    """Chosen lanes [n] from numbers or from one bool per lane; each at most once."""
    chosen = np.asarray(lanes)
    if chosen.dtype == np.bool_ and chosen.shape == (num_lanes,):
        return np.flatnonzero(chosen)
    chosen = chosen.astype(np.int64) if chosen.size == 0 else chosen
    if chosen.ndim != 1 or chosen.dtype.kind not in "iu" or ((chosen < 0) | (chosen >= num_lanes)).any():
        raise RolloutError(f"lanes={lanes!r} must be numbers from 0 to {num_lanes - 1}, or one bool for each of {num_lanes} lanes")
    if len(np.unique(chosen)) != len(chosen):
        raise RolloutError(f"lanes={lanes!r} names a lane twice")
    return chosen.astype(np.int64)
