"""Serves step 2 of 9: whom to play against. Prioritised fictitious self-play as pure functions of win rates.

Prioritised fictitious self-play (Vinyals et al. 2019, "Grandmaster level in StarCraft II", Methods) draws an opponent by how often it
still wins: who is always beaten teaches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MEMORY = 100
"""Games after which an old result counts 1/e of a new one: the policy that played it is another one by now."""


@dataclass(slots=True)
class Score:
    """Games against one opponent, older ones counting less."""

    wins: float = 0.0
    games: float = 0.0

    def add(self, win: float) -> None:
        """One more game: 1 won, 0 lost, 0.5 drawn."""
        keep = 1.0 - 1.0 / MEMORY
        self.wins, self.games = self.wins * keep + win, self.games * keep + 1.0

    @property
    def win_rate(self) -> float:
        """(wins + 1) / (games + 2): one half before the first game, and never quite 0 or 1."""
        return (self.wins + 1.0) / (self.games + 2.0)


def pfsp_weights(win_rates: Sequence[float], power: float) -> np.ndarray:
    """How likely each opponent is drawn, by (1 - win rate)^power; all alike where nobody is left to fear."""
    weights: np.ndarray = (1.0 - np.asarray(win_rates, np.float64)) ** power  # [members]
    total = weights.sum()
    if not total > 0:
        return np.full(len(weights), 1.0 / len(weights))
    result: np.ndarray = weights / total
    return result


def draw_index(probabilities: np.ndarray, rng: np.random.Generator) -> int:
    """One index by its probability, from one uniform number."""
    return min(int(np.searchsorted(np.cumsum(probabilities), rng.random(), side="right")), len(probabilities) - 1)
