"""Step 2 of 9, outwards: a batch of actions is checked, and taken apart into what each environment gets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from inchworm.errors import SpaceError
from inchworm.spaces import Path, Space, leaf_shape, leaves
from inchworm.types import Tree

Put: TypeAlias = Callable[[Any, Any], None]
"""(actions [B, *act], rows [B, *act]): check the actions and copy them into the rows."""

Split: TypeAlias = Callable[[Tree], list[Any]]
"""Actions [N, *act] as N elements of the action space that share no memory with them."""


def make_put(space: Space, path: Path = (), what: str = "actions") -> Put:
    """The function that takes a batch of actions in, or of `what` else has the space's structure."""
    if not list(leaves(space, path)):
        raise SpaceError(f"the space of {what}, {space}, has no parts")
    if isinstance(space, spaces.Dict):
        parts: dict[Any, Put] = {key: make_put(inner, (*path, key), what) for key, inner in space.spaces.items()}
    elif isinstance(space, spaces.Tuple):
        parts = {index: make_put(inner, (*path, index), what) for index, inner in enumerate(space.spaces)}
    else:
        return functools.partial(_put_leaf, f"{what}{_at(path)}")

    def put(value: Any, rows: Any) -> None:
        if not isinstance(value, dict | tuple) or len(value) != len(parts):
            raise SpaceError(f"{what}{_at(path)} must have the structure of {space}, not {type(value).__name__}")
        for key, put_part in parts.items():
            try:
                part = value[key]
            except (KeyError, IndexError, TypeError):
                raise SpaceError(f"{what}{_at(path)} lack the part {key!r} of {space}") from None
            put_part(part, rows[key])

    return put


def _put_leaf(what: str, value: Any, rows: np.ndarray) -> None:
    if type(value) is np.ndarray and value.dtype is rows.dtype and value.shape == rows.shape:
        rows[...] = value  # the usual case, in the least time; whatever `is` misses is judged carefully below
        return
    array = np.asarray(value)
    if array.shape != rows.shape:
        raise SpaceError(f"{what} have shape {array.shape}, but {rows.shape[0]} lanes need {rows.shape}")
    try:
        np.copyto(rows, array, casting="same_kind")
    except TypeError:
        raise SpaceError(f"{what} have dtype {array.dtype}, but the space says {rows.dtype}") from None


def _at(path: Path) -> str:
    return f"[{']['.join(map(repr, path))}]" if path else ""


def make_split(space: Space) -> Split:
    """The function that takes a batch of actions apart: Python ints, fresh arrays, dicts and tuples of them."""
    if isinstance(space, spaces.Dict):
        keys = list(space.spaces)
        parts = [(key, make_split(space.spaces[key])) for key in keys]
        return lambda batch: [dict(zip(keys, row)) for row in zip(*(split(batch[key]) for key, split in parts))]
    if isinstance(space, spaces.Tuple):
        splits = [make_split(inner) for inner in space.spaces]
        return lambda batch: list(zip(*(split(part) for split, part in zip(splits, batch))))
    if isinstance(space, spaces.Discrete):
        return np.ndarray.tolist
    if leaf_shape(space) == ():
        return lambda batch: [batch[index, ...].copy() for index in range(len(batch))]
    return lambda batch: list(batch.copy())
