"""Scoring a policy by seeded episodes, on environments separate from those of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from inchworm.collect.opponents import OpponentVectorEnv, check_spaces, own_lanes
from inchworm.config.sections import EvalConfig, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Actor, VectorEnv
from inchworm.core.seeding import episode_seed
from inchworm.env.registry import heuristic_of
from inchworm.env.source import EnvSource, env_source
from inchworm.evaluate.games import Progress, RecordedVectorEnv, check_episodes, episode_limit, make_world, play_games
from inchworm.evaluate.stats import EvalStats
from inchworm.run.policies import is_built_in, make_player

if TYPE_CHECKING:
    from inchworm.evaluate.suites import SuiteStats


class PolicyEvaluator:
    """Plays evaluation episodes. The environments are made at the first evaluation and kept until `close`.

    Results are reproducible: episodes and sampled actions depend on `config.seed` only. Nothing is shared with training, and
    the policy's normaliser statistics are not updated.
    """

    def __init__(
        self,
        env: Any = None,
        config: EvalConfig | None = None,
        *,
        wrap: Callable[[VectorEnv], VectorEnv] | None = None,
        record: int = 0,
    ) -> None:
        """`env` is anything that `make_vector_env` accepts; instances are not closed. `evaluate_suites` needs no `env`.

        `wrap` is applied to the environments when they are made, for example to add an opponent. The actions of the first `record`
        episodes of each evaluation are kept in its stats, for a video.
        """
        self.config = config or EvalConfig()
        self.source = None if env is None else env_source(env)
        self._wrap, self._record = wrap, record
        self._recorder: RecordedVectorEnv | None = None
        self._made: VectorEnv | None = None
        self._played: VectorEnv | None = None
        self._baseline = None if self.config.baseline is None else load_player(self.config.baseline, self.source)
        self._baseline_returns: dict[tuple[bool, tuple[int, ...]], np.ndarray] = {}  # of episodes with these seeds, greedy or not

    def evaluate(
        self,
        policy: Actor,
        episodes: int | None = None,
        deterministic: bool | None = None,
        *,
        seeds: Sequence[int] | None = None,
        progress: Progress | None = None,
    ) -> EvalStats:
        """Play `episodes` episodes (default: the config's), greedily or sampled, with the given seeds, the config's or derived ones."""
        greedy = self.config.deterministic if deterministic is None else deterministic
        count = self.config.episodes if episodes is None else episodes
        check_episodes(count)
        seeds = seeds if seeds is not None else self.config.seeds or None
        if seeds is not None and len(seeds) != count:
            raise ConfigError(f"evaluation got {len(seeds)} seeds for {count} episodes; give one seed per episode, or no seeds")
        env, seed = self.vector_env, self.config.seed
        copies = env.num_envs
        try:
            if seeds is None:  # episode i is number i // copies of copy i % copies
                seeds = [episode_seed(seed, index % copies, index // copies) for index in range(count)]
            limit = episode_limit(self.source, self.config.max_episode_steps)
            games = [int(one) for one in seeds]
            if self._recorder is not None:
                self._recorder.record(min(self._record, count))
            stats = play_games(policy, env, games, seed, deterministic=greedy, max_episode_steps=limit, progress=progress)
            if self._recorder is not None:
                stats = replace(stats, recorded=tuple(self._recorder.finish(stats.lengths.tolist())))
            name, key = self.config.baseline, (greedy, tuple(games))
            if name is None:
                return stats
            if key not in self._baseline_returns:
                self._baseline = self._baseline or load_player(name, self.source, env)
                check_spaces(self._baseline, env.observation_space, env.action_space, f"the baseline {name}")
                played = play_games(self._baseline, env, games, seed, deterministic=greedy, max_episode_steps=limit, purpose="baseline")
                self._baseline_returns[key] = played.returns
            return replace(stats, baseline=name, baseline_returns=self._baseline_returns[key])
        except BaseException:  # do not reuse an environment that is broken or in the middle of a step
            self.close()
            raise

    def evaluate_suites(self, policy: Actor, suites: Mapping[str, Sequence[Any]], *, progress: Progress | None = None) -> SuiteStats:
        """Score a policy on named groups of environments and opponents, with the config's settings but its `episodes`."""
        from inchworm.evaluate.suites import evaluate_suites  # which builds on matches; scoring alone does not

        config = self.config
        how = {name: getattr(config, name) for name in ("deterministic", "num_envs", "seed", "max_episode_steps")}
        return evaluate_suites(policy, suites, **how, progress=progress)

    @property
    def vector_env(self) -> VectorEnv:
        """The environments that are played, made at the first access."""
        if self.source is None:
            raise ConfigError("this evaluator has no environment; use PolicyEvaluator(env), or call evaluate_suites")
        if self._played is None:
            if self.source.kind != "vector":
                self._made = make_world(self.source, self.config.num_envs, self.config.seed)
            env: Any = self.source.given if self._made is None else self._made
            if self._record:
                env = self._recorder = RecordedVectorEnv(env)
            self._played = env if self._wrap is None else self._wrap(env)
        return self._played

    @property
    def make_replay(self) -> Callable[..., dict[str, Any]] | None:
        """What makes a replay of a recorded game; None where games are not recorded, or cannot be replayed as files."""
        _ = self.vector_env  # makes the environments, and with them the recorder
        return getattr(self._recorder, "make_replay", None)

    def close(self) -> None:
        """Close the environments that were made here; the next evaluation makes new ones."""
        made, self._made, self._played, self._recorder = self._made, None, None, None
        if made is not None:
            made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
    max_episode_steps: int | None = None,
) -> EvalStats:
    """Score a policy on an environment: 100 episodes by default, with derived seeds or one given seed per episode.

    An episode that has not ended after `max_episode_steps` is cut off and counted in `capped_episodes`; by default that is the limit that
    the environment is registered with, else 100,000.
    """
    if episodes is None:
        episodes = 100 if seeds is None else len(seeds)
    copies = max(1, min(num_envs, episodes))
    how: dict[str, Any] = {"deterministic": deterministic, "seed": seed, "max_episode_steps": max_episode_steps}
    config = EvalConfig(episodes=max(1, episodes), num_envs=copies, **how)
    with PolicyEvaluator(env, config) as evaluator:
        return evaluator.evaluate(policy, episodes, seeds=seeds)


def make_evaluator(source: Any, config: TrainingConfig, *, record: int = 0) -> PolicyEvaluator:
    """Make the evaluator of a run's policy; a run with opponents is scored against its `evaluation_opponent`."""
    opponent = evaluation_opponent(config)
    if opponent is None:
        return PolicyEvaluator(source, config.evaluation, record=record)
    loaded = load_player(opponent, config.env)

    def add_opponent(env: VectorEnv) -> VectorEnv:
        lanes = own_lanes(env, config)
        return OpponentVectorEnv(env, loaded or load_player(opponent, config.env, env), lanes, seed=config.evaluation.seed)

    alone = config.evaluation.replace(baseline=None)  # it plays, and is not compared with
    return PolicyEvaluator(source, alone, wrap=add_opponent, record=record)


def load_player(name: str, source: Any, env: VectorEnv | None = None) -> Any:
    """Load or make the player of that name, as in a match; without `env`, None for players that are made for an environment.

    A policy file is loaded when the evaluator is made, so that a missing one is an error before training.
    """
    return None if env is None and is_built_in(name) else make_player(name, source, env)[0]


def check_baseline(config: TrainingConfig, source: EnvSource, env: VectorEnv) -> None:
    """Reject a baseline that cannot play where the policy is evaluated, which has the spaces of `env`, before training."""
    name = config.evaluation.baseline
    if name is not None:
        check_spaces(load_player(name, source.given, env), env.observation_space, env.action_space, f"the baseline {name}")


def evaluation_opponent(config: TrainingConfig) -> str | None:
    """Return the opponent in a run's evaluations; None without opponents.

    It is the baseline of the config, else the heuristic at full skill, or random where there is none.
    """
    if config.opponent.mode == "none":
        return None
    if config.evaluation.baseline is not None:
        return config.evaluation.baseline
    return "heuristic" if config.opponent.mode != "random" and heuristic_of(config.env.id) else "random"
