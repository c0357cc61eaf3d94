"""How observations, which are trees, become the vectors that networks read; `layout.py` does it for actions. Serves steps 4 and 8."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from gymnasium import spaces

from inchworm.errors import SpaceError
from inchworm.spaces import Path, Space, leaf_dtype, leaf_shape, leaves, mask_sizes, split_mask


@dataclass(frozen=True, kw_only=True)
class ObservationPart:
    """One leaf of the observation and its place in the network's input."""

    path: Path
    kind: Literal["box", "one_hot", "image"]
    shape: tuple[int, ...]
    size: int
    """Width in the flat input; 0 for an image, which goes through convolutions instead."""
    offset: int
    scale: float = 1.0
    """What raw values are multiplied with: 1/255 for bytes."""
    sizes: tuple[int, ...] = ()
    """one_hot: the number of categories of each entry."""
    starts: tuple[int, ...] = ()
    """one_hot: the smallest value of each entry."""


@dataclass(frozen=True)
class ObservationLayout:
    """All parts of an observation; images apart if the network has convolutions."""

    parts: tuple[ObservationPart, ...]
    has_mask: bool

    @cached_property
    def flat(self) -> tuple[ObservationPart, ...]:
        """The parts of the flat input."""
        return tuple(part for part in self.parts if part.kind != "image")

    @cached_property
    def images(self) -> tuple[ObservationPart, ...]:
        """The parts that go through convolutions."""
        return tuple(part for part in self.parts if part.kind == "image")

    @cached_property
    def size(self) -> int:
        """Width of the flat input."""
        return sum(part.size for part in self.flat)

    @cached_property
    def normalized(self) -> np.ndarray:
        """[size] bool: entries that a normaliser may scale. One-hot entries and bytes are scaled already."""
        keep = np.zeros(self.size, bool)
        for part in self.flat:
            keep[part.offset : part.offset + part.size] = part.kind == "box" and part.scale == 1.0
        return keep


def observation_layout(space: Space, *, convolutions: bool) -> ObservationLayout:
    """The layout of an observation space; the action mask is no part of it."""
    seen, mask = split_mask(space)
    parts: list[ObservationPart] = []
    offset = 0
    for path, leaf_space in leaves(seen):
        part = _observation_part(path, leaf_space, offset, convolutions)
        parts.append(part)
        offset += part.size
    if not any(part.size or part.kind == "image" for part in parts):
        raise SpaceError(f"the observation space {space} holds nothing that a policy could see")
    if convolutions and not any(part.kind == "image" for part in parts):
        raise SpaceError(f'policy.kind="cnn" needs an image (a Box of rank 3) in the observation space, which is {space}; use "mlp"')
    return ObservationLayout(tuple(parts), mask is not None)


def has_image(space: Space) -> bool:
    """Whether there is something to convolve: a Box of rank 3."""
    return any(isinstance(part, spaces.Box) and len(leaf_shape(part)) == 3 for _, part in leaves(split_mask(space)[0]))


def _observation_part(path: Path, space: Space, offset: int, convolutions: bool) -> ObservationPart:
    shape = leaf_shape(space)
    size = int(np.prod(shape))
    if isinstance(space, spaces.Box):
        scale = 1 / 255 if leaf_dtype(space) == np.uint8 and np.all(space.low == 0) and np.all(space.high == 255) else 1.0
        if convolutions and len(shape) == 3:
            return ObservationPart(path=path, kind="image", shape=shape, size=0, offset=offset, scale=scale)
        return ObservationPart(path=path, kind="box", shape=shape, size=size, offset=offset, scale=scale)
    if isinstance(space, spaces.MultiBinary):
        return ObservationPart(path=path, kind="box", shape=shape, size=size, offset=offset)
    sizes = mask_sizes(space)
    starts = np.broadcast_to(getattr(space, "start", 0), shape).reshape(-1)
    return ObservationPart(
        path=path, kind="one_hot", shape=shape, size=sum(sizes), offset=offset, sizes=sizes, starts=tuple(int(s) for s in starts)
    )
