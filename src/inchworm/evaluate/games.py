"""Seeded evaluation episodes, the environments they are played in, and a record of the first of them.

An episode is one game of one copy of the environment, however many lanes the copy has. Episode i belongs to copy i % n and has its
own seed, and every copy plays a fixed share of the episodes: if the next free copy took the next episode, short games would be
over-represented.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import numpy as np

from inchworm.config.sections import EnvConfig, WrapperConfig
from inchworm.core.errors import BadNumberError, ConfigError, EnvError
from inchworm.core.protocols import Actor, VectorEnv
from inchworm.core.seeding import episode_seed, make_stream
from inchworm.core.spaces import map_tree
from inchworm.core.types import EnvStep, Tree
from inchworm.env.registry import vectorised
from inchworm.env.source import InProcessVectorEnv, env_source, make_vector_env
from inchworm.evaluate.stats import UNDECIDED, EvalStats, RecordedEpisode
from inchworm.policy.composite import CompositePolicy
from inchworm.rollout.buffer import hold_memory

Progress = Callable[[int], None]
"""Called with the number of finished episodes whenever one ends."""

EPISODE_LIMIT = 100_000
"""Steps after which an episode is cut off if neither the config nor the environment has a limit."""


def episode_limit(env: Any, asked: int | None) -> int:
    """Return the number of steps after which an episode is cut off: the one asked for, else the environment's own, else `EPISODE_LIMIT`."""
    return asked or env_source(env).max_episode_steps or EPISODE_LIMIT


def check_episodes(episodes: int) -> None:
    """Reject an evaluation without episodes."""
    if episodes < 1:
        raise ConfigError(f"episodes={episodes} must be 1 or more")


def play_games(
    policy: Actor,
    env: VectorEnv,
    seeds: Sequence[int],
    seed: int,
    *,
    deterministic: bool,
    max_episode_steps: int,
    purpose: str = "evaluation",
    progress: Progress | None = None,
) -> EvalStats:
    """Play one game for each of `seeds`; actions are sampled from the stream of `seed` and `purpose`.

    A game that has not ended after `max_episode_steps` is cut off there and marked as capped: it has no last info, so where other games
    report a win or a success it is a draw and not a success. Copies without a game left are stepped too, because another batch size would
    change the last bits.
    """
    if isinstance(policy, CompositePolicy) and env.agent_spaces:
        policy.fit(env)
    width, copies, total = env.lanes_per_copy, env.num_envs, len(seeds)
    returns, lengths = np.zeros((total, width)), np.zeros(total, np.int64)  # [episodes, k], [episodes]
    infos: list[Mapping[str, float]] = [{} for _ in seeds]
    capped = np.zeros(total, np.bool_)  # [episodes]
    playing = np.arange(copies)  # [E] the episode that each copy plays; past the last one it is idle
    rng, state, finished = make_stream(seed, purpose), policy.initial_state(env.num_lanes), 0
    first = [seeds[copy] if copy < total else episode_seed(seed, copy, 0) for copy in range(copies)]
    step = env.reset(first, list(range(copies)))
    while finished < total:
        acted = policy.act(step.observations, state, step.episode_starts, rng, deterministic=deterministic)
        state = hold_memory(acted.state, state, step.valid) if env.turn_based else acted.state
        step = env.step(acted.env_actions)
        counts = playing < total  # [E]
        returns[playing[counts]] += step.rewards.reshape(copies, width)[counts]
        lengths[playing[counts]] += 1
        ended: dict[int, list[Mapping[str, float]]] = {}  # copy -> the last infos of its lanes
        for lane in step.ended:
            if counts[lane.lane // width]:
                ended.setdefault(lane.lane // width, []).append(lane.info)
        active = np.flatnonzero(counts)
        for copy in active[lengths[playing[active]] >= max_episode_steps].tolist():
            if copy not in ended:
                ended[copy], capped[playing[copy]] = [], True
        if not ended:
            continue
        for copy, lane_infos in ended.items():
            episode = int(playing[copy])
            for number, value in enumerate(returns[episode].tolist(), copy * width):
                if not np.isfinite(value):
                    raise BadNumberError(
                        f"the return of evaluation episode {episode} (lane {number}, seed {seeds[episode]}) is {value}; "
                        "run inchworm check-env to find the step"
                    )
            infos[episode] = mean_info(lane_infos)
        playing[list(ended)] += copies
        finished += len(ended)
        if progress is not None:
            progress(finished)
        again = [copy for copy in ended if playing[copy] < total]
        if env.resets_itself:  # the next episode has begun, unless this one was cut off here
            if any(capped[playing[copy] - copies] for copy in again):
                raise EnvError(
                    f"an evaluation episode was cut off after {max_episode_steps:,} steps, and this vector env begins episodes only by "
                    "itself; set a larger max_episode_steps, or give an id or a factory, of which copies are made here"
                )
        elif again:
            step = env.reset([seeds[playing[copy]] for copy in again], again)
    names = {name for info in infos for name in info}
    for episode in np.flatnonzero(capped).tolist():
        infos[episode] = {name: value for name, value in UNDECIDED.items() if name in names}
    return EvalStats(
        returns=returns.sum(axis=1),
        lengths=lengths,
        seeds=np.array(seeds),
        infos={name: np.array([info.get(name, np.nan) for info in infos]) for name in names},
        deterministic=deterministic,
        agent_returns=returns,
        capped=capped,
    )


def mean_info(infos: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Average each number over the lanes that report it; equal numbers are returned exactly."""
    numbers: dict[str, list[float]] = {}
    for info in infos:
        for name, value in info.items():
            numbers.setdefault(name, []).append(value)
    return {name: values[0] if values.count(values[0]) == len(values) else float(np.mean(values)) for name, values in numbers.items()}


def make_world(env: Any, num_envs: int, seed: int) -> VectorEnv:
    """Make `num_envs` copies of anything that `make_vector_env` accepts; an instance is used as it is and not closed."""
    source = env_source(env)
    if source.is_instance:
        return _BorrowedVectorEnv(lambda: source.given, 1, seed=seed)
    if source.kind in ("gymnasium.vector", "stable_baselines3"):
        adapted: Any = make_vector_env(source, seed=seed)
        adapted.is_borrowed = True
        return adapted  # type: ignore[no-any-return]
    if not source.is_config:
        return make_vector_env(source, num_envs, seed=seed)
    config = EnvConfig(id=source.given) if source.kind == "id" else source.given
    return make_vector_env(for_evaluation(config, num_envs), num_envs, seed=seed)


class _BorrowedVectorEnv(InProcessVectorEnv):
    """One environment of the caller's, which is not closed."""

    def close(self) -> None:
        """Leave the environment open."""


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


def for_evaluation(config: EnvConfig, num_envs: int) -> EnvConfig:
    """Adapt a config to evaluation: its own number of copies, at most as many workers, and whole Atari games."""
    if vectorised(config) is not None:  # all copies step together: workers would only slow it down
        return config.replace(num_envs=num_envs, num_workers=0, help_workers=False)
    workers = config.num_workers if config.num_workers == "auto" else min(config.num_workers, num_envs)
    helps = config.help_workers and workers != "auto" and 1 <= workers < num_envs
    config = config.replace(num_envs=num_envs, num_workers=workers, help_workers=helps)
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


class RecordedVectorEnv:
    """Records the first episodes that are played in a vector env, when asked to; everything else is forwarded to it."""

    def __init__(self, inner: VectorEnv) -> None:
        self._inner = inner
        self._episodes: dict[int, RecordedEpisode] = {}  # by number
        self._running: dict[int, RecordedEpisode] = {}  # by copy
        self._count = 0
        self._next: list[int] = []  # the number of the next episode of each copy

    def record(self, count: int) -> None:
        """Record the first `count` episodes that begin from now on; episode i is played by copy i % n, as in every evaluation."""
        self._episodes, self._running, self._count = {}, {}, count
        self._next = list(range(self._inner.num_envs))

    def finish(self, lengths: Sequence[int]) -> list[RecordedEpisode]:
        """Stop recording; return the recorded episodes, which have these lengths."""
        episodes = [episode for _, episode in sorted(self._episodes.items())]
        for episode, length in zip(episodes, lengths):
            if len(episode.actions) > length or not episode.ended:  # cut off: the copy was stepped on until all others had ended
                episode.info = {}
            del episode.actions[length:], episode.rewards[length:]
        self._episodes, self._running, self._count = {}, {}, 0
        return episodes

    def reset(self, seeds: Sequence[int] | None = None, indices: Sequence[int] | None = None) -> EnvStep:
        """Forward; the episodes that begin are recorded if they are among the first."""
        for copy, seed in zip(indices if indices is not None else range(self._inner.num_envs), seeds or ()):
            self._running.pop(copy, None)
            if self._count and self._next[copy] < self._count:
                self._running[copy] = self._episodes[self._next[copy]] = RecordedEpisode(int(seed))
                self._next[copy] += self._inner.num_envs
        return self._inner.reset(seeds, indices)

    def send(self, actions: Tree) -> None:
        """Forward, and record the actions."""
        for copy, episode in self._running.items():
            episode.actions.append(map_tree(np.array, map_tree(itemgetter(self._lanes(copy)), actions)))
        self._inner.send(actions)

    def recv(self) -> EnvStep:
        """Forward, and record the rewards; an episode that has ended is complete."""
        step = self._inner.recv()
        if self._running:
            for copy, episode in self._running.items():
                episode.rewards.append(step.rewards[self._lanes(copy)].copy())
            for ended in step.ended:
                if ended.lane % self._inner.lanes_per_copy == 0:
                    complete = self._running.pop(ended.lane // self._inner.lanes_per_copy, None)
                    if complete is not None:
                        complete.info, complete.ended = ended.info, True
        return step

    def step(self, actions: Tree) -> EnvStep:
        """`send`, then `recv`."""
        self.send(actions)
        return self.recv()

    def _lanes(self, copy: int) -> slice:
        width = self._inner.lanes_per_copy
        return slice(copy * width, (copy + 1) * width)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
