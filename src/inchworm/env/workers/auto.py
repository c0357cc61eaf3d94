"""`env.num_workers: auto`: measure an environment briefly and choose how many processes step its copies.

The choice affects only the speed: the results of a run are the same with any number of workers.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from inchworm.config.sections import EnvConfig
from inchworm.env.make import make_env
from inchworm.env.registry import ENVPOOL, is_vector_only, vectorised
from inchworm.env.restore import Env
from inchworm.env.source import InProcessVectorEnv
from inchworm.env.vector_env import random_actions

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return how many cores this process may use at once, at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = cpu_quota(_CGROUPS)
    return max(1, cores if quota is None else min(cores, int(quota)))


def cpu_quota(root: Path) -> float | None:
    """Return how many cores the quota of a control group (as of a container) grants, or None without one."""

    def words(*files: str) -> list[str]:
        try:
            return [word for file in files for word in (root / file).read_text(encoding="ascii").split()]
        except OSError:  # another system, another version, or no permission
            return []

    found = [words("cpu.max")]  # cgroups version 2: quota and period in one file
    found += [words(f"{group}/cpu.cfs_quota_us", f"{group}/cpu.cfs_period_us") for group in ("cpu", "cpu,cpuacct")]  # version 1
    limits = [int(pair[0]) / int(pair[1]) for pair in found if len(pair) == 2 and pair[0] != "max" and int(pair[0]) > 0]
    return min(limits, default=None)


_MEASURE_SECONDS = 0.3
_MEASURE_STEPS = 200
_WARM_UP_STEPS = 5
"""The first steps load and allocate, and are not counted."""

# The cost of one exchange with the workers besides the steps themselves, while this process steps a share too. Measured with
# benchmarks/vector_envs.py on 2 cores: 8 HalfCheetahs take 320 µs in one process and 200 µs with a worker (160 µs of them stepping),
# 8 CartPoles 75 to 84 µs and 83 µs (40 µs).
_EXCHANGE_SECONDS = 30e-6
_EXCHANGE_SECONDS_PER_WORKER = 10e-6

_LEAST_GAIN = 1.3
"""Workers cost memory and start-up time, so they must be faster by this factor."""
_TOLERANCE = 1.05
"""Fewer workers are preferred to more that are faster by less than this factor."""


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """How many workers, the reason in a sentence, and whether this process steps a share too."""

    num_workers: int
    reason: str
    help_workers: bool = False


def choose_num_workers(config: EnvConfig, *, cores: int | None = None) -> WorkerChoice:
    """Resolve `env.num_workers: auto`, measuring the environment for about 0.3 s where the answer depends on its speed.

    `cores` overrides the machine's number.
    """
    if config.num_workers != "auto":
        return WorkerChoice(config.num_workers, f"{_workers(config.num_workers)} (env.num_workers={config.num_workers})")
    if config.id.startswith(ENVPOOL):
        return WorkerChoice(0, "no worker processes: EnvPool steps its copies in threads")
    if is_vector_only(config.id) or vectorised(config) is not None:
        return WorkerChoice(0, f"no worker processes: all {config.num_envs} copies of {config.id} are stepped together")
    cores = usable_cores() if cores is None else cores
    if config.num_envs == 1 or cores == 1:
        return WorkerChoice(0, f"no worker processes: there is only one {'copy' if config.num_envs == 1 else 'core'}")
    return choose_by_step(step_seconds(lambda: make_env(config)), config.num_envs, cores)


def choose_by_step(seconds: float, num_envs: int, cores: int) -> WorkerChoice:
    """Choose for an environment whose step takes `seconds`: as many processes as help, of which this one is one."""
    alone = num_envs * seconds
    predicted = {workers: lockstep_seconds(seconds, num_envs, workers) for workers in range(1, min(num_envs, cores))}
    fastest = min(predicted.values())
    workers, together = next((workers, cost) for workers, cost in predicted.items() if cost <= _TOLERANCE * fastest)
    if alone < _LEAST_GAIN * together:
        compared = f"{_time(alone)} per vector step in this process, about {_time(together)} with {_workers(workers)}"
        return WorkerChoice(0, f"no worker processes: {compared}")
    saved = f"about {_time(together)} per vector step instead of {_time(alone)}"
    return WorkerChoice(workers, f"using {_workers(workers)} plus this one: {saved}", help_workers=True)


def lockstep_seconds(seconds: float, num_envs: int, workers: int) -> float:
    """Predict the time of a step of all copies in `workers` processes and this one: the largest share, and the exchange."""
    largest = -(-num_envs // (workers + 1))
    return largest * seconds + _EXCHANGE_SECONDS + workers * _EXCHANGE_SECONDS_PER_WORKER


def step_seconds(make: Callable[[], Env]) -> float:
    """Measure the time of a step of one copy with random legal actions: the median step, and its part of the resets."""
    rng = np.random.default_rng(0)
    measured: list[tuple[float, bool]] = []  # (seconds, did an episode end)
    with InProcessVectorEnv(make, 1) as env:
        env.reset()
        for actions in itertools.islice(random_actions(env, rng, _MEASURE_SECONDS), _WARM_UP_STEPS + _MEASURE_STEPS):
            began = time.perf_counter()
            step = env.step(actions)
            measured.append((time.perf_counter() - began, bool(step.ended)))
    measured = measured[_WARM_UP_STEPS:] or measured
    typical = median([taken for taken, ended in measured if not ended] or [taken for taken, _ in measured])
    return typical + sum(max(0.0, taken - typical) for taken, ended in measured if ended) / len(measured)


def _workers(count: int) -> str:
    return "no worker processes" if count == 0 else "1 worker process" if count == 1 else f"{count} worker processes"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
