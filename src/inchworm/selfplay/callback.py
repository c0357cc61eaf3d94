"""Serves the loop: lets the policy join its past selves, rates it against the fixed players, and writes both down."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from inchworm.collect.actors import has_heuristic, make_actor
from inchworm.collect.opponents import OpponentSource, OpponentVectorEnv, check_spaces, team_lanes
from inchworm.config.sections import EnvConfig, EvalConfig, OpponentConfig, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Actor, Callback, Policy, VectorEnv
from inchworm.core.spaces import Space
from inchworm.core.tensor_file import write_atomically
from inchworm.env.registry import team_worlds
from inchworm.env.source import EnvSource, make_vector_env
from inchworm.evaluate.evaluator import PolicyEvaluator
from inchworm.policy.file import fingerprint, load_policy
from inchworm.selfplay.pool import OpponentPool, SkillLadder
from inchworm.selfplay.ratings import Rating, RatingEntry, RatingGames, rating_model
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


def with_opponents(env: VectorEnv, config: TrainingConfig) -> VectorEnv:
    """The environments that train, with the other team played by the config's opponent."""
    if config.opponent.mode == "none":
        return env
    teams = _check_teams(env, config)
    source = make_opponent(config, teams.observation_space, teams.action_space)
    return OpponentVectorEnv(teams, source, _our_lanes(teams, config.opponent), seed=config.run.seed)


def _check_teams(env: VectorEnv, config: TrainingConfig) -> VectorEnv:
    agents = env.lanes_per_copy
    if agents % 2:
        raise ConfigError(
            f"opponent.mode={config.opponent.mode} needs a world with two teams, but a copy of {config.env.id} has {agents} agent(s); "
            f"use a world such as {team_worlds()}, or opponent.mode=none"
        )
    return env


def _our_lanes(env: VectorEnv, config: OpponentConfig) -> np.ndarray:
    sides: Any = {"first": 0, "second": 1, "alternate": np.arange(env.num_envs) % 2}[config.sides]
    return team_lanes(env.num_envs, env.lanes_per_copy, sides)


def make_opponent(config: TrainingConfig, observation_space: Space, action_space: Space) -> Actor | OpponentSource:
    """Whom the config's mode means."""
    opponent, named = config.opponent, partial(make_actor, action_space=action_space, env_id=config.env.id, kwargs=config.env.kwargs)
    if opponent.mode == "random":
        return named("random")
    if opponent.mode == "heuristic":
        top = named(f"heuristic:{opponent.skill}")
        if opponent.skill_start is None:
            return top
        return SkillLadder(
            lambda skill: named(f"heuristic:{skill}"), start=opponent.skill_start, top=opponent.skill, threshold=opponent.skill_threshold
        )
    if opponent.rating_interval:
        rating_model()  # what is missing is told before anything is made
    return OpponentPool(
        fixed_players(config, observation_space, action_space),
        size=opponent.pool_size,
        power=opponent.pfsp_power,
        latest_share=opponent.latest_share,
        anchor_share=opponent.anchor_share,
        keep_selves=opponent.mode == "self_play",
    )


def fixed_players(config: TrainingConfig, observation_space: Space, action_space: Space) -> dict[str, Actor]:
    """The config's anchors and policy files by name. A file's holds the fingerprint of its weights, so that no other takes its place."""
    names = config.opponent.anchors or (("random", "heuristic:0.5", "heuristic") if has_heuristic(config.env.id) else ("random",))
    players: dict[str, Actor] = {name: make_actor(name, action_space, config.env.id, config.env.kwargs) for name in names}
    for path in config.opponent.policies:
        try:
            policy = load_policy(path)
        except OSError as error:
            raise ConfigError(
                f"opponent.policies names {path}, which cannot be read: {error.strerror or error}; give a policy file"
            ) from error
        check_spaces(policy, observation_space, action_space, f"the opponent {path}")
        players[f"policy-{fingerprint(policy.get_weights()):016x}"] = policy
    return players


class MatchEvaluator(PolicyEvaluator):
    """Scores a policy in a world of two teams, against the heuristic at full strength where there is one, else against a random player."""

    def __init__(self, env: Any, config: TrainingConfig) -> None:
        super().__init__(env, config.evaluation)
        self._training = config
        self._match: VectorEnv | None = None

    @property
    def vector_env(self) -> VectorEnv:
        """The environments that are played, our lanes of them."""
        inner = super().vector_env
        if self._match is None:
            self._match = self._against(inner)
        return self._match

    def _against(self, inner: VectorEnv) -> VectorEnv:
        config = self._training
        teams = _check_teams(inner, config)
        actor = make_actor(str(evaluation_opponent(config)), teams.action_space, config.env.id, config.env.kwargs)
        return OpponentVectorEnv(teams, actor, _our_lanes(teams, config.opponent), seed=config.evaluation.seed)

    def close(self) -> None:
        """Close the environments; the next evaluation makes new ones."""
        self._match = None
        super().close()


def bind_pool(env: VectorEnv, policy: Actor) -> None:
    """Tell a pool among the environments' opponents whose past selves it keeps; `policy` is who acts."""
    pool = _pool_of(env)
    if pool is None or not pool.keep_selves:
        return
    if not isinstance(policy, Policy):
        raise ConfigError(f"opponent.mode=self_play needs a policy with weights, but {type(policy).__name__} only acts")
    pool.bind(policy)


def opponent_callbacks(
    env: VectorEnv, actor: Callable[[], Actor], config: TrainingConfig, source: Any, directory: Path | None = None
) -> list[Callback]:
    """Who watches the opponents during training; `source` is where environments for ratings come from, None if there is nowhere."""
    pool, opponent = _pool_of(env), config.opponent
    if pool is None:
        ladder = env.opponent if isinstance(env, OpponentVectorEnv) and isinstance(env.opponent, SkillLadder) else None
        return [] if ladder is None else [LadderCallback(ladder.metrics)]
    games = None
    if opponent.rating_interval and source is None:
        warnings.warn(
            "nobody is rated: environments that were handed over cannot be copied; give PPOTrainer an id or a factory", stacklevel=4
        )
    elif opponent.rating_interval:
        make = partial(_rating_env, source, config)
        evaluation = config.evaluation
        games = RatingGames(make, episodes=opponent.rating_episodes, seed=evaluation.seed, deterministic=evaluation.deterministic)
    return [
        SelfPlayCallback(
            pool,
            actor,
            snapshot_interval=opponent.snapshot_interval,
            games=games,
            rating_interval=opponent.rating_interval,
            directory=directory,
        )
    ]


def _pool_of(env: VectorEnv) -> OpponentPool | None:
    return env.opponent if isinstance(env, OpponentVectorEnv) and isinstance(env.opponent, OpponentPool) else None


def _rating_env(source: Any, config: TrainingConfig, copies: int) -> VectorEnv:
    given = source.given if isinstance(source, EnvSource) else source
    world = given.replace(num_envs=copies, num_workers=0, help_workers=False) if isinstance(given, EnvConfig) else source
    return make_vector_env(world, copies, 0, seed=config.evaluation.seed)


def evaluation_opponent(config: TrainingConfig) -> str | None:
    """Whom a run's policy meets when it is scored; None where it plays alone."""
    if config.opponent.mode == "none":
        return None
    return "heuristic" if config.opponent.mode != "random" and has_heuristic(config.env.id) else "random"


def make_evaluator(source: Any, config: TrainingConfig) -> PolicyEvaluator:
    """Who scores a run's policy."""
    evaluation: EvalConfig = config.evaluation
    return PolicyEvaluator(source, evaluation) if config.opponent.mode == "none" else MatchEvaluator(source, config)
