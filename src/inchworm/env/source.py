"""What a user may hand over as an environment, decided once, and the vector env that is made from it, with as many worker processes as pay.

`env_source` sorts an id, an `EnvConfig`, a factory, an environment or a vector env into one `EnvSource`; everything else asks that.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from inchworm.config.sections import EnvConfig
from inchworm.core.errors import EnvError
from inchworm.core.protocols import VectorEnv, complete_vector_env
from inchworm.env.foreign import GymVectorEnv, adapt_vector_env
from inchworm.env.local import LocalCopies
from inchworm.env.make import make_env, make_from, wrap_given
from inchworm.env.pettingzoo_copy import is_team_env
from inchworm.env.registry import ENVPOOL, device_maker, is_vector_only, vector_maker, vectorised
from inchworm.env.restore import Env
from inchworm.env.sb3 import VecEnv, adapt_vec_env, is_vec_env
from inchworm.env.vector_env import LaneVectorEnv, random_actions
from inchworm.env.workers.pool import WorkerPool

__all__ = ["EnvSource", "InProcessVectorEnv", "VectorEnv", "WorkerVectorEnv", "env_source", "is_vector_env", "make_vector_env"]

_VECTOR_ENV = ("num_lanes", "send", "recv", "load_state_dict")
"""What a `VectorEnv` has and no other kind of environment."""


@dataclass(frozen=True, slots=True)
class EnvSource:
    """An environment as it was handed over."""

    given: Any
    kind: Literal["id", "config", "factory", "gymnasium", "pettingzoo", "gymnasium.vector", "stable_baselines3", "device", "vector"]

    @property
    def is_config(self) -> bool:
        """Whether it is plain data, so that any process can make it."""
        return self.kind in ("id", "config")

    @property
    def is_instance(self) -> bool:
        """Whether it is one environment: a single copy that stays in this process."""
        return self.kind in ("gymnasium", "pettingzoo")

    @property
    def is_vector(self) -> bool:
        """Whether it is a vector env, ours or another library's."""
        return self.kind in ("gymnasium.vector", "stable_baselines3", "device", "vector")

    @property
    def can_be_copied(self) -> bool:
        """Whether copies can be made from it, here or in workers."""
        return self.is_config or self.kind == "factory"

    @property
    def num_copies(self) -> int | None:
        """Number of copies of an environment that exists already; None if they are still to be made."""
        if self.is_instance:
            return 1
        given: Any = self.given.unwrapped if self.kind == "device" and isinstance(self.given, gym.Wrapper) else self.given
        return int(given.num_envs) if self.is_vector else None

    @property
    def max_episode_steps(self) -> int | None:
        """The step limit that the environment is registered with, or that its config sets; None if it has none or is still to be made."""
        if self.is_config:
            config = EnvConfig(id=self.given) if self.kind == "id" else self.given
            spec = gym.registry.get(config.id)
            return config.max_episode_steps or (None if spec is None else spec.max_episode_steps)
        spec = getattr(self.given, "spec", None) if self.kind in ("gymnasium", "gymnasium.vector") else None
        return getattr(spec, "max_episode_steps", None)  # an EnvPool's spec is of another kind

    @property
    def name(self) -> str:
        """An id for the run's record; for an environment without one its class or function, as `module:name` where copies have teams."""
        given: Any = self.given
        if self.is_config:
            return given if self.kind == "id" else str(given.id)
        if self.kind == "gymnasium":
            return given.spec.id if given.spec is not None else type(given.unwrapped).__name__
        if self.kind == "pettingzoo" or (self.kind == "vector" and given.lanes_per_copy > 1):
            kind = type(given.unwrapped if self.kind == "pettingzoo" else given)
            return f"{kind.__module__}:{kind.__qualname__}"
        name = getattr(given, "__qualname__", None)
        return type(given).__name__ if name is None else f"{given.__module__}:{name}"

    def with_config(self, config: EnvConfig) -> EnvSource:
        """The same source with a config's limit and wrappers; an id becomes the config, a vector env stays as it is."""
        if self.is_config:
            return EnvSource(config, "config")
        if self.is_vector:
            return self
        if self.kind == "factory":
            return EnvSource(partial(make_from, self.given, config), "factory")
        return EnvSource(wrap_given(self.given, config), self.kind)

    def for_evaluation(self, config: EnvConfig) -> EnvSource | None:
        """A source of separate copies for evaluation; None where only the environments that train exist."""
        if self.can_be_copied:
            return self.with_config(config)
        spec = self.given.spec if self.kind == "gymnasium" else None
        return None if spec is None else EnvSource(lambda: wrap_given(gym.make(spec), config), "factory")


def is_vector_env(env: Any) -> bool:
    """Whether something is a vector env, ours or another library's."""
    ours = not isinstance(env, type) and all(getattr(env, name, None) is not None for name in _VECTOR_ENV)
    ours = ours and isinstance(env.num_lanes, int | np.integer)  # else it answers to any name, as mocks do
    return ours or isinstance(env, gym.vector.VectorEnv) or is_vec_env(env)


def is_device_env(env: Any) -> bool:
    """Whether something is a simulator whose lanes are on a device: it has a number of them, says which device, and steps."""
    if isinstance(env, type | str) or not callable(getattr(env, "step", None)):
        return False
    inner = env.unwrapped if isinstance(env, gym.Wrapper) else env
    device = getattr(inner, "device", None)
    of_torch = type(device).__module__.partition(".")[0] == "torch"
    return isinstance(getattr(inner, "num_envs", None), int | np.integer) and (of_torch or isinstance(device, str))


def env_source(env: Any) -> EnvSource:
    """Decide what was handed over."""
    if isinstance(env, EnvSource):
        return env
    if isinstance(env, str):
        return EnvSource(env, "id")
    if isinstance(env, EnvConfig):
        return EnvSource(env, "config")
    if is_device_env(env):  # before Gymnasium's vector envs: ManiSkill's is both
        ours = all(getattr(env, name, None) is not None for name in _VECTOR_ENV)
        return EnvSource(env, "vector" if ours else "device")
    if is_vector_env(env):  # before gymnasium.Env: an EnvPool is both
        if isinstance(env, gym.vector.VectorEnv):
            return EnvSource(env, "gymnasium.vector")
        return EnvSource(env, "stable_baselines3") if is_vec_env(env) else EnvSource(complete_vector_env(env), "vector")
    if is_team_env(env):
        return EnvSource(env, "pettingzoo")
    spaces = {} if isinstance(env, type) else {name: getattr(env, name, None) for name in ("observation_space", "action_space")}
    for name, space in spaces.items():
        looks_like_one = isinstance(env, gym.Env) or space is not None
        if looks_like_one and not isinstance(space, gym.Space):
            got = f"{name} of {type(env).__name__} is {type(space).__name__}"
            raise EnvError(f"{got}, not a Gymnasium space; set it to one such as Box")
    if isinstance(env, gym.Env):
        return EnvSource(env, "gymnasium")
    if callable(env):
        return EnvSource(env, "factory")
    raise EnvError(f"an environment must be an id, an EnvConfig, a gymnasium.Env, a factory or a VectorEnv; got {type(env).__name__}")


def make_vector_env(
    env: EnvConfig | str | Env | Callable[[], Env] | VectorEnv | GymVectorEnv | VecEnv | EnvSource,
    num_envs: int | None = None,
    num_workers: int | Literal["auto"] | None = None,
    *,
    seed: int = 0,
    worker_timeout: float | None = None,
    worker_restarts: int | None = None,
    max_replay_steps: int = 100_000,
    first_copy: int = 0,
    global_state: bool = False,
    keep_infos: Sequence[str] = (),
) -> VectorEnv:
    """Make many copies of an environment, stepped as one.

    `env` is an `EnvConfig`, a Gymnasium id or `package.module:make_env`, a factory, one environment (then there is exactly one
    copy, in this process), a `gymnasium.vector.VectorEnv`, an EnvPool or a Stable-Baselines3 `VecEnv`, or a `VectorEnv`, which is
    returned as it is. A factory may
    also make PettingZoo environments, parallel or AEC: a copy then has a lane for each of its agents, side by side, and with
    `global_state` its `state()` is read at every step, for a central critic. `keep_infos` names numbers of `info` that every step keeps
    (`EnvStep.infos`). `num_envs`, which counts copies, `num_workers`, `worker_timeout` and `worker_restarts` override the config's; 0
    workers and "auto" mean this process. Copies are numbered from `first_copy`, which with `seed` decides every episode's seed. The id
    `envpool:Name` has EnvPool make the copies, `gymnax:Name` JAX.
    """
    source = env_source(env)
    given: Any = source.given
    options: dict[str, Any] = {"seed": seed, "max_replay_steps": max_replay_steps, "first_copy": first_copy}
    if source.kind == "vector":
        if global_state and isinstance(given, LaneVectorEnv) and given.global_state_space is None:
            raise EnvError("the vector env was made without a global state; make it by make_vector_env(…, global_state=True)")
        missing = [name for name in keep_infos if name not in getattr(given, "kept_infos", ())]
        if missing:
            raise EnvError(f"the vector env does not keep {missing[0]!r} of its infos; make it by make_vector_env(…, keep_infos=…)")
        vector_env: VectorEnv = given
        return vector_env
    if source.is_vector:
        if global_state:
            raise EnvError(f"{type(given).__name__} has no global state for a central critic; give a PettingZoo environment with state()")
        if source.kind == "device":
            if keep_infos:
                raise EnvError(f"infos of {type(given).__name__}, a simulator on a device, are not kept; leave collect.keep_infos out")
            return device_maker()(given, **options)
        adapt = adapt_vector_env if source.kind == "gymnasium.vector" else adapt_vec_env
        return adapt(given, keep_infos=keep_infos, **options)
    reads: dict[str, Any] = {"global_state": global_state, "keep_infos": keep_infos}
    if source.is_instance:
        if num_envs not in (None, 1) or num_workers not in (None, 0, "auto"):
            raise EnvError(
                f"one environment is one lane in this process, but num_envs={num_envs} and num_workers={num_workers} were requested; "
                "give its id or a factory, so that it can be made several times"
            )
        return InProcessVectorEnv(lambda: given, 1, is_given=True, **reads, **options)
    overrides: dict[str, Any] = {"num_envs": num_envs, "num_workers": num_workers}
    overrides |= {"worker_timeout": worker_timeout, "worker_restarts": worker_restarts}
    config = given if source.kind == "config" else EnvConfig(id=given) if source.kind == "id" else EnvConfig()
    config = config.replace(**{name: value for name, value in overrides.items() if value is not None})
    make_together = vector_maker(config.id) if source.is_config else None
    if make_together is not None:
        return make_together(config, **reads, **options)
    if config.num_workers != "auto" and config.num_workers > 0:
        workers = {name: getattr(config, name) for name in ("help_workers", "worker_timeout", "worker_restarts")}
        make = config if source.is_config else given
        return WorkerVectorEnv(make, config.num_envs, config.num_workers, **reads, **workers, **options)
    world = vectorised(config) if source.is_config else None
    if world is not None and world.make_vector is not None and (world.has_teams or not global_state) and not keep_infos:
        return complete_vector_env(world.make_vector(config, global_state=global_state, **options))
    factory = partial(make_env, config) if source.is_config else given
    return InProcessVectorEnv(factory, config.num_envs, **reads, **options)


class InProcessVectorEnv(LaneVectorEnv):
    """`num_envs` copies in this process: the least overhead for environments whose step takes microseconds.

    One that `is_given`, the caller's own, is not reset before `reset` is called.
    """

    def __init__(
        self,
        make: Callable[[], Env],
        num_envs: int,
        *,
        global_state: bool = False,
        keep_infos: Sequence[str] = (),
        is_given: bool = False,
        **options: Any,
    ) -> None:
        copies = LocalCopies(make, 0, num_envs, global_state=global_state, keep_infos=keep_infos, is_given=is_given)
        copies.attach(copies.allocate(num_envs)[0])
        super().__init__(copies, **options)


class WorkerVectorEnv(LaneVectorEnv):
    """`num_envs` copies in `num_workers` processes; with `help_workers` a share of them is stepped in this process meanwhile.

    A worker that dies, or does not answer within `worker_timeout` seconds, is replaced and its copies are rebuilt by replay,
    at most `worker_restarts` times in ten minutes; one whose environment raises ends all of them with a `WorkerError`.
    """

    def __init__(
        self,
        make: EnvConfig | Callable[[], Env],
        num_envs: int,
        num_workers: int,
        *,
        help_workers: bool = False,
        worker_timeout: float = 60.0,
        worker_restarts: int = 10,
        global_state: bool = False,
        keep_infos: Sequence[str] = (),
        **options: Any,
    ) -> None:
        most = num_envs - help_workers
        if not 1 <= num_workers <= most:
            share = " (this process steps a share too)" if help_workers else ""
            raise EnvError(f"num_workers={num_workers}{share} must be from 1 to {most}, because num_envs={num_envs}")
        parts: dict[str, Any] = {"help_workers": help_workers, "global_state": global_state, "keep_infos": keep_infos}
        engine = WorkerPool(make, num_envs, num_workers, worker_timeout, worker_restarts, **parts)
        super().__init__(engine, **options)
        engine.rebuild_from(self._ledger)


# `env.num_workers: auto`: measure an environment briefly and choose how many processes step its copies.
#
# The choice affects only the speed: the results of a run are the same with any number of workers.

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
