"""Seeded evaluation episodes, and the environments they are played in.

An episode is one game of one copy of the environment, however many lanes the copy has. Episode i belongs to copy i % n and has its
own seed, and every copy plays a fixed share of the episodes: if the next free copy took the next episode, short games would be
over-represented.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np

from inchworm.config.sections import EnvConfig, WrapperConfig
from inchworm.core.errors import BadNumberError, ConfigError
from inchworm.core.protocols import Actor, VectorEnv
from inchworm.core.seeding import episode_seed
from inchworm.core.types import EndedEpisode, EnvStep
from inchworm.env.pettingzoo_copy import Team, as_team
from inchworm.env.registry import vectorised
from inchworm.env.source import env_source, make_vector_env
from inchworm.evaluate.stats import EvalStats

Progress = Callable[[int], None]
"""Called with the number of finished episodes whenever one ends."""


def check_episodes(episodes: int) -> None:
    """Reject an evaluation without episodes."""
    if episodes < 1:
        raise ConfigError(f"episodes={episodes} must be 1 or more")


class Game:
    """The games of one evaluation, one for each of `seeds`. A copy without an episode left is idle, with a seed from `idle_seed`."""

    def __init__(self, env: VectorEnv, seeds: Sequence[int], idle_seed: int) -> None:
        self.env = env
        self.seeds = seeds
        self.idle_seed = idle_seed
        self.width, self.copies = env.lanes_per_copy, env.num_envs
        self.returns = np.zeros((len(seeds), self.width))  # [episodes, k]
        self.lengths = np.zeros(len(seeds), np.int64)  # [episodes]
        self.infos: list[Mapping[str, float]] = [{} for _ in seeds]
        self.playing = np.arange(self.copies)  # [E] the episode that each copy plays; past the last one it is idle
        self.finished = 0

    def play(self, policy: Actor, rng: np.random.Generator, deterministic: bool, progress: Progress | None = None) -> EvalStats:
        """Step all copies until every episode has ended. Idle copies are stepped too: another batch size would change the last bits."""
        step = self._reset(range(self.copies))
        state = policy.initial_state(self.env.num_lanes)
        while self.finished < len(self.seeds):
            acted = policy.act(step.observations, state, step.episode_starts, rng, deterministic=deterministic)
            state = acted.state
            step = self.env.step(acted.env_actions)
            counts = self.playing < len(self.seeds)  # [E]
            self.returns[self.playing[counts]] += step.rewards.reshape(self.copies, self.width)[counts]
            self.lengths[self.playing[counts]] += 1
            if step.ended:
                step = self._end(step, progress)
        names = {name for info in self.infos for name in info}
        return EvalStats(
            returns=self.returns.sum(axis=1),
            lengths=self.lengths,
            seeds=np.array(self.seeds),
            infos={name: np.array([info.get(name, np.nan) for info in self.infos]) for name in names},
            deterministic=deterministic,
            agent_returns=self.returns,
        )

    def _end(self, step: EnvStep, progress: Progress | None) -> EnvStep:
        """Record the episodes that ended and start the next ones of their copies."""
        by_copy: dict[int, list[EndedEpisode]] = {}
        for ended in step.ended:
            by_copy.setdefault(ended.lane // self.width, []).append(ended)
        again = []
        for copy, lanes in by_copy.items():
            episode = int(self.playing[copy])
            if episode >= len(self.seeds):
                continue
            for place, value in enumerate(self.returns[episode].tolist()):
                if not np.isfinite(value):
                    raise BadNumberError(
                        f"the return of evaluation episode {episode} (lane {copy * self.width + place}, seed {self.seeds[episode]}) is "
                        f"{value}; run inchworm check-env to find the step"
                    )
            self.infos[episode] = mean_info([lane.info for lane in lanes])
            self.playing[copy] += self.copies
            self.finished += 1
            if self.playing[copy] < len(self.seeds):
                again.append(copy)
        if progress is not None:
            progress(self.finished)
        return self._reset(again) if again else step

    def _reset(self, copies: Sequence[int]) -> EnvStep:
        """Start new episodes in these copies; idle copies get a fixed seed, so that results do not depend on chance."""
        playing = [(copy, int(self.playing[copy])) for copy in copies]
        seeds = [self.seeds[e] if e < len(self.seeds) else episode_seed(self.idle_seed, copy, 0) for copy, e in playing]
        return self.env.reset(seeds, list(copies))


def mean_info(infos: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Average each number over the lanes that report it; equal numbers are returned exactly."""
    if len(infos) == 1:
        return dict(infos[0])
    numbers: dict[str, list[float]] = {}
    for info in infos:
        for name, value in info.items():
            numbers.setdefault(name, []).append(value)
    return {name: values[0] if values.count(values[0]) == len(values) else float(np.mean(values)) for name, values in numbers.items()}


def make_world(env: Any, num_envs: int, seed: int) -> VectorEnv:
    """Make `num_envs` copies of anything that `make_vector_env` accepts; an instance is used as the only copy and not closed."""
    source = env_source(env)
    return make_vector_env(for_evaluation(source, num_envs), 1 if source.is_instance else num_envs, seed=seed)


@contextmanager
def opened(env: Any, num_envs: int, seed: int) -> Iterator[VectorEnv]:
    """Make the environments and close them at the end; a `VectorEnv` is used as it is and stays open."""
    source = env_source(env)
    if source.kind == "vector":
        yield source.given
        return
    made = make_world(source, num_envs, seed)
    try:
        yield made
    finally:
        made.close()


def for_evaluation(given: Any, num_envs: int) -> Any:
    """Adapt what was handed over to evaluation: its own number of copies, at most as many workers, and whole Atari games."""
    env = env_source(given)
    if env.kind == "gymnasium":
        return _Borrowed(env.given)
    if env.kind == "pettingzoo":
        from pettingzoo.utils import BaseParallelWrapper  # an extra, installed where there is such an environment

        class BorrowedTeam(BaseParallelWrapper):  # type: ignore[misc]
            def close(self) -> None:
                """Leave the environment open."""

        team = as_team(env.given)
        return Team(BorrowedTeam(team.env), team.max_steps)
    if not env.is_config:
        return env
    source = EnvConfig(id=env.given) if env.kind == "id" else env.given
    if vectorised(source) is not None:  # all copies step together: workers would only slow it down
        return source.replace(num_envs=num_envs, num_workers=0, help_workers=False)
    workers = source.num_workers if source.num_workers == "auto" else min(source.num_workers, num_envs)
    helps = source.help_workers and workers != "auto" and 1 <= workers < num_envs
    config = source.replace(num_envs=num_envs, num_workers=workers, help_workers=helps)
    if not config.atari:
        return config
    # Training ends Atari episodes at lost lives and clips rewards to their signs; scores are of whole games with the true rewards.
    preprocessing = {"noop_max": 30, "frame_skip": 4, "screen_size": 84, "grayscale_obs": True, "terminal_on_life_loss": False}
    limit = config.max_episode_steps
    wrappers = (
        WrapperConfig(name="AtariPreprocessing", kwargs=preprocessing),
        *(() if limit is None else (WrapperConfig(name="TimeLimit", kwargs={"max_episode_steps": limit}),)),
        *config.wrappers,
    )
    return config.replace(atari=False, max_episode_steps=None, kwargs={**config.kwargs, "frameskip": 1}, wrappers=wrappers)


class _Borrowed(gym.Wrapper[Any, Any, Any, Any]):
    """The caller's environment, which is not closed."""

    def close(self) -> None:
        """Leave the environment open."""
