"""Step 2 of 9: copies of an environment, stepped as one. `make_vector_env` chooses how they run; the numbers are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium as gym

from inchworm.config.sections import EnvConfig
from inchworm.core.errors import EnvError
from inchworm.core.protocols import VectorEnv
from inchworm.env.episodes import Replay
from inchworm.env.foreign import ENVPOOL, GymVectorEnv, adapt_vector_env, make_envpool
from inchworm.env.local import Block, warn_of
from inchworm.env.make import Env, make_env
from inchworm.env.teams import is_team_env
from inchworm.env.vector_env import LaneVectorEnv
from inchworm.env.workers.pool import WorkerPool
from inchworm.worlds.cartpole import SKIRMISH, NativeCartPole, native_pays

__all__ = ["InProcessVectorEnv", "VectorEnv", "WorkerVectorEnv", "make_vector_env"]

DEFAULT_NUM_ENVS = 8


class _InProcess:
    """The engine that steps all copies in this process, one after another."""

    def __init__(self, make: Callable[[], Env], num_copies: int, global_state: bool = False) -> None:
        self._block = Block(make, 0, num_copies, global_state=global_state)
        self.observation_space, self.action_space = self._block.observation_space, self._block.action_space
        self.lanes_per_copy = self._block.lanes_per_copy
        self.rows, _ = self._block.carve(num_copies)
        self._block.attach(self.rows)
        self.reset, self.set_options, self.finish = self._block.reset, self._block.set_options, self._block.step
        self.get_states, self.set_states = self._block.get_states, self._block.set_states

    def start(self) -> None:
        """Nothing to wake: `finish` takes the step."""

    def replay(self, jobs: Sequence[Replay]) -> list[tuple[float, int]]:
        """Replay one copy after another."""
        return [self._block.replay(job) for job in jobs]

    def close(self) -> None:
        """Close every environment."""
        warn_of(self._block.close())


class InProcessVectorEnv(LaneVectorEnv):
    """`num_envs` copies in this process: the least overhead for environments whose step takes microseconds."""

    def __init__(self, make: Callable[[], Env], num_envs: int, *, global_state: bool = False, **options: Any) -> None:
        super().__init__(_InProcess(make, num_envs, global_state), **options)


class WorkerVectorEnv(LaneVectorEnv):
    """`num_envs` copies in `num_workers` processes; with `help_workers` a share of them is stepped in this process meanwhile.

    A worker that dies, or does not answer within `worker_timeout` seconds, is replaced and its copies are brought to where they stood,
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
        **options: Any,
    ) -> None:
        most = num_envs - help_workers
        if not 1 <= num_workers <= most:
            beside = ", beside the share of this process," if help_workers else ""
            raise EnvError(f"num_workers={num_workers}{beside} must be from 1 to {most}, because num_envs={num_envs}")
        parts: dict[str, Any] = {"help_workers": help_workers, "global_state": global_state}
        engine = WorkerPool(make, num_envs, num_workers, worker_timeout, worker_restarts, **parts)
        super().__init__(engine, **options)
        engine.rebuild_from(self._ledger)


def make_vector_env(
    env: EnvConfig | str | Env | Callable[[], Env] | VectorEnv | GymVectorEnv,
    num_envs: int | None = None,
    num_workers: int | Literal["auto"] | None = None,
    *,
    seed: int = 0,
    worker_timeout: float | None = None,
    worker_restarts: int | None = None,
    max_replay_steps: int = 100_000,
    first_copy: int = 0,
    global_state: bool = False,
) -> VectorEnv:
    """Many copies of an environment, stepped as one.

    `env` is an `EnvConfig`, a Gymnasium id or `package.module:make_env`, a factory, one environment (then there is exactly one
    copy, in this process), a `gymnasium.vector.VectorEnv` or an EnvPool, or a `VectorEnv`, which is returned as it is. A factory may
    also make PettingZoo environments, parallel or AEC: a copy then has a lane for each of its agents, side by side, and with
    `global_state` its `state()` is read at every step, for a central critic. `num_envs`, which counts copies, `num_workers`,
    `worker_timeout` and `worker_restarts` override the config's; 0 workers and "auto" mean this process. Copies are numbered from
    `first_copy`, which with `seed` decides every episode's seed. The id `envpool:Name` has EnvPool make the copies.
    """
    if isinstance(env, VectorEnv):
        return _with_state(env) if global_state else env
    if global_state and isinstance(env, gym.vector.VectorEnv):
        raise EnvError(f"{type(env).__name__} has no global state for a central critic; give a PettingZoo environment with state()")
    if isinstance(env, gym.vector.VectorEnv):  # before gymnasium.Env, which EnvPool's is too
        return adapt_vector_env(env, seed=seed, first_copy=first_copy, max_replay_steps=max_replay_steps)
    overrides = {
        "num_envs": num_envs,
        "num_workers": num_workers,
        "worker_timeout": worker_timeout,
        "worker_restarts": worker_restarts,
    }
    given = {name: value for name, value in overrides.items() if value is not None}
    options: dict[str, Any] = {
        "seed": seed,
        "max_replay_steps": max_replay_steps,
        "first_copy": first_copy,
        "global_state": global_state,
    }
    if isinstance(env, str):
        env = EnvConfig(id=env)
    if isinstance(env, gym.Env) or is_team_env(env):
        return _of_instance(env, num_envs, num_workers, options)
    if isinstance(env, EnvConfig):
        return _of_config(env.replace(**given), options)
    if callable(env):
        copies = DEFAULT_NUM_ENVS if num_envs is None else num_envs
        checked = EnvConfig(num_envs=copies).replace(**given)
        workers = 0 if checked.num_workers == "auto" else checked.num_workers
        if workers:
            return WorkerVectorEnv(env, copies, workers, **_worker_options(checked), **options)
        return InProcessVectorEnv(env, copies, **options)
    raise EnvError(f"an environment must be an id, an EnvConfig, a gymnasium.Env, a factory or a VectorEnv; got {type(env).__name__}")


def _with_state(env: VectorEnv) -> VectorEnv:
    """A vector env that was handed over, if it shows a global state."""
    if not isinstance(env, LaneVectorEnv) or env.global_state_space is not None:
        return env
    raise EnvError("the vector env was made without a global state; make it by make_vector_env(…, global_state=True)")


def _of_config(config: EnvConfig, options: dict[str, Any]) -> VectorEnv:
    if config.id.startswith(ENVPOOL):
        if options["global_state"]:
            raise EnvError(f"env.id={config.id!r}: EnvPool has no global state for a central critic")
        return make_envpool(config, seed=options["seed"], first_copy=options["first_copy"])
    workers = 0 if config.num_workers == "auto" else config.num_workers
    if workers:
        return WorkerVectorEnv(config, config.num_envs, workers, **_worker_options(config), **options)
    if config.id == SKIRMISH and native_pays(config):
        from inchworm.worlds.skirmish import SkirmishVectorEnv  # most runs need none of it

        return SkirmishVectorEnv(config.kwargs, config.num_envs, **options)
    if native_pays(config) and not options["global_state"]:
        del options["global_state"]
        return NativeCartPole(config.id, config.num_envs, max_episode_steps=config.max_episode_steps, **options)
    return InProcessVectorEnv(lambda: make_env(config), config.num_envs, **options)


def _worker_options(config: EnvConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("help_workers", "worker_timeout", "worker_restarts")}


def _of_instance(env: Any, num_envs: int | None, num_workers: Any, options: dict[str, Any]) -> VectorEnv:
    if num_envs not in (None, 1) or num_workers not in (None, 0, "auto"):
        raise EnvError(
            f"one environment is one lane in this process, but num_envs={num_envs} and num_workers={num_workers} were asked for; "
            "give its id or a factory, so that it can be made several times"
        )
    return InProcessVectorEnv(lambda: env, 1, **options)
