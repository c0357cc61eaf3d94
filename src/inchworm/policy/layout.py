"""How trees of observations and actions become the vectors that networks read and write, and the form of a memory (steps 4 and 8 of 9).

The layout of an observation or action is a list of parts with offsets. The encoders of every backend follow the same list, so that they
cannot diverge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from inchworm.core.errors import InchwormError, SpaceError
from inchworm.core.spaces import (
    MASK_KEY,
    Path,
    Space,
    build_tree,
    check_action_space,
    check_observation_space,
    leaf,
    leaf_dtype,
    leaf_shape,
    leaves,
    mask_sizes,
    path_name,
    split_mask,
)
from inchworm.core.types import Array, Tree


@dataclass(frozen=True, kw_only=True)
class ActionPart:
    """One leaf of the action: some categorical choices, or some Gaussian dimensions."""

    path: Path
    kind: Literal["categorical", "gaussian"]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sizes: tuple[int, ...] = ()
    """categorical: choices of each entry."""
    starts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """categorical: the smallest value of each entry."""
    low: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    high: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def sampled_dtype(self) -> np.dtype[Any]:
        """The dtype of a sampled action: at least float32, because rounding further would change its log-prob."""
        return np.result_type(self.dtype, np.float32) if self.kind == "gaussian" else self.dtype

    @cached_property
    def width(self) -> int:
        """Entries of the flat action."""
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class ActionLayout:
    """All parts of an action.

    A network's output is [..., C + D]: the logits of all choices, part after part, then the Gaussian means. A flat action is a
    pair: choices [..., G] counted from 0, and Gaussian values [..., D].
    """

    space: Space
    parts: tuple[ActionPart, ...]
    bounds: Literal["clip", "tanh"]

    @cached_property
    def group_sizes(self) -> tuple[int, ...]:
        """The number of choices of every categorical entry; there are G."""
        return tuple(size for part in self.parts for size in part.sizes)

    @cached_property
    def num_logits(self) -> int:
        """C"""
        return sum(self.group_sizes)

    @cached_property
    def num_gaussians(self) -> int:
        """D"""
        return sum(part.width for part in self.parts if part.kind == "gaussian")

    @cached_property
    def num_outputs(self) -> int:
        """C + D"""
        return self.num_logits + self.num_gaussians

    @cached_property
    def groups(self) -> tuple[slice, ...]:
        """The slice of each categorical entry's logits."""
        ends = np.cumsum((0, *self.group_sizes))
        return tuple(slice(int(a), int(b)) for a, b in pairwise(ends))

    @cached_property
    def low(self) -> np.ndarray:
        """[D] lower bounds of the Gaussian entries."""
        return np.concatenate([part.low for part in self.parts] or [np.zeros(0, np.float32)])

    @cached_property
    def high(self) -> np.ndarray:
        """[D] f32 upper bounds."""
        return np.concatenate([part.high for part in self.parts] or [np.zeros(0, np.float32)])

    def unflatten(self, choices: np.ndarray, gaussians: np.ndarray, *, sampled: bool = False) -> Tree:
        """Flat actions [..., G] and [..., D] as the space's tree, each leaf in the space's dtype, or in `sampled_dtype`."""
        leading = choices.shape[:-1]
        pieces: dict[Path, np.ndarray] = {}
        group = dimension = 0
        for part in self.parts:
            if part.kind == "categorical":
                values = choices[..., group : group + part.width] + part.starts
                group += part.width
            else:
                values = gaussians[..., dimension : dimension + part.width]
                dimension += part.width
            dtype = part.sampled_dtype if sampled else part.dtype
            pieces[part.path] = values.reshape(*leading, *part.shape).astype(dtype, copy=False)
        return build_tree(self.space, lambda path, _: pieces[path])

    def mask_leaves(self, mask: Tree) -> list[Array]:
        """The mask arrays of the categorical parts, in order."""
        return [leaf(mask, part.path) for part in self.parts if part.kind == "categorical"]


def action_layout(space: Space, bounds: Literal["clip", "tanh"]) -> ActionLayout:
    """The layout of an action space."""
    check_action_space(space)
    parts = tuple(_action_part(path, leaf_space, bounds) for path, leaf_space in leaves(space))
    return ActionLayout(space, parts, bounds)


def _action_part(path: Path, space: Space, bounds: str) -> ActionPart:
    shape, dtype = leaf_shape(space), leaf_dtype(space)
    if isinstance(space, spaces.Box):
        with np.errstate(over="ignore"):
            width = space.high - space.low
        if bounds == "tanh" and not np.isfinite(width).all():
            raise SpaceError(
                f'policy.action_bounds="tanh" needs finite bounds, but the action space has {space.low} to {space.high}; use "clip"'
            )
        low, high = space.low.reshape(-1), space.high.reshape(-1)  # in the space's dtype: a rounded bound may lie outside
        return ActionPart(path=path, kind="gaussian", shape=shape, dtype=dtype, low=low, high=high)
    starts = np.broadcast_to(np.asarray(getattr(space, "start", 0), np.int64), shape).reshape(-1)
    return ActionPart(path=path, kind="categorical", shape=shape, dtype=dtype, sizes=mask_sizes(space), starts=starts)


def check_mask_space(observation_space: Space, layout: ActionLayout) -> None:
    """Raise if a mask in the observation space does not fit the action space."""
    _, mask = split_mask(observation_space)
    if mask is None:
        return
    if not layout.group_sizes:
        raise SpaceError(f"the observation has the key {MASK_KEY}, but the action space {layout.space} has no discrete part; rename it")
    for part in layout.parts:
        if part.kind != "categorical":
            continue
        try:
            found = leaf(mask, part.path)
        except (KeyError, IndexError, TypeError):
            raise SpaceError(f"the observation's {MASK_KEY} has no part {path_name(part.path)} for the action of that name") from None
        size = int(np.prod(leaf_shape(found)))
        if size != sum(part.sizes):
            raise SpaceError(
                f"the observation's {MASK_KEY} has {size} entries where the action {layout.space} has {sum(part.sizes)} choices"
            )


@dataclass(frozen=True, kw_only=True)
class ObservationPart:
    """One leaf of the observation and its position in the network's input."""

    path: Path
    kind: Literal["box", "one_hot", "image"]
    shape: tuple[int, ...]
    size: int
    """Width in the flat input; 0 for an image, which is convolved instead."""
    offset: int
    scale: float = 1.0
    """Factor of raw values: 1/255 for bytes."""
    sizes: tuple[int, ...] = ()
    """one_hot: the number of categories of each entry."""
    starts: tuple[int, ...] = ()
    """one_hot: the smallest value of each entry."""


@dataclass(frozen=True)
class ObservationLayout:
    """All parts of an observation; images are separate if the network has convolutions."""

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


def observation_layout(space: Space, smallest: int | None = None) -> ObservationLayout:
    """The layout of an observation space without its action mask; images of at least this height and width are convolved; None: none is."""
    check_observation_space(space)
    seen, mask = split_mask(space)
    parts: list[ObservationPart] = []
    offset = 0
    for path, leaf_space in leaves(seen):
        shape, is_box = leaf_shape(leaf_space), isinstance(leaf_space, spaces.Box)
        is_image = smallest is not None and is_box and len(shape) == 3 and min(height_and_width(shape)) >= smallest
        part = _observation_part(path, leaf_space, offset, is_image)
        parts.append(part)
        offset += part.size
    return ObservationLayout(tuple(parts), mask is not None)


def channels_first(shape: tuple[int, ...]) -> bool:
    """Whether an image's channels are its first axis: the smaller of first and last axis (4x84x84), else they are last (96x96x3)."""
    return shape[0] <= shape[2]


def height_and_width(shape: tuple[int, ...]) -> tuple[int, int]:
    """The sides of an image."""
    return shape[1:] if channels_first(shape) else shape[:2]  # type: ignore[return-value]


def smallest_image(filters: Sequence[Sequence[int]]) -> int:
    """The side of the smallest image that convolutions (filters, kernel, stride) can read: one value is left at the end."""
    side = 1
    for _, kernel, stride in reversed(filters):
        side = (side - 1) * stride + kernel
    return side


def _observation_part(path: Path, space: Space, offset: int, convolved: bool) -> ObservationPart:
    shape = leaf_shape(space)
    size = int(np.prod(shape))
    if isinstance(space, spaces.Box):
        scale = 1 / 255 if leaf_dtype(space) == np.uint8 and np.all(space.low == 0) and np.all(space.high == 255) else 1.0
        if convolved:
            return ObservationPart(path=path, kind="image", shape=shape, size=0, offset=offset, scale=scale)
        return ObservationPart(path=path, kind="box", shape=shape, size=size, offset=offset, scale=scale)
    if isinstance(space, spaces.MultiBinary):
        return ObservationPart(path=path, kind="box", shape=shape, size=size, offset=offset)
    sizes = mask_sizes(space)
    starts = np.broadcast_to(getattr(space, "start", 0), shape).reshape(-1)
    return ObservationPart(
        path=path, kind="one_hot", shape=shape, size=sum(sizes), offset=offset, sizes=sizes, starts=tuple(int(s) for s in starts)
    )


MEMORY_KINDS = ("lstm", "gru")
"""The values of `policy.kind` with a memory."""
GATES = {"lstm": 4, "gru": 3}
"""Blocks of rows in each weight, in torch's order: input, forget, cell, output; reset, update, new."""
FORGET_GATE = 1
"""Its position among the LSTM's gates."""


@dataclass(frozen=True)
class MemoryLayout:
    """A stack of recurrent layers, each reading the output of the one below."""

    kind: Literal["lstm", "gru"]
    inputs: int
    """Width of the first layer's input."""
    size: int
    """Width of every layer's state."""
    layers: int

    @property
    def names(self) -> tuple[str, ...]:
        """The parts of the state, each [B, layers, size]."""
        return ("hidden", "cell") if self.kind == "lstm" else ("hidden",)

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Every weight's name and shape: [gates * size, inputs] and [gates * size]."""
        shapes: dict[str, tuple[int, ...]] = {}
        rows = GATES[self.kind] * self.size
        for layer in range(self.layers):
            for part, width in (("input", self.size if layer else self.inputs), ("state", self.size)):
                shapes |= {f"memory.{layer}.{part}.weight": (rows, width), f"memory.{layer}.{part}.bias": (rows,)}
        return shapes

    def empty(self, num_lanes: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
        """The initial state of lanes: zeros."""
        return {name: np.zeros((num_lanes, self.layers, self.size), dtype) for name in self.names}

    def refusal(self, state: Tree, num_lanes: int) -> InchwormError:
        """The error for a state that does not fit this memory."""
        wanted = f"{{{', '.join(self.names)}}}, each [{num_lanes}, {self.layers}, {self.size}]"
        found = {name: np.shape(leaf) for name, leaf in state.items()} if isinstance(state, dict) else repr(state)[:80]
        return InchwormError(
            f"the policy has a memory ({self.kind}), so its state must be {wanted}, not {found}; begin with "
            f"policy.initial_state({num_lanes}) and pass on the state of each PolicyStep"
        )

    def fits(self, state: Tree, leading: tuple[int, ...]) -> bool:
        """Whether a tree has the form of this memory's state, with these leading axes."""
        shape = (*leading, self.layers, self.size)
        return isinstance(state, dict) and state.keys() == set(self.names) and all(np.shape(leaf) == shape for leaf in state.values())
