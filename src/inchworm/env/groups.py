"""Step 2 of 9, twice side by side: the copies of an environment as groups that step in turns, one while the policy acts for another.

A group is a vector env of its own, with workers of its own; its copies are numbered globally, so that every episode has the
seed that it has without groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import gymnasium as gym

from inchworm.config.sections import EnvConfig
from inchworm.core.errors import EnvError
from inchworm.core.protocols import VectorEnv
from inchworm.env.make import Env
from inchworm.env.source import DEFAULT_NUM_ENVS, make_vector_env
from inchworm.env.teams import is_team_env


def make_groups(
    env: EnvConfig | str | Env | Callable[[], Env] | VectorEnv,
    num_envs: int | None = None,
    num_workers: int | Literal["auto"] | None = None,
    groups: int = 1,
    *,
    seed: int = 0,
    worker_timeout: float | None = None,
    worker_restarts: int | None = None,
    max_replay_steps: int = 100_000,
    first_copy: int = 0,
    global_state: bool = False,
) -> tuple[VectorEnv, ...]:
    """The copies of an environment in `groups` vector envs: the first part of the copies, the next part, and so on.

    The arguments are those of `make_vector_env`, which makes the one vector env of `groups=1`. Workers are shared out like
    copies, but every group has at least one, unless all copies step in this process.
    """
    options = {
        "seed": seed,
        "worker_timeout": worker_timeout,
        "worker_restarts": worker_restarts,
        "max_replay_steps": max_replay_steps,
        "global_state": global_state,
    }
    if groups == 1:
        return (make_vector_env(env, num_envs, num_workers, first_copy=first_copy, **options),)  # type: ignore[arg-type]
    copies, workers = _layout(env, num_envs, num_workers)
    if not 1 <= groups <= copies:
        raise EnvError(f"{groups} groups need as many copies of the environment or more, but there are {copies}; raise env.num_envs")
    made: list[VectorEnv] = []
    try:
        for own, first, share in _shares(copies, workers, groups):
            made.append(make_vector_env(env, own, share, first_copy=first_copy + first, **options))  # type: ignore[arg-type]
    except BaseException:
        for group in made:
            group.close()
        raise
    return tuple(made)


def _layout(env: Any, num_envs: int | None, num_workers: int | Literal["auto"] | None) -> tuple[int, int]:
    """(copies, workers) of all groups together."""
    if isinstance(env, VectorEnv | gym.Env | gym.vector.VectorEnv) or is_team_env(env):
        raise EnvError("an environment that is made already cannot be split into groups; give its id or a factory, or set collect.groups=1")
    config = env if isinstance(env, EnvConfig) else EnvConfig(num_envs=DEFAULT_NUM_ENVS)
    given = {name: value for name, value in (("num_envs", num_envs), ("num_workers", num_workers)) if value is not None}
    config = config.replace(**given)
    return config.num_envs, 0 if config.num_workers == "auto" else config.num_workers


def _shares(copies: int, workers: int, groups: int) -> list[tuple[int, int, int]]:
    """(copies, first copy, workers) of each group."""
    shares = []
    for index in range(groups):
        first, end = index * copies // groups, (index + 1) * copies // groups
        share = (index + 1) * workers // groups - index * workers // groups
        shares.append((end - first, first, min(max(share, 1), end - first) if workers else 0))
    return shares
