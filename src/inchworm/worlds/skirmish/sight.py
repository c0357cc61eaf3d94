"""Serves step 1: what every unit sees and may do, for all arenas at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from inchworm.core.types import Array
from inchworm.worlds.skirmish.config import CLASSES, HEADINGS, SkirmishConfig
from inchworm.worlds.skirmish.state import (
    ALLY,
    DIRECTIONS,
    ENEMY,
    MOVES,
    OWN,
    RAY_LENGTH,
    TURNS,
    UNIT_STATE,
    ArenaState,
    Layout,
    free_ways,
    sight_is_free,
)

_CLOSE = np.float32(1.0 / 64.0)
"""What a distance is divided by at least; smaller than the lattice."""


@dataclass(frozen=True, slots=True)
class Sightings:
    """How the enemies stand to every unit: [n (enemy j), 2, n (unit i), E] each."""

    away: Array
    """[2 (x, y), j, 2, i, E]: from the unit to the enemy."""
    distance: Array
    ahead: Array
    """The cosine of the enemy's direction from the unit's facing."""
    left: Array
    """The sine."""
    in_sight: Array
    """Near enough to see, and no wall between."""
    in_arc: Array
    """In sight, and within reach and arc of the unit's weapon."""


class Observer:
    """Looks at arenas of one config."""

    def __init__(self, config: SkirmishConfig) -> None:
        kinds, layout = config.classes, Layout(config.team_size)
        self._kind_rows, self._ray_rows, self._ally_rows, self._enemy_rows = layout.kind, layout.rays, layout.allies, layout.enemies

        def per_unit(values: list[float]) -> Array:
            return np.array(values, np.float32)[:, None]  # [n, 1]

        self._size = config.team_size
        self._edge = np.array([config.width / 2, config.height / 2], np.float32)
        self._radii = per_unit([kind.radius for kind in kinds])
        self._sight, self._reach = per_unit([kind.sight for kind in kinds]), per_unit([kind.reach for kind in kinds])
        self._arc_cosine = per_unit([math.cos(math.radians(kind.arc / 2)) - 1e-6 for kind in kinds])  # the rim belongs to it
        self._full_health = per_unit([kind.health for kind in kinds])
        self._full_cooldown = per_unit([kind.cooldown for kind in kinds])
        straight, diagonal = [kind.speed for kind in kinds], [kind.diagonal for kind in kinds]
        steps = [straight if 0 in direction else diagonal for direction in DIRECTIONS]
        self._steps = np.array(steps, np.float32)[:, None, :, None]  # [8, 1, n, 1]
        self._zone = np.float32(config.zone_radius**2)
        # What numbers are divided by: never more than 1 comes out, which a product with a rounded inverse does not promise.
        self._longest = np.float32(max(config.width, config.height))
        self._farthest = np.float32(max(kind.sight for kind in kinds))
        self._target, self._limit = np.float32(config.zone_target), np.float32(config.max_steps)
        names = list(CLASSES)
        self._kinds = np.eye(len(names), dtype=np.float32)[:, [names.index(unit) for unit in config.units], None][:, None]  # [K, 1, n, 1]

    def sightings(self, state: ArenaState) -> Sightings:
        """How enemies stand to each other. What holds for (our i, their j) is worked out once and turned for the other team."""
        places = state.places
        ours, theirs = places[:, 0], -places[:, 1]  # both in the first team's frame, [2, n, E]
        size, arenas = self._size, places.shape[-1]
        stand = np.empty((4, size, 2, size, arenas), np.float32)  # dx, dy, distance, whether the line of sight is free
        base = stand[:, :, 0]  # [4, j, i, E]
        away = np.subtract(theirs[:, :, None], ours[:, None], out=base[:2])
        squared = away * away
        np.sqrt(squared[0] + squared[1], out=base[2])
        base[3] = sight_is_free(ours, theirs, state.walls)
        # Turned by 180 degrees, the way from their i to our j is the way from our j to their i.
        stand[:, :, 1] = base.swapaxes(1, 2)
        dx, dy, distance, free = stand
        facing_x, facing_y = state.facings
        near = np.maximum(distance, _CLOSE)
        bearing = np.stack([facing_x * dx + facing_y * dy, facing_x * dy - facing_y * dx])
        bearing /= near
        np.clip(bearing, np.float32(-1.0), np.float32(1.0), out=bearing)  # rounding can go a bit beyond
        ahead, left = bearing
        in_sight = distance <= self._sight
        in_sight &= free > 0
        in_arc = distance <= self._reach
        in_arc &= in_sight
        in_arc &= ahead >= self._arc_cosine
        return Sightings(stand[:2], distance, ahead, left, in_sight, in_arc)

    def in_zone(self, state: ArenaState) -> Array:
        """[2, n, E] bool: who is alive and in the zone."""
        squared = state.places * state.places
        inside = (squared[0] + squared[1]) <= self._zone
        inside &= state.alive
        return inside

    def look(self, state: ArenaState, sightings: Sightings, in_zone: Array) -> None:
        """Write what every unit sees and may do. A dead unit sees zeros."""
        seen, lanes = state.seen, state.alive.shape
        free = free_ways(state.places, self._radii, state.walls, self._edge)
        self._write_own(state, in_zone)
        seen[self._kind_rows] = self._kinds
        rays = np.minimum(free, np.float32(RAY_LENGTH), out=seen[self._ray_rows])
        rays *= np.float32(1.0 / RAY_LENGTH)
        self._write_allies(state, seen[self._ally_rows].reshape(len(ALLY), self._size, *lanes))
        visible = sightings.in_sight & state.alive[::-1].swapaxes(0, 1)[:, :, None]
        self._write_enemies(state, sightings, visible, seen[self._enemy_rows].reshape(len(ENEMY), self._size, *lanes))
        if not state.alive.all():
            np.copyto(seen, np.float32(0.0), where=~state.alive)  # a product would leave the sign in the zeros
        self._write_mask(state, free, sightings.in_arc & visible)

    def _write_own(self, state: ArenaState, in_zone: Array) -> None:
        """Into the first rows, in the order of `OWN`."""
        own = state.seen[: len(OWN)]
        np.divide(state.places, self._edge[:, None, None, None], out=own[0:2])
        own[2:4] = state.facings
        np.divide(state.health, self._full_health, out=own[4])
        np.divide(state.cooldowns, self._full_cooldown, out=own[5])
        own[6] = in_zone
        own[7] = np.float32(1.0) - state.steps / self._limit
        scores = (state.scores / self._target)[:, None]  # [2, 1, E]
        own[8], own[9] = scores, scores[::-1]
        holds = state.holds.astype(np.float32)[:, None]
        own[10] = holds - holds[::-1]

    def _write_allies(self, state: ArenaState, out: Array) -> None:
        """Into [len(ALLY), n (ally j), 2, n (unit i), E]."""
        alive = state.alive.swapaxes(0, 1)[:, :, None]  # [j, 2, 1, E]
        out[0] = alive
        places = state.places
        away = np.subtract(places.swapaxes(1, 2)[:, :, :, None], places[:, None], out=out[1:3])
        away /= self._longest
        out[3] = state.seen[4].swapaxes(0, 1)[:, :, None]
        out[4] = state.seen[5].swapaxes(0, 1)[:, :, None]
        out[1:] *= alive

    def _write_enemies(self, state: ArenaState, sightings: Sightings, visible: Array, out: Array) -> None:
        """Into [len(ENEMY), n (enemy j), 2, n (unit i), E]."""
        out[0] = visible
        np.divide(sightings.away, self._farthest, out=out[2:4])
        np.divide(sightings.distance, self._farthest, out=out[4])
        out[5], out[6] = sightings.ahead, sightings.left
        out[7] = state.seen[4, ::-1].swapaxes(0, 1)[:, :, None]
        out[8] = sightings.ahead[:, ::-1].swapaxes(0, 2)  # their view of us: enemy and unit change places
        out[9] = sightings.in_arc
        out[2:] *= visible
        out[1] = state.alive[::-1].swapaxes(0, 1)[:, :, None]

    def _write_mask(self, state: ArenaState, free: Array, in_arc: Array) -> None:
        """A dead unit's mask allows everything, as that of every lane without an agent; the world does nothing of it."""
        mask = state.mask
        mask[0] = mask[MOVES : MOVES + TURNS + 1] = True
        np.greater_equal(free, self._steps, out=mask[1:MOVES])
        np.logical_and(in_arc, state.cooldowns == 0, out=mask[MOVES + TURNS + 1 :])
        mask |= ~state.alive


TEAMS = ("blue", "red")
STEP_SECONDS = 0.2
"""How long a step takes when a game is watched."""


def describe_arena(config: SkirmishConfig, state: ArenaState, arena: int) -> dict[str, Any]:
    """What does not change during a game; (0, 0) is the lower left corner."""
    middle = np.array([config.width / 2, config.height / 2])
    centres, halves = state.walls[..., arena].astype(np.float64)  # [2 (x, y), W]
    corners = np.concatenate([middle[:, None] + centres - halves, middle[:, None] + centres + halves])
    units = [
        {
            "team": team,
            "kind": name,
            "max_health": kind.health,
            "radius": kind.radius,
            "range": kind.reach,
            "arc": math.radians(kind.arc),
        }
        for team in range(2)
        for name, kind in zip(config.units, config.classes)
    ]
    return {
        "game": "Skirmish-v0",
        "width": config.width,
        "height": config.height,
        "walls": corners.T.tolist(),
        "zone": {"x": config.width / 2, "y": config.height / 2, "radius": config.zone_radius},
        "teams": list(TEAMS),
        "units": units,
        "max_steps": config.max_steps,
        "step_seconds": STEP_SECONDS,
    }


def frame_of_arena(config: SkirmishConfig, state: ArenaState, arena: int) -> dict[str, Any]:
    """Units, scores and shots as they stand after the last step."""
    size = config.team_size
    units, shots = [], []
    for team, sign in enumerate((1.0, -1.0)):
        for unit in range(size):
            x, y = (sign * float(state.places[axis, team, unit, arena]) for axis in range(2))
            heading = (int(state.headings[team, unit, arena]) + team * HEADINGS // 2) % HEADINGS
            facing = 2.0 * math.pi * heading / HEADINGS
            rest = [float(state.health[team, unit, arena]), float(state.cooldowns[team, unit, arena])]
            units.append([x + config.width / 2, y + config.height / 2, facing, *rest])
            target = int(state.shots[team, unit, arena])
            if target:
                shots.append([team * size + unit, (1 - team) * size + target - 1, int(state.hits[team, unit, arena])])
    return {"units": units, "score": state.scores[:, arena].tolist(), "shots": shots}


def global_states(config: SkirmishConfig, state: ArenaState, out: Array) -> None:
    """Write [E, S]: every unit's `UNIT_STATE` (dead ones as zeros), clock, scores, holder, and the walls of the left half."""
    size, arenas = config.team_size, state.steps.shape[-1]
    units = np.empty((len(UNIT_STATE), 2, size, arenas), np.float32)
    edge = np.array([config.width / 2, config.height / 2], np.float32)
    units[:4] = np.concatenate([state.places / edge[:, None, None, None], state.facings])
    np.negative(units[:4, 1], out=units[:4, 1])
    full = np.array([[kind.health, kind.cooldown] for kind in config.classes], np.float32).T[:, None, :, None]
    units[4:6] = np.stack([state.health, state.cooldowns]) / full
    units[6] = 1.0
    np.copyto(units, np.float32(0.0), where=~state.alive)
    width = units[:, :, :, 0].size
    out[:, :width] = units.reshape(width, arenas).T
    scores = state.scores / np.float32(config.zone_target)
    holder = state.holds[0].astype(np.float32) - state.holds[1]
    out[:, width : width + 4] = np.stack([np.float32(1.0) - state.steps / np.float32(config.max_steps), *scores, holder], 1)
    left = state.walls[:, :, : config.wall_pairs] / edge[:, None, None]  # [2, 2, pairs, E]
    out[:, width + 4 :] = left.reshape(-1, arenas).T
