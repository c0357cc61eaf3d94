"""Serves step 2 of 9: a pool of opponents. Fixed players, and past selves that join and leave while the policy learns.

Past selves are kept as weights, all of them in the pool's own state, so that a checkpoint holds everybody who plays. One that leaves is
no longer drawn, and is kept until the last episode against it has ended.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Actor, Policy
from inchworm.core.types import Weights
from inchworm.selfplay.ratings import Rating, RatingBook

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


@dataclass
class PastSelf:
    """The policy as it was after some iteration."""

    iteration: int
    weights: Weights
    score: Score = field(default_factory=Score)
    rating: Rating | None = None
    retired: bool = False
    """Whether it has left, and only finishes its episodes."""


class OpponentPool:
    """A source of opponents: `fixed` players by name, and the past selves of the policy it is bound to.

    Of the games a `latest_share` is against the newest past self and an `anchor_share` against fixed players; the others are against past
    selves by prioritised fictitious self-play. Without past selves (`keep_selves=False`) all are against fixed players.
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
        self._playing: dict[int, str] = {}  # copy -> whom it meets
        if not keep_selves and not self.fixed:
            raise ConfigError("a pool without past selves needs a fixed player; give opponent.anchors or opponent.policies")

    def bind(self, policy: Policy) -> None:
        """Say whose past selves these are. As it is now, it is the first of them."""
        self._template = policy
        if self.keep_selves and not self.selves:
            self.add_self(0)

    def add_self(self, iteration: int, rating: Rating | None = None) -> str:
        """Let the policy as it is now join; beyond the size the easiest leaves, the older of two that are alike, never the newest."""
        name = f"self-{iteration}"
        weights = {key: np.array(value) for key, value in self._bound().get_weights().items()}
        for array in weights.values():
            array.flags.writeable = False  # checkpoints under way share them
        self.selves[name] = PastSelf(iteration, weights, rating=rating)
        active = self._active()
        for leaver in sorted(active[:-1], key=lambda one: -self.selves[one].score.win_rate)[: max(0, len(active) - self._size)]:
            self.selves[leaver].retired = True
        self._forget_unused()
        return name

    def draw(self, copy: int, rng: np.random.Generator) -> str:
        """Whom the copy meets in the episode that begins."""
        active, share = self._active(), float(rng.random())
        if active and share < self._latest_share:
            name = active[-1]
        elif not active or (self.fixed and share < self._latest_share + self._anchor_share):
            name = self._prioritised({name: score.win_rate for name, score in self.scores.items()}, rng)
        else:
            name = self._prioritised({name: self.selves[name].score.win_rate for name in active}, rng)
        self._playing[copy] = name
        self._forget_unused()
        return name

    def _prioritised(self, win_rates: Mapping[str, float], rng: np.random.Generator) -> str:
        if not win_rates:
            raise ConfigError("the pool is empty; bind it to a policy, or give it fixed players")
        return list(win_rates)[draw_index(pfsp_weights(list(win_rates.values()), self._power), rng)]

    def actor(self, name: str) -> Actor:
        """The player of that name: a fixed one, or a past self made from its weights."""
        if name in self.fixed:
            return self.fixed[name]
        if name not in self.selves:
            raise ConfigError(
                f"there is no {name} in the pool, which has {', '.join([*self.fixed, *self.selves])}; keep opponent as it was"
            )
        if name not in self._actors:
            player = copying.deepcopy(self._bound())
            player.set_weights(self.selves[name].weights)
            self._actors[name] = player
        return self._actors[name]

    def record(self, name: str, win: float) -> None:
        """An episode against a player ended."""
        if name in self.scores:
            self.scores[name].add(win)
        elif name in self.selves:
            self.selves[name].score.add(win)

    def metrics(self) -> dict[str, float]:
        """The win rate against everybody who is drawn and has been met, by name, and how many past selves there are."""
        scores = {**self.scores, **{name: self.selves[name].score for name in self._active()}}
        rates = {f"win_rate/{name}": score.win_rate for name, score in scores.items() if score.games}
        return {**rates, "pool_size": float(len(self._active()))} if self.keep_selves else rates

    def state_dict(self) -> dict[str, Any]:
        """Everybody, with weights, results and ratings."""
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
        """Go on from there. The fixed players must be the same ones."""
        if set(state["fixed"]) != set(self.fixed):
            raise ConfigError(
                f"the saved pool has the fixed players {', '.join(sorted(state['fixed']))}, but this one {', '.join(sorted(self.fixed))}; "
                "keep opponent.anchors and opponent.policies, and the policy files, as they were"
            )
        self.scores = {name: Score(*map(float, state["fixed"][name])) for name in self.fixed}
        self.selves = {str(entry["name"]): _past_self(entry) for entry in state["selves"]}
        self._playing = {int(copy): str(name) for copy, name in state["playing"]}
        self._actors = {}
        self.book.load_state_dict(state["ratings"])

    def _active(self) -> list[str]:
        """Past selves that are drawn, the newest last."""
        return [name for name, one in self.selves.items() if not one.retired]

    def _forget_unused(self) -> None:
        """Let go of who has left and plays nowhere any more."""
        gone = [name for name, one in self.selves.items() if one.retired and name not in self._playing.values()]
        for name in gone:
            del self.selves[name]
            self._actors.pop(name, None)

    def _bound(self) -> Policy:
        if self._template is None:
            raise ConfigError("this pool knows no policy whose past selves it could keep; call bind(policy) first")
        return self._template


def _past_self(entry: Mapping[str, Any]) -> PastSelf:
    weights = {str(name): np.asarray(value) for name, value in entry["weights"].items()}
    rating = None if entry["rating"] is None else Rating(*map(float, entry["rating"]))
    return PastSelf(int(entry["iteration"]), weights, Score(*map(float, entry["score"])), rating, bool(entry["retired"]))


STEP, GAMES = 0.1, 20
"""How far the skill is raised at a time, and how many games of one skill are played at least."""


class SkillLadder:
    """Begins at skill `start` and climbs to `top`; a copy meets the skill that holds when its episode begins."""

    def __init__(self, make: Callable[[float], Actor], *, start: float, top: float = 1.0, threshold: float = 0.6) -> None:
        self._make, self._top, self._threshold = make, top, threshold
        self.skill, self._score, self._played = start, Score(), 0
        self._actors: dict[str, Actor] = {}

    @property
    def name(self) -> str:
        """Of the player whom the next episode meets."""
        return f"heuristic:{self.skill:.6g}"

    def draw(self, copy: int, rng: np.random.Generator) -> str:  # noqa: ARG002 - there is no choice
        """The heuristic at today's skill."""
        return self.name

    def actor(self, name: str) -> Actor:
        """The heuristic of that name."""
        if name not in self._actors:
            kind, _, skill = name.partition(":")
            if kind != "heuristic":
                raise ConfigError(
                    f"a saved game is against {name}, but the opponent here is a heuristic; give the opponent that it began with"
                )
            self._actors[name] = self._make(float(skill))
        return self._actors[name]

    def record(self, name: str, win: float) -> None:
        """Count a game of today's skill, and raise it if it has become too easy."""
        if name != self.name:
            return  # begun before the last step up
        self._score.add(win)
        self._played += 1
        if self.skill < self._top and self._played >= GAMES and self._score.win_rate >= self._threshold:
            self.skill = min(self._top, round(self.skill + STEP, 6))
            self._score, self._played = Score(), 0

    def metrics(self) -> dict[str, float]:
        """For the run's rows."""
        return {"opponent/skill": self.skill, "opponent/win_rate": self._score.win_rate}

    def state_dict(self) -> dict[str, Any]:
        """The skill and the games at it."""
        return {"skill": self.skill, "wins": self._score.wins, "games": self._score.games, "played": self._played}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.skill, self._played = float(state["skill"]), int(state["played"])
        self._score = Score(float(state["wins"]), float(state["games"]))
