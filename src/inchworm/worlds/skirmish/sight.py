"""What every unit of Skirmish sees and may do, for all arenas at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from inchworm.core.types import Array
from inchworm.worlds.skirmish.state import (
    ALLY,
    CLASSES,
    DIRECTIONS,
    ENEMY,
    MOVES,
    OWN,
    RAY_LENGTH,
    TURNS,
    ArenaState,
    Layout,
    SkirmishConfig,
)

_CLOSE = np.float32(1.0 / 64.0)
"""The minimum of what a distance is divided by; smaller than the lattice."""
_FAR = np.float32(1e6)
"""The free distance where nothing is in the way."""


def has_line_of_sight(ours: Array, theirs: Array, walls: Array) -> Array:
    """[n, n, E] bool: whether no wall intersects the line from our unit i to their unit j, at [j, i]. All in our frame.

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


def free_distances(places: Array, radii: Array, walls: Array, edge: Array) -> Array:
    """[8, 2, n, E]: how far each unit can go in each of `DIRECTIONS` before it touches a wall or the edge, measured along an axis.

    Places are [2, 2, n, E], radii [n, 1], walls [2, 2, W, E], edge [2] the arena's half size.
    """
    room = edge[:, None, None, None] - radii  # [2, 1, n, 1]
    ahead, behind = room - places, room + places  # [2, 2, n, E]
    free = np.empty((2, 4, *places.shape[1:]), np.float32)  # [there or back, line, 2, n, E]
    free[0, :2], free[1, :2] = ahead, behind
    np.minimum(ahead[0], ahead[1], out=free[0, 2])
    np.minimum(behind[0], ahead[1], out=free[0, 3])
    np.minimum(behind[0], behind[1], out=free[1, 2])
    np.minimum(ahead[0], behind[1], out=free[1, 3])
    if walls.shape[2]:
        np.minimum(free, np.minimum.reduce(_distances_to_walls(places, radii, walls), 2), out=free)
    return free.reshape(8, *places.shape[1:])


def _distances_to_walls(places: Array, radii: Array, walls: Array) -> Array:
    """[2 (there, back), 4 (lines), W, 2, n, E]: the distance to each wall along each line and its opposite, _FAR where it misses the wall.

    A line through the unit is inside a box from `near` to `far`; where near < 0 the box is behind, and likewise for -far on the way back.
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
    np.logical_not(inside[::-1], out=missed[:2])  # a line to the east meets a box whose range of y contains it
    np.greater_equal(near[2:], -back[2:], out=missed[2:])
    hidden = ways < 0
    hidden |= missed
    np.copyto(ways, _FAR, where=hidden)
    return ways


@dataclass(frozen=True, slots=True)
class Sightings:
    """Where the enemies are relative to every unit: [n (enemy j), 2, n (unit i), E] each."""

    away: Array
    """[2 (x, y), j, 2, i, E]: from the unit to the enemy."""
    distance: Array
    ahead: Array
    """The cosine of the enemy's direction relative to the unit's facing."""
    left: Array
    """The sine."""
    in_sight: Array
    """Within sight, and no wall in between."""
    in_arc: Array
    """In sight, and within reach and arc of the unit's weapon."""


class Observer:
    """Computes observations and action masks of the arenas of one config."""

    def __init__(self, config: SkirmishConfig) -> None:
        kinds, layout = config.classes, Layout(config.team_size)
        self._kind_rows, self._ray_rows, self._ally_rows, self._enemy_rows = layout.kind, layout.rays, layout.allies, layout.enemies

        def per_unit(values: list[float]) -> Array:
            return np.array(values, np.float32)[:, None]  # [n, 1]

        self._size = config.team_size
        self._edge = np.array([config.width / 2, config.height / 2], np.float32)
        self._radii = per_unit([kind.radius for kind in kinds])
        self._sight, self._reach = per_unit([kind.sight for kind in kinds]), per_unit([kind.reach for kind in kinds])
        self._arc_cosine = per_unit([math.cos(math.radians(kind.arc / 2)) - 1e-6 for kind in kinds])  # including the rim
        self._full_health = per_unit([kind.health for kind in kinds])
        self._full_cooldown = per_unit([kind.cooldown for kind in kinds])
        straight, diagonal = [kind.speed for kind in kinds], [kind.diagonal for kind in kinds]
        steps = [straight if 0 in direction else diagonal for direction in DIRECTIONS]
        self._steps = np.array(steps, np.float32)[:, None, :, None]  # [8, 1, n, 1]
        self._zone = np.float32(config.zone_radius**2)
        # Divisors. The result never exceeds 1, which a product with a rounded inverse would not guarantee.
        self._longest = np.float32(max(config.width, config.height))
        self._farthest = np.float32(max(kind.sight for kind in kinds))
        self._target, self._limit = np.float32(config.zone_target), np.float32(config.max_steps)
        names = list(CLASSES)
        self._kinds = np.eye(len(names), dtype=np.float32)[:, [names.index(unit) for unit in config.units], None][:, None]  # [K, 1, n, 1]

    def sightings(self, state: ArenaState) -> Sightings:
        """Compute where the enemies are relative to every unit: once for (our i, their j), then rotated for the other team."""
        places = state.places
        ours, theirs = places[:, 0], -places[:, 1]  # both in the first team's frame, [2, n, E]
        size, arenas = self._size, places.shape[-1]
        relative = np.empty((4, size, 2, size, arenas), np.float32)  # dx, dy, distance, whether the line of sight is free
        base = relative[:, :, 0]  # [4, j, i, E]
        away = np.subtract(theirs[:, :, None], ours[:, None], out=base[:2])
        squared = away * away
        np.sqrt(squared[0] + squared[1], out=base[2])
        base[3] = has_line_of_sight(ours, theirs, state.walls)
        # Rotated by 180 degrees, the vector from their i to our j is the vector from our j to their i.
        relative[:, :, 1] = base.swapaxes(1, 2)
        dx, dy, distance, free = relative
        facing_x, facing_y = state.facings
        near = np.maximum(distance, _CLOSE)
        bearing = np.stack([facing_x * dx + facing_y * dy, facing_x * dy - facing_y * dx])
        bearing /= near
        np.clip(bearing, np.float32(-1.0), np.float32(1.0), out=bearing)  # rounding can exceed it slightly
        ahead, left = bearing
        in_sight = distance <= self._sight
        in_sight &= free > 0
        in_arc = distance <= self._reach
        in_arc &= in_sight
        in_arc &= ahead >= self._arc_cosine
        return Sightings(relative[:2], distance, ahead, left, in_sight, in_arc)

    def in_zone(self, state: ArenaState) -> Array:
        """[2, n, E] bool: units that are alive and in the zone."""
        squared = state.places * state.places
        inside = (squared[0] + squared[1]) <= self._zone
        inside &= state.alive
        return inside

    def write(self, state: ArenaState, sightings: Sightings, in_zone: Array) -> None:
        """Write the observation and the action mask of every unit. A dead unit observes zeros."""
        observations, places, size = state.observations, state.places, self._size
        free = free_distances(places, self._radii, state.walls, self._edge)
        own = observations[: len(OWN)]
        np.divide(places, self._edge[:, None, None, None], out=own[0:2])
        own[2:4] = state.facings
        np.divide(state.health, self._full_health, out=own[4])
        np.divide(state.cooldowns, self._full_cooldown, out=own[5])
        own[6] = in_zone
        own[7] = np.float32(1.0) - state.steps / self._limit
        scores = (state.scores / self._target)[:, None]  # [2, 1, E]
        own[8], own[9] = scores, scores[::-1]
        holds = state.holds.astype(np.float32)[:, None]
        own[10] = holds - holds[::-1]
        observations[self._kind_rows] = self._kinds
        rays = np.minimum(free, np.float32(RAY_LENGTH), out=observations[self._ray_rows])
        rays *= np.float32(1.0 / RAY_LENGTH)

        allies = observations[self._ally_rows].reshape(len(ALLY), size, *state.alive.shape)  # [feature, ally j, 2, unit i, E]
        alive = state.alive.swapaxes(0, 1)[:, :, None]  # [j, 2, 1, E]
        allies[0] = alive
        away = np.subtract(places.swapaxes(1, 2)[:, :, :, None], places[:, None], out=allies[1:3])
        away /= self._longest
        allies[3] = own[4].swapaxes(0, 1)[:, :, None]
        allies[4] = own[5].swapaxes(0, 1)[:, :, None]
        allies[1:] *= alive

        enemies = observations[self._enemy_rows].reshape(len(ENEMY), size, *state.alive.shape)  # [feature, enemy j, 2, unit i, E]
        enemy_alive = state.alive[::-1].swapaxes(0, 1)[:, :, None]
        visible = sightings.in_sight & enemy_alive
        enemies[0] = visible
        np.divide(sightings.away, self._farthest, out=enemies[2:4])
        np.divide(sightings.distance, self._farthest, out=enemies[4])
        enemies[5], enemies[6] = sightings.ahead, sightings.left
        enemies[7] = own[4, ::-1].swapaxes(0, 1)[:, :, None]
        enemies[8] = sightings.ahead[:, ::-1].swapaxes(0, 2)  # the enemy's view of the unit: the two change places
        enemies[9] = sightings.in_arc
        enemies[2:] *= visible
        enemies[1] = enemy_alive

        if not state.alive.all():
            np.copyto(observations, np.float32(0.0), where=~state.alive)  # a product would keep the sign in the zeros
        mask = state.mask
        mask[0] = mask[MOVES : MOVES + TURNS + 1] = True
        np.greater_equal(free, self._steps, out=mask[1:MOVES])
        np.logical_and(sightings.in_arc & visible, state.cooldowns == 0, out=mask[MOVES + TURNS + 1 :])
        mask |= ~state.alive  # as for every lane without an agent; the world ignores a dead unit's action
