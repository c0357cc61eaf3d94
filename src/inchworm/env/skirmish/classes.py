"""Serves step 1: the kinds of units that fight in Skirmish. Lengths lie on the lattice, damage and health are whole numbers.

That keeps the world exact: positions are multiples of 1/16 and sums of damage are sums of whole numbers, so float32 rounds
nothing, and neither the order of a sum nor the number of arenas stepped together changes a bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LATTICE = 16
"""Positions are multiples of 1 / LATTICE."""

HEADINGS = 16
"""Directions that a unit can face: multiples of 22.5 degrees, counted to the left from the own frame's +x."""


@dataclass(frozen=True, slots=True)
class UnitClass:
    """What a kind of unit can do."""

    health: int
    speed: float
    """The way of one step along an axis; a diagonal step is as long, up to the lattice."""
    radius: float
    """How far its centre stays from walls."""
    sight: float
    """How far it sees enemies."""
    reach: float
    """How far its weapon carries."""
    arc: int
    """The weapon's full angle in degrees, centred on the facing."""
    damage: int
    cooldown: int
    """Steps from one shot to the next."""
    turn: int
    """Headings that one turn changes the facing by."""

    @property
    def diagonal(self) -> float:
        """The way of a diagonal step along each axis."""
        return round(self.speed * math.sqrt(0.5) * LATTICE) / LATTICE


CLASSES: dict[str, UnitClass] = {
    "scout": UnitClass(health=60, speed=1.0, radius=0.3125, sight=8.0, reach=3.5, arc=120, damage=8, cooldown=2, turn=3),
    "soldier": UnitClass(health=100, speed=0.75, radius=0.375, sight=7.0, reach=5.0, arc=90, damage=12, cooldown=3, turn=2),
    "heavy": UnitClass(health=160, speed=0.5, radius=0.5, sight=6.0, reach=4.0, arc=60, damage=20, cooldown=4, turn=2),
}
"""scout: quick, sees far, weak; soldier: the longest reach; heavy: slow, tough, narrow and hard."""
