"""Between steps 1 and 2: the contract of a batched world, somebody else's vector env that steps all lanes in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from inchworm.env.memory import StepRows
from inchworm.env.rows import brief
from inchworm.errors import EnvError
from inchworm.spaces import Space
from inchworm.types import Array, Tree


class Moved(NamedTuple):
    """One step of all lanes, before any reset."""

    observations: Tree
    rewards: Array
    terminated: Array
    truncated: Array
    info: Mapping[str, Any]


class BatchedWorld(Protocol):
    """A vector env as its library makes it, reduced to what is needed here."""

    observation_space: Space
    action_space: Space
    num_lanes: int
    inexact: list[str]
    """Why the world cannot be brought to where it stood, in sentences; empty if it can."""

    def begin(self, lanes: Sequence[int], seeds: Sequence[int] | None, options: Mapping[str, Any] | None) -> Tree:
        """Begin episodes in some lanes: their first observations [len(lanes), *obs]."""
        ...

    def start(self, actions: Tree) -> None:
        """Begin a step."""
        ...

    def finish(self) -> Moved:
        """Wait for it."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


@runtime_checkable
class SavedWorld(BatchedWorld, Protocol):
    """A world whose whole state can be saved."""

    def state(self, observations: Tree) -> dict[str, Any]:
        """Where it stands, as plain data and arrays; the lanes see `observations`."""
        ...

    def restore(self, state: Mapping[str, Any], observations: Tree) -> str | None:
        """Bring it there; why it is not there, or None if it is."""
        ...


def scatter(values: Tree, rows: Tree, lanes: Sequence[int]) -> None:
    """Put values [n, *leaf] into the rows of n lanes."""
    if isinstance(rows, dict):
        for key, part in rows.items():
            scatter(values[key], part, lanes)
    elif isinstance(rows, tuple):
        for value, part in zip(values, rows):
            scatter(value, part, lanes)
    else:
        rows[list(lanes)] = values


def lane_numbers(info: Mapping[str, Any], lane: int) -> dict[str, float]:
    """The numbers of one lane in an info that holds an array [B] for each key, and for some keys `_key`, who has it."""
    numbers = {}
    for key, value in info.items():
        has = info.get(f"_{key}")
        if key.startswith("_") or not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "biuf":
            continue
        if (has is None or has[lane]) and np.isfinite(value[lane]):  # one NaN would take the mean of all the others with it
            numbers[key] = float(value[lane])
    return numbers


def write_outcome(moved: Moved, rows: StepRows) -> None:
    """Check rewards and flags of a step and put them into the rows."""
    lanes = len(rows.rewards)
    rows.rewards[:] = _lane_values(moved.rewards, "rewards", lanes, "fiub")
    rows.terminated[:] = _lane_values(moved.terminated, "terminated", lanes, "b")
    truncated = _lane_values(moved.truncated, "truncated", lanes, "b")
    np.logical_and(truncated, ~rows.terminated, out=rows.truncated)  # both flags mean terminated


def _lane_values(values: Any, name: str, num_lanes: int, kinds: str) -> Array:
    """One value for each lane [B], of one of these kinds: never one for all, never a text that happens to be a number."""
    if isinstance(values, np.ndarray) and values.shape == (num_lanes,) and values.dtype.kind in kinds:
        return values
    wanted = "bool" if kinds == "b" else "real numbers"
    got = f"{values.dtype} of shape {values.shape}" if isinstance(values, np.ndarray | np.generic) else type(values).__name__
    raise EnvError(f"{name} must be an array of {wanted} of shape ({num_lanes},), one for each lane; got {got}: {brief(values)}")
