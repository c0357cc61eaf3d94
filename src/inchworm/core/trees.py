"""Nested plain data and arrays, taken apart for a file and put together again. Serves rollouts and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from inchworm.core.errors import CorruptFileError
from inchworm.core.tensor_file import check_key

_SCALARS = (bool, int, float, str)


def flatten_tree(tree: Any) -> tuple[dict[str, np.ndarray], Any]:
    """A tree of dicts, tuples, lists, arrays and plain values as (named arrays, the rest as JSON data)."""
    arrays: dict[str, np.ndarray] = {}
    return arrays, _flatten(tree, (), arrays)


def _flatten(tree: Any, path: tuple[str, ...], arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(tree, np.generic):
        tree = tree.item()
    if isinstance(tree, Mapping):
        for key in tree:
            check_key(key, f"key of {'/'.join(path) or 'the tree'}")
        return {"dict": {key: _flatten(value, (*path, key), arrays) for key, value in tree.items()}}
    if isinstance(tree, tuple | list):
        kind = "tuple" if isinstance(tree, tuple) else "list"
        return {kind: [_flatten(value, (*path, str(index)), arrays) for index, value in enumerate(tree)]}
    if isinstance(tree, np.ndarray):
        name = "/".join(path) or "array"
        while name in arrays or name == "__metadata__":  # keys that contain a slash can make the same name twice
            name += "'"
        arrays[name] = tree
        return {"array": name}
    if isinstance(tree, float) and not math.isfinite(tree):
        return {"float": repr(tree)}
    if tree is None or isinstance(tree, _SCALARS):
        return tree
    raise TypeError(
        f"{'/'.join(path) or 'the tree'} is {type(tree).__name__}; a file holds dicts, tuples, lists, arrays, numbers, text and None"
    )


def unflatten_tree(arrays: Mapping[str, np.ndarray], structure: Any) -> Any:
    """The tree that `flatten_tree` took apart. Every array must be used once; what does not fit is a `CorruptFileError`."""
    left = dict(arrays)
    try:
        tree = _unflatten(structure, left)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CorruptFileError(f"the structure does not fit the arrays: {type(error).__name__} {error}") from None
    if left:
        raise CorruptFileError(f"the structure does not name the arrays {sorted(left)}")
    return tree


def _unflatten(node: Any, left: dict[str, np.ndarray]) -> Any:
    if node is None or isinstance(node, _SCALARS):
        return node
    ((kind, content),) = node.items()
    if kind == "dict":
        return {key: _unflatten(value, left) for key, value in content.items()}
    if kind in ("tuple", "list"):
        items = [_unflatten(value, left) for value in content]
        return tuple(items) if kind == "tuple" else items
    if kind == "array":
        return left.pop(content)
    if kind == "float":
        return float(content)
    raise ValueError(f"unknown node {kind!r}")
