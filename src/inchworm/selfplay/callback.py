"""Self-play during training: opponents from a config, snapshots of the policy, ratings against fixed players."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from inchworm.collect.opponents import OpponentSource, OpponentVectorEnv, check_spaces, make_actor, own_lanes, team_lanes
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import ConfigError, EnvError
from inchworm.core.protocols import Actor, BaseCallback, Callback, Policy, VectorEnv, complete_vector_env
from inchworm.core.seeding import derive_seed
from inchworm.core.spaces import Space
from inchworm.core.tensor_file import write_atomically
from inchworm.env.registry import heuristic_of
from inchworm.evaluate.games import EPISODE_LIMIT, episode_limit, make_world, play_games
from inchworm.policy.file import fingerprint
from inchworm.run.directory import RATINGS
from inchworm.run.policies import load_policy
from inchworm.selfplay.opponent_pool import OpponentPool, Rating, RatingEntry, SkillLadder, calibrate, rate, rating_model

if TYPE_CHECKING:
    from inchworm.train.loop import TrainingState

Result = TypeVar("Result")


class SelfPlayCallback(BaseCallback):
    """Adds past policies to a pool and rates the policy. Its state is in the pool, which is saved with the environments."""

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
        """`actor()` returns the actor for the policy; without `games` there are no ratings, which are written into `directory`."""
        self._pool, self._actor, self._directory = pool, actor, directory
        self._games = games if rating_interval else None
        self._snapshot_interval, self._rating_interval = snapshot_interval, rating_interval
        if self._games is not None:
            rating_model()  # report a missing package before the first iteration

    def on_train_start(self, state: TrainingState) -> None:
        """Rate the fixed players, once in a run, and the untrained policy."""
        games, pool = self._games, self._pool
        if games is not None and not pool.book.anchors:
            pool.book.anchors = _attempt(state, lambda: games.calibrate(pool.fixed)) or {}
        if not self._pool.book.history:
            self._rate(state)

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> bool | None:
        """Rate the policy and take a snapshot at their intervals; add win rates and ratings to the iteration's metrics."""
        del metrics
        rating = self._rate(state) if self._rating_interval and state.iteration % self._rating_interval == 0 else None
        if rating is not None:
            state.metrics |= {"rating": rating.mu, "rating_sigma": rating.sigma}
        if self._pool.keep_selves and state.iteration % self._snapshot_interval == 0:
            self._pool.add_self(state.iteration, rating)
        state.metrics |= self._pool.metrics()
        return None

    def on_train_end(self, state: TrainingState) -> None:
        """Write the report, and close the environments."""
        del state
        self._write()
        if self._games is not None:
            self._games.close()

    def _rate(self, state: TrainingState) -> Rating | None:
        """Rate the policy; None if ratings are disabled, or this one failed."""
        games, pool = self._games, self._pool
        if games is None or not pool.book.anchors:
            return None
        found = _attempt(state, lambda: games.rate(self._actor(), pool.fixed, pool.book.anchors))
        if found is None:
            return None
        rating, win_rates = found
        pool.book.history.append(RatingEntry(state.iteration, state.env_steps, rating, win_rates))
        self._write()
        return rating

    def _write(self) -> None:
        if self._directory is None or not self._pool.book.history:
            return
        try:
            write_atomically(self._directory / RATINGS, json.dumps(self._pool.book.state_dict(), indent=1) + "\n")
        except OSError as error:
            warnings.warn(f"the ratings could not be written: {error}; the checkpoints have them", stacklevel=3)


def _attempt(state: TrainingState, action: Callable[[], Result]) -> Result | None:
    """Return the action's result; record an exception instead of stopping the run, as with an evaluation."""
    try:
        return action()
    except Exception as error:
        state.failures.append(f"the rating after iteration {state.iteration} failed: {type(error).__name__}: {error}")
        state.metrics["rating_failed"] = 1.0
        return None


class LadderCallback(BaseCallback):
    """Adds an opponent's metrics, such as the heuristic's current skill, to the iteration's metrics."""

    def __init__(self, opponent_metrics: Callable[[], Mapping[str, float]]) -> None:
        self._opponent_metrics = opponent_metrics

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> bool | None:
        """Add the opponent's metrics."""
        del metrics
        state.metrics |= self._opponent_metrics()
        return None


def with_opponents(env: VectorEnv, config: TrainingConfig, first_copy: int = 0) -> VectorEnv:
    """Let the config's opponent play the other team of the training environments, of which `first_copy` is the first."""
    if config.opponent.mode == "none":
        return env
    lanes = own_lanes(env, config, first_copy)
    return OpponentVectorEnv(env, make_opponent(config, env.observation_space, env.action_space), lanes, seed=config.run.seed)


def make_opponent(config: TrainingConfig, observation_space: Space, action_space: Space) -> Actor | OpponentSource:
    """Make the opponent of the config's mode."""
    opponent, named = config.opponent, partial(make_actor, action_space=action_space, env_id=config.env.id, kwargs=config.env.kwargs)
    if opponent.mode == "random":
        return named("random")
    if opponent.mode == "heuristic":
        top, skills = named(f"heuristic:{opponent.skill}"), config.curriculum.opponent_skills
        if skills:  # which the curriculum sets
            return SkillLadder(lambda skill: named(f"heuristic:{skill}"), start=skills[0], top=skills[0])
        if opponent.skill_start is None:
            return top
        return SkillLadder(
            lambda skill: named(f"heuristic:{skill}"), start=opponent.skill_start, top=opponent.skill, threshold=opponent.skill_threshold
        )
    if opponent.rating_interval:
        rating_model()  # report a missing package first
    return OpponentPool(
        fixed_players(config, observation_space, action_space),
        size=opponent.pool_size,
        power=opponent.pfsp_power,
        latest_share=opponent.latest_share,
        anchor_share=opponent.anchor_share,
        keep_selves=opponent.mode == "self_play",
    )


def fixed_players(config: TrainingConfig, observation_space: Space, action_space: Space) -> dict[str, Actor]:
    """Make the config's anchors and load its policy files, by name. Files are named by the weights' fingerprint, so changes are noticed."""
    names = config.opponent.anchors or (("random", "heuristic:0.5", "heuristic") if heuristic_of(config.env.id) else ("random",))
    players: dict[str, Actor] = {name: make_actor(name, action_space, config.env.id, config.env.kwargs) for name in names}
    for path in config.opponent.policies:
        try:
            policy = load_policy(path)
        except OSError as error:
            raise ConfigError(f"cannot read {path} of opponent.policies: {error.strerror or error}; give a policy file") from error
        check_spaces(policy, observation_space, action_space, f"the opponent {path}")
        players[f"policy-{fingerprint(policy.get_weights()):016x}"] = policy
    return players


def bind_pool(env: VectorEnv, policy: Actor) -> None:
    """Bind a pool of past selves among the environments' opponents to the policy that acts."""
    pool = env.opponent if isinstance(env, OpponentVectorEnv) else None
    if not isinstance(pool, OpponentPool) or not pool.keep_selves:
        return
    if not isinstance(policy, Policy):
        raise ConfigError(f"opponent.mode=self_play needs a policy with weights, but {type(policy).__name__} only acts")
    pool.bind(policy)


def opponent_callbacks(
    env: VectorEnv, actor: Callable[[], Actor], config: TrainingConfig, source: Any, directory: Path | None = None
) -> list[Callback]:
    """Make the callbacks that update the opponents during training; environments for ratings are made from `source`, unless it is None."""
    opponent, evaluation = config.opponent, config.evaluation
    pool = env.opponent if isinstance(env, OpponentVectorEnv) else None
    if isinstance(pool, SkillLadder):
        return [LadderCallback(pool.metrics)]
    if not isinstance(pool, OpponentPool):
        return []

    games = None
    if opponent.rating_interval and source is None:
        warnings.warn("ratings disabled: an environment instance cannot be copied; pass an id or a factory", stacklevel=4)
    elif opponent.rating_interval:
        games = RatingGames(
            lambda copies: make_world(source, copies, evaluation.seed),
            episodes=opponent.rating_episodes,
            seed=evaluation.seed,
            deterministic=evaluation.deterministic,
            max_episode_steps=episode_limit(source, evaluation.max_episode_steps),
        )
    intervals = {"snapshot_interval": opponent.snapshot_interval, "rating_interval": opponent.rating_interval}
    return [SelfPlayCallback(pool, actor, **intervals, games=games, directory=directory)]


_MAX_COPIES = 16


class RatingGames:
    """Plays rating games: each seed twice, once from either side. The environments are made at the first game and kept until `close`."""

    def __init__(
        self,
        make_env: Callable[[int], VectorEnv],
        *,
        episodes: int = 20,
        seed: int = 0,
        deterministic: bool = True,
        max_episode_steps: int = EPISODE_LIMIT,
    ) -> None:
        """`make_env(n)` makes n copies of an environment with two teams; with `deterministic` the first player acts greedily."""
        self.episodes = episodes + episodes % 2
        self._make_env, self._seed = make_env, seed
        self._how: dict[str, Any] = {"deterministic": deterministic, "max_episode_steps": max_episode_steps}
        self._env: VectorEnv | None = None

    def play(self, ours: Actor, theirs: Actor) -> np.ndarray:
        """Play `episodes` games; return the results of `ours` [episodes]: 1 won, 0 lost, 0.5 drawn."""
        if self._env is None:
            self._env = complete_vector_env(self._make_env(min(_MAX_COPIES, self.episodes)))
        inner = self._env
        lanes = team_lanes(inner.num_envs, inner.lanes_per_copy, np.arange(inner.num_envs) % 2)
        env = OpponentVectorEnv(inner, theirs, lanes, seed=self._seed)
        # Episode i is played in copy i % n, n even: neighbours have the same seed and different sides.
        seeds = [derive_seed(self._seed, "rating", episode // 2) for episode in range(self.episodes)]
        try:
            stats = play_games(ours, env, seeds, self._seed, **self._how, purpose="rating")
        except BaseException:  # do not reuse an environment in the middle of a step
            self.close()
            raise
        wins = stats.infos.get("win")
        if wins is None or np.isnan(wins).any():
            capped = stats.capped_text.removeprefix(", ") or "this environment does not provide it"
            raise EnvError(f"ratings need info['win'] at the end of each episode, but {capped}")
        return np.asarray(wins)

    def calibrate(self, fixed: Mapping[str, Actor]) -> dict[str, Rating]:
        """Rate the fixed players by games of each pair, in turns."""
        pairs = list(combinations(fixed, 2))
        wins = {pair: self.play(fixed[pair[0]], fixed[pair[1]]) for pair in pairs}
        return calibrate(list(fixed), [(*pair, float(wins[pair][turn])) for turn in range(self.episodes) for pair in pairs])

    def rate(self, policy: Actor, fixed: Mapping[str, Actor], anchors: Mapping[str, Rating]) -> tuple[Rating, dict[str, float]]:
        """Return a policy's rating, and its win rate against each fixed player."""
        if not fixed:
            raise ConfigError("a rating needs a fixed player; set opponent.anchors")
        wins = {name: self.play(policy, player) for name, player in fixed.items()}
        results = [(name, float(wins[name][turn])) for turn in range(self.episodes) for name in fixed]
        return rate(results, anchors), {name: float(won.mean()) for name, won in wins.items()}

    def close(self) -> None:
        """Close the environments; the next game makes new ones."""
        env, self._env = self._env, None
        if env is not None:
            env.close()
