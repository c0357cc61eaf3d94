"""Serves steps 4 and 8 of 9: trees become the flat tensors that networks and distributions use, as in `backends/numpy/encoding`."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from torch import Tensor

from inchworm.core.errors import RolloutError
from inchworm.core.spaces import leaf
from inchworm.core.types import Array, Tree
from inchworm.policy.layout import ActionLayout, ObservationLayout, ObservationPart
from inchworm.policy.spec import NO_GLOBAL_STATE, channels_first


def to_tensors(tree: Tree, device: torch.device | str) -> Tree:
    """Every array of a tree as a tensor on `device`."""
    return optree.tree_map(lambda array: to_tensor(array, device), tree)


def to_tensor(array: Any, device: torch.device | str) -> Tensor:
    """One array as a tensor. Read-only memory (a rollout's) is copied, because torch has no read-only tensors."""
    if isinstance(array, Tensor):
        return array.to(device)
    array = np.asarray(array)
    if array.dtype in (np.uint16, np.uint32, np.uint64):  # hardly any operation knows these
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(array) if array.flags.writeable else np.array(array)).to(device)


def encode_observations(layout: ObservationLayout, observations: Tree, num_leading: int) -> Tensor:
    """Observations [..., *obs] as the flat input [..., F] f32."""
    pieces = [_encode_part(part, leaf(observations, part.path), num_leading) for part in layout.flat]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


def _encode_part(part: ObservationPart, values: Tensor, num_leading: int) -> Tensor:
    leading = values.shape[:num_leading]
    if part.kind == "box":
        flat = values.to(torch.float32).reshape(*leading, part.size)
        return flat if part.scale == 1.0 else flat * part.scale
    entries = values.reshape(*leading, len(part.sizes))
    ranges = zip(part.starts, part.sizes)
    # Torch's own one_hot asks the host whether every entry is in range, which the rollout's checks have done.
    columns = [entries[..., i, None] == torch.arange(start, start + size, device=values.device) for i, (start, size) in enumerate(ranges)]
    return torch.cat(columns, dim=-1).to(torch.float32)


def encode_image(part: ObservationPart, values: Tensor) -> Tensor:
    """Images [N, *shape], channels first or last, as a view [N, channels, height, width]; their own numbers, which `part.scale` is for."""
    return values if channels_first(part.shape) else values.permute(0, 3, 1, 2)


def channels_together(images: Tensor) -> Tensor:
    """The same images [N, channels, height, width] with the channels of a pixel side by side in memory.

    Gradients of convolutions are made from these in two thirds of the time. Done before bytes become floats: a quarter of the memory.
    """
    if not images.is_contiguous():  # a view of images whose channels are last
        return images
    return torch.stack(images.unbind(1), dim=-1).permute(0, 3, 1, 2)


def encode_mask(layout: ActionLayout, mask: Tree, num_leading: int) -> Tensor:
    """A tree of action masks as one bool tensor [..., C]."""
    pieces = [part.reshape(*part.shape[:num_leading], -1) != 0 for part in layout.mask_leaves(mask)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


def flatten_actions(layout: ActionLayout, actions: Tree, num_leading: int) -> tuple[Tensor, Tensor]:
    """A tree of actions as choices [..., G] counted from 0 and Gaussian values [..., D]."""
    choices: list[Tensor] = []
    gaussians: list[Tensor] = []
    for part in layout.parts:
        values = leaf(actions, part.path)
        values = values.reshape(*values.shape[:num_leading], part.width)
        if part.kind == "categorical":
            counted = values.long()
            choices.append(counted - torch.from_numpy(np.array(part.starts)).to(values.device) if part.starts.any() else counted)
        else:
            gaussians.append(values.to(torch.float32))
    empty = values[..., :0]
    return _joined(choices, empty.long()), _joined(gaussians, empty.float())


def _joined(parts: list[Tensor], empty: Tensor) -> Tensor:
    return torch.cat(parts, -1) if len(parts) > 1 else (parts[0] if parts else empty)


VALUE_CHUNK = 16_384
"""Rows that the critic reads at once, so that a rollout does not need the memory of all its activations."""
VALUE_NUMBERS = 2**24
"""And the numbers in those rows: observations of more than 1,024, such as images, are read fewer at once."""


def chunks(tree: Tree, rows: int) -> Iterator[Tree]:
    """Rows [rows, …], some at a time."""
    size = rows_at_once(tree, 1)
    for start in range(0, rows, size):
        yield optree.tree_map(operator.itemgetter(slice(start, start + size)), tree)


def rows_at_once(tree: Tree, num_leading: int) -> int:
    """How many rows of such leaves, which have so many axes in front."""
    numbers = sum(leaf.shape[num_leading:].numel() for leaf in optree.tree_leaves(tree))  # of one row
    return max(1, min(VALUE_CHUNK, VALUE_NUMBERS // max(1, int(numbers))))


def merge_leading(tree: Tree) -> tuple[Tree, tuple[int, int]]:
    """[L, N, …] as [L·N, …], which is what networks read; and (L, N)."""
    if isinstance(tree, Tensor):
        return tree.flatten(0, 1), (tree.shape[0], tree.shape[1])
    first = optree.tree_leaves(tree)[0]
    return optree.tree_map(lambda leaf: leaf.flatten(0, 1), tree), (first.shape[0], first.shape[1])


class Central(NamedTuple):
    """Observations with what only a central critic sees, as one tree: whatever cuts or flattens the one does it to all."""

    observations: Tree
    global_state: Tree
    valid: Tensor


def with_world(observations: Tree, global_state: Tree, valid: Array | None) -> Central:
    """Observations [L, N, *obs] beside `lane_states` [L, N, …] and who lives [L, N]; all do unless it is said."""
    first = optree.tree_leaves(observations)[0]
    if isinstance(global_state, tuple) and not global_state:
        raise RolloutError(NO_GLOBAL_STATE)
    alive = torch.ones(first.shape[:2], dtype=torch.bool, device=first.device) if valid is None else to_tensor(valid, first.device)
    return Central(observations, to_tensors(global_state, first.device), alive)


def beside(features: Tensor, seen: Tree, layout: ObservationLayout, center: Tensor, inverse_std: Tensor, limit: float | None) -> Tensor:
    """[N, F + G]: a lane's own features, nothing of them where its agent does not live, and the world's, normalised if `limit` is given."""
    if not isinstance(seen, Central):
        raise RolloutError(NO_GLOBAL_STATE)
    world = encode_observations(layout, seen.global_state, 1).to(features.dtype)
    if limit is not None:
        world = ((world - center) * inverse_std).clamp(-limit, limit)
    return torch.cat([features * seen.valid[:, None], world], -1)
