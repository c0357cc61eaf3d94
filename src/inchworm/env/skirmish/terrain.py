"""Serves step 1: what an episode begins with, drawn from the arena's own stream: walls, and where the units stand.

Only one half is drawn. The other is the same turned by 180 degrees about the middle, which is the origin, so that both teams
see the same arena from their own side.
"""

from __future__ import annotations

import numpy as np

from inchworm.env.skirmish.classes import LATTICE
from inchworm.env.skirmish.config import SkirmishConfig
from inchworm.types import Array

_PASSAGE = 1.25
"""The least way between two blocks: more than the widest unit."""
_SMALLEST, _LONGEST, _WIDEST = 0.75, 3.0, 2.5
_SPAWN_LINE, _SPAWN_JITTER = 1.0, 0.75


def draw_walls(config: SkirmishConfig, rng: np.random.Generator) -> Array:
    """[2 (centre, half size), 2 (x, y), W] f32: wall blocks of both halves, the second half's after the first's.

    Each block has a band of the arena's height to itself, less a passage, so that no wall ever closes the way.
    """
    pairs = config.wall_pairs
    drawn = rng.random((4, pairs))
    left, right = config.wall_columns
    band = config.height / max(pairs, 1)
    widths = _on_lattice(_SMALLEST + drawn[0] * (min(_WIDEST, right - left) - _SMALLEST), 2)
    heights = _on_lattice(_SMALLEST + drawn[1] * (min(_LONGEST, band - _PASSAGE) - _SMALLEST), 2)
    lowest = -config.height / 2 + band * np.arange(pairs) + _PASSAGE / 2
    x0 = _on_lattice(left + drawn[2] * (right - left - widths))
    y0 = _on_lattice(lowest + drawn[3] * (band - _PASSAGE - heights))
    centres = np.stack([x0 + widths / 2, y0 + heights / 2])
    halves = np.stack([widths / 2, heights / 2])
    return np.stack([np.concatenate([centres, -centres], 1), np.concatenate([halves, halves], 1)]).astype(np.float32)


def draw_spawns(config: SkirmishConfig, rng: np.random.Generator) -> Array:
    """[2 (x, y), n] f32: where a team's units begin, in its own frame: spread over its side in an order of their own."""
    size = config.team_size
    order = rng.permutation(size)
    jitter = (rng.random((2, size)) * 2.0 - 1.0) * _SPAWN_JITTER
    band = (config.height - 2.0) / size
    y = -config.height / 2 + 1.0 + band * (order + 0.5) + jitter[1] * min(1.0, band / 2)
    x = -config.width / 2 + _SPAWN_LINE + (jitter[0] + _SPAWN_JITTER) / 2
    return np.stack([_on_lattice(x), _on_lattice(y)]).astype(np.float32)


def _on_lattice(values: Array, cells: int = 1) -> Array:
    """Rounded down to multiples of `cells` / LATTICE."""
    return np.floor(values * (LATTICE / cells)) * (cells / LATTICE)
