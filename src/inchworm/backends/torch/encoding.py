"""Serves steps 4 and 8 of 9: trees become the flat tensors that networks and distributions use, as in `backends/numpy/encoding`."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

from inchworm.policy.layout import ActionLayout
from inchworm.policy.observation_layout import ObservationLayout, ObservationPart
from inchworm.policy.spec import channels_first
from inchworm.spaces import leaf
from inchworm.types import Tree


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
