"""Agents with different spaces: the common space of their lanes, and the way from it to an agent's own part and back.

Every lane of a vector env has the same arrays. Where agents differ, these are as large as the largest: an agent's own numbers come first
along each axis, the rest is padding. Which choices of a discrete action an agent lacks is in the action mask, which dimensions of a Box in
the observation key `action_dimensions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium import spaces

from inchworm.core.errors import SpaceError
from inchworm.core.spaces import (
    MASK_KEY,
    Path,
    Space,
    build_tree,
    in_one_line,
    leaf,
    leaf_dtype,
    leaf_shape,
    leaves,
    mask_sizes,
    mask_space,
    path_name,
    space_from_dict,
    space_to_dict,
    split_mask,
    value_range,
    with_mask,
)
from inchworm.core.types import Array, Tree

DIMENSIONS_KEY = "action_dimensions"
"""The observation key that tells which dimensions of continuous actions a lane's agent has. The others count in no log-prob or entropy."""

_KINDS = (spaces.Dict, spaces.Tuple, spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


@dataclass(frozen=True)
class AgentSpaces:
    """The own spaces of an agent, or the common ones of several."""

    seen: Space
    """The observation without an action mask."""
    action_space: Space
    masked: bool = False
    """Whether the environment itself offers action masks."""

    @property
    def observation_space(self) -> Space:
        """The observation with the action mask, if there is one."""
        return with_mask(self.seen, mask_space(self.action_space)) if self.masked else self.seen

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `from_dict`."""
        return {"seen": space_to_dict(self.seen), "action_space": space_to_dict(self.action_space), "masked": self.masked}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AgentSpaces:
        """Restore what `to_dict` returned."""
        return cls(space_from_dict(data["seen"]), space_from_dict(data["action_space"]), bool(data["masked"]))


def unite_agents(agents: Mapping[Any, AgentSpaces]) -> tuple[Space, Space]:
    """The observation and the action space of lanes that serve all of these agents; those of one agent, or of equal ones, are theirs."""
    seen = unite_spaces({name: own.seen for name, own in agents.items()}, "observation")
    action_space = unite_spaces({name: own.action_space for name, own in agents.items()}, "action")
    parts = [OwnPart((seen, action_space), (own.seen, own.action_space)) for own in agents.values()]
    added: dict[str, Space] = {}
    if any(own.masked for own in agents.values()) or not all(part.has_all_choices for part in parts):
        added[MASK_KEY] = mask_space(action_space)
    if not all(part.dimensions.all() for part in parts):
        added[DIMENSIONS_KEY] = spaces.MultiBinary(len(parts[0].dimensions))
    if not added:
        return seen, action_space
    return spaces.Dict({**(seen.spaces if isinstance(seen, spaces.Dict) else {"observation": seen}), **added}), action_space


def unite_spaces(found: Mapping[Any, Space], what: str, path: Path = ()) -> Space:
    """The smallest space that holds some spaces of one kind, each by the name of its agent; keys may be missing in some."""
    (first_name, first), *others = found.items()
    if all(space == first for _, space in others):
        return first
    kind = next((kind for kind in _KINDS if isinstance(first, kind)), type(first))
    for name, space in others:
        alike = isinstance(space, kind) and (
            isinstance(space, spaces.Dict | spaces.Tuple)
            or (len(leaf_shape(space)), leaf_dtype(space).kind) == (len(leaf_shape(first)), leaf_dtype(first).kind)
        )
        if not alike:
            where = f" at {path_name(path)}" if path else ""
            raise SpaceError(
                f"the {what} spaces of {first_name} and {name}{where} cannot be padded to one: {in_one_line(first)} and "
                f"{in_one_line(space)} differ in more than size; let the environment give them one kind, rank and kind of number"
            )
    trees: Any = dict(found)
    if kind is spaces.Dict:
        keys = dict.fromkeys(key for space in trees.values() for key in space.spaces)
        return spaces.Dict({key: unite_spaces(_having(trees, key), what, (*path, key)) for key in keys})
    if kind is spaces.Tuple:
        longest = max(len(space.spaces) for space in trees.values())
        return spaces.Tuple([unite_spaces(_having(trees, index), what, (*path, index)) for index in range(longest)])
    return _unite_leaves(list(found.values()))


def _having(trees: Mapping[Any, Any], key: str | int) -> dict[Any, Space]:
    """The parts at a key, of those that have it."""
    keys = {name: space.spaces if isinstance(space, spaces.Dict) else range(len(space.spaces)) for name, space in trees.items()}
    return {name: space.spaces[key] for name, space in trees.items() if key in keys[name]}


def _unite_leaves(found: Sequence[Any]) -> Space:
    """The largest size along each axis and the loosest bounds."""
    shape = tuple(max(sizes) for sizes in zip(*(leaf_shape(space) for space in found)))
    dtype = np.result_type(*(leaf_dtype(space) for space in found))
    if isinstance(found[0], spaces.MultiBinary):
        return spaces.MultiBinary(shape if len(shape) > 1 else shape[0])
    is_box = isinstance(found[0], spaces.Box)
    low, high = np.zeros(shape, dtype if is_box else np.int64), np.zeros(shape, dtype if is_box else np.int64)
    owned = np.zeros(shape, bool)  # entries that some space has: two shapes may leave a corner between them
    for space in found:
        ends = (space.low, space.high) if is_box else value_range(space)
        at = corner(leaf_shape(space))
        low[at] = np.where(owned[at], np.minimum(low[at], ends[0]), ends[0])
        high[at] = np.where(owned[at], np.maximum(high[at], ends[1]), ends[1])
        owned[at] = True
    if not owned.all() and owned.any():
        low[~owned], high[~owned] = low[owned].min(), high[owned].max()
    if is_box:
        return spaces.Box(low, high, shape, dtype.type)
    if isinstance(found[0], spaces.Discrete):
        return spaces.Discrete(int(high - low), start=int(low), dtype=dtype.type)
    return spaces.MultiDiscrete(high - low, dtype.type, start=low)


def corner(shape: Sequence[int]) -> tuple[Any, ...]:
    """The index of an array's last axes that selects an agent's own entries."""
    return (..., *(slice(size) for size in shape))


class OwnPart:
    """The part of the lanes' common spaces that belongs to an agent, or to several with the same policy.

    `whole` and `own` are each an observation and an action space; arrays may have any leading axes.
    """

    def __init__(self, whole: tuple[Space, Space], own: tuple[Space, Space]) -> None:
        self.whole, self.own = whole, own
        self._seen = own[0]  # without the masks of choices and dimensions
        if isinstance(own[0], spaces.Dict):
            self._seen = spaces.Dict({key: inner for key, inner in own[0].spaces.items() if key not in (MASK_KEY, DIMENSIONS_KEY)})
        self._wrapped = isinstance(whole[0], spaces.Dict) and not isinstance(own[0], spaces.Dict)
        self._mask = split_mask(own[0])[1]
        self._own_leaves = dict(leaves(own[1]))
        everything = dict(leaves(whole[1]))
        self.choices = {path: _positions(everything[path], part) for path, part in self._own_leaves.items() if mask_sizes(part)}
        """By discrete leaf, the positions of the own choices in the flat mask of `whole`."""
        boxes = [(path, part) for path, part in everything.items() if isinstance(part, spaces.Box)]
        has = [np.zeros(leaf_shape(part), bool) for _, part in boxes]
        for (path, _), marks in zip(boxes, has):
            if path in self._own_leaves:
                marks[corner(leaf_shape(self._own_leaves[path]))] = True
        self.dimensions = np.concatenate([np.zeros(0, bool), *(marks.reshape(-1) for marks in has)])
        """[D] the continuous dimensions of `whole` that `own` has."""

    @property
    def has_all_choices(self) -> bool:
        """Whether every choice of `whole` is a choice here, too."""
        return all(array.all() for array in self.legal.values())

    @cached_property
    def legal(self) -> dict[Path, np.ndarray]:
        """By discrete leaf of `whole` its flat mask: own choices are legal, and a missing entry has one legal choice, the first."""
        masks = {}
        for path, part in leaves(self.whole[1]):
            if sizes := mask_sizes(part):
                mask, entries = np.zeros(sum(sizes), np.int8), np.ones(leaf_shape(part), bool)
                if path in self._own_leaves:
                    mask[self.choices[path]] = 1
                    entries[corner(leaf_shape(self._own_leaves[path]))] = False
                mask[np.cumsum([0, *sizes[:-1]])[entries.reshape(-1)]] = 1
                masks[path] = mask
        return masks

    def seen(self, observations: Tree) -> Tree:
        """Views of the own entries of observations [..., *whole], without masks."""
        tree = observations["observation"] if self._wrapped else observations
        return build_tree(self._seen, lambda path, part: leaf(tree, path)[corner(leaf_shape(part))])

    def observations(self, observations: Tree) -> Tree:
        """The own part [..., *own] of observations [..., *whole], as new arrays."""
        tree = observations["observation"] if self._wrapped else observations
        cut = build_tree(self._seen, lambda path, part: np.array(leaf(tree, path)[corner(leaf_shape(part))], leaf_dtype(part), order="C"))
        if self._mask is not None:
            whole = observations[MASK_KEY]
            cut[MASK_KEY] = build_tree(mask_space(self.own[1]), lambda path, _: leaf(whole, path)[..., self.choices[path]])
        if isinstance(self.own[0], spaces.Dict) and DIMENSIONS_KEY in self.own[0].spaces:
            cut[DIMENSIONS_KEY] = observations[DIMENSIONS_KEY][..., self.dimensions]
        return cut

    def actions(self, actions: Tree) -> Tree:
        """The own part [..., *own] of actions [..., *whole]."""
        return build_tree(self.own[1], lambda path, part: np.ascontiguousarray(leaf(actions, path)[corner(leaf_shape(part))]))

    def padded_actions(self, actions: Tree) -> Tree:
        """Actions [..., *own] as [..., *whole]: missing choices are the first, missing numbers 0."""
        path, first = next(iter(self._own_leaves.items()))
        given = leaf(actions, path)
        leading = given.shape[: given.ndim - len(leaf_shape(first))]

        def one(path: Path, part: Space) -> Array:
            own = self._own_leaves.get(path)
            if own is not None and leaf_shape(own) == leaf_shape(part):
                return leaf(actions, path)
            value = leaf(actions, path) if own is not None else None
            padded = np.zeros((*leading, *leaf_shape(part)), leaf_dtype(part) if value is None else value.dtype)
            padded[...] = getattr(part, "start", 0)
            if own is not None:
                padded[corner(leaf_shape(own))] = value
            return padded

        return build_tree(self.whole[1], one)


def _positions(whole: Any, own: Any) -> np.ndarray:
    """Where the choices of a discrete leaf are in the flat mask of the larger leaf."""
    sizes, shape = mask_sizes(whole), leaf_shape(whole)
    firsts = np.array([0, *np.cumsum(sizes)[:-1]], np.int64).reshape(shape)  # of each entry
    starts = np.broadcast_to(getattr(whole, "start", 0), shape)
    begins = (firsts - starts)[corner(leaf_shape(own))] + getattr(own, "start", 0)
    runs = [np.arange(begin, begin + size) for begin, size in zip(begins.reshape(-1).tolist(), mask_sizes(own))]
    return np.concatenate(runs) if runs else np.zeros(0, np.int64)
