"""Serves step 1: what a step of Skirmish is worth to each unit, by named components. Damage is a unit's own, zone and win its team's."""

from __future__ import annotations

import numpy as np

from inchworm.env.skirmish.config import SkirmishConfig
from inchworm.env.skirmish.layout import COMPONENTS
from inchworm.env.skirmish.state import NOBODY, TIME, ArenaState
from inchworm.types import Array

DAMAGE, HURT, KILL, DEATH, ZONE, WIN = range(len(COMPONENTS))


class Rewards:
    """The weights of a config, ready for a step."""

    def __init__(self, config: SkirmishConfig) -> None:
        self._damage, self._hurt = np.float32(config.reward_damage / 100.0), np.float32(config.reward_hurt / 100.0)
        self._kill, self._death = np.float32(config.reward_kill), np.float32(config.reward_death)
        self._zone, self._win = np.float32(config.reward_zone), np.float32(config.reward_win)

    def write(self, state: ArenaState, dealt: Array, lost: Array, kills: Array) -> None:
        """Fill `rewards` and add them to the sums. Dealt, lost and kills are [2, n, E], of each unit."""
        parts = state.rewards
        np.multiply(dealt, self._damage, out=parts[DAMAGE])
        np.multiply(lost, self._hurt, out=parts[HURT])
        np.multiply(kills, self._kill, out=parts[KILL])
        np.multiply(state.died, self._death, out=parts[DEATH])
        held = state.holds[0].astype(np.float32) - state.holds[1]  # [E]
        held *= self._zone
        parts[ZONE, 0], parts[ZONE, 1] = held, -held
        if state.reasons.any():
            # A game cut off on time is truncated: its value goes on in the critic, so that paying the win too would count it twice.
            paid = (state.winners != NOBODY) & (state.reasons != TIME)
            won = np.where(paid, 1 - 2 * state.winners, 0) * self._win
            parts[WIN, 0], parts[WIN, 1] = won, -won
        else:
            parts[WIN] = 0.0
        state.reward_sums += parts

    @staticmethod
    def total(state: ArenaState) -> Array:
        """[2, n, E] f32: the components, added in their order."""
        total = state.rewards[0] + state.rewards[1]
        for part in state.rewards[2:]:
            total += part
        return total
