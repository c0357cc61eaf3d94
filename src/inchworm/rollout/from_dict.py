"""Complete fields of a rollout from data of any origin: another process, `torch.load`, made up."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optree

from inchworm.core.errors import RolloutError
from inchworm.core.types import EpisodeRecord, Tree
from inchworm.rollout.checks import FLAT_DTYPES, PLAIN, check_fields, expect_array, freeze, named_leaves, sort_cut_rows, valid_at_cuts

_REQUIRED = ("observations", "actions", "log_probs", "rewards", "terminated")
LEARNER_FIELDS = ("values", "next_values", "advantages", "returns")
"""What the learner computes: other libraries keep it with the data, a rollout does not."""
_HINTS = {
    "obs": "did you mean observations?",
    "dones": "give terminated (the episode ended by itself) and truncated (it was cut off)",
    "done": "give terminated (the episode ended by itself) and truncated (it was cut off)",
    "action_masks": 'masks are the key "action_mask" of observations',
    "action_mask": 'masks are the key "action_mask" of observations',
}


def complete_fields(data: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return all fields of a rollout, checked and read-only; what `data` omits is derived or gets its default."""
    if not isinstance(data, Mapping):
        raise RolloutError(f"a rollout is made from a mapping of names to arrays, not from {type(data).__name__}")
    _check_names(data, names)
    fields: dict[str, Any] = {name: _flat(data[name], name) for name in FLAT_DTYPES if name in data}
    rewards = fields["rewards"]
    if rewards.ndim != 2:
        hint = "; for one lane add an axis to every array, as in rewards[:, None]" if rewards.ndim == 1 else ""
        raise RolloutError(f"rewards: got float32{list(rewards.shape)}, expected float32[T, B]{hint}")
    lanes = rewards.shape[1]
    fields = {"truncated": np.zeros(rewards.shape, np.bool_), "valid": np.ones(rewards.shape, np.bool_)} | fields
    for name in ("terminated", "truncated"):
        if fields[name].shape != rewards.shape:
            raise RolloutError(f"{name}: got bool{list(fields[name].shape)}, expected bool{list(rewards.shape)} as rewards")
    # Gymnasium's TimeLimit sets both flags: such a row is terminated, nothing follows it.
    fields["truncated"] = fields["truncated"] & ~fields["terminated"]
    ended = fields["terminated"] | fields["truncated"]  # [T, B]
    fields.setdefault("episode_starts", np.concatenate([np.ones_like(ended[:1]), ended[:-1]]))
    for name in ("observations", "actions", "policy_state", "cut_state", "global_state", "context"):
        fields[name] = _tree(data.get(name, ()), name)
    for name, dtype in (("policy_version", np.int32), ("weights_fingerprint", np.uint64)):
        array = _array(data.get(name, 0), name)
        if array.dtype.kind not in "iu" or array.shape not in ((), (lanes,)):
            raise RolloutError(f"{name}: got {array.dtype}{list(array.shape)}, expected {np.dtype(dtype).name}[{lanes}] or one number")
        fields[name] = np.full(lanes, array, dtype)
    fields["episodes"] = tuple(_episode(item) for item in data.get("episodes", ()))
    every = _array(data.get("state_every", 0), "state_every")
    fields["state_every"] = int(every) if every.ndim == 0 and every.dtype.kind in "iu" else data["state_every"]
    _add_cuts(fields, data)
    fields.setdefault("cut_valid", valid_at_cuts(fields))
    _add_global_cuts(fields, data)
    for name in ("observations", "global_state"):
        tree, like = fields[f"cut_{name}"], fields[name]
        if optree.tree_structure(tree) == optree.tree_structure(like):  # what cannot be cast is left for check_fields to reject
            fields[f"cut_{name}"] = optree.tree_map(
                lambda a, b: a.astype(b.dtype) if np.can_cast(a.dtype, b.dtype, "same_kind") else a, tree, like
            )
    check_fields(fields)

    def own(array: np.ndarray) -> np.ndarray:
        """Copy an array that the caller can still write to."""
        return array if array.base is None and not array.flags.writeable else freeze(array.copy())

    return {name: fields[name] if name in PLAIN else optree.tree_map(own, fields[name]) for name in names}


def _check_names(data: Mapping[str, Any], names: Sequence[str]) -> None:
    known = (*names, "next_observations")
    unknown = [name for name in data if name not in known and name not in LEARNER_FIELDS]
    if unknown:
        near = difflib.get_close_matches(str(unknown[0]), known, n=1)
        hint = _HINTS.get(unknown[0]) or (f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}")
        raise RolloutError(f"unknown rollout key {unknown[0]!r}; {hint}")
    missing = [name for name in _REQUIRED if name not in data]
    if missing:
        raise RolloutError(f"the rollout lacks {', '.join(missing)}; required are {', '.join(_REQUIRED)}, each [T, B, …]")
    ignored = [name for name in data if name in LEARNER_FIELDS]
    if ignored:
        warnings.warn(f"{', '.join(ignored)} ignored: learn computes them itself, with the current critic", stacklevel=4)


def _array(value: Any, name: str) -> np.ndarray:
    """Convert to an array of numbers; tensors come through NumPy's array protocol."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RolloutError(f"{name}: cannot be read as an array ({error}); give a NumPy array or a tensor after .detach().cpu()") from None
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise RolloutError(f"{name}: got {array.dtype}{list(array.shape)}, expected an array of numbers of up to 64 bits")
    return array.astype(array.dtype.newbyteorder("="), copy=False)  # tensor libraries need the native byte order


def _flat(value: Any, name: str) -> np.ndarray:
    """Convert a field that is one array of floats or flags."""
    array = _array(value, name)
    found = f"{name}: got {array.dtype}{list(array.shape)}"
    if FLAT_DTYPES[name] is np.bool_:
        if array.dtype != np.bool_:
            raise RolloutError(f"{found}, expected bool[T, B]; use bool, as in {name}.astype(bool)")
        return array
    if array.dtype.kind != "f" and not (name == "rewards" and array.dtype.kind in "iu"):
        raise RolloutError(f"{found}, expected float32[T, B]")
    with np.errstate(over="ignore"):  # what overflows becomes infinite, and validate() reports its row
        return array.astype(np.float32, copy=False)


def _tree(value: Any, name: str) -> Tree:
    """Convert a tree: mappings and tuples are branches, everything else is an array."""
    if isinstance(value, Mapping):
        if any(not isinstance(key, str) for key in value):
            raise RolloutError(f"{name}: the keys of a tree must be text, not {sorted(map(repr, value))}")
        return {key: _tree(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(_tree(inner, f"{name}.{index}") for index, inner in enumerate(value))
    return _array(value, name)


def _episode(item: Any) -> EpisodeRecord:
    if isinstance(item, EpisodeRecord):
        return item
    try:
        return EpisodeRecord(**item)
    except TypeError as error:
        raise RolloutError(f"episodes: {item!r} is not an EpisodeRecord: {error}") from None


def _add_cuts(fields: dict[str, Any], data: Mapping[str, Any]) -> None:
    """Add the true successors: as given, or taken from `next_observations`, or anything where every episode terminates."""
    given = [name for name in ("cut_rows", "cut_observations") if name in data]
    if given and "next_observations" in data:
        raise RolloutError("next_observations and cut_observations hold the same data; give one of them")
    if len(given) == 1:
        raise RolloutError(f"the rollout has {given[0]} but lacks {'cut_observations' if given[0] == 'cut_rows' else 'cut_rows'}")
    if given:
        cut_rows = _array(data["cut_rows"], "cut_rows")
        if cut_rows.dtype.kind not in "iu" or cut_rows.ndim != 2 or cut_rows.shape[1] != 2:
            raise RolloutError(f"cut_rows: got {cut_rows.dtype}{list(cut_rows.shape)}, expected int32[K, 2]")
        order = sort_cut_rows(cut_rows)
        fields["cut_rows"] = cut_rows[order].astype(np.int32)
        cuts = {name: _tree(data.get(name, ()), name) for name in ("cut_observations", "cut_state", "cut_global_state")}
        if "cut_valid" in data:
            cuts["cut_valid"] = _array(data["cut_valid"], "cut_valid")
        for name, tree in cuts.items():
            for leaf in optree.tree_leaves(tree):
                if leaf.shape[:1] != order.shape:
                    got = f"{leaf.dtype}{list(leaf.shape)}"
                    raise RolloutError(f"{name}: got {got}, expected [{len(order)}, …], one row for each of cut_rows")
            fields[name] = optree.tree_map(lambda leaf: leaf[order], tree)
        return
    if "next_observations" not in data and _something_follows(fields):
        raise RolloutError(
            "the rollout has truncated rows or lanes that continue after the last row, so their true successors are needed; "
            "add next_observations [T, B, *obs], or cut_rows [K, 2] and cut_observations [K, *obs]"
        )
    needed = fields["truncated"].copy()
    needed[-1:] = True
    fields["cut_rows"] = np.argwhere(needed).astype(np.int32)  # [K, 2] sorted by (t, b)
    name = "next_observations" if "next_observations" in data else "observations"
    successors = _tree(data[name], name)
    for leaf_name, leaf in named_leaves(successors, name):
        expect_array(leaf_name, leaf, needed.shape)
    time, lane = fields["cut_rows"].T
    fields["cut_observations"] = optree.tree_map(lambda leaf: leaf[time, lane], successors)


def _add_global_cuts(fields: dict[str, Any], data: Mapping[str, Any]) -> None:
    """Add the global state at the true successors: as given, or any where every episode terminates."""
    found = optree.tree_leaves(fields["global_state"])
    fields.setdefault("cut_global_state", _tree(data.get("cut_global_state", ()), "cut_global_state"))
    if not found or optree.tree_leaves(fields["cut_global_state"]):
        return
    if _something_follows(fields):
        raise RolloutError(
            "the rollout has a global_state, and truncated rows or lanes that continue after the last row, so the global state at their "
            "true successors is needed; add cut_rows [K, 2], cut_observations [K, *obs] and cut_global_state [K, *]"
        )
    time, lane = fields["cut_rows"].T
    for name, leaf in named_leaves(fields["global_state"], "global_state"):
        expect_array(name, leaf, (len(fields["rewards"]), "E"))
    width = max(1, fields["rewards"].shape[1] // max(1, found[0].shape[1]))
    fields["cut_global_state"] = optree.tree_map(
        lambda leaf: leaf[time, np.minimum(lane // width, leaf.shape[1] - 1)], fields["global_state"]
    )


def _something_follows(fields: Mapping[str, Any]) -> bool:
    return bool(fields["truncated"].any() or not fields["terminated"][-1:].all())
