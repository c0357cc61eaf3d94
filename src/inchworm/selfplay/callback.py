"""Serves the loop: lets the policy join its past selves, rates it against the fixed players, and writes both down."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from inchworm.files import write_atomically
from inchworm.protocols import Actor
from inchworm.selfplay.pool import OpponentPool
from inchworm.selfplay.rating_games import RatingGames
from inchworm.selfplay.ratings import Rating, RatingEntry, rating_model
from inchworm.selfplay.report import ratings_page

if TYPE_CHECKING:
    from inchworm.rollout.rollout import Rollout
    from inchworm.train.loop import TrainingState

RATINGS, REPORT = "ratings.json", "ratings.html"


class SelfPlayCallback:
    """Grows a pool of past selves and keeps the ratings. All that it remembers is in the pool, which is saved with the environments."""

    def __init__(
        self,
        pool: OpponentPool,
        actor: Callable[[], Actor],
        *,
        snapshot_interval: int = 20,
        games: RatingGames | None = None,
        rating_interval: int = 20,
        directory: Path | None = None,
    ) -> None:
        """`actor()` is who acts for the policy; without `games` nobody is rated; ratings are written into `directory`."""
        self._pool, self._actor, self._games, self._directory = pool, actor, games, directory
        self._snapshot_interval, self._rating_interval = snapshot_interval, rating_interval
        if games is not None and rating_interval:
            rating_model()  # what is missing is told before the first iteration

    def on_train_start(self, state: TrainingState) -> None:
        """Rate the fixed players, once in a run, and the policy before it has learned anything."""
        if self._rates and not self._pool.book.anchors:
            self._watched(state, self._calibrate)
        if self._rates and self._pool.book.anchors and not self._pool.book.history:
            self._watched(state, self._rate)

    def on_rollout(self, state: TrainingState, rollout: Rollout) -> Rollout | None:
        """Results are counted by the environments, episode by episode."""

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> bool | None:
        """Rate and take a snapshot if it is time; win rates and ratings join the iteration's metrics."""
        del metrics
        rating = None
        if self._rates and self._pool.book.anchors and state.iteration % self._rating_interval == 0:
            rating = self._watched(state, self._rate)
        if rating is not None:
            state.metrics |= {"rating": rating.mu, "rating_sigma": rating.sigma}
        if self._pool.keep_selves and state.iteration % self._snapshot_interval == 0:
            self._pool.add_self(state.iteration, rating)
        state.metrics |= self._pool.metrics()
        return None

    def on_train_end(self, state: TrainingState) -> None:
        """Write the report, and let go of the environments."""
        del state
        self._write()
        if self._games is not None:
            self._games.close()

    @property
    def _rates(self) -> bool:
        return self._games is not None and self._rating_interval > 0

    def _calibrate(self, state: TrainingState) -> None:
        del state
        assert self._games is not None
        self._pool.book.anchors = self._games.calibrate(self._pool.fixed)

    def _rate(self, state: TrainingState) -> Rating:
        assert self._games is not None
        rating, win_rates = self._games.rate(self._actor(), self._pool.fixed, self._pool.book.anchors)
        self._pool.book.history.append(RatingEntry(state.iteration, state.env_steps, rating, win_rates))
        self._write()
        return rating

    def _watched(self, state: TrainingState, part: Callable[[TrainingState], Rating | None]) -> Rating | None:
        """Training does not hang on a rating: what goes wrong in one is written down, as with an evaluation."""
        try:
            return part(state)
        except Exception as error:
            state.failures.append(f"the rating after iteration {state.iteration} failed: {type(error).__name__}: {error}")
            state.metrics["rating_failed"] = 1.0
            return None

    def _write(self) -> None:
        if self._directory is None or not self._pool.book.history:
            return
        try:
            write_atomically(self._directory / RATINGS, json.dumps(self._pool.book.state_dict(), indent=1) + "\n")
            write_atomically(self._directory / REPORT, ratings_page(self._pool.book))
        except OSError as error:
            warnings.warn(f"the ratings could not be written: {error}; the checkpoints have them", stacklevel=3)


class LadderCallback:
    """Puts a source's own numbers, such as the skill that the heuristic has by now, into the run's rows."""

    def __init__(self, numbers: Callable[[], Mapping[str, float]]) -> None:
        self._numbers = numbers

    def on_train_start(self, state: TrainingState) -> None:
        """Nothing yet."""

    def on_rollout(self, state: TrainingState, rollout: Rollout) -> Rollout | None:
        """Nothing to change."""

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> bool | None:
        """Add the numbers to the iteration's metrics."""
        del metrics
        state.metrics |= self._numbers()
        return None

    def on_train_end(self, state: TrainingState) -> None:
        """Nothing left to do."""
