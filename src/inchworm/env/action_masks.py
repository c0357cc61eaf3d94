"""Step 1 of 9: finds an environment's action masks and adds them to its observations.

A mask is the observation key `action_mask`, the result of the environment's `action_masks()` or `get_action_mask()`, or
`info["action_mask"]`, in this order; where the first reset provides one, every step must.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any, Literal, Self

import numpy as np
from gymnasium import spaces

from inchworm.core.errors import EnvError
from inchworm.core.spaces import MASK_KEY, Path, Space, build_tree, leaf, leaf_shape, leaves, mask_sizes, mask_space, tree_leaves
from inchworm.core.types import Tree
from inchworm.env.values import Refusal, refusal

MaskSource = Literal["key", "action_masks", "get_action_mask", "info"]

_METHODS: tuple[MaskSource, ...] = ("action_masks", "get_action_mask")


MASKS_UNKNOWN = (
    f"info holds {MASK_KEY!r}, which is not known before an environment instance is reset; pass a factory (its class) instead of the "
    "instance, or give it a method action_masks()"
)


class Masks:
    """Fetches the mask that belongs to an observation, and writes it into its lane's row."""

    def __init__(self, source: MaskSource, action_space: Space, ask: Callable[..., Any] | None = None) -> None:
        self.source, self._ask, self._action_space = source, ask, action_space
        sizes = [(path, part, mask_sizes(part)) for path, part in leaves(action_space)]
        # Of each discrete leaf its path, space, number of entries, and where each of its parts begins in the flat mask.
        self._leaves = [(path, part, sum(own), np.array([0, *accumulate(own)][:-1])) for path, part, own in sizes if own]

    @classmethod
    def find(
        cls, observation_space: Space, action_space: Space, method: Callable[[str], Any], probe: Callable[[], Iterable[Any]]
    ) -> Self | None:
        """Where the masks come from; None if there are none.

        `method` returns the environment's method of a name, or None; `probe` resets the environment and returns its infos, if needed.
        """
        if not any(mask_sizes(part) for _, part in leaves(action_space)):
            return None
        if isinstance(observation_space, spaces.Dict) and MASK_KEY in observation_space.spaces:
            given, wanted = observation_space.spaces[MASK_KEY], mask_space(action_space)
            found, needed = ({path: np.prod(leaf_shape(part)) for path, part in leaves(space)} for space in (given, wanted))
            if found != needed:
                raise EnvError(f"the observation key {MASK_KEY!r} has the space {given}, but masks of {action_space} need {wanted}")
            return cls("key", action_space)
        for name in _METHODS:
            ask = method(name)
            if callable(ask):
                return cls(name, action_space, ask)
        in_info = any(isinstance(info, Mapping) and MASK_KEY in info for info in probe())
        return cls("info", action_space) if in_info else None

    def fetch(self, observation: Any, info: Mapping[str, Any], *agent: Any) -> Any:
        """The mask of the latest observation, of an `agent` where there are several; None if there is none."""
        if self._ask is not None:
            return self._ask(*agent)
        return (observation if self.source == "key" else info).get(MASK_KEY)

    def write(self, mask: Any, rows: Tree, lane: int, *, acted_on: bool) -> None:
        """Check a mask and put it into its row. If it is `acted_on`, every discrete part must have a legal action."""
        if mask is None:
            raise Refusal(f"{MASK_KEY} missing: reset() provided it via {self.source}, this step did not")
        for path, space, total, firsts in self._leaves:
            try:
                given = leaf(mask, path)
            except (KeyError, IndexError, TypeError):
                raise refusal((MASK_KEY,), f"must have the structure of {mask_space(self._action_space)}", mask) from None
            name, row = (MASK_KEY, *path), leaf(rows, path)
            flat = given
            if type(given) is not np.ndarray:  # a flat list, or one vector per part
                try:
                    flat = np.concatenate([np.asarray(part).reshape(-1) for part in given])
                except (TypeError, ValueError):
                    raise refusal(name, "must be a vector of true and false", given) from None
            if flat.shape != (total,) and not (flat.size == total and row.shape[1:] == flat.shape):
                raise refusal(name, f"has shape {flat.shape}, but masks of {space} need ({total},)", given)
            flat = flat.reshape(-1)
            # As in the collector, a byte of a boolean array is looked for: that takes a third of the time of any() and all().
            if flat.dtype != np.bool_:
                if flat.dtype.kind not in "iuf" or 1 in (flat != (legal := flat != 0)).tobytes():
                    raise refusal(name, "must hold true and false, or 1 and 0", given)
                flat = legal
            if acted_on and 0 in np.logical_or.reduceat(flat, firsts).tobytes():
                raise refusal(name, f"leaves no legal action in a part of {space}", given)
            row[lane] = flat.reshape(row.shape[1:])


def allow_all(rows: Tree, lane: int) -> None:
    """Write the mask of a state in which no action follows."""
    for part in tree_leaves(rows):
        part[lane] = 1


def random_mask(action_space: Space, rng: np.random.Generator) -> Tree:
    """A mask in which every discrete part has one legal action or more."""
    actions = dict(leaves(action_space))

    def one(path: Path, space: Space) -> np.ndarray:
        mask = rng.integers(2, size=leaf_shape(space)).astype(np.int8)
        first = 0
        for size in mask_sizes(actions[path]):
            mask[first + rng.integers(size)] = 1
            first += size
        return mask

    return build_tree(mask_space(action_space), one)


def is_legal(action_space: Space, action: Any, mask: Tree) -> bool:
    """Whether every discrete part of an action is allowed by its mask."""
    for path, part in leaves(action_space):
        sizes = mask_sizes(part)
        if sizes:
            chosen = np.reshape(np.asarray(leaf(action, path)) - getattr(part, "start", 0), -1).astype(np.int64)
            firsts = np.cumsum([0, *sizes[:-1]])
            if not np.asarray(leaf(mask, path))[firsts + chosen].all():
                return False
    return True
