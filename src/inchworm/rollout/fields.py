"""The fields of a rollout as plain dicts: what they must be, and made from data of any origin."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

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

    if not isinstance(fields["extras"], Mapping) and fields["extras"] != ():
        raise RolloutError("extras: expected named columns, {name: [T, B, …]}")
    for name, leaf in named_leaves(fields["extras"], "extras"):
        expect_array(name, leaf, (steps, lanes))

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


MissingSuccessors = Literal["refuse", "own_observation", "end"]
"""What stands for the true successor of a cut row where the data have none."""


def complete_fields(data: Mapping[str, Any], names: Sequence[str], missing_successors: MissingSuccessors = "refuse") -> dict[str, Any]:
    """Return all fields of a rollout, checked and read-only; what `data` omits is derived or gets its default."""
    if not isinstance(data, Mapping):
        raise RolloutError(f"a rollout is made from a mapping of names to arrays, not from {type(data).__name__}")
    if missing_successors not in get_args(MissingSuccessors):
        raise RolloutError(f"missing_successors={missing_successors!r:.80}; use {', '.join(get_args(MissingSuccessors))}")
    rebuilt = missing_successors != "refuse" and "next_observations" not in data and "cut_rows" not in data
    if rebuilt and "dones" in data and "terminated" not in data:
        warnings.warn("dones is read as terminated, because the data do not tell which episodes were cut off", stacklevel=3)
        data = {**{name: value for name, value in data.items() if name != "dones"}, "terminated": data["dones"]}
    _check_names(data, names)
    fields: dict[str, Any] = {name: _flat(data[name], name) for name in FLAT_DTYPES if name in data}
    if all(array.ndim == 1 for array in fields.values()):
        fields, data = {name: array[:, None] for name, array in fields.items()}, _as_one_lane(data)
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
    if rebuilt and _something_follows(fields):
        _rebuild_successors(fields, missing_successors)
    fields.setdefault("episode_starts", np.concatenate([np.ones_like(ended[:1]), ended[:-1]]))
    for name in ("observations", "actions", "policy_state", "cut_state", "global_state", "context", "extras"):
        fields[name] = _tree(data.get(name, ()), name)
    for name, dtype in (("policy_version", np.int32), ("weights_fingerprint", np.uint64)):
        array = _array(data.get(name, 0), name)
        if array.dtype.kind not in "iu" or array.shape not in ((), (lanes,)):
            raise RolloutError(f"{name}: got {array.dtype}{list(array.shape)}, expected {np.dtype(dtype).name}[{lanes}] or one number")
        fields[name] = np.full(lanes, array, dtype)
    fields["episodes"] = tuple(_episode(item) for item in data.get("episodes", ()))
    every = _array(data.get("state_every", 0), "state_every")
    fields["state_every"] = int(every) if every.ndim == 0 and every.dtype.kind in "iu" else data["state_every"]
    _add_cuts(fields, data, rebuilt=rebuilt)
    fields.setdefault("cut_valid", valid_at_cuts(fields))
    _add_global_cuts(fields, data, rebuilt=rebuilt)
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


def _as_one_lane(data: Mapping[str, Any]) -> dict[str, Any]:
    """Add the lane axis to data [N, …] of a single lane."""
    timed = {"observations", "actions", "policy_state", "global_state", "next_observations", "extras"}
    added: dict[str, Any] = {
        name: optree.tree_map(lambda leaf: leaf[:, None], _tree(value, name)) for name, value in data.items() if name in timed
    }
    if "cut_rows" in data and _array(data["cut_rows"], "cut_rows").ndim == 1:
        added["cut_rows"] = np.stack([rows := _array(data["cut_rows"], "cut_rows"), np.zeros_like(rows)], 1)  # [K, 2]
    if isinstance(data.get("context"), tuple) and len(data["context"]) == 2:
        added["context"] = (data["context"][0], _array(data["context"][1], "context index")[:, None])
    return {**data, **added}


def _rebuild_successors(fields: dict[str, Any], missing: str) -> None:
    """Warn of the rows whose true successor is not in the data, and end their episodes there if that is asked for."""
    cut = fields["truncated"].copy()  # [T, B]
    cut[-1:] |= ~fields["terminated"][-1:]
    meaning = "their episodes are taken to end there" if missing == "end" else "the value of their own observation stands for the next one"
    warnings.warn(
        f"{int(cut.sum())} rows have no successor in the data (the next row begins another episode or is missing): {meaning}", stacklevel=4
    )
    if missing == "end":
        fields["terminated"], fields["truncated"] = fields["terminated"] | cut, np.zeros_like(cut)


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


def _add_cuts(fields: dict[str, Any], data: Mapping[str, Any], *, rebuilt: bool) -> None:
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
    if "next_observations" not in data and _something_follows(fields) and not rebuilt:
        raise RolloutError(
            "the rollout has truncated rows or lanes that continue after the last row, so their true successors are needed; "
            "add next_observations [T, B, *obs], or cut_rows [K, 2] and cut_observations [K, *obs]; for data that do not have them, "
            'missing_successors="own_observation" or "end" says what to do there'
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


def _add_global_cuts(fields: dict[str, Any], data: Mapping[str, Any], *, rebuilt: bool) -> None:
    """Add the global state at the true successors: as given, or any where every episode terminates."""
    found = optree.tree_leaves(fields["global_state"])
    fields.setdefault("cut_global_state", _tree(data.get("cut_global_state", ()), "cut_global_state"))
    if not found or optree.tree_leaves(fields["cut_global_state"]):
        return
    if _something_follows(fields) and not rebuilt:
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
