"""The state of a batch of Skirmish arenas as arrays whose last axis is the arena, their spaces, and how walls and spawns are drawn.

Each team has its own frame of coordinates: the arena's centre is the origin and the enemy's side is in +x. The second team's frame is the
first's rotated by 180 degrees, and so are the walls. One set of walls therefore serves both, and the game is symmetric.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import numpy as np
from gymnasium import spaces

from inchworm.core.spaces import Space, mask_space, with_mask
from inchworm.core.types import Array
from inchworm.worlds.skirmish.config import CLASSES, LATTICE, SkirmishConfig

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
