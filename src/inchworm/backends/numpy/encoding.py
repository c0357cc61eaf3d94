"""Serves step 4 of 9: trees of observations, masks and actions become the flat arrays that networks and distributions use."""

from __future__ import annotations

import numpy as np

from inchworm.policy.layout import ActionLayout
from inchworm.policy.observation_layout import ObservationLayout, ObservationPart
from inchworm.spaces import leaf
from inchworm.types import Tree


def encode_observations(layout: ObservationLayout, observations: Tree, num_leading: int = 1) -> np.ndarray:
    """Observations [..., *obs] as the flat input [..., F] f32: boxes flattened, categories one-hot, bytes scaled to 0…1."""
    if len(layout.parts) == 1 and layout.parts[0].kind == "box" and layout.parts[0].scale == 1.0:  # almost everybody
        values: np.ndarray = leaf(observations, layout.parts[0].path)
        if values.ndim == num_leading + 1 and values.dtype == np.float32:  # flat as it is
            return values
        return np.asarray(values, np.float32).reshape(*values.shape[:num_leading], layout.size)
    pieces = [_encode_part(part, np.asarray(leaf(observations, part.path)), num_leading) for part in layout.flat]
    return np.concatenate(pieces, axis=-1)


def _encode_part(part: ObservationPart, values: np.ndarray, num_leading: int) -> np.ndarray:
    leading = values.shape[:num_leading]
    if part.kind == "box":
        return values.astype(np.float32).reshape(*leading, part.size) * np.float32(part.scale)
    entries = values.reshape(*leading, len(part.sizes)).astype(np.int64) - np.asarray(part.starts)  # [..., entries]
    columns = [np.arange(size) == entries[..., index, None] for index, size in enumerate(part.sizes)]
    return np.concatenate(columns, axis=-1).astype(np.float32)


def encode_mask(layout: ActionLayout, mask: Tree, num_leading: int = 1) -> np.ndarray:
    """A tree of action masks as one bool array [..., C], in the order of the logits."""
    pieces = [np.asarray(part).reshape(*np.shape(part)[:num_leading], -1) != 0 for part in layout.mask_leaves(mask)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=-1)


def flatten_actions(layout: ActionLayout, actions: Tree, num_leading: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """A tree of actions as choices [..., G] counted from 0 and Gaussian values [..., D]."""
    leading = np.shape(leaf(actions, layout.parts[0].path))[:num_leading]
    choices, gaussians = [np.zeros((*leading, 0), np.int64)], [np.zeros((*leading, 0), np.float32)]
    for part in layout.parts:
        values = np.asarray(leaf(actions, part.path)).reshape(*leading, part.width)
        if part.kind == "categorical":
            choices.append(values.astype(np.int64) - part.starts)
        else:
            gaussians.append(values.astype(np.float32))
    return np.concatenate(choices, axis=-1), np.concatenate(gaussians, axis=-1)
