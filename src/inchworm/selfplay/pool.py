"""Serves step 2 of 9: a pool of opponents. Fixed players, and past selves that join and leave while the policy learns.

Past selves are kept as weights, all of them in the pool's own state, so that a checkpoint holds everybody who plays. One that leaves is
no longer drawn, and is kept until the last episode against it has ended.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inchworm.errors import ConfigError
from inchworm.protocols import Actor, Policy
from inchworm.selfplay.ratings import Rating, RatingBook
from inchworm.selfplay.sampling import Score, draw_index, pfsp_weights
from inchworm.types import Weights


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
