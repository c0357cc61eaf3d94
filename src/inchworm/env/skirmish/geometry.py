"""Serves step 1: who can see whom past the walls, and how far the way is free. Arrays have the arena E as their last axis.

Coordinates are on the lattice, so differences, products and comparisons here are exact, and the same for one arena as for many.
"""

from __future__ import annotations

import numpy as np

from inchworm.types import Array

FAR = np.float32(1e6)
"""Nothing in the way."""

DIRECTIONS = ((1, 0), (0, 1), (1, 1), (-1, 1), (-1, 0), (0, -1), (-1, -1), (1, -1))
"""The moves after "stay", in the own frame: east, north, north-east, north-west, and their opposites in the same order."""


def sight_is_free(ours: Array, theirs: Array, walls: Array) -> Array:
    """[n, n, E] bool: whether no wall cuts the line from our unit i to their unit j, at [j, i]. All in our frame.

    Ours and theirs are [2 (x, y), n, E], walls [2 (centre, half), 2, W, E]. A segment (middle m, half h) and a box overlap unless one of
    three axes separates them: x, y, and the segment's normal.
    """
    middle = (ours[:, None] + theirs[:, :, None]) * np.float32(0.5)  # [2, j, i, E]
    half = (theirs[:, :, None] - ours[:, None]) * np.float32(0.5)
    reach = np.abs(half)
    away = middle[:, None] - walls[0][:, :, None, None]  # [2, W, j, i, E]
    size = walls[1][:, :, None, None]
    near = np.abs(away) < size + reach[:, None]
    turned = np.abs(half[0] * away[1] - half[1] * away[0])  # [W, j, i, E]
    cut = turned < size[0] * reach[1] + size[1] * reach[0]
    cut &= near[0]
    cut &= near[1]
    return ~np.logical_or.reduce(cut, 0)


def free_ways(places: Array, radii: Array, walls: Array, edge: Array) -> Array:
    """[8, 2, n, E]: how far each unit can go in each of `DIRECTIONS` before it touches a wall or the edge, counted along an axis.

    Places are [2, 2, n, E], radii [n, 1], walls [2, 2, W, E], edge [2] the arena's half size.
    """
    free = _to_edge(places, radii, edge)
    if walls.shape[2]:
        np.minimum(free, np.minimum.reduce(_to_walls(places, radii, walls), 2), out=free)
    return free.reshape(8, *places.shape[1:])


def _to_edge(places: Array, radii: Array, edge: Array) -> Array:
    """[2 (there, back), 4 (lines), 2, n, E]: the way to the arena's edge along each line and its opposite."""
    room = edge[:, None, None, None] - radii  # [2, 1, n, 1]
    ahead, behind = room - places, room + places  # [2, 2, n, E]
    free = np.empty((2, 4, *places.shape[1:]), np.float32)
    free[0, :2], free[1, :2] = ahead, behind
    np.minimum(ahead[0], ahead[1], out=free[0, 2])
    np.minimum(behind[0], ahead[1], out=free[0, 3])
    np.minimum(behind[0], behind[1], out=free[1, 2])
    np.minimum(ahead[0], behind[1], out=free[1, 3])
    return free


def _to_walls(places: Array, radii: Array, walls: Array) -> Array:
    """[2 (there, back), 4 (lines), W, 2, n, E]: the way to each wall along each line and its opposite, FAR where it is not met.

    A line through the unit is inside a box from `near` to `far`; where near < 0 the box is behind, and so for -far on the way back.
    """
    margin = walls[1][:, :, None, None] + radii  # [2, W, 1, n, E]
    away = walls[0][:, :, None, None] - places[:, None]  # [2, W, 2, n, E]
    low, high = away - margin, away + margin
    (left, lower), (right, _) = low, high
    ways = np.empty((2, 4, *left.shape), np.float32)  # near of the four lines, then -far
    near, back = ways
    near[:2] = low
    np.maximum(left, lower, out=near[2])
    np.maximum(-right, lower, out=near[3])
    np.negative(high, out=back[:2])
    np.maximum(back[0], back[1], out=back[2])
    np.maximum(left, back[1], out=back[3])
    missed = np.empty((4, *left.shape), np.bool_)
    inside = (low < 0) & (high > 0)
    np.logical_not(inside[::-1], out=missed[:2])  # a line to the east meets a box whose range of y holds it
    np.greater_equal(near[2:], -back[2:], out=missed[2:])
    hidden = ways < 0
    hidden |= missed
    np.copyto(ways, FAR, where=hidden)
    return ways
