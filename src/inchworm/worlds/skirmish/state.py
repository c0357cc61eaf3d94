"""Skirmish's rules and unit classes, and the state of a batch of its arenas as arrays whose last axis is the arena, with their spaces.

The fields of `SkirmishConfig` are what `env.kwargs` of the id Skirmish-v0 may hold. Each team has its own frame of coordinates: the arena's
centre is the origin and the enemy's side is in +x. The second team's frame is the first's rotated by 180 degrees, and so are the walls. One
set of walls therefore serves both, and the game is symmetric.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Annotated, Any

import numpy as np
from gymnasium import spaces
from pydantic import Field

from inchworm.config.reading import FROM_LIST, ConfigBase, config_class, short
from inchworm.core.errors import ConfigError
from inchworm.core.spaces import Space, mask_space, with_mask
from inchworm.core.types import Array

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
        # So many blocks leave room to pass between them.
        for name, most in (("wall_pairs", int(self.height // 3)), ("zone_radius", min(self.width, self.height) / 2)):
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


DIRECTIONS = ((1, 0), (0, 1), (1, 1), (-1, 1), (-1, 0), (0, -1), (-1, -1), (1, -1))
"""The moves after "stay", in the own frame: east, north, north-east, north-west, and their opposites in the same order."""


OWN = ("x", "y", "facing_x", "facing_y", "health", "cooldown", "in_zone", "clock", "score", "enemy_score", "holder")
"""The unit and the game: position over the arena's half size, facing as a unit vector, shares of health, cooldown and time left, the
teams' zone scores over the target, and which team held the zone alone in the last step (1 own, -1 enemy, 0 neither)."""
ALLY = ("alive", "dx", "dy", "health", "cooldown")
"""Each unit of the own team, including the unit itself; dx and dy over the arena's longer side."""
ENEMY = ("visible", "alive", "dx", "dy", "distance", "ahead", "left", "health", "aims", "in_arc")
"""Each enemy; all but `alive` are 0 while it is not visible. dx, dy and distance over the longest sight; ahead and left are the cosine and
sine of its direction relative to the own facing, aims the cosine of the own direction relative to its facing; in_arc: within reach and
arc of the own weapon."""
UNIT_STATE = ("x", "y", "facing_x", "facing_y", "health", "cooldown", "alive")
RAY_LENGTH = 4.0
"""Free distances are clipped to this and divided by it."""

MOVES, TURNS = 1 + len(DIRECTIONS), 3
COMPONENTS = ("damage", "hurt", "kill", "death", "zone", "win")
"""The named parts of the reward."""


class Layout:
    """Columns of the observation of a team of `size` units, and the choices of a unit."""

    def __init__(self, size: int) -> None:
        widths = (len(OWN), len(CLASSES), len(DIRECTIONS), len(ALLY) * size, len(ENEMY) * size)
        ends = list(accumulate(widths))
        # the own class as one of `CLASSES`; the free distance in each of `DIRECTIONS`; [len(ALLY), size] and [len(ENEMY), size] flattened
        _, self.kind, self.rays, self.allies, self.enemies = (slice(end - width, end) for width, end in zip(widths, ends))
        self.width = ends[-1]
        self.choices = MOVES, TURNS, 1 + size  # moves, turns, attacks: 0 is staying, not turning, not attacking


def action_space(config: SkirmishConfig) -> Space:
    """[move, turn, attack] of one unit."""
    return spaces.MultiDiscrete(list(Layout(config.team_size).choices))


def observation_space(config: SkirmishConfig) -> Space:
    """The observation of one unit and its action mask."""
    seen = spaces.Box(-1.0, 1.0, (Layout(config.team_size).width,), np.float32)
    return with_mask(seen, mask_space(action_space(config)))


def state_space(config: SkirmishConfig) -> Space:
    """The whole arena in the first team's frame: every unit, clock, scores, holder, and the walls of the left half."""
    width = len(UNIT_STATE) * 2 * config.team_size + 4 + 4 * config.wall_pairs
    return spaces.Box(-1.0, 1.0, (width,), np.float32)


ELIMINATION, HELD, TIME = 1, 2, 3
REASONS = ("", "elimination", "zone", "time")
NO_TEAM = 2
"""The winner of a game that is a draw or still running."""


@dataclass(slots=True)
class ArenaState:
    """E arenas with two teams of n units."""

    walls: Array  # [2 (centre, half size), 2 (x, y), W, E] f32, in either team's frame
    spawns: Array  # [2 (x, y), n, E] f32: starting positions, the same for both teams
    places: Array  # [2 (x, y), 2, n, E] f32
    headings: Array  # [2, n, E] int: the facing in HEADINGS-ths of a turn, counterclockwise from +x
    facings: Array  # [2 (x, y), 2, n, E] f32: the same as a unit vector
    health: Array  # [2, n, E] f32 whole numbers; 0 is dead
    alive: Array  # [2, n, E] bool
    cooldowns: Array  # [2, n, E] f32: steps until the weapon is ready
    scores: Array  # [2, E] f32: steps that each team held the zone alone
    holds: Array  # [2, E] bool: which team held the zone alone in the last step
    steps: Array  # [E] f32
    observations: Array  # [D, 2, n, E] f32
    mask: Array  # [choices, 2, n, E] bool: the action masks
    shots: Array  # [2, n, E] int: 1 + the enemy that was shot at in the last step, or 0
    hits: Array  # [2, n, E] bool: whether that shot hit
    died: Array  # [2, n, E] bool: units that died in the last step
    rewards: Array  # [component, 2, n, E] f32: of the last step
    reward_sums: Array  # [component, 2, n, E] f64: of the episode
    winners: Array  # [E] int: 0, 1 or NO_TEAM
    reasons: Array  # [E] int: how the game ended, an index of REASONS; 0 while it is running

    def copy_from(self, other: ArenaState, theirs: Sequence[int], arenas: Sequence[int]) -> None:
        """Copy the arenas `theirs` of another state into these."""
        for name in _NAMES:
            getattr(self, name)[..., arenas] = getattr(other, name)[..., theirs]


_NAMES = tuple(field.name for field in fields(ArenaState))


def empty_state(config: SkirmishConfig, num_arenas: int) -> ArenaState:
    """Arenas without a game."""
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
        observations=zeros(layout.width, 2, size),
        mask=zeros(sum(layout.choices), 2, size, kind=np.bool_),
        shots=zeros(2, size, kind=np.intp),
        hits=zeros(2, size, kind=np.bool_),
        died=zeros(2, size, kind=np.bool_),
        rewards=zeros(len(COMPONENTS), 2, size),
        reward_sums=zeros(len(COMPONENTS), 2, size, kind=np.float64),
        winners=zeros(kind=np.intp),
        reasons=zeros(kind=np.intp),
    )


_PASSAGE = 1.25
"""The minimum gap between two blocks: more than the widest unit."""
_SMALLEST, _LONGEST, _WIDEST = 0.75, 3.0, 2.5
_SPAWN_LINE, _SPAWN_JITTER = 1.0, 0.75


def draw_walls(config: SkirmishConfig, rng: np.random.Generator) -> Array:
    """Draw [2 (centre, half size), 2 (x, y), W] f32: the wall blocks of the left half, then those of the right half.

    Each block stays within its own band of the arena's height, minus a passage, so that walls never block the way completely.
    """
    pairs = config.wall_pairs
    drawn = rng.random((4, pairs))
    left, right = -config.width / 2 + _SPAWN_DEPTH, -0.75  # where walls may stand in the left half
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
    """Draw [2 (x, y), n] f32: the starting positions of a team's units in its own frame, spread over its side in random order."""
    size = config.team_size
    order = rng.permutation(size)
    jitter = (rng.random((2, size)) * 2.0 - 1.0) * _SPAWN_JITTER
    band = (config.height - 2.0) / size
    y = -config.height / 2 + 1.0 + band * (order + 0.5) + jitter[1] * min(1.0, band / 2)
    x = -config.width / 2 + _SPAWN_LINE + (jitter[0] + _SPAWN_JITTER) / 2
    return np.stack([_on_lattice(x), _on_lattice(y)]).astype(np.float32)


def _on_lattice(values: Array, cells: int = 1) -> Array:
    """Round down to multiples of `cells` / LATTICE."""
    return np.floor(values * (LATTICE / cells)) * (cells / LATTICE)
