"""Serves exact resume, for the vector env: whether every copy is where it was saved, and the states that environments keep themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from inchworm.env.memory import StepRows, tree_leaves
from inchworm.env.own_state import Restore


@runtime_checkable
class KeepsStates(Protocol):
    """An engine whose copies may offer their own states."""

    def get_states(self) -> list[dict[str, Any]]:
        """Of each copy {"state": …}, {"why": why not}, or nothing if it does not offer one."""
        ...

    def set_states(self, jobs: Sequence[Restore]) -> None:
        """Begin episodes in some copies and put them where they stood; their rows show first observations."""
        ...


def add_own_states(engine: Any, rows: StepRows, copies: Sequence[dict[str, Any]]) -> list[str]:
    """Write into the saved copies what their environments say of where they stand, with what they show; why some cannot."""
    found = engine.get_states() if isinstance(engine, KeepsStates) and any(copy["episode"] >= 0 for copy in copies) else []
    for index, (copy, own) in enumerate(zip(copies, found)):
        if "state" in own:
            copy["state"], copy["observation"] = own["state"], [array.copy() for array in _shown(rows, index)]
    return list(dict.fromkeys(own["why"] for own in found if "why" in own))


def set_own_states(engine: Any, rows: StepRows, copies: Sequence[Mapping[str, Any]]) -> list[int]:
    """Put copies where their saved states say, and show the observations that were seen there; which copies."""
    if not isinstance(engine, KeepsStates):
        return []
    saved = {index: copy for index, copy in enumerate(copies) if copy.get("state") is not None}
    if saved:
        engine.set_states([Restore(index, int(copy["seed"]), copy["options"], copy["state"]) for index, copy in saved.items()])
    for index, copy in saved.items():
        for array, seen in zip(_shown(rows, index), copy["observation"], strict=True):
            array[...] = seen
    return list(saved)


def why_astray(saved: Mapping[str, Any], result: tuple[float, int] | None, seen: str) -> str | None:
    """Why a copy is not where it was saved, if it is not: `result` is return and length of the way there, `seen` its observation's hash."""
    if saved["episode"] < 0:
        return None
    if result is None:
        return f"its episode had {saved['length']} steps, more than collect.max_replay_steps kept"
    if result != (saved["episode_return"], saved["length"]):
        return f"replay gave return and length {result}, but {(saved['episode_return'], saved['length'])} was saved"
    if seen != saved["observation_hash"]:
        return "replay led to another observation: the environment is not a function of seed, options and actions"
    return None


def observation_hash(rows: StepRows, copy: int) -> str:
    """What a copy shows, in a few bytes."""
    digest = hashlib.sha256()
    for array in _shown(rows, copy):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _shown(rows: StepRows, copy: int) -> list[np.ndarray]:
    """What a copy shows between two steps, as views: observations [*obs], or of k lanes [k, *obs] and who lives; and its global state."""
    width, seen = rows.lanes_per_copy, tree_leaves(rows.observations)
    shared = [array[copy, ...] for array in tree_leaves(rows.global_state)]
    if width == 1:
        return [array[copy, ...] for array in seen] + shared
    lanes = slice(copy * width, (copy + 1) * width)
    return [array[lanes] for array in (*seen, rows.valid, rows.joined)] + shared
