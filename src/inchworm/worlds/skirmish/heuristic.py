"""A hand-written player for Skirmish with the observations of an agent: an opponent to train against, and a baseline.

Its rules, which a better player can exploit: it goes to the zone and stays there, attacks the enemy that is nearest and weakest, keeps its
distance mainly while its weapon cools down, flees when badly hurt unless the enemy scores, never hides behind walls, and forgets
enemies that it no longer sees.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from inchworm.core.errors import ConfigError
from inchworm.core.spaces import MASK_KEY
from inchworm.core.types import Array, PolicyStep, Tree
from inchworm.worlds.skirmish.state import CLASSES, DIRECTIONS, ENEMY, MOVES, OWN, TURNS, Layout, SkirmishConfig

_HEALTH, _COOLDOWN, _HOLDER = map(OWN.index, ("health", "cooldown", "holder"))
_VISIBLE, _DX, _DISTANCE, _FOE_HEALTH = map(ENEMY.index, ("visible", "dx", "distance", "health"))
_FORWARD = np.array([1.0, 0.0], np.float32)
"""The direction of the enemy's side."""
_UNSEEN = np.float32(1e3)
_WEAK = 0.3
"""The share of health below which a unit flees."""
_MOMENTUM, _MOMENTUM_AT_WALLS = np.float32(0.3), np.float32(1.0)
"""The weight of continuing in the facing direction, relative to going to the goal."""
_HOLD = 0.6
"""The part of the zone's radius within which a unit that sees no enemy stands still."""


class HeuristicPolicy:
    """An actor for Skirmish. With `skill` below 1, a share of 1 - `skill` of its actions is random and legal instead."""

    def __init__(self, config: SkirmishConfig | None = None, skill: float = 1.0) -> None:
        self.config = config or SkirmishConfig()
        self.skill = skill
        layout = Layout(self.config.team_size)
        self._kind, self._enemies = layout.kind, layout.enemies
        self._edge = np.array([self.config.width / 2, self.config.height / 2], np.float32)
        self._sight = np.float32(max(kind.sight for kind in self.config.classes))
        vectors = np.array([(0, 0), *DIRECTIONS], np.float32)  # [9, 2]
        self._moves = vectors / np.maximum(np.sqrt((vectors * vectors).sum(1, keepdims=True)), 1.0)
        self._reach = np.array([kind.reach for kind in CLASSES.values()], np.float32)
        starts = np.cumsum([0, *layout.choices])
        self._parts = [slice(int(start), int(end)) for start, end in itertools.pairwise(starts)]

    @property
    def skill(self) -> float:
        """From 0 (random) to 1 (best); may be changed at any time, for example by a curriculum."""
        return self._skill

    @skill.setter
    def skill(self, skill: float) -> None:
        if not 0.0 <= skill <= 1.0:
            raise ConfigError(f"the heuristic's skill={skill} must be from 0 to 1")
        self._skill = float(skill)

    def initial_state(self, num_lanes: int) -> Tree:  # noqa: ARG002 - the protocol's
        """Return the empty state: no memory."""
        return ()

    def act(
        self,
        observations: Tree,
        state: Tree,
        episode_starts: Array,
        rng: np.random.Generator,
        *,
        deterministic: bool = False,  # noqa: ARG002 - skill is strength, not exploration
    ) -> PolicyStep:
        """Choose a legal action per lane. The share of random ones depends on the skill even if `deterministic`."""
        seen, mask = observations["observation"], observations[MASK_KEY].astype(np.bool_)
        actions = self._choose(seen, mask)
        if self._skill < 1.0:
            careless = rng.random(len(seen)) >= self._skill
            drawn = rng.random(mask.shape, np.float32)
            drawn += mask  # legal choices are above 1, the others below, so that the largest is uniform over the legal ones
            random = np.stack([drawn[:, part].argmax(1) for part in self._parts], 1)  # [B, 3]
            actions = np.where(careless[:, None], random, actions)
        return PolicyStep(actions, actions, np.zeros(len(episode_starts), np.float32), state)

    def _choose(self, seen: Array, mask: Array) -> Array:
        """[B, 3]: the actions by the rules."""
        own = seen[:, : len(OWN)]
        enemies = seen[:, self._enemies].reshape(len(seen), len(ENEMY), -1)  # [B, feature, enemy]
        visible, distance, health = enemies[:, _VISIBLE] > 0, enemies[:, _DISTANCE] * self._sight, enemies[:, _FOE_HEALTH]
        lanes = np.arange(len(seen))
        foe = np.where(visible, distance + 4.0 * health, _UNSEEN).argmin(1)  # near and weak first
        away = enemies[lanes, _DX : _DX + 2, foe]  # [B, 2]
        meets, gap = visible.any(1), distance[lanes, foe]
        reach = self._reach[seen[:, self._kind].argmax(1)]  # [B]
        place = own[:, 0:2] * self._edge
        in_hold = (place * place).sum(1) < (_HOLD * self.config.zone_radius) ** 2
        home = np.where(in_hold[:, None], 0.0, -place)
        waits = own[:, _COOLDOWN] > 0  # the weapon cools down
        too_near = gap < np.where(waits, 0.8, 0.4) * reach
        flees = too_near | (own[:, _HEALTH] < _WEAK)
        towards = np.where(flees, -1.0, np.where(gap > 0.85 * reach, 1.0, 0.0)).astype(np.float32)
        fights = meets & (in_hold | (own[:, _HOLDER] >= 0))  # while the enemy scores, the zone comes first
        goal = np.where(fights[:, None], away * towards[:, None], home)  # [B, 2]: a direction; zero to stay
        move = self._move(goal, own, mask[:, :MOVES])
        heading = np.where(meets[:, None], away, np.where(move[:, None] > 0, self._moves[move], _FORWARD))
        attackable = mask[:, MOVES + TURNS + 1 :]
        attack = np.where(attackable.any(1), 1 + np.where(attackable, health + 0.05 * distance, _UNSEEN).argmin(1), 0)
        return np.stack([move, self._turn(own, heading), attack], 1)

    def _move(self, goal: Array, own: Array, legal: Array) -> Array:
        """[B]: the legal move that best leads to the goal; preferring the facing direction keeps a unit at a wall from turning back."""
        length = np.sqrt((goal * goal).sum(1, keepdims=True))
        worth = self._along_moves(goal / np.maximum(length, np.float32(1e-6)))  # [B, 9]
        worth[:, 0] = np.where(length[:, 0] > 0, -0.5, 9.0)
        blocked = ~np.take_along_axis(legal, worth.argmax(1)[:, None], 1)
        worth += np.where(blocked, _MOMENTUM_AT_WALLS, _MOMENTUM) * self._along_moves(own[:, 2:4])
        return np.where(legal, worth, -_UNSEEN).argmax(1)

    def _along_moves(self, vectors: Array) -> Array:
        """[B, 9]: the component of each move along each vector [B, 2]."""
        return vectors[:, :1] * self._moves[:, 0] + vectors[:, 1:] * self._moves[:, 1]

    @staticmethod
    def _turn(own: Array, heading: Array) -> Array:
        """[B]: 1 (left) or 2 (right) towards a direction, 0 if the unit almost faces it."""
        ahead = own[:, 2] * heading[:, 0] + own[:, 3] * heading[:, 1]
        left = own[:, 2] * heading[:, 1] - own[:, 3] * heading[:, 0]
        aimed = (ahead > 0) & (np.abs(left) < math.tan(math.radians(15.0)) * ahead)
        return np.where(aimed, 0, np.where(left >= 0, 1, 2))
