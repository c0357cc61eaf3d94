"""What a Gymnasium space means here: its leaves, the arrays that hold it, and its description as plain data.

The vector env and the buffer allocate arrays for a space, and policies encode them. A tree of values has the structure of
its space: `Dict` spaces are dicts, `Tuple` spaces are tuples, everything else is an array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from inchworm.core.errors import SpaceError
from inchworm.core.types import Tree

Space: TypeAlias = spaces.Space[Any]
Path: TypeAlias = tuple[str | int, ...]

MASK_KEY = "action_mask"
"""The observation key that holds an action mask; it is obeyed, never fed to a network."""

WORLD, PLACE = "world", "place"
"""Inputs of a central critic: the state of a lane's env copy, and the lane's number within the copy."""

_DTYPES = tuple(np.dtype(kind).name for kind in "?bhilqBHILQefd")  # what a description may name
_MAX_BYTES, _MAX_RANK = 2**26, 32
"""What a described space may take: room for an image of 2048 x 2048 pixels with 4 channels."""

_LEAVES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_KNOWN = (*_LEAVES, spaces.Dict, spaces.Tuple)


def leaves(space: Space, path: Path = ()) -> Iterator[tuple[Path, Space]]:
    """Yield the parts of a space that are not containers, each with its path, in a fixed order."""
    if isinstance(space, spaces.Dict):
        for key in sorted(space.spaces):
            if not path and not isinstance(space.spaces[key], _KNOWN):
                raise SpaceError(_unsupported(space.spaces[key], key) + _how_without(key, space))
            yield from leaves(space.spaces[key], (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, inner in enumerate(space.spaces):
            yield from leaves(inner, (*path, index))
    elif isinstance(space, _LEAVES):
        yield path, space
    else:
        raise SpaceError(_unsupported(space, path_name(path) if path else ""))


def _unsupported(space: Space, where: str) -> str:
    known = "use Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these"
    return f"{type(space).__name__} spaces{where and f' at {where}'} are not supported; {known}"


def _how_without(key: str, space: spaces.Dict) -> str:
    """What to do about a key of a Dict observation that no network can read, such as a text."""
    kept = ", ".join(sorted(name for name, inner in space.spaces.items() if isinstance(inner, _KNOWN)))
    encode = "make the environment in a factory of your own, with a wrapper that encodes it as numbers"
    if isinstance(space.spaces[key], spaces.Text):
        encode += " (MiniGrid has minigrid.wrappers.FlatObsWrapper; its ImgObsWrapper keeps only the image)"
    if not kept:
        return f"; {encode}"
    wrapper = f"--env.wrappers '[{{name: FilterObservation, kwargs: {{filter_keys: [{kept}]}}}}]'"
    return f". If it is part of an observation, leave it out with {wrapper}, or {encode}"


def check_observation_space(space: Space) -> None:
    """Refuse an observation space in which a policy has nothing to read."""
    if not any(math.prod(leaf_shape(part)) for _, part in leaves(split_mask(space)[0])):
        raise SpaceError(f"the observation space {space} has nothing that a policy could read")


def check_action_space(space: Space) -> None:
    """Refuse an action space that a policy cannot act in: nothing to choose, or a Box of whole numbers."""
    parts = list(leaves(space))
    for path, part in parts:
        if isinstance(part, spaces.Box) and leaf_dtype(part).kind != "f":
            raise SpaceError(
                f"the action {path_name(path) if path else space} has dtype {leaf_dtype(part)}; "
                "continuous actions need a float Box, else use MultiDiscrete"
            )
    if not any(math.prod(leaf_shape(part)) for _, part in parts):
        raise SpaceError(f"the action space {space} has nothing to choose")


def path_name(path: Path) -> str:
    """A path as people read it: `camera.left`, or `observation` for the root."""
    return ".".join(map(str, path)) if path else "observation"


def leaf(tree: Tree, path: Path) -> Any:
    """The value at `path`."""
    for key in path:
        tree = tree[key]
    return tree


def build_tree(space: Space, make: Callable[[Path, Space], Any], path: Path = ()) -> Tree:
    """A tree in the structure of `space`, with `make(path, leaf_space)` at every leaf."""
    if isinstance(space, spaces.Dict):
        return {key: build_tree(space.spaces[key], make, (*path, key)) for key in sorted(space.spaces)}
    if isinstance(space, spaces.Tuple):
        return tuple(build_tree(inner, make, (*path, index)) for index, inner in enumerate(space.spaces))
    ((_, checked),) = leaves(space, path)
    return make(path, checked)


def map_tree(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """The tree with `function` applied to each leaf."""
    if isinstance(tree, dict):
        return {key: map_tree(function, inner) for key, inner in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_tree(function, inner) for inner in tree)
    return function(tree)


def tree_leaves(tree: Tree) -> list[Any]:
    """The tree's arrays in the order of `leaves`."""
    if isinstance(tree, dict):
        return [array for key in sorted(tree) for array in tree_leaves(tree[key])]
    if isinstance(tree, tuple):
        return [array for inner in tree for array in tree_leaves(inner)]
    return [tree]


def leaf_shape(space: Space) -> tuple[int, ...]:
    """The shape of one value of a leaf space."""
    return tuple(space.shape or ())


def leaf_dtype(space: Space) -> np.dtype[Any]:
    """The dtype in which a leaf's values are stored: the space's own."""
    return np.dtype(space.dtype)


def form_of(space: Space) -> list[Any]:
    """What of a space a network depends on: the tree, and of each leaf its kind, shape and choices. Bounds are not part of it."""
    return [(path, type(part), leaf_shape(part), mask_sizes(part)) for path, part in leaves(space)]


def check_same_form(who: str, made_for: tuple[Space, Space], found: tuple[Space, Space]) -> None:
    """Refuse an actor that was made for an observation and an action space of another form than those of `found`."""
    for what, ours, theirs in zip(("observation", "action"), made_for, found, strict=True):
        if form_of(ours) != form_of(theirs):
            raise SpaceError(f"{who} was made for the {what} space {in_one_line(ours)}, but the environment has {in_one_line(theirs)}")


def in_one_line(space: Space) -> str:
    """A space as it prints, without the line breaks and columns of its bounds."""
    return " ".join(str(space).split())


def zeros(space: Space, leading: tuple[int, ...]) -> Tree:
    """Arrays [*leading, *leaf] of zeros for a space."""
    return build_tree(space, lambda _, leaf_space: np.zeros((*leading, *leaf_shape(leaf_space)), leaf_dtype(leaf_space)))


def split_mask(space: Space) -> tuple[Space, Space | None]:
    """An observation space as (what the network sees, the action mask or None)."""
    if isinstance(space, spaces.Dict) and MASK_KEY in space.spaces:
        seen = {key: inner for key, inner in space.spaces.items() if key != MASK_KEY}
        return spaces.Dict(seen), space.spaces[MASK_KEY]
    return space, None


def with_mask(space: Space, mask_space: Space) -> Space:
    """The observation space with a mask added."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({**space.spaces, MASK_KEY: mask_space})
    return spaces.Dict({"observation": space, MASK_KEY: mask_space})


def mask_sizes(action_leaf: Space) -> tuple[int, ...]:
    """The number of choices of each categorical part of a discrete leaf; empty for a Box."""
    if isinstance(action_leaf, spaces.Discrete):
        return (int(action_leaf.n),)
    if isinstance(action_leaf, spaces.MultiDiscrete):
        return tuple(int(n) for n in action_leaf.nvec.reshape(-1))
    if isinstance(action_leaf, spaces.MultiBinary):
        return (2,) * int(np.prod(action_leaf.shape))
    return ()


def value_range(discrete_leaf: Space) -> tuple[np.ndarray, np.ndarray]:
    """The smallest value of each entry of a discrete leaf, and the one after its largest: integers of the leaf's shape."""
    shape = leaf_shape(discrete_leaf)
    first = np.broadcast_to(np.asarray(getattr(discrete_leaf, "start", 0), np.int64), shape)
    return first, first + np.reshape(mask_sizes(discrete_leaf), shape).astype(np.int64)


def mask_space(action_space: Space) -> Space:
    """The space of an action space's masks: its tree, with one flat bool vector for every discrete leaf.

    A `MultiDiscrete([2, 3])` has a mask of 5 entries, part after part; a `MultiBinary(n)` has 2n, (off, on) pairs; a
    Box has none: in a Dict its key is left out, in a Tuple its place is `()`.
    """

    def walk(space: Space) -> Space:
        if isinstance(space, spaces.Dict):
            return spaces.Dict({key: walk(inner) for key, inner in space.spaces.items() if _is_discrete(inner)})
        if isinstance(space, spaces.Tuple):
            return spaces.Tuple([walk(inner) if _is_discrete(inner) else spaces.Tuple([]) for inner in space.spaces])
        return spaces.MultiBinary(sum(mask_sizes(space)))

    if not _is_discrete(action_space):
        raise SpaceError(f"an action mask needs a discrete part in the action space, which is {action_space}")
    return walk(action_space)


def _is_discrete(space: Space) -> bool:
    return any(mask_sizes(leaf_space) for _, leaf_space in leaves(space))


def space_to_dict(space: Space) -> dict[str, Any]:
    """A space as plain data, for a file."""
    if isinstance(space, spaces.Dict):
        return {"kind": "Dict", "spaces": {key: space_to_dict(space.spaces[key]) for key in sorted(space.spaces)}}
    if isinstance(space, spaces.Tuple):
        return {"kind": "Tuple", "spaces": [space_to_dict(inner) for inner in space.spaces]}
    if isinstance(space, spaces.Box):
        return {
            "kind": "Box",
            "shape": list(leaf_shape(space)),
            "dtype": leaf_dtype(space).name,
            "low": _compact(space.low),
            "high": _compact(space.high),
        }
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": leaf_dtype(space).name}
    if isinstance(space, spaces.MultiDiscrete):
        return {"kind": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist(), "dtype": leaf_dtype(space).name}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(leaf_shape(space))}
    raise SpaceError(f"{type(space).__name__} spaces are not supported")


def _compact(bound: np.ndarray) -> Any:
    """A bound that is the same everywhere as one number; infinities as text, which JSON lacks."""
    distinct = np.unique(bound)
    values = (distinct if distinct.size == 1 else bound.reshape(-1)).tolist()
    numbers = [value if math.isfinite(value) else str(value) for value in values]
    return numbers[0] if distinct.size == 1 else numbers


def space_from_dict(data: Mapping[str, Any]) -> Space:
    """The space that `space_to_dict` described. Descriptions of unreasonably large spaces are refused."""
    kind = data.get("kind")
    if kind == "Dict":
        return spaces.Dict({key: space_from_dict(inner) for key, inner in data["spaces"].items()})
    if kind == "Tuple":
        return spaces.Tuple([space_from_dict(inner) for inner in data["spaces"]])
    if kind == "Box":
        shape, dtype = tuple(data["shape"]), _known_dtype(data["dtype"])
        _check_entries(shape, 4 * dtype.itemsize)
        return spaces.Box(_expand(data["low"], shape, dtype), _expand(data["high"], shape, dtype), shape, dtype.type)
    if kind == "Discrete":
        _check_entries((data["n"],), 1)
        return spaces.Discrete(data["n"], start=data["start"], dtype=_known_dtype(data.get("dtype", "int64")).type)
    if kind == "MultiDiscrete":
        nvec = np.array(data["nvec"])
        _check_entries((int(nvec.max(initial=0)), nvec.size), 1)
        return spaces.MultiDiscrete(nvec, _known_dtype(data.get("dtype", "int64")).type, start=np.array(data["start"]))
    if kind == "MultiBinary":
        _check_entries(data["n"] if isinstance(data["n"], list) else (data["n"],), 16)
        return spaces.MultiBinary(data["n"])
    raise SpaceError(f"a file describes a space of kind {kind!r}, which this version does not know")


def _check_entries(shape: Sequence[int], bytes_each: int) -> None:
    """Refuse invalid sizes and unreasonably large ones."""
    if any(type(size) is not int or size < 0 for size in shape) or len(shape) > _MAX_RANK:
        raise SpaceError(f"a file describes a space of shape {shape!s:.100}, which is not a valid shape")
    if math.prod(shape) * bytes_each > _MAX_BYTES:
        raise SpaceError(f"a file describes a space of shape {shape!s:.100}, which is too large")


def _known_dtype(name: Any) -> np.dtype[Any]:
    if name not in _DTYPES:
        raise SpaceError(f"a file describes a space with the unknown dtype {name!r:.100}")
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


def _expand(bound: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """The array that `_compact` described."""
    values = bound if isinstance(bound, list) else [bound]
    numbers = np.array([float(value) if value in ("inf", "-inf") else value for value in values], dtype)
    return numbers.reshape(shape) if isinstance(bound, list) else np.full(shape, numbers[0])


WIDE_ONE_HOT = 4_096
"""Values of a discrete observation from which on its one-hot vector is reported."""


def wide_one_hots(observation_space: Space) -> list[str]:
    """A sentence for each discrete part of an observation whose one-hot vector is very wide."""
    seen, _ = split_mask(observation_space)
    found = [(path, sum(mask_sizes(part))) for path, part in leaves(seen) if isinstance(part, spaces.Discrete | spaces.MultiDiscrete)]
    return [
        f"{path_name(path)} has {size:,} discrete values, which become a one-hot vector of as many inputs: slow, and nothing is learned "
        "about values that were not seen; encode it as numbers (a Box, such as row and column) or as a MultiDiscrete of several small parts"
        for path, size in found
        if size > WIDE_ONE_HOT
    ]
