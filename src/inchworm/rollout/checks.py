"""Checks of a rollout's fields: structure, shapes, dtypes, finite numbers. Works on plain dicts; `rollout.py` defines the class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optree
from gymnasium import spaces

from inchworm.core.errors import BadNumberError, RolloutError
from inchworm.core.spaces import Space, build_tree, leaf_dtype, leaf_shape, leaves, value_range
from inchworm.core.types import EpisodeRecord, Tree

FLAT_DTYPES: dict[str, Any] = {
    "log_probs": np.float32,
    "rewards": np.float32,
    "terminated": np.bool_,
    "truncated": np.bool_,
    "episode_starts": np.bool_,
    "valid": np.bool_,
}
"""The fields that are one array [T, B]."""
PLAIN = ("episodes", "state_every")
"""The fields that are not arrays."""


def freeze(tree: Tree) -> Tree:
    """Make the arrays read-only and return them."""
    for leaf in optree.tree_leaves(tree):
        leaf.flags.writeable = False
    return tree


def valid_at_cuts(fields: Mapping[str, Any]) -> np.ndarray:
    """Default of `cut_valid` [K]: the successor is valid where its cut row is."""
    cut_rows, truncated = fields["cut_rows"], fields["truncated"]
    expect_array("valid", fields["valid"], truncated.shape, np.bool_)
    _check_cut_rows(cut_rows, truncated)
    valid: np.ndarray = fields["valid"][cut_rows[:, 0], cut_rows[:, 1]]
    return valid


def sort_cut_rows(cut_rows: np.ndarray) -> np.ndarray:
    """Return the order [K] that sorts cut rows by (t, b)."""
    return np.lexsort((cut_rows[:, 1], cut_rows[:, 0]))


def action_dtype(leaf_space: Space) -> np.dtype[Any]:
    """Return the dtype that a sampled action is stored in: a Gaussian's sample is a float, even if its Box holds integers."""
    if isinstance(leaf_space, spaces.Box):
        return np.dtype(np.float64 if leaf_space.dtype == np.float64 else np.float32)
    return leaf_dtype(leaf_space)


def named_leaves(tree: Tree, name: str) -> list[tuple[str, Any]]:
    """Return every leaf with its full name, such as `observations.camera`."""
    paths, values, _ = optree.tree_flatten_with_path(tree)
    return [(".".join(map(str, (name, *path))), value) for path, value in zip(paths, values)]


def expect_array(name: str, array: Any, shape: Sequence[Any], dtype: Any = None) -> None:
    """Reject an array whose leading axes or dtype differ; `shape` may hold letters for sizes that are free."""
    fits = len(array.shape) >= len(shape)
    for have, want in zip(array.shape, shape):
        fits = fits and (isinstance(want, str) or have == want)
    if dtype is not None:
        fits = fits and len(array.shape) == len(shape) and array.dtype == dtype
    if not fits or array.dtype.kind not in "biuf":
        expected = ", ".join(map(str, shape)) + ("" if dtype is not None else ", …")
        raise RolloutError(
            f"{name}: got {array.dtype}{list(array.shape)}, expected {np.dtype(dtype).name if dtype else 'numbers'}[{expected}]"
        )


def check_fields(fields: Mapping[str, Any]) -> None:
    """Reject fields whose structure, shapes or dtypes do not make a rollout."""
    expect_array("rewards", fields["rewards"], ("T", "B"), np.float32)
    steps, lanes = fields["rewards"].shape
    for name, dtype in FLAT_DTYPES.items():
        expect_array(name, fields[name], (steps, lanes), dtype)
    for name in ("observations", "actions"):
        if not optree.tree_leaves(fields[name]):
            raise RolloutError(f"{name}: contains no array")
        for leaf_name, leaf in named_leaves(fields[name], name):
            expect_array(leaf_name, leaf, (steps, lanes))

    every = fields["state_every"]
    if type(every) is not int or every < 0:
        raise RolloutError(f"state_every: got {every!r:.80}, expected the number of rows between recorded policy states, or 0 if unknown")
    for name, leaf in named_leaves(fields["policy_state"], "policy_state"):
        expect_array(name, leaf, ("T/S", lanes))
        if every and len(leaf) != -(-steps // every):
            raise RolloutError(f"{name}: {len(leaf)} rows are not one for every {every} (state_every) of {steps} steps")

    for name, leaf in named_leaves(fields["global_state"], "global_state"):
        expect_array(name, leaf, (steps, "E"))
        copies = leaf.shape[1]
        if (copies == 0 and lanes) or (copies and lanes % copies):
            raise RolloutError(f"{name}: {copies} env copies do not divide {lanes} lanes")

    _check_cut_rows(fields["cut_rows"], fields["truncated"])
    rows = len(fields["cut_rows"])
    expect_array("cut_valid", fields["cut_valid"], (rows,), np.bool_)
    for name, like in (("cut_observations", "observations"), ("cut_state", "policy_state"), ("cut_global_state", "global_state")):
        check_structure(fields[name], fields[like], name, like)
        for (leaf_name, leaf), model in zip(named_leaves(fields[name], name), optree.tree_leaves(fields[like])):
            expect_array(leaf_name, leaf, (rows, *model.shape[2:]), model.dtype)  # [K, *x] where the field is [T, B, *x]

    context = fields["context"]
    if not isinstance(context, tuple) or (context and (len(context) != 2 or not optree.tree_leaves(context[0]))):
        raise RolloutError("context: expected (table [C, …], index [T, B])")
    if context:
        table, index = context
        expect_array("context index", index, (steps, lanes), index.dtype)
        size = min(leaf.shape[0] for leaf in optree.tree_leaves(table))
        if index.dtype.kind not in "iu" or (index.size and (index.min() < 0 or index.max() >= size)):
            raise RolloutError(f"context: the index must hold integers from 0 to {size - 1}, the rows of the table")

    expect_array("policy_version", fields["policy_version"], (lanes,), np.int32)
    expect_array("weights_fingerprint", fields["weights_fingerprint"], (lanes,), np.uint64)
    for episode in fields["episodes"]:
        if not isinstance(episode, EpisodeRecord) or not 0 <= episode.lane < lanes:
            raise RolloutError(f"episodes: {episode!r} is not an EpisodeRecord of one of {lanes} lanes")


def _check_cut_rows(cut_rows: np.ndarray, truncated: np.ndarray) -> None:
    expect_array("cut_rows", cut_rows, ("K", 2), np.int32)
    steps, lanes = truncated.shape
    if ((cut_rows < 0) | (cut_rows >= (steps, lanes))).any():
        raise RolloutError(f"cut_rows: a row lies outside the rollout of {steps} steps and {lanes} lanes")
    count = np.zeros((steps, lanes), np.int64)  # [T, B]
    np.add.at(count, (cut_rows[:, 0], cut_rows[:, 1]), 1)
    needed = truncated.copy()
    needed[-1:] = True
    for wrong, words in ((count > 1, "is listed twice"), (needed & (count == 0), "is missing: it is truncated or its lane's last row")):
        if wrong.any():
            row, lane = np.argwhere(wrong)[0].tolist()
            raise RolloutError(f"cut_rows: (t={row}, b={lane}) {words}")


def check_structure(tree: Tree, model: Tree, name: str, like: str) -> None:
    """Reject a tree whose structure differs from that of `model`."""
    structure, wanted = optree.tree_structure(tree), optree.tree_structure(model)
    if structure != wanted:
        got, expected = (str(one).removeprefix("PyTreeSpec(").removesuffix(")").split(", NoneIsLeaf")[0] for one in (structure, wanted))
        raise RolloutError(f"{name}: its tree {got} differs from that of {like}, {expected}")


def check_space(tree: Tree, space: Space, name: str) -> None:
    """Reject a tree [T, B, …] that does not match `space` in structure, shape and kind of dtype."""
    dtype_of = action_dtype if name == "actions" else leaf_dtype
    model = build_tree(space, lambda _, leaf: np.empty(leaf_shape(leaf), dtype_of(leaf)))
    check_structure(tree, model, name, "its space")
    for (leaf_name, leaf), (_, row) in zip(named_leaves(tree, name), named_leaves(model, name)):
        if leaf.shape[2:] != row.shape or not np.can_cast(leaf.dtype, row.dtype, "same_kind"):
            raise RolloutError(
                f"{leaf_name}: got {leaf.dtype}{list(leaf.shape)}, expected {row.dtype}{['T', 'B', *row.shape]}".replace("'", "")
            )


def check_choices(actions: Tree, space: Space, valid: np.ndarray) -> None:
    """Reject discrete actions outside their space."""
    for (_, leaf_space), (name, leaf) in zip(leaves(space), named_leaves(actions, "actions")):
        if isinstance(leaf_space, spaces.Box):
            continue
        low, end = value_range(leaf_space)
        wrong = ((leaf < low) | (leaf >= end)).any(tuple(range(2, leaf.ndim))) & valid  # [T, B]
        if wrong.any():
            row, lane = np.argwhere(wrong)[0].tolist()
            raise RolloutError(f"{name}: {leaf[row, lane]} at (t={row}, b={lane}) is not in {leaf_space}")


def check_finite(fields: Mapping[str, Any]) -> None:
    """Reject numbers that are not finite in valid rows, in cut rows and in the global state."""
    valid, cut_rows = fields["valid"], fields["cut_rows"]
    valid_cuts = valid[cut_rows[:, 0], cut_rows[:, 1]] | fields["cut_valid"]  # [K]
    counts = dict.fromkeys(("observations", "actions", "log_probs", "rewards"), valid) | {"cut_observations": valid_cuts}
    for name in (*counts, "global_state", "cut_global_state"):
        for leaf_name, leaf in named_leaves(fields[name], name):
            if leaf.dtype.kind != "f" or np.isfinite(leaf).all():
                continue
            axes = 1 if name.startswith("cut_") else 2
            wrong = ~np.isfinite(leaf).all(tuple(range(axes, leaf.ndim))) & counts.get(name, True)
            if wrong.any():
                first = np.argwhere(wrong)[0]
                row, lane = (first if axes == 2 else cut_rows[first[0]]).tolist()
                raise BadNumberError(f"{leaf_name} at (t={row}, b={lane}) is not finite")


def lane_numbers(lanes: Any, num_lanes: int) -> np.ndarray:
    """Return lane numbers [n] from numbers, each at most once, or from one bool per lane."""
    chosen = np.asarray(lanes)
    if chosen.dtype == np.bool_ and chosen.shape == (num_lanes,):
        return np.flatnonzero(chosen)
    chosen = chosen.astype(np.int64) if chosen.size == 0 else chosen
    if chosen.ndim != 1 or chosen.dtype.kind not in "iu" or ((chosen < 0) | (chosen >= num_lanes)).any():
        raise RolloutError(f"lanes={lanes!r} must be numbers from 0 to {num_lanes - 1}, or one bool for each of {num_lanes} lanes")
    if len(np.unique(chosen)) != len(chosen):
        raise RolloutError(f"lanes={lanes!r} names a lane twice")
    return chosen.astype(np.int64)


def bad_number(what: str, lane: int, step: int, value: Any) -> BadNumberError:
    """The error about a number of the environment that is not finite."""
    number = np.array2string(np.asarray(value), threshold=20)
    return BadNumberError(
        f"the {what} of lane {lane} is not finite at step {step} of its episode: {number}; "
        "nothing of this step was stored. Run `inchworm check-env` on the environment to find out why"
    )
