"""Serves step 1: arenas as plain data for a replay, and as the one vector that a central critic reads. In the first team's frame."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from inchworm.env.skirmish.classes import HEADINGS
from inchworm.env.skirmish.config import SkirmishConfig
from inchworm.env.skirmish.layout import UNIT_STATE
from inchworm.env.skirmish.state import ArenaState
from inchworm.types import Array

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
