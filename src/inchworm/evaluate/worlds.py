"""The environments that policies are scored on, made for that and closed afterwards. Serves the evaluator, matches and suites."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym

from inchworm.config import EnvConfig, WrapperConfig
from inchworm.env.native import SKIRMISH, native_pays
from inchworm.env.teams import is_team_env
from inchworm.env.vector_env import make_vector_env
from inchworm.protocols import VectorEnv


def make_world(source: Any, num_envs: int, seed: int) -> VectorEnv:
    """`num_envs` copies of whatever `make_vector_env` takes; of a single environment there is one, and it is left open for its owner."""
    copies = 1 if isinstance(source, gym.Env) or is_team_env(source) else num_envs
    return make_vector_env(for_evaluation(source, num_envs), copies, seed=seed)


@contextmanager
def opened(source: Any, num_envs: int, seed: int) -> Iterator[VectorEnv]:
    """The environments while they are needed; a `VectorEnv` is taken as it is and stays open."""
    if isinstance(source, VectorEnv):
        yield source
        return
    env = make_world(source, num_envs, seed)
    try:
        yield env
    finally:
        env.close()


def for_evaluation(source: Any, num_envs: int) -> Any:
    """A run's env config as evaluation needs it: its own number of copies, and no more workers than those."""
    if isinstance(source, gym.Env):
        return _Borrowed(source)
    if is_team_env(source):
        from inchworm.evaluate.borrowed import borrowed_team  # which imports PettingZoo

        return borrowed_team(source)
    if not isinstance(source, EnvConfig):
        return source
    if source.id == SKIRMISH and native_pays(source):  # all arenas step as one here: workers would change no number, and take longer
        return source.replace(num_envs=num_envs, num_workers=0, help_workers=False)
    workers = source.num_workers if source.num_workers == "auto" else min(source.num_workers, num_envs)
    helps = source.help_workers and workers != "auto" and 1 <= workers < num_envs
    env = source.replace(num_envs=num_envs, num_workers=workers, help_workers=helps)
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


class _Borrowed(gym.Wrapper[Any, Any, Any, Any]):
    """Somebody's environment: played, and left open for them."""

    def close(self) -> None:
        """Not ours to close."""
