"""Serves step 1: all that a batch of arenas is, as arrays whose last axis is the arena.

Each team lives in its own frame: the arena's middle is the origin and the enemy's side lies in +x. The second team's frame is the first's
turned by 180 degrees, and so are the walls, which is why one set of them serves both and swapping the teams changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from inchworm.env.skirmish.config import SkirmishConfig
from inchworm.env.skirmish.layout import COMPONENTS, Layout
from inchworm.types import Array

ELIMINATION, ZONE, TIME = 1, 2, 3
REASONS = ("", "elimination", "zone", "time")
NOBODY = 2
"""The winner of a game that is a draw or goes on."""


@dataclass(slots=True)
class ArenaState:
    """E arenas with two teams of n units."""

    walls: Array
    """[2 (centre, half size), 2 (x, y), W, E] f32, in either team's frame."""
    spawns: Array
    """[2 (x, y), n, E] f32: where the game began, for either team."""
    places: Array
    """[2 (x, y), 2, n, E] f32"""
    headings: Array
    """[2, n, E] int: facing, counted in turns of a HEADINGS-th to the left from +x."""
    facings: Array
    """[2 (x, y), 2, n, E] f32: the same as a unit vector."""
    health: Array
    """[2, n, E] f32 whole numbers; 0 is dead."""
    alive: Array
    """[2, n, E] bool"""
    cooldowns: Array
    """[2, n, E] f32: steps until the weapon is ready."""
    scores: Array
    """[2, E] f32: steps that each team held the zone alone."""
    holds: Array
    """[2, E] bool: which team held the zone alone in the last step."""
    steps: Array
    """[E] f32"""
    seen: Array
    """[D, 2, n, E] f32: the observations, number by number."""
    mask: Array
    """[choices, 2, n, E] bool: the action masks."""
    shots: Array
    """[2, n, E] int: 1 + the enemy that was shot at in the last step, or 0."""
    hits: Array
    """[2, n, E] bool: whether that shot hit."""
    died: Array
    """[2, n, E] bool: who died in the last step."""
    rewards: Array
    """[component, 2, n, E] f32: of the last step."""
    reward_sums: Array
    """[component, 2, n, E] f64: of the episode."""
    winners: Array
    """[E] int: 0, 1 or NOBODY."""
    reasons: Array
    """[E] int: how the game ended, an index of REASONS; 0 while it goes on."""

    def take(self, arenas: Sequence[int], other: ArenaState, theirs: Sequence[int]) -> None:
        """Make these arenas what those of `other` are."""
        for name in _NAMES:
            getattr(self, name)[..., arenas] = getattr(other, name)[..., theirs]


_NAMES = tuple(field.name for field in fields(ArenaState))


def empty_state(config: SkirmishConfig, num_arenas: int) -> ArenaState:
    """Arenas in which nothing has begun."""
    size, layout = config.team_size, Layout(config.team_size)

    def zeros(*shape: int, kind: Any = np.float32) -> Array:
        return np.zeros((*shape, num_arenas), kind)

    return ArenaState(
        walls=zeros(2, 2, 2 * config.wall_pairs),
        spawns=zeros(2, size),
        places=zeros(2, 2, size),
        headings=zeros(2, size, kind=np.intp),
        facings=zeros(2, 2, size),
        health=zeros(2, size),
        alive=zeros(2, size, kind=np.bool_),
        cooldowns=zeros(2, size),
        scores=zeros(2),
        holds=zeros(2, kind=np.bool_),
        steps=zeros(),
        seen=zeros(layout.width, 2, size),
        mask=zeros(sum(layout.choices), 2, size, kind=np.bool_),
        shots=zeros(2, size, kind=np.intp),
        hits=zeros(2, size, kind=np.bool_),
        died=zeros(2, size, kind=np.bool_),
        rewards=zeros(len(COMPONENTS), 2, size),
        reward_sums=zeros(len(COMPONENTS), 2, size, kind=np.float64),
        winners=zeros(kind=np.intp),
        reasons=zeros(kind=np.intp),
    )
