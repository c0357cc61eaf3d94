"""Step 1 of 9: many arenas of Skirmish move at once: moves, then turns, then shots, each of all units together.

A step is elementwise arithmetic on arrays with the arena as last axis, on numbers that float32 holds exactly or rounds the same way
wherever they stand, so an arena's bits do not depend on how many others are stepped beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from inchworm.env.skirmish.classes import HEADINGS
from inchworm.env.skirmish.config import SkirmishConfig
from inchworm.env.skirmish.describing import describe_arena, frame_of_arena, global_states
from inchworm.env.skirmish.ends import decide
from inchworm.env.skirmish.geometry import DIRECTIONS
from inchworm.env.skirmish.layout import Layout
from inchworm.env.skirmish.observing import Observer, Sightings
from inchworm.env.skirmish.rewards import Rewards
from inchworm.env.skirmish.state import NOBODY, empty_state
from inchworm.env.skirmish.terrain import draw_spawns, draw_walls
from inchworm.errors import EnvError
from inchworm.types import Array


class SkirmishWorld:
    """`num_arenas` arenas of one config. `begin` starts games, `step` moves all arenas; `state` is all that they are."""

    def __init__(self, config: SkirmishConfig, num_arenas: int) -> None:
        size = config.team_size
        self.config, self.num_arenas = config, num_arenas
        self.state = empty_state(config, num_arenas)
        self._observer, self._rewards = Observer(config), Rewards(config)
        kinds = config.classes
        self._full_health = np.array([kind.health for kind in kinds], np.float32)[:, None]  # [n, 1]
        self._damage = np.array([kind.damage for kind in kinds], np.float32)[:, None]
        self._cooldown = np.array([kind.cooldown for kind in kinds], np.float32)[:, None]
        self._ways = _ways(config)  # [2 (x, y), move * n + unit] f32
        self._turns = np.array([[0] * size, [kind.turn for kind in kinds], [-kind.turn for kind in kinds]]).reshape(-1)
        self._units = np.arange(size)[:, None]  # [n, 1]
        lanes = 2 * size * num_arenas
        starts = np.cumsum([0, *Layout(size).choices[:-1]])
        self._mask_places = (starts[:, None] * lanes + np.arange(lanes)).reshape(3, 2, size, num_arenas)
        self._mask_stride = lanes
        self._sizes = np.array(Layout(size).choices, np.uint64).reshape(3, 1, 1, 1)
        self._enemies = np.arange(1, size + 1)[:, None, None, None]  # [j, 1, 1, 1]

    def begin(self, seeds: Sequence[int], arenas: Sequence[int] | None = None) -> None:
        """Start a game in every arena, each drawn from its own seed. With `arenas` only these are drawn, the others start theirs again."""
        state, config = self.state, self.config
        for arena, seed in zip(range(self.num_arenas) if arenas is None else arenas, seeds):
            stream = np.random.Generator(np.random.PCG64(int(seed)))
            state.walls[..., arena] = draw_walls(config, stream)
            state.spawns[..., arena] = draw_spawns(config, stream)
        state.places[:] = state.spawns[:, None]
        state.headings[:] = 0
        state.health[:] = self._full_health
        state.alive[:] = True
        for array in (state.cooldowns, state.scores, state.holds, state.steps, state.shots, state.hits, state.died):
            array[:] = 0
        state.rewards[:], state.reward_sums[:] = 0.0, 0.0
        state.winners[:], state.reasons[:] = NOBODY, 0
        self.look()

    def look(self) -> None:
        """Renew what the units see and may do, after somebody has changed the state."""
        self._face()
        self._observer.look(self.state, self._observer.sightings(self.state), self._observer.in_zone(self.state))

    def step(self, actions: Array) -> None:
        """Move all arenas by actions [3 (move, turn, attack), 2, n, E] int; a part that the mask forbids is not done.

        A game that is over stays in the state until somebody begins another.
        """
        state, observer = self.state, self._observer
        actions = self._legal(actions)
        state.places += self._ways[:, actions[0] * self.config.team_size + self._units]
        state.headings += self._turns[actions[1] * self.config.team_size + self._units]
        state.headings &= HEADINGS - 1
        self._face()
        sightings = observer.sightings(state)
        state.steps += np.float32(1.0)
        dealt, lost, kills = self._shoot(actions[2], sightings)
        in_zone = observer.in_zone(state)
        held = np.logical_or.reduce(in_zone, 1)  # [2, E]
        np.greater(held, held[::-1], out=state.holds)
        state.scores += state.holds
        decide(self.config, state)
        self._rewards.write(state, dealt, lost, kills)
        observer.look(state, sightings, in_zone)

    def _legal(self, actions: Array) -> Array:
        """The actions with 0, which is always allowed, where the mask forbids what was asked for."""
        if (actions.view(np.uint64) >= self._sizes).any():  # a negative number is a huge one there
            raise EnvError(f"actions must be from 0 to {[int(size) - 1 for size in self._sizes.ravel()]} for (move, turn, attack)")
        allowed = self.state.mask.reshape(-1).take(actions * self._mask_stride + self._mask_places)
        allowed &= self.state.alive
        return actions * allowed

    def _face(self) -> None:
        np.take(_FACINGS, self.state.headings, axis=1, out=self.state.facings, mode="clip")

    def _shoot(self, targets: Array, sightings: Sightings) -> tuple[Array, Array, Array]:
        """All shots at once; (damage dealt, health lost, kills) of each unit, [2, n, E].

        A shot was allowed by what the unit saw before the step; it hits if the enemy is in the arc after everybody has moved.
        """
        state = self.state
        hits = (targets == self._enemies) & sightings.in_arc  # [j, 2, i, E]
        blows = hits * self._damage
        taken = np.add.reduce(blows, 2)[:, ::-1].swapaxes(0, 1)  # [2, n, E]: whole numbers, in any order
        before = state.health.copy()
        np.subtract(before, taken, out=state.health)
        np.maximum(state.health, np.float32(0.0), out=state.health)
        np.greater(state.health, 0, out=state.alive)
        lost = before - state.health
        np.greater(lost > 0, state.alive, out=state.died)
        fired = targets > 0
        state.shots[:] = targets
        np.logical_or.reduce(hits, 0, out=state.hits)
        np.copyto(state.cooldowns, self._cooldown, where=fired)
        state.cooldowns -= np.float32(1.0)
        np.maximum(state.cooldowns, np.float32(0.0), out=state.cooldowns)
        rest = before[::-1].swapaxes(0, 1)[:, :, None]  # [j, 2, 1, E]: more than is left cannot be dealt
        dealt = np.add.reduce(np.minimum(blows, rest), 0)
        kills = np.logical_or.reduce(hits & state.died[::-1].swapaxes(0, 1)[:, :, None], 0)
        return dealt, lost, kills

    def rewards(self) -> Array:
        """[2, n, E] f32: of the last step."""
        return self._rewards.total(self.state)

    def global_state(self, out: Array) -> None:
        """Write the whole of every arena into [E, S]: see `layout.state_space`."""
        global_states(self.config, self.state, out)

    def describe(self, arena: int) -> dict[str, Any]:
        """The world part of a replay: what does not change during a game."""
        return describe_arena(self.config, self.state, arena)

    def frame(self, arena: int) -> dict[str, Any]:
        """One frame of a replay: units, scores and shots as they stand."""
        return frame_of_arena(self.config, self.state, arena)


def _ways(config: SkirmishConfig) -> Array:
    """[2 (x, y), (1 + directions) * n]: what each move of each unit adds to its place."""
    ways = [[(0.0, 0.0)] * config.team_size]
    for x, y in DIRECTIONS:
        lengths = [kind.speed if 0 in (x, y) else kind.diagonal for kind in config.classes]
        ways.append([(x * length, y * length) for length in lengths])
    return np.array(ways, np.float32).reshape(-1, 2).T.copy()


def _facings() -> Array:
    """[2 (x, y), HEADINGS] f32: the second half is the first turned by 180 degrees to the bit."""
    half = [2.0 * math.pi * heading / HEADINGS for heading in range(HEADINGS // 2)]
    first = np.array([[round(math.cos(angle), 9) for angle in half], [round(math.sin(angle), 9) for angle in half]], np.float32)
    return np.concatenate([first, -first], 1)


_FACINGS = _facings()
