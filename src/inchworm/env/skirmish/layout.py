"""Serves step 1: where each number stands in what an agent of Skirmish sees, in its mask and in the global state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gymnasium import spaces

from inchworm.env.skirmish.classes import CLASSES
from inchworm.env.skirmish.config import SkirmishConfig
from inchworm.env.skirmish.geometry import DIRECTIONS
from inchworm.spaces import Space, mask_space, with_mask

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
