"""Ratings of policies on a scale defined by fixed players (OpenSkill's Plackett-Luce), and the games for them.

The fixed players are rated once, by games among themselves, and their ratings never change. A policy's rating is computed from its own
games against them only, starting at 25 ± 25/3: so it follows the policy without delay, and its uncertainty is that of these games.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inchworm.core.errors import MissingExtraError


@dataclass(frozen=True, slots=True)
class Rating:
    """Strength and its uncertainty."""

    mu: float = 25.0
    sigma: float = 25.0 / 3.0

    @property
    def interval95(self) -> tuple[float, float]:
        """mu ± 2 sigma."""
        return self.mu - 2 * self.sigma, self.mu + 2 * self.sigma


@dataclass(frozen=True, slots=True)
class RatingEntry:
    """The policy's rating after an iteration."""

    iteration: int
    env_steps: int
    rating: Rating
    win_rates: Mapping[str, float]
    """Win rate against each fixed player; a draw counts one half."""


@dataclass
class RatingBook:
    """All ratings of a run, saved with it."""

    anchors: dict[str, Rating] = field(default_factory=dict)
    history: list[RatingEntry] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data, which is also the content of `ratings.json`."""
        return {
            "anchors": {name: [rating.mu, rating.sigma] for name, rating in self.anchors.items()},
            "history": [
                {
                    "iteration": entry.iteration,
                    "env_steps": entry.env_steps,
                    "rating": entry.rating.mu,
                    "rating_sigma": entry.rating.sigma,
                    "win_rates": dict(entry.win_rates),
                }
                for entry in self.history
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore all ratings."""
        self.anchors = {str(name): Rating(float(mu), float(sigma)) for name, (mu, sigma) in state["anchors"].items()}
        self.history = [
            RatingEntry(
                int(entry["iteration"]),
                int(entry["env_steps"]),
                Rating(float(entry["rating"]), float(entry["rating_sigma"])),
                {str(name): float(rate) for name, rate in entry["win_rates"].items()},
            )
            for entry in state["history"]
        ]


def rating_model() -> Any:
    """Return OpenSkill's model; if the package is missing, the error has the command to install it."""
    try:
        from openskill.models import PlackettLuce
    except ImportError as error:
        raise MissingExtraError('ratings need openskill: pip install "inchworm[marl]", or set opponent.rating_interval=0') from error
    return PlackettLuce()


def rate(results: Sequence[tuple[str, float]], anchors: Mapping[str, Rating], start: Rating | None = None) -> Rating:
    """Rate a player by games against fixed players, in order: (opponent, 1 won, 0 lost, 0.5 drawn). The fixed ratings do not change."""
    model, rating = rating_model(), start or Rating()
    for name, win in results:
        rating, _ = _after(model, rating, anchors[name], win)
    return rating


def calibrate(names: Sequence[str], results: Sequence[tuple[str, str, float]]) -> dict[str, Rating]:
    """Rate players by games among themselves, in order: (one, other, 1 won by the first, 0 lost, 0.5 drawn)."""
    model, ratings = rating_model(), {name: Rating() for name in names}
    for one, other, win in results:
        ratings[one], ratings[other] = _after(model, ratings[one], ratings[other], win)
    return ratings


def _after(model: Any, one: Rating, other: Rating, win: float) -> tuple[Rating, Rating]:
    """Update both ratings after a game."""
    ranks = [1, 1] if win == 0.5 else [1, 2] if win > 0.5 else [2, 1]
    teams = [[model.rating(mu=rating.mu, sigma=rating.sigma)] for rating in (one, other)]
    (first,), (second,) = model.rate(teams, ranks=ranks)
    return Rating(float(first.mu), float(first.sigma)), Rating(float(second.mu), float(second.sigma))
