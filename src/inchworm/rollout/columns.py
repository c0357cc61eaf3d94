"""Serves step 5 of 9: the arrays of a rollout's fields, the one way in which a row gets into them, and the cut rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import optree

from inchworm.errors import RolloutError
from inchworm.rollout.checks import freeze
from inchworm.types import Tree

Target: TypeAlias = tuple[str, tuple[Any, ...], np.ndarray, tuple[int, ...], np.dtype[Any]]
"""Where a leaf goes: its name, its path in what is written, the array of all rows, and the shape and dtype of one row."""

_ROOT: list[tuple[Any, ...]] = [()]
"""The paths of a tree that is one array."""


class Column:
    """One field's arrays: rows that look like `example`, leaf by leaf."""

    def __init__(self, name: str, example: Tree) -> None:
        self._paths = optree.tree_paths(example)
        self._names = [".".join(map(str, (name, *path))) for path in self._paths]
        self._examples, self._structure = optree.tree_flatten(example)
        self._arrays: list[np.ndarray] = []

    def allocate(self, rows: int) -> None:
        """Fresh arrays of that many rows; nothing is filled in, because every row will be."""
        self._arrays = self._empty(rows)

    def targets(self, place: int, part: Any = ()) -> list[Target]:
        """Where the leaves go of what stands at `place` in the values of `write_row`: into these arrays, or this part of them."""
        return self._aim(place, [array[part] for array in self._arrays])

    def copied(self, row: Tree) -> Tree:
        """A checked copy of one row, to be written later."""
        arrays = self._empty(1)
        write_row(self._aim(0, arrays), 0, (row,))
        return self._tree([array[0, ...] for array in arrays])

    def tree(self, part: Any = ()) -> Tree:
        """The arrays as they are now, or this part of them."""
        return self._tree([array[part] for array in self._arrays])

    def take(self) -> Tree:
        """The arrays, read-only from now on; the column lets go of them."""
        arrays, self._arrays = freeze(self._tree(self._arrays)), []
        return arrays

    def _empty(self, rows: int) -> list[np.ndarray]:
        return [np.empty((rows, *row.shape), row.dtype) for row in self._examples]

    def _aim(self, place: int, arrays: list[np.ndarray]) -> list[Target]:
        return [(name, (place, *path), a, a.shape[1:], a.dtype) for name, path, a in zip(self._names, self._paths, arrays)]

    def _tree(self, arrays: list[np.ndarray]) -> Tree:
        if self._paths == _ROOT:  # almost everybody
            return arrays[0]
        return optree.tree_unflatten(self._structure, arrays)


def write_row(targets: Iterable[Target], index: int, values: tuple[Any, ...]) -> None:
    """Copy one row in. Neither NumPy's broadcasting nor a lossy cast may bend a wrong row into shape."""
    for name, path, array, shape, dtype in targets:
        value: Any = values
        for key in path:
            value = value[key]
        if type(value) is not np.ndarray or value.shape != shape or value.dtype != dtype:
            value = _fitted(name, value, shape, dtype)
        array[index] = value


def _fitted(name: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    array = np.asarray(value)
    if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise RolloutError(f"{name}: got {array.dtype}{list(array.shape)}, expected {dtype}{list(shape)}")
    return array


class Cuts:
    """The true successors of rows where a lane was cut off, with the memory and the global state there."""

    def __init__(self, observation: Tree, state: Tree, global_state: Tree = ()) -> None:
        examples = {"observations": observation, "state": state, "global_state": global_state, "valid": np.empty((), np.bool_)}
        self._columns = {f"cut_{name}": Column(f"cut_{name}", example) for name, example in examples.items()}
        self._known: dict[tuple[int, int], tuple[Tree, ...]] = {}

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._known

    def add(self, key: tuple[int, int], *successor: Tree) -> None:
        """The successor of row t of lane b, `key` being (t, b): observation, memory, global state, whether an agent lives there."""
        self._known[key] = tuple(column.copied(part) for column, part in zip(self._columns.values(), successor, strict=True))

    def take(self, num_steps: int, num_lanes: int, *last: Tree) -> dict[str, Tree]:
        """The rollout's cut fields, sorted by (t, b): the rows that were told, and the last row of every lane, each of `last` [B, …]."""
        end, lanes = num_steps - 1, num_lanes if num_steps else 0
        keys = sorted(key for key in self._known if key[0] < end) + [(end, lane) for lane in range(lanes)]
        for column in self._columns.values():
            column.allocate(len(keys))
        targets = [target for place, column in enumerate(self._columns.values()) for target in column.targets(place)]
        if lanes:  # of all lanes at once, as if they were one row
            write_row([(n, p, a[None, -lanes:], (lanes, *s), d) for n, p, a, s, d in targets], 0, last)
        for index, key in enumerate(keys):
            if key in self._known:  # always, before the last row
                write_row(targets, index, self._known[key])
        cut_rows = freeze(np.array(keys, np.int32).reshape(-1, 2))
        return {"cut_rows": cut_rows, **{name: column.take() for name, column in self._columns.items()}}
