"""Rules and unit classes of Skirmish. The fields of `SkirmishConfig` are what `env.kwargs` of the id Skirmish-v0 may hold."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

from pydantic import Field

from inchworm.config.reading import FROM_LIST, ConfigBase, config_class, short
from inchworm.core.errors import ConfigError

__all__ = ["SkirmishConfig"]


LATTICE = 16
"""Positions are multiples of 1 / LATTICE."""

HEADINGS = 16
"""Directions that a unit can face: multiples of 22.5 degrees, counterclockwise from +x in its team's frame."""


@dataclasses.dataclass(frozen=True, slots=True)
class UnitClass:
    """The abilities of a kind of unit."""

    health: int
    speed: float
    """The length of a step along an axis; a diagonal step is as long, rounded to the lattice."""
    radius: float
    """The minimum distance of its centre from walls."""
    sight: float
    """How far it sees enemies."""
    reach: float
    """The range of its weapon."""
    arc: int
    """The weapon's full angle in degrees, centred on the facing."""
    damage: int
    cooldown: int
    """Steps from one shot to the next."""
    turn: int
    """Headings that one turn changes the facing by."""

    @property
    def diagonal(self) -> float:
        """The length of a diagonal step along each axis."""
        return round(self.speed * math.sqrt(0.5) * LATTICE) / LATTICE


CLASSES: dict[str, UnitClass] = {
    "scout": UnitClass(health=60, speed=1.0, radius=0.3125, sight=8.0, reach=3.5, arc=120, damage=8, cooldown=2, turn=3),
    "soldier": UnitClass(health=100, speed=0.75, radius=0.375, sight=7.0, reach=5.0, arc=90, damage=12, cooldown=3, turn=2),
    "heavy": UnitClass(health=160, speed=0.5, radius=0.5, sight=6.0, reach=4.0, arc=60, damage=20, cooldown=4, turn=2),
}
"""scout: fast, far sight, weak; soldier: the longest reach; heavy: slow, tough, strong in a narrow arc."""


_MOST_UNITS = 10
_SPAWN_DEPTH = 3.0
"""Walls keep this distance from a team's side."""


@config_class()
class SkirmishConfig(ConfigBase):
    """The rules of a game: who fights, where, for how long, and what is rewarded."""

    units: Annotated[tuple[str, ...], FROM_LIST] = ("scout", "soldier", "heavy")
    """The classes of a team's units, 1 to 10 of scout, soldier and heavy; both teams have the same."""
    width: Annotated[float, Field(ge=10, le=48)] = 16.0
    """The arena from one team's side to the other's, in multiples of 1/8."""
    height: Annotated[float, Field(ge=6, le=48)] = 12.0
    """The arena across, in multiples of 1/8."""
    wall_pairs: Annotated[int, Field(ge=0)] = 3
    """Wall blocks on each half, drawn anew for each episode; the other half has the same, turned by 180 degrees."""
    zone_radius: Annotated[float, Field(ge=0.5)] = 2.5
    """The round zone in the middle of the arena."""
    zone_target: Annotated[int, Field(ge=1, le=1_000_000)] = 40
    """A team wins once it has held the zone alone for this many steps."""
    max_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 150
    """After this many steps the game is truncated and decided on time."""
    reward_damage: float = 0.5
    """For a hit, per 100 points of health taken from the enemy."""
    reward_hurt: float = -0.25
    """For being hit, per 100 points of own health lost."""
    reward_kill: float = 0.2
    """For each unit whose shot hit an enemy in the step in which it died."""
    reward_death: float = -0.2
    """For the unit that died."""
    reward_zone: float = 0.01
    """For the whole team, per step in which it held the zone alone; the other team gets as much less."""
    reward_win: float = 1.0
    """For the whole team, for a win by elimination or zone; the losers get as much less. On time nothing is paid: the game is truncated."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.units) <= _MOST_UNITS:
            raise ConfigError(f"units={list(self.units)} must name 1 to {_MOST_UNITS} units")
        for name in self.units:
            if name not in CLASSES:
                raise ConfigError(f"units: {name!r} is not a unit class; use {', '.join(CLASSES)}")
        for name in ("width", "height"):
            if getattr(self, name) * LATTICE % 2:
                raise ConfigError(f"{name}={getattr(self, name)} must be a multiple of 1/8")
        for name, most in (("wall_pairs", self.most_wall_pairs), ("zone_radius", min(self.width, self.height) / 2)):
            if getattr(self, name) > most:
                raise ConfigError(f"{name}={short(getattr(self, name))} must be {most:g} or less in an arena of this size")

    @property
    def team_size(self) -> int:
        """Units of a team."""
        return len(self.units)

    @property
    def classes(self) -> tuple[UnitClass, ...]:
        """The classes of a team's units."""
        return tuple(CLASSES[name] for name in self.units)

    @property
    def most_wall_pairs(self) -> int:
        """The most blocks that leave room to pass between them."""
        return int(self.height // 3)

    @property
    def wall_columns(self) -> tuple[float, float]:
        """(left, right) of where walls may stand in the left half."""
        return -self.width / 2 + _SPAWN_DEPTH, -0.75
