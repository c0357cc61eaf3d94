"""Serves the rollout, between steps 5 and 6: data of any origin (another process, `torch.load`, made up) becomes a rollout's fields."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optree

from inchworm.core.errors import RolloutError
from inchworm.core.types import EpisodeRecord, Tree
from inchworm.rollout.checks import FLAGS, FLOATS, PLAIN, check_fields, expect_array, freeze, named_leaves, valid_at_cuts

_NEEDED = ("observations", "actions", "log_probs", "rewards", "terminated")
_OPINIONS = ("values", "next_values", "advantages", "returns")
_HINTS = {
    "obs": "did you mean observations?",
    "dones": "give terminated (the episode ended by itself) and truncated (it was cut off)",
    "done": "give terminated (the episode ended by itself) and truncated (it was cut off)",
    "action_masks": 'masks are the key "action_mask" of observations',
    "action_mask": 'masks are the key "action_mask" of observations',
}


def complete_fields(data: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """All of a rollout's fields, checked, owned and read-only; what `data` leaves out is derived or has its default."""
    if not isinstance(data, Mapping):
        raise RolloutError(f"a rollout is made from a mapping of names to arrays, not from {type(data).__name__}")
    _check_names(data, names)
    fields: dict[str, Any] = {name: _floats(data[name], name) for name in FLOATS}
    steps, lanes = _two_axes(fields["rewards"])
    fields |= {name: _tree(data[name], name) for name in ("observations", "actions")}
    fields |= {name: _tree(data.get(name, ()), name) for name in ("policy_state", "cut_state", "global_state", "context")}
    fields |= {name: _flags(data[name], name) for name in FLAGS if name in data}
    fields = {"truncated": np.zeros((steps, lanes), np.bool_), "valid": np.ones((steps, lanes), np.bool_)} | fields
    fields["terminated"], fields["truncated"] = _ends(fields["terminated"], fields["truncated"], (steps, lanes))
    fields.setdefault("episode_starts", _starts(fields["terminated"] | fields["truncated"]))
    fields["policy_version"] = _per_lane(data.get("policy_version", 0), "policy_version", lanes, np.int32)
    fields["weights_fingerprint"] = _per_lane(data.get("weights_fingerprint", 0), "weights_fingerprint", lanes, np.uint64)
    fields["episodes"] = tuple(_episode(item) for item in data.get("episodes", ()))
    every = _array(data.get("state_every", 0), "state_every")
    fields["state_every"] = int(every) if every.ndim == 0 and every.dtype.kind in "iu" else data["state_every"]
    _add_cuts(fields, data)
    fields.setdefault("cut_valid", valid_at_cuts(fields))
    _add_global_cuts(fields, data)
    for name in ("observations", "global_state"):
        fields[f"cut_{name}"] = _cast_like(fields[f"cut_{name}"], fields[name])
    check_fields(fields)
    return {name: fields[name] if name in PLAIN else optree.tree_map(_owned, fields[name]) for name in names}


def _check_names(data: Mapping[str, Any], names: Sequence[str]) -> None:
    missing = [name for name in _NEEDED if name not in data]
    known = (*names, "next_observations")
    unknown = [name for name in data if name not in known and name not in _OPINIONS]
    if unknown:
        near = difflib.get_close_matches(str(unknown[0]), known, n=1)
        hint = _HINTS.get(unknown[0]) or (f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}")
        raise RolloutError(f"unknown rollout key {unknown[0]!r}; {hint}")
    if missing:
        raise RolloutError(f"the rollout lacks {', '.join(missing)}; needed are {', '.join(_NEEDED)}, each [T, B, …]")
    opinions = [name for name in data if name in _OPINIONS]
    if opinions:
        warnings.warn(f"{', '.join(opinions)} ignored: learn computes them itself, with the current critic", stacklevel=4)


def _array(value: Any, name: str) -> np.ndarray:
    """An array of numbers; tensors come through NumPy's array protocol."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RolloutError(f"{name}: cannot be read as an array ({error}); give a NumPy array or a tensor after .detach().cpu()") from None
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise RolloutError(f"{name}: got {array.dtype}{list(array.shape)}, expected an array of numbers of up to 64 bits")
    return array.astype(array.dtype.newbyteorder("="), copy=False)  # other machines' byte order is no tensor library's


def _tree(value: Any, name: str) -> Tree:
    """Mappings and tuples are branches, everything else is an array."""
    if isinstance(value, Mapping):
        if any(not isinstance(key, str) for key in value):
            raise RolloutError(f"{name}: the keys of a tree must be text, not {sorted(map(repr, value))}")
        return {key: _tree(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(_tree(inner, f"{name}.{index}") for index, inner in enumerate(value))
    return _array(value, name)


def _floats(value: Any, name: str) -> np.ndarray:
    array = _array(value, name)
    if array.dtype.kind != "f" and not (name == "rewards" and array.dtype.kind in "iu"):
        raise RolloutError(f"{name}: got {array.dtype}{list(array.shape)}, expected float32[T, B]")
    with np.errstate(over="ignore"):  # what overflows is infinite, and validate() names its place
        return array.astype(np.float32, copy=False)


def _flags(value: Any, name: str) -> np.ndarray:
    array = _array(value, name)
    if array.dtype != np.bool_:
        raise RolloutError(f"{name}: got {array.dtype}{list(array.shape)}, expected bool[T, B]; use bool, as in {name}.astype(bool)")
    return array


def _two_axes(rewards: np.ndarray) -> tuple[int, int]:
    if rewards.ndim != 2:
        hint = "; for one lane add an axis to every array, as in rewards[:, None]" if rewards.ndim == 1 else ""
        raise RolloutError(f"rewards: got float32{list(rewards.shape)}, expected float32[T, B]{hint}")
    return rewards.shape


def _ends(terminated: np.ndarray, truncated: np.ndarray, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """A row with both flags is terminated: nothing follows it. (Gymnasium's TimeLimit sets both.)"""
    for name, flags in (("terminated", terminated), ("truncated", truncated)):
        if flags.shape != shape:
            raise RolloutError(f"{name}: got bool{list(flags.shape)}, expected bool{list(shape)} as rewards")
    return terminated, truncated & ~terminated


def _starts(ended: np.ndarray) -> np.ndarray:
    """A row opens an episode if it is the first or the row before it ended one. [T, B]"""
    return np.concatenate([np.ones_like(ended[:1]), ended[:-1]])


def _per_lane(value: Any, name: str, lanes: int, dtype: Any) -> np.ndarray:
    array = _array(value, name)
    if array.dtype.kind not in "iu" or array.shape not in ((), (lanes,)):
        raise RolloutError(f"{name}: got {array.dtype}{list(array.shape)}, expected {np.dtype(dtype).name}[{lanes}] or one number")
    return np.full(lanes, array, dtype)


def _episode(item: Any) -> EpisodeRecord:
    if isinstance(item, EpisodeRecord):
        return item
    try:
        return EpisodeRecord(**item)
    except TypeError as error:
        raise RolloutError(f"episodes: {item!r} is no EpisodeRecord: {error}") from None


def _add_cuts(fields: dict[str, Any], data: Mapping[str, Any]) -> None:
    """The true successors: as given, or picked out of `next_observations`, or not needed because nothing follows anywhere."""
    if "next_observations" in data and ("cut_rows" in data or "cut_observations" in data):
        raise RolloutError("next_observations and cut_observations say the same thing twice; give one of them")
    if "cut_rows" in data or "cut_observations" in data:
        _given_cuts(fields, data)
        return
    needed = fields["truncated"].copy()
    needed[-1:] = True
    fields["cut_rows"] = np.argwhere(needed).astype(np.int32)  # [K, 2] sorted by (t, b)
    if "next_observations" not in data:
        _check_nothing_follows(fields)
    name = "next_observations" if "next_observations" in data else "observations"
    successors = _tree(data[name], name)
    for leaf_name, leaf in named_leaves(successors, name):
        expect_array(leaf_name, leaf, needed.shape)
    time, lane = fields["cut_rows"].T
    fields["cut_observations"] = optree.tree_map(lambda leaf: leaf[time, lane], successors)


def _given_cuts(fields: dict[str, Any], data: Mapping[str, Any]) -> None:
    for name, other in (("cut_rows", "cut_observations"), ("cut_observations", "cut_rows")):
        if name not in data:
            raise RolloutError(f"the rollout has {other} but lacks {name}")
    cut_rows = _array(data["cut_rows"], "cut_rows")
    if cut_rows.dtype.kind not in "iu" or cut_rows.ndim != 2 or cut_rows.shape[1] != 2:
        raise RolloutError(f"cut_rows: got {cut_rows.dtype}{list(cut_rows.shape)}, expected int32[K, 2]")
    order = np.lexsort((cut_rows[:, 1], cut_rows[:, 0]))
    fields["cut_rows"] = cut_rows[order].astype(np.int32)
    if "cut_valid" in data:
        fields["cut_valid"] = _in_order(_flags(data["cut_valid"], "cut_valid"), order, "cut_valid")
    for name in ("cut_observations", "cut_state", "cut_global_state"):
        fields[name] = _in_order(_tree(data.get(name, ()), name), order, name)


def _add_global_cuts(fields: dict[str, Any], data: Mapping[str, Any]) -> None:
    """The global state at the true successors: as given, or not needed because nothing follows anywhere."""
    found = optree.tree_leaves(fields["global_state"])
    fields.setdefault("cut_global_state", _tree(data.get("cut_global_state", ()), "cut_global_state"))
    if not found or optree.tree_leaves(fields["cut_global_state"]):
        return
    if fields["truncated"].any() or not fields["terminated"][-1:].all():
        raise RolloutError(
            "the rollout has a global_state, and truncated rows or lanes that go on after the last row, so the global state at their true "
            "successors is needed; add cut_rows [K, 2], cut_observations [K, *obs] and cut_global_state [K, *]"
        )
    time, lane = fields["cut_rows"].T
    for name, leaf in named_leaves(fields["global_state"], "global_state"):
        expect_array(name, leaf, (len(fields["rewards"]), "E"))
    width = max(1, fields["rewards"].shape[1] // max(1, found[0].shape[1]))
    fields["cut_global_state"] = optree.tree_map(
        lambda leaf: leaf[time, np.minimum(lane // width, leaf.shape[1] - 1)], fields["global_state"]
    )


def _in_order(tree: Tree, order: np.ndarray, name: str) -> Tree:
    for leaf in optree.tree_leaves(tree):
        if leaf.shape[:1] != order.shape:
            raise RolloutError(f"{name}: got {leaf.dtype}{list(leaf.shape)}, expected [{len(order)}, …], one row for each of cut_rows")
    return optree.tree_map(lambda leaf: leaf[order], tree)


def _cast_like(tree: Tree, model: Tree) -> Tree:
    """Successors in the dtypes of what they succeed, where that is a matter of width only; the rest is left to be refused."""
    if optree.tree_structure(tree) != optree.tree_structure(model):
        return tree
    return optree.tree_map(lambda a, b: a.astype(b.dtype) if np.can_cast(a.dtype, b.dtype, "same_kind") else a, tree, model)


def _check_nothing_follows(fields: Mapping[str, Any]) -> None:
    if fields["truncated"].any() or not fields["terminated"][-1:].all():
        raise RolloutError(
            "the rollout has truncated rows or lanes that go on after the last row, so their true successors are needed; "
            "add next_observations [T, B, *obs], or cut_rows [K, 2] and cut_observations [K, *obs]"
        )


def _owned(array: np.ndarray) -> np.ndarray:
    """A read-only array that nobody else writes to: what is writable belongs to the caller and is copied."""
    return array if array.base is None and not array.flags.writeable else freeze(array.copy())
