"""Scoring a policy on environments of its own, by seeded episodes. Serves the loop, which never learns from what is seen here.

Episode i belongs to copy i % n and has a seed of its own, and every copy plays exactly its share: a copy whose episodes
are short does not play more of them, so short episodes count no more than long ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import gymnasium as gym
import numpy as np

from inchworm.config import EnvConfig, EvalConfig, WrapperConfig
from inchworm.env.vector_env import make_vector_env
from inchworm.errors import BadNumberError, ConfigError
from inchworm.evaluate.stats import EvalStats
from inchworm.protocols import Actor, VectorEnv
from inchworm.seeding import episode_seed, make_stream
from inchworm.types import EnvStep

Progress = Callable[[int], None]
"""Told how many episodes are finished, whenever one is."""


class PolicyEvaluator:
    """Plays evaluation episodes. The environments are made at the first evaluation and kept until `close`.

    The same policy gets the same numbers each time: episodes and sampled actions come from `config.seed` alone. Nothing is
    shared with training, and a policy only acts here, so its normalisers stay as they are.
    """

    def __init__(self, env: Any, config: EvalConfig | None = None) -> None:
        """`env` is whatever `make_vector_env` takes. An environment or a `VectorEnv` that is given as such stays open."""
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
        if count < 1:
            raise ConfigError(f"an evaluation of {count} episodes says nothing; give 1 or more")
        env = self.vector_env
        try:
            game = _Game(env, _episode_seeds(self.config.seed, count, env.num_lanes, seeds), self.config.seed)
            return game.play(policy, make_stream(self.config.seed, "evaluation"), greedy, progress)
        except BaseException:  # a broken or half-stepped environment is no ground for the next evaluation
            self.close()
            raise

    @property
    def vector_env(self) -> VectorEnv:
        """The environments that are played; made when first asked for."""
        if isinstance(self._source, VectorEnv):
            return self._source
        if self._env is None:
            copies = 1 if isinstance(self._source, gym.Env) else self.config.num_envs
            self._env = make_vector_env(_for_evaluation(self._source, self.config), copies, seed=self.config.seed)
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


def _for_evaluation(source: Any, config: EvalConfig) -> Any:
    """A run's env config as evaluation needs it: its own number of copies, and no more workers than those."""
    if isinstance(source, gym.Env):
        return _Borrowed(source)
    if not isinstance(source, EnvConfig):
        return source
    workers = source.num_workers if source.num_workers == "auto" else min(source.num_workers, config.num_envs)
    helps = source.help_workers and workers != "auto" and 1 <= workers < config.num_envs
    env = source.replace(num_envs=config.num_envs, num_workers=workers, help_workers=helps)
    return _whole_games(env) if env.atari else env


def _whole_games(env: EnvConfig) -> EnvConfig:
    """Atari as it is scored: training cuts games at lost lives and keeps only the signs of rewards, a score counts neither."""
    preprocessing = {"noop_max": 30, "frame_skip": 4, "screen_size": 84, "grayscale_obs": True, "terminal_on_life_loss": False}
    limit = env.max_episode_steps
    wrappers = (
        WrapperConfig(name="AtariPreprocessing", kwargs=preprocessing),
        *(() if limit is None else (WrapperConfig(name="TimeLimit", kwargs={"max_episode_steps": limit}),)),
        *env.wrappers,
    )
    return env.replace(atari=False, max_episode_steps=None, kwargs={**env.kwargs, "frameskip": 1}, wrappers=wrappers)


def _episode_seeds(seed: int, episodes: int, copies: int, given: Sequence[int] | None) -> list[int]:
    """One seed per episode; episode i is number i // copies of copy i % copies."""
    if given is None:
        return [episode_seed(seed, index % copies, index // copies) for index in range(episodes)]
    if len(given) != episodes:
        raise ConfigError(f"evaluation got {len(given)} seeds for {episodes} episodes; give one seed per episode, or no seeds")
    return [int(one) for one in given]


class _Borrowed(gym.Wrapper[Any, Any, Any, Any]):
    """Somebody's environment: played, and left open for them."""

    def close(self) -> None:
        """Not ours to close."""


class _Game:
    """The episodes of one evaluation while they are played."""

    def __init__(self, env: VectorEnv, seeds: Sequence[int], idle_seed: int) -> None:
        self.env = env
        self.seeds = seeds
        self.idle_seed = idle_seed
        self.returns = np.zeros(len(seeds))  # [episodes]
        self.lengths = np.zeros(len(seeds), np.int64)  # [episodes]
        self.infos: list[dict[str, float]] = [{} for _ in seeds]
        self.playing = np.arange(env.num_lanes)  # [B] which episode each copy plays; past the last one it idles
        self.finished = 0

    def play(self, policy: Actor, rng: np.random.Generator, deterministic: bool, progress: Progress | None) -> EvalStats:
        """Step all copies together until every episode is over. Idle copies step along, because the batch must stay the same."""
        step = self._reset(range(self.env.num_lanes))
        state = policy.initial_state(self.env.num_lanes)
        while self.finished < len(self.seeds):
            acted = policy.act(step.observations, state, step.episode_starts, rng, deterministic=deterministic)
            state = acted.state
            step = self.env.step(acted.env_actions)
            counts = self.playing < len(self.seeds)  # [B]
            self.returns[self.playing[counts]] += step.rewards[counts]
            self.lengths[self.playing[counts]] += 1
            if step.ended:
                step = self._end(step, progress)
        names = {name for info in self.infos for name in info}
        infos = {name: np.array([info.get(name, np.nan) for info in self.infos]) for name in names}
        return EvalStats(returns=self.returns, lengths=self.lengths, seeds=np.array(self.seeds), infos=infos, deterministic=deterministic)

    def _end(self, step: EnvStep, progress: Progress | None) -> EnvStep:
        """Book the episodes that ended and begin the next ones of their copies, with the seeds planned for them."""
        again = []
        for ended in step.ended:
            episode = int(self.playing[ended.lane])
            if episode >= len(self.seeds):
                continue
            if not np.isfinite(self.returns[episode]):
                raise BadNumberError(
                    f"the return of evaluation episode {episode} (lane {ended.lane}, seed {self.seeds[episode]}) is "
                    f"{self.returns[episode]}; inchworm check-env looks for the step"
                )
            self.infos[episode] = dict(ended.info)
            self.playing[ended.lane] += self.env.num_lanes
            self.finished += 1
            if self.playing[ended.lane] < len(self.seeds):
                again.append(ended.lane)
        if progress is not None:
            progress(self.finished)
        return self._reset(again) if again else step

    def _reset(self, lanes: Sequence[int]) -> EnvStep:
        """New episodes in these copies; a copy without one left gets some fixed seed, so that nothing depends on chance."""
        playing = [(lane, int(self.playing[lane])) for lane in lanes]
        seeds = [self.seeds[e] if e < len(self.seeds) else episode_seed(self.idle_seed, lane, 0) for lane, e in playing]
        return self.env.reset(seeds, list(lanes))
