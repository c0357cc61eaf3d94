"""Serves step 1: all that a batch of arenas is, as arrays whose last axis is the arena.

Each team lives in its own frame: the arena's middle is the origin and the enemy's side lies in +x. The second team's frame is the first's
turned by 180 degrees, and so are the walls, which is why one set of them serves both and swapping the teams changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from gymnasium import spaces

from inchworm.core.spaces import Space, mask_space, with_mask
from inchworm.core.types import Array
from inchworm.worlds.skirmish.config import CLASSES, LATTICE, SkirmishConfig

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


OWN = ("x", "y", "facing_x", "facing_y", "health", "cooldown", "in_zone", "clock", "score", "enemy_score", "holder")
"""Of the unit itself and of the game: place over the arena's half size, facing as a unit vector, shares of health, cooldown and time left,
the teams' zone scores over the target, and who held the zone alone in the last step (1 we, -1 they, 0 nobody)."""
ALLY = ("alive", "dx", "dy", "health", "cooldown")
"""Of each unit of the own team, itself included: dx and dy over the arena's longer side."""
ENEMY = ("visible", "alive", "dx", "dy", "distance", "ahead", "left", "health", "aims", "in_arc")
"""Of each enemy; all but `alive` are 0 while it is not seen. dx, dy and distance over the longest sight; ahead and left are the cosine and
sine of its direction from the own facing, aims the cosine of ours from its facing; in_arc: within reach and arc of our weapon."""
UNIT_STATE = ("x", "y", "facing_x", "facing_y", "health", "cooldown", "alive")
RAY_LENGTH = 4.0
"""Free ways are shown up to here, over this."""

STAY, NO_TURN, NO_ATTACK = 0, 0, 0
MOVES, TURNS = 1 + len(DIRECTIONS), 3
COMPONENTS = ("damage", "hurt", "kill", "death", "zone", "win")
"""The named parts of the reward."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Columns of the observation of a team of `size` units."""

    size: int

    @property
    def kind(self) -> slice:
        """The own class, one of `CLASSES`."""
        return slice(len(OWN), len(OWN) + len(CLASSES))

    @property
    def rays(self) -> slice:
        """The free way in each of `DIRECTIONS`."""
        return slice(self.kind.stop, self.kind.stop + len(DIRECTIONS))

    @property
    def allies(self) -> slice:
        """[len(ALLY), size] flattened."""
        return slice(self.rays.stop, self.rays.stop + len(ALLY) * self.size)

    @property
    def enemies(self) -> slice:
        """[len(ENEMY), size] flattened."""
        return slice(self.allies.stop, self.allies.stop + len(ENEMY) * self.size)

    @property
    def width(self) -> int:
        """Numbers in an observation."""
        return int(self.enemies.stop)

    @property
    def choices(self) -> tuple[int, int, int]:
        """(moves, turns, attacks): 0 is staying, not turning, not attacking."""
        return MOVES, TURNS, 1 + self.size


def action_space(config: SkirmishConfig) -> Space:
    """[move, turn, attack] of one unit."""
    return spaces.MultiDiscrete(list(Layout(config.team_size).choices))


def observation_space(config: SkirmishConfig) -> Space:
    """What one unit sees, and what it may do."""
    seen = spaces.Box(-1.0, 1.0, (Layout(config.team_size).width,), np.float32)
    return with_mask(seen, mask_space(action_space(config)))


def state_space(config: SkirmishConfig) -> Space:
    """The whole arena in the first team's frame: every unit, clock, scores, holder, and the walls of the left half."""
    width = len(UNIT_STATE) * 2 * config.team_size + 4 + 4 * config.wall_pairs
    return spaces.Box(-1.0, 1.0, (width,), np.float32)


ELIMINATION, HELD, TIME = 1, 2, 3
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


_PASSAGE = 1.25
"""The least way between two blocks: more than the widest unit."""
_SMALLEST, _LONGEST, _WIDEST = 0.75, 3.0, 2.5
_SPAWN_LINE, _SPAWN_JITTER = 1.0, 0.75


def draw_walls(config: SkirmishConfig, rng: np.random.Generator) -> Array:
    """[2 (centre, half size), 2 (x, y), W] f32: wall blocks of both halves, the second half's after the first's.

    Each block has a band of the arena's height to itself, less a passage, so that no wall ever closes the way.
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
    """[2 (x, y), n] f32: where a team's units begin, in its own frame: spread over its side in an order of their own."""
    size = config.team_size
    order = rng.permutation(size)
    jitter = (rng.random((2, size)) * 2.0 - 1.0) * _SPAWN_JITTER
    band = (config.height - 2.0) / size
    y = -config.height / 2 + 1.0 + band * (order + 0.5) + jitter[1] * min(1.0, band / 2)
    x = -config.width / 2 + _SPAWN_LINE + (jitter[0] + _SPAWN_JITTER) / 2
    return np.stack([_on_lattice(x), _on_lattice(y)]).astype(np.float32)


def _on_lattice(values: Array, cells: int = 1) -> Array:
    """Rounded down to multiples of `cells` / LATTICE."""
    return np.floor(values * (LATTICE / cells)) * (cells / LATTICE)
