"""Sources of opponents: a pool of fixed players and past policies, and a heuristic whose skill rises with the policy's. Their ratings.

Past policies are kept as weights in the pool's state, so that a checkpoint holds every opponent. A retired one is no longer drawn, and
is kept until the last episode against it has ended.

Ratings (OpenSkill's Plackett-Luce) are on a scale defined by fixed players, which are rated once, by games among themselves. A policy's
rating is computed from its own games against them only, starting at 25 ± 25/3: so it follows the policy without delay, and its
uncertainty is that of these games.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inchworm.core.errors import ConfigError, MissingExtraError
from inchworm.core.protocols import Actor, Policy
from inchworm.core.types import Weights

MEMORY = 100
"""Number of games after which the weight of a result has fallen to 1/e, because the policy has changed since."""


@dataclass(slots=True)
class Score:
    """Results against one opponent, with less weight on older games."""

    wins: float = 0.0
    games: float = 0.0

    def add(self, win: float) -> None:
        """Add a game: 1 won, 0 lost, 0.5 drawn."""
        keep = 1.0 - 1.0 / MEMORY
        self.wins, self.games = self.wins * keep + win, self.games * keep + 1.0

    @property
    def win_rate(self) -> float:
        """(wins + 1) / (games + 2): one half before the first game, never exactly 0 or 1."""
        return (self.wins + 1.0) / (self.games + 2.0)


def pfsp_weights(win_rates: Sequence[float], power: float) -> np.ndarray:
    """Return the probability of drawing each opponent, proportional to (1 - win rate)^power; uniform if all are 0."""
    weights: np.ndarray = (1.0 - np.asarray(win_rates, np.float64)) ** power  # [members]
    total = weights.sum()
    if not total > 0:
        return np.full(len(weights), 1.0 / len(weights))
    result: np.ndarray = weights / total
    return result


def draw_index(probabilities: np.ndarray, rng: np.random.Generator) -> int:
    """Draw an index by its probability, from one uniform number."""
    return min(int(np.searchsorted(np.cumsum(probabilities), rng.random(), side="right")), len(probabilities) - 1)


@dataclass
class PastSelf:
    """The policy as it was after an iteration."""

    iteration: int
    weights: Weights
    score: Score = field(default_factory=Score)
    rating: Rating | None = None
    retired: bool = False
    """Whether it is no longer drawn, and only finishes its episodes."""


class OpponentPool:
    """A source of opponents: `fixed` players by name, and past selves of the policy it is bound to.

    A `latest_share` of the games is against the newest past self, an `anchor_share` against fixed players, and the rest against past
    selves by prioritised fictitious self-play. Without past selves (`keep_selves=False`) all games are against fixed players.
    """

    def __init__(
        self,
        fixed: Mapping[str, Actor] | None = None,
        *,
        size: int = 10,
        power: float = 2.0,
        latest_share: float = 0.5,
        anchor_share: float = 0.0,
        keep_selves: bool = True,
    ) -> None:
        self.fixed = dict(fixed or {})
        self.scores = {name: Score() for name in self.fixed}
        self.selves: dict[str, PastSelf] = {}
        self.book = RatingBook()
        self.keep_selves = keep_selves
        self._size, self._power, self._latest_share, self._anchor_share = size, power, latest_share, anchor_share
        self._template: Policy | None = None
        self._actors: dict[str, Actor] = {}
        self._playing: dict[int, str] = {}  # env copy -> its opponent
        if not keep_selves and not self.fixed:
            raise ConfigError("a pool without past selves needs a fixed player; give opponent.anchors or opponent.policies")

    def bind(self, policy: Policy) -> None:
        """Set the policy whose past selves are kept; its current weights become the first of them."""
        self._template = policy
        if self.keep_selves and not self.selves:
            self.add_self(0)

    def add_self(self, iteration: int, rating: Rating | None = None) -> str:
        """Add the current policy; beyond the pool's size the easiest (of equals the oldest) is retired, never the newest."""
        name = f"self-{iteration}"
        weights = {key: np.array(value) for key, value in self._bound().get_weights().items()}
        for array in weights.values():
            array.flags.writeable = False  # shared with checkpoints that are being written
        self.selves[name] = PastSelf(iteration, weights, rating=rating)
        active = self._active()
        for easiest in sorted(active[:-1], key=lambda one: -self.selves[one].score.win_rate)[: max(0, len(active) - self._size)]:
            self.selves[easiest].retired = True
        self._remove_unused()
        return name

    def draw(self, copy: int, rng: np.random.Generator) -> str:
        """Draw the opponent of a copy's next episode."""
        active, share = self._active(), float(rng.random())
        if active and share < self._latest_share:
            name = active[-1]
        elif not active or (self.fixed and share < self._latest_share + self._anchor_share):
            name = self._prioritised({name: score.win_rate for name, score in self.scores.items()}, rng)
        else:
            name = self._prioritised({name: self.selves[name].score.win_rate for name in active}, rng)
        self._playing[copy] = name
        self._remove_unused()
        return name

    def _prioritised(self, win_rates: Mapping[str, float], rng: np.random.Generator) -> str:
        if not win_rates:
            raise ConfigError("the pool is empty; bind it to a policy, or give it fixed players")
        return list(win_rates)[draw_index(pfsp_weights(list(win_rates.values()), self._power), rng)]

    def actor(self, name: str) -> Actor:
        """Return the player of that name: a fixed one, or a past self made from its weights."""
        if name in self.fixed:
            return self.fixed[name]
        if name not in self.selves:
            raise ConfigError(
                f"there is no {name} in the pool, which has {', '.join([*self.fixed, *self.selves])}; restore the config of opponent"
            )
        if name not in self._actors:
            player = copying.deepcopy(self._bound())
            player.set_weights(self.selves[name].weights)
            self._actors[name] = player
        return self._actors[name]

    def record(self, name: str, win: float) -> None:
        """Count the result of an episode against a player."""
        if name in self.scores:
            self.scores[name].add(win)
        elif name in self.selves:
            self.selves[name].score.add(win)

    def metrics(self) -> dict[str, float]:
        """Return the win rates against current opponents with at least one game, and the number of past selves."""
        scores = {**self.scores, **{name: self.selves[name].score for name in self._active()}}
        rates = {f"win_rate/{name}": score.win_rate for name, score in scores.items() if score.games}
        return {**rates, "pool_size": float(len(self._active()))} if self.keep_selves else rates

    def state_dict(self) -> dict[str, Any]:
        """Return all players, with weights, results and ratings."""
        return {
            "fixed": {name: [score.wins, score.games] for name, score in self.scores.items()},
            "selves": [
                {
                    "name": name,
                    "iteration": one.iteration,
                    "score": [one.score.wins, one.score.games],
                    "rating": None if one.rating is None else [one.rating.mu, one.rating.sigma],
                    "retired": one.retired,
                    "weights": dict(one.weights),
                }
                for name, one in self.selves.items()
            ],
            "playing": [[copy, name] for copy, name in self._playing.items()],
            "ratings": self.book.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; the fixed players must be the same."""
        if set(state["fixed"]) != set(self.fixed):
            raise ConfigError(
                f"the saved pool has the fixed players {', '.join(sorted(state['fixed']))}, but this one {', '.join(sorted(self.fixed))}; "
                "use the same opponent.anchors, opponent.policies and policy files"
            )
        self.scores = {name: Score(*map(float, state["fixed"][name])) for name in self.fixed}
        self.selves = {
            str(entry["name"]): PastSelf(
                int(entry["iteration"]),
                {str(name): np.asarray(value) for name, value in entry["weights"].items()},
                Score(*map(float, entry["score"])),
                None if entry["rating"] is None else Rating(*map(float, entry["rating"])),
                bool(entry["retired"]),
            )
            for entry in state["selves"]
        }
        self._playing = {int(copy): str(name) for copy, name in state["playing"]}
        self._actors = {}
        self.book.load_state_dict(state["ratings"])

    def _active(self) -> list[str]:
        """Return the past selves that can be drawn, the newest last."""
        return [name for name, one in self.selves.items() if not one.retired]

    def _remove_unused(self) -> None:
        """Remove retired past selves whose last episode has ended."""
        unused = [name for name, one in self.selves.items() if one.retired and name not in self._playing.values()]
        for name in unused:
            del self.selves[name]
            self._actors.pop(name, None)

    def _bound(self) -> Policy:
        if self._template is None:
            raise ConfigError("this pool is not bound to a policy; call bind(policy) first")
        return self._template


STEP, GAMES = 0.1, 20
"""By how much the skill is raised, and the minimum number of games at one skill."""


class SkillLadder:
    """The heuristic at a skill that rises from `start` to `top` with the win rate; it changes between episodes only."""

    def __init__(self, make: Callable[[float], Actor], *, start: float, top: float = 1.0, threshold: float = 0.6) -> None:
        self._make, self._top, self._threshold = make, top, threshold
        self.skill, self._score, self._played = start, Score(), 0
        self._actors: dict[str, Actor] = {}
        self._held: dict[int, float] = {}  # copy -> skill that was set from outside

    def hold(self, skill: float, copies: Iterable[int]) -> None:
        """Keep these copies at a skill, from their next episodes on, whatever the results."""
        self._held |= dict.fromkeys(copies, skill)
        self.skill = self._top = skill

    @property
    def name(self) -> str:
        """Name of the next episode's opponent."""
        return f"heuristic:{self.skill:.6g}"

    def draw(self, copy: int, rng: np.random.Generator) -> str:  # noqa: ARG002 - nothing is random
        """Return the heuristic at the copy's skill."""
        return f"heuristic:{self._held[copy]:.6g}" if copy in self._held else self.name

    def actor(self, name: str) -> Actor:
        """Return the heuristic of that name."""
        if name not in self._actors:
            kind, _, skill = name.partition(":")
            if kind != "heuristic":
                raise ConfigError(
                    f"a saved game is against {name}, but the opponent here is a heuristic; use the opponent of the saved game"
                )
            self._actors[name] = self._make(float(skill))
        return self._actors[name]

    def record(self, name: str, win: float) -> None:
        """Count a game at the current skill, and raise the skill if the win rate is high enough."""
        if name != self.name:
            return  # it started before the skill was raised
        self._score.add(win)
        self._played += 1
        if self.skill < self._top and self._played >= GAMES and self._score.win_rate >= self._threshold:
            self.skill = min(self._top, round(self.skill + STEP, 6))
            self._score, self._played = Score(), 0

    def metrics(self) -> dict[str, float]:
        """Return the current skill and the win rate at it."""
        return {"opponent/skill": self.skill, "opponent/win_rate": self._score.win_rate}

    def state_dict(self) -> dict[str, Any]:
        """Return the skill and the results at it."""
        return {"skill": self.skill, "wins": self._score.wins, "games": self._score.games, "played": self._played}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the skill and the results at it."""
        self.skill, self._played = float(state["skill"]), int(state["played"])
        self._score = Score(float(state["wins"]), float(state["games"]))


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
