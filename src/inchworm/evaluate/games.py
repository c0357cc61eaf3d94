"""The episodes of one evaluation while they are played. Serves the evaluator, matches and suites.

An episode is one game of one copy of the environment, however many lanes the copy has. Episode i belongs to copy i % n and has a
seed of its own, and every copy plays exactly its share: a copy whose games are short does not play more of them, so short games count
no more than long ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from inchworm.env.opponents import TeamVectorEnv
from inchworm.errors import BadNumberError, ConfigError
from inchworm.evaluate.stats import EvalStats
from inchworm.protocols import Actor, VectorEnv
from inchworm.seeding import episode_seed
from inchworm.types import EndedEpisode, EnvStep

Progress = Callable[[int], None]
"""Told how many episodes are finished, whenever one is."""


def lanes_of_a_copy(env: VectorEnv) -> int:
    """How many adjacent lanes each copy has; one where the environment does not say."""
    return env.lanes_per_copy if isinstance(env, TeamVectorEnv) else 1


def num_copies(env: VectorEnv) -> int:
    """How many games run side by side."""
    return env.num_lanes // lanes_of_a_copy(env)


def check_episodes(episodes: int) -> None:
    """Refuse an evaluation of nothing."""
    if episodes < 1:
        raise ConfigError(f"an evaluation of {episodes} episodes says nothing; give 1 or more")


class Game:
    """The games of one evaluation: `seeds` has one per episode. A copy without one left gets some fixed seed derived from `idle_seed`."""

    def __init__(self, env: VectorEnv, seeds: Sequence[int], idle_seed: int) -> None:
        self.env = env
        self.seeds = seeds
        self.idle_seed = idle_seed
        self.width = lanes_of_a_copy(env)
        self.copies = num_copies(env)
        self.returns = np.zeros((len(seeds), self.width))  # [episodes, k]
        self.lengths = np.zeros(len(seeds), np.int64)  # [episodes]
        self.infos: list[Mapping[str, float]] = [{} for _ in seeds]
        self.playing = np.arange(self.copies)  # [E] which episode each copy plays; past the last one it idles
        self.finished = 0

    def play(self, policy: Actor, rng: np.random.Generator, deterministic: bool, progress: Progress | None = None) -> EvalStats:
        """Step all copies together until every episode is over. Idle copies step along, because the batch must stay the same."""
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
        return self._stats(deterministic)

    def _stats(self, deterministic: bool) -> EvalStats:
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
        """Book the episodes that ended and begin the next ones of their copies, with the seeds planned for them."""
        by_copy: dict[int, list[EndedEpisode]] = {}
        for ended in step.ended:
            by_copy.setdefault(ended.lane // self.width, []).append(ended)
        again = []
        for copy, lanes in by_copy.items():
            episode = int(self.playing[copy])
            if episode >= len(self.seeds):
                continue
            self._check_finite(episode, copy)
            self.infos[episode] = mean_info([lane.info for lane in lanes])
            self.playing[copy] += self.copies
            self.finished += 1
            if self.playing[copy] < len(self.seeds):
                again.append(copy)
        if progress is not None:
            progress(self.finished)
        return self._reset(again) if again else step

    def _check_finite(self, episode: int, copy: int) -> None:
        for place, value in enumerate(self.returns[episode].tolist()):
            if not np.isfinite(value):
                raise BadNumberError(
                    f"the return of evaluation episode {episode} (lane {copy * self.width + place}, seed {self.seeds[episode]}) is "
                    f"{value}; inchworm check-env looks for the step"
                )

    def _reset(self, copies: Sequence[int]) -> EnvStep:
        """New episodes in these copies; a copy without one left gets some fixed seed, so that nothing depends on chance."""
        playing = [(copy, int(self.playing[copy])) for copy in copies]
        seeds = [self.seeds[e] if e < len(self.seeds) else episode_seed(self.idle_seed, copy, 0) for copy, e in playing]
        return self.env.reset(seeds, list(copies))


def mean_info(infos: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """The mean of each number over the lanes that gave it; where all gave the same, exactly that."""
    if len(infos) == 1:
        return dict(infos[0])
    numbers: dict[str, list[float]] = {}
    for info in infos:
        for name, value in info.items():
            numbers.setdefault(name, []).append(value)
    return {name: values[0] if values.count(values[0]) == len(values) else float(np.mean(values)) for name, values in numbers.items()}
