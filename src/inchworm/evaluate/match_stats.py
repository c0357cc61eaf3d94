"""What a match found: its games as the first player saw them. Serves matches and suites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from inchworm.evaluate.stats import EvalStats


@dataclass(frozen=True, eq=False, kw_only=True)
class MatchStats(EvalStats):
    """The games of one match, in order, from the first player's side: `returns`, `infos` and rates are the first player's.

    Episodes 2i and 2i + 1 are a pair: the same seed, played from side 0 and then from side 1. The interval of the win rate takes
    games for independent; the two of a pair often are not, and where one side is better off the pairing makes it rather too wide.
    """

    players: tuple[str, str] = ("first", "second")
    """What the two are called."""
    replay: Mapping[str, Any] | None = None
    """The first game as plain data, if it was asked for."""

    @property
    def sides(self) -> np.ndarray:
        """[episodes] i64, which side the first player had: 0, 1, 0, 1, …"""
        return np.arange(self.episodes) % 2

    @property
    def wins(self) -> int:
        """Games that the first player won; 0 where the environment does not say."""
        return int((self._info_values("win") == 1.0).sum())

    @property
    def losses(self) -> int:
        """Games that the second player won."""
        return int((self._info_values("win") == 0.0).sum())

    @property
    def draws(self) -> int:
        """Games that neither won: a `win` between 0 and 1."""
        values = self._info_values("win")
        return int(((values > 0.0) & (values < 1.0)).sum())

    def win_rate_on(self, side: int) -> float | None:
        """The win rate from one side alone; None where the environment says none."""
        values = self._info_values("win")
        told = values[side::2][~np.isnan(values[side::2])]
        return float(told.mean()) if told.size else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a file: finite floats or None."""
        counts = {"wins": self.wins, "draws": self.draws, "losses": self.losses}
        return {"players": list(self.players), **super().to_dict(), **counts, "sides": self.sides.tolist()}

    def __str__(self) -> str:
        """One line, such as `win rate 0.83 [0.77, 0.88] (160 won, 12 drawn, 28 lost of 200 greedy episodes), health margin 0.31, …`."""
        if self._info_mean("win") is None:
            return super().__str__()
        kind = "greedy" if self.deterministic else "sampled"
        games = f"{self.wins:,} won, {self.draws:,} drawn, {self.losses:,} lost of {self.episodes:,} {kind} episodes"
        margin = "" if self.mean_hp_margin is None else f", health margin {self.mean_hp_margin:.3f}"
        return f"{self.win_text} ({games}){margin}, mean return {self.mean_return:.5g}, mean length {self.mean_episode_length:.5g}"
