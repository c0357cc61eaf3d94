"""Serves step 1: the one place that decides whether a game of Skirmish is over, who won, and how."""

from __future__ import annotations

import numpy as np

from inchworm.env.skirmish.config import SkirmishConfig
from inchworm.env.skirmish.state import ELIMINATION, NOBODY, TIME, ZONE, ArenaState
from inchworm.types import Array


def decide(config: SkirmishConfig, state: ArenaState) -> None:
    """Set `winners` and `reasons` after a step: elimination comes before zone, zone before time.

    Both teams eliminated by the same shots is a draw. On time the higher zone score wins, then the larger rest of health.
    """
    left = np.logical_or.reduce(state.alive, 1)  # [2, E]
    wiped = ~(left[0] & left[1])
    held = np.maximum(state.scores[0], state.scores[1]) >= config.zone_target
    late = state.steps >= config.max_steps
    state.reasons[:] = 0
    state.winners[:] = NOBODY
    if not (wiped | held | late).any():
        return
    state.reasons[late] = TIME
    state.reasons[held] = ZONE
    state.reasons[wiped] = ELIMINATION
    health = team_health(state)
    _name(state, (state.reasons == TIME), _first_larger(state.scores, health))
    _name(state, (state.reasons == ZONE), _first_larger(state.scores, state.scores))
    _name(state, (state.reasons == ELIMINATION), _first_larger(left.astype(np.float32), state.scores * 0))


def team_health(state: ArenaState) -> Array:
    """[2, E] f32: whole numbers, so the order of the sum does not matter."""
    return np.add.reduce(state.health, 1)


def _first_larger(first: Array, second: Array) -> Array:
    """[E] int: the team with more of the first, else of the second, else NOBODY."""
    blue = (first[0] > first[1]) | ((first[0] == first[1]) & (second[0] > second[1]))
    red = (first[1] > first[0]) | ((first[0] == first[1]) & (second[1] > second[0]))
    return np.where(blue, 0, np.where(red, 1, NOBODY))


def _name(state: ArenaState, which: Array, winners: Array) -> None:
    np.copyto(state.winners, winners, where=which)
