"""Scoring a policy on environments of its own, by seeded episodes. Serves the loop, which never learns from what is seen here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from inchworm.config.sections import EvalConfig
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Actor, VectorEnv
from inchworm.core.seeding import episode_seed, make_stream
from inchworm.evaluate.games import Game, Progress, check_episodes, make_world, num_copies
from inchworm.evaluate.stats import EvalStats
from inchworm.evaluate.suites import SuiteStats, evaluate_suites


class PolicyEvaluator:
    """Plays evaluation episodes. The environments are made at the first evaluation and kept until `close`.

    The same policy gets the same numbers each time: episodes and sampled actions come from `config.seed` alone. Nothing is
    shared with training, and a policy only acts here, so its normalisers stay as they are.
    """

    def __init__(self, env: Any = None, config: EvalConfig | None = None) -> None:
        """`env` is whatever `make_vector_env` takes. An environment or a `VectorEnv` that is given as such stays open.

        An evaluator of suites alone needs none: those name their own.
        """
        self.config = config or EvalConfig()
        self._source = env
        self._env: VectorEnv | None = None

    def evaluate(
        self,
        policy: Actor,
        episodes: int | None = None,
        deterministic: bool | None = None,
        *,
        seeds: Sequence[int] | None = None,
        progress: Progress | None = None,
    ) -> EvalStats:
        """Play `episodes` episodes (the config's number by default), greedily or sampled, with derived seeds or with these."""
        greedy = self.config.deterministic if deterministic is None else deterministic
        count = self.config.episodes if episodes is None else episodes
        check_episodes(count)
        env = self.vector_env
        try:
            game = Game(env, _episode_seeds(self.config.seed, count, num_copies(env), seeds), self.config.seed)
            return game.play(policy, make_stream(self.config.seed, "evaluation"), greedy, progress)
        except BaseException:  # a broken or half-stepped environment is no ground for the next evaluation
            self.close()
            raise

    def evaluate_suites(self, policy: Actor, suites: Mapping[str, Sequence[Any]], *, progress: Progress | None = None) -> SuiteStats:
        """Score a policy on named groups of environments and opponents, with the config's seed, copies and way to act."""
        config = self.config
        return evaluate_suites(
            policy, suites, deterministic=config.deterministic, num_envs=config.num_envs, seed=config.seed, progress=progress
        )

    @property
    def vector_env(self) -> VectorEnv:
        """The environments that are played; made when first asked for."""
        if self._source is None:
            raise ConfigError("this evaluator was given no environment; PolicyEvaluator(env) has one, and evaluate_suites needs none")
        if isinstance(self._source, VectorEnv):
            return self._source
        if self._env is None:
            self._env = make_world(self._source, self.config.num_envs, self.config.seed)
        return self._env

    def close(self) -> None:
        """Close the environments that were made here; the next evaluation makes new ones."""
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def evaluate_policy(
    policy: Actor,
    env: Any,
    episodes: int | None = None,
    *,
    seeds: Sequence[int] | None = None,
    deterministic: bool = True,
    num_envs: int = 8,
    seed: int = EvalConfig.seed,
) -> EvalStats:
    """Score a policy on an environment: 100 episodes unless told otherwise, with derived seeds or with one given seed per episode."""
    if episodes is None:
        episodes = 100 if seeds is None else len(seeds)
    config = EvalConfig(episodes=max(1, episodes), num_envs=max(1, min(num_envs, episodes)), deterministic=deterministic, seed=seed)
    with PolicyEvaluator(env, config) as evaluator:
        return evaluator.evaluate(policy, episodes, seeds=seeds)


def _episode_seeds(seed: int, episodes: int, copies: int, given: Sequence[int] | None) -> list[int]:
    """One seed per episode; episode i is number i // copies of copy i % copies."""
    if given is None:
        return [episode_seed(seed, index % copies, index // copies) for index in range(episodes)]
    if len(given) != episodes:
        raise ConfigError(f"evaluation got {len(given)} seeds for {episodes} episodes; give one seed per episode, or no seeds")
    return [int(one) for one in given]
