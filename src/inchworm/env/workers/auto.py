"""Serves step 2: `num_workers: auto` looks at an environment for a moment and chooses how many processes step its copies.

The choice is about time alone: the numbers of a run are the same with any number of workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import gymnasium as gym
import numpy as np

from inchworm.config.sections import EnvConfig
from inchworm.core.spaces import zeros
from inchworm.core.types import EnvStep, Tree
from inchworm.env.foreign import ENVPOOL
from inchworm.env.make import Env, make_env
from inchworm.env.source import InProcessVectorEnv
from inchworm.env.step_arrays import map_tree
from inchworm.env.teams import is_team_env
from inchworm.env.trial import put_legal_actions
from inchworm.worlds.cartpole import native_pays

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """The cores that this process may use at once, at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = cpu_quota(_CGROUPS)
    return max(1, cores if quota is None else min(cores, int(quota)))


def cpu_quota(root: Path) -> float | None:
    """How many cores a control group's quota grants, as a container's limit does; none without one."""
    found = [quota for quota in (_version_2(root / "cpu.max"), _version_1(root / "cpu"), _version_1(root / "cpu,cpuacct")) if quota]
    return min(found, default=None)


def _version_2(file: Path) -> float | None:
    words = _words(file)
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _version_1(directory: Path) -> float | None:
    quota, period = _words(directory / "cpu.cfs_quota_us"), _words(directory / "cpu.cfs_period_us")
    return int(quota[0]) / int(period[0]) if quota and period and int(quota[0]) > 0 else None


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").split()
    except OSError:  # another system, another version, or no right to look
        return []


_LOOK_SECONDS = 0.3
_LOOK_STEPS = 200
_WARM_UP = 5
"""First steps, which load and allocate, and are not counted."""

# What one exchange with W workers costs besides the steps themselves, while this process steps a share too: measured by
# benchmarks/vector_envs.py on 2 cores, 8 HalfCheetahs take 320 µs here and 200 with a worker (160 of them stepping), 8 CartPoles
# 75 to 84 and 83 (40).
_EXCHANGE_SECONDS = 30e-6
_EXCHANGE_SECONDS_PER_WORKER = 10e-6

_LEAST_GAIN = 1.3
"""Workers cost memory and start-up, so they must save this much."""
_ALIKE = 1.05
"""Fewer workers are preferred to more that save less than this."""


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """How many workers, and why, as a sentence for people; whoever chooses by the clock lets this process help them."""

    num_workers: int
    reason: str
    help_workers: bool = False


def choose_num_workers(config: EnvConfig, env: Env | Callable[[], Env] | None = None, *, cores: int | None = None) -> WorkerChoice:
    """What `env.num_workers: auto` means here: measures the environment for at most about 0.3 s, unless the answer needs no measuring.

    `env` is an environment or a factory that was given beside the config, if there is one; `cores` overrides what the machine has.
    """
    if config.num_workers != "auto":
        return WorkerChoice(config.num_workers, f"{_workers(config.num_workers)}: env.num_workers says so")
    if isinstance(env, gym.Env) or is_team_env(env):
        return WorkerChoice(0, "no workers: an environment that was handed over stays in this process")
    if env is None and config.id.startswith(ENVPOOL):
        return WorkerChoice(0, "no workers: EnvPool steps its copies in threads of its own")
    if env is None and native_pays(config):
        return WorkerChoice(0, f"no workers: all {config.num_envs} copies of {config.id} are stepped as one")
    cores = usable_cores() if cores is None else cores
    if config.num_envs == 1 or cores == 1:
        return WorkerChoice(0, f"no workers: there is one {'copy' if config.num_envs == 1 else 'core'}")
    return choose_by_step(step_seconds(env or (lambda: make_env(config))), config.num_envs, cores)


def choose_by_step(seconds: float, num_envs: int, cores: int) -> WorkerChoice:
    """The choice for an environment whose step takes so long: as many processes as help, of which this one is one."""
    alone = num_envs * seconds
    predicted = {workers: lockstep_seconds(seconds, num_envs, workers) for workers in range(1, min(num_envs, cores))}
    least = min(predicted.values())
    workers, together = next((workers, cost) for workers, cost in predicted.items() if cost <= _ALIKE * least)
    looked = f"a step takes {_time(seconds)}, {num_envs} copies one after another {_time(alone)}"
    helped = f"{_workers(workers)} and this process"
    if alone < _LEAST_GAIN * together:
        return WorkerChoice(0, f"no workers: {looked}, and in {helped} about {_time(together)}")
    return WorkerChoice(workers, f"{helped}: {looked}, together about {_time(together)}", help_workers=True)


def lockstep_seconds(seconds: float, num_envs: int, workers: int) -> float:
    """What a step of all copies takes in so many workers and this process: the fullest one's copies, and the exchange."""
    fullest = -(-num_envs // (workers + 1))
    return fullest * seconds + _EXCHANGE_SECONDS + workers * _EXCHANGE_SECONDS_PER_WORKER


def step_seconds(make: Callable[[], Env]) -> float:
    """The time of a step of one copy, by random legal actions: the median step, and each step's part of the resets."""
    rng = np.random.default_rng(0)
    looks: list[tuple[float, bool]] = []  # (seconds, did an episode end)
    with InProcessVectorEnv(make, 1) as env:
        step, actions = env.reset(), zeros(env.action_space, (env.num_lanes,))
        until = time.perf_counter() + _LOOK_SECONDS
        while len(looks) < _WARM_UP + _LOOK_STEPS and time.perf_counter() < until:
            put_legal_actions(env.action_space, step.observations, rng, actions, range(env.num_lanes))
            taken, step = _timed(env, map_tree(np.copy, actions))
            looks.append((taken, bool(step.ended)))
    looks = looks[_WARM_UP:] or looks
    typical = median([taken for taken, ended in looks if not ended] or [taken for taken, _ in looks])
    return typical + sum(max(0.0, taken - typical) for taken, ended in looks if ended) / len(looks)


def _timed(env: InProcessVectorEnv, actions: Tree) -> tuple[float, EnvStep]:
    began = time.perf_counter()
    step = env.step(actions)
    return time.perf_counter() - began, step


def _workers(count: int) -> str:
    return "no workers" if count == 0 else "1 worker" if count == 1 else f"{count} workers"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
