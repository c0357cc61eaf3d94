"""Step 1 of 9: makes one environment from its config, with its wrappers, its time limit and Atari preprocessing."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium import wrappers
from gymnasium.vector.utils import batch_space, create_empty_array

from inchworm.config.sections import EnvConfig, WrapperConfig
from inchworm.core.errors import ConfigError, EnvError, MissingExtraError, close_names, env_errors
from inchworm.env import atari
from inchworm.env.pettingzoo_copy import as_team, check_one_env, is_team_env
from inchworm.env.registry import find_world, is_vector_only, package_hint
from inchworm.env.restore import REFUSED_WRAPPERS, Env, refuse_stateful_wrappers
from inchworm.env.values import brief


class RecreatedWorld(gym.Wrapper[Any, Any, Any, Any]):
    """A BipedalWalker whose Box2D world is created at each reset, so that an episode depends only on its seed."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in a new Box2D world."""
        game: Any = self.unwrapped
        game._destroy()  # releases the bodies, so that the environment's own reset finds none
        game.world = type(game.world)()
        return self.env.reset(seed=seed, options=options)


class FrameStack(gym.Wrapper[Any, Any, Any, Any]):
    """The last `size` observations of a Box, the newest last, as Gymnasium's FrameStackObservation gives them, in a fifth of its time."""

    def __init__(self, env: gym.Env[Any, Any], size: int) -> None:
        super().__init__(env)
        self.observation_space = batch_space(env.observation_space, size)
        self._frames: np.ndarray = create_empty_array(env.observation_space, size)  # type: ignore[assignment]  # [size, *obs]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode, with its first observation in place of those before it."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._frames[:] = observation
        return self._frames.copy(), info

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        """Step, and drop the oldest observation."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        frames = self._frames
        frames[:-1] = frames[1:]
        frames[-1] = observation
        return frames.copy(), reward, terminated, truncated, info


def make_env(config: EnvConfig) -> Env:
    """One environment as `config` describes it: the world, its time limit, then the config's wrappers."""
    if is_vector_only(config.id):
        raise EnvError(f"the copies of env.id={config.id!r} are made and stepped all together; use make_vector_env, with env.num_workers=0")
    factory = named_factory(config)
    if factory is not None:
        return make_from(factory, config)
    name = config.id
    if ":" not in name and (config.atari or name.startswith("ALE/") or "NoFrameskip" in name):
        try:
            import ale_py
        except ImportError as error:
            raise MissingExtraError('Atari games need ale-py and OpenCV; type: pip install "inchworm[atari]"') from error
        gym.register_envs(ale_py)
    return add_wrappers(_make_registered(config), config)


def named_factory(config: EnvConfig) -> Callable[..., Any] | None:
    """The function that makes the environment of an id; None if Gymnasium makes it."""
    world = find_world(config.id)
    name = config.id if world is None or world.make_copy is None else world.make_copy
    return _find_factory(name) if ":" in name else None


def make_from(factory: Callable[..., Any], config: EnvConfig) -> Env:
    """One environment from a factory, with the config's arguments, limit and wrappers."""
    return complete_env(call_factory(factory, config), config)


def call_factory(factory: Callable[..., Any], config: EnvConfig) -> Any:
    """What a factory returns for the config's arguments."""
    try:  # before it is called: a `TypeError` from inside it is not about the arguments
        signature = inspect.signature(factory)
        try:
            signature.bind(**config.kwargs)
        except TypeError as error:
            raise EnvError(f"{config.id} cannot be called with env.kwargs={config.kwargs}: {error}; it takes {signature}") from None
    except ValueError:  # some built-in callables have no signature
        pass
    with env_errors(config.id, "making the environment"):
        return factory(**config.kwargs)


def complete_env(env: Any, config: EnvConfig) -> Env:
    """What a factory returned, if it is one environment, with the config's limit and wrappers."""
    check_one_env(env, config.id)
    return add_wrappers(_limit(env, config), config)


def wrap_given(env: Env, config: EnvConfig) -> Env:
    """Put the config's limit and wrappers around an environment that was handed over."""
    if config.kwargs:
        raise EnvError(f"env.kwargs={config.kwargs} cannot reach an environment that is made already; give a factory")
    return add_wrappers(_limit(env, config), config)


def add_wrappers(env: Env, config: EnvConfig) -> Env:
    """Put the config's Atari preprocessing, wrappers and frame stacking around an environment; a PettingZoo one has none."""
    if is_team_env(env):
        unfit = {"atari": config.atari, "wrappers": config.wrappers, "frame_stack": config.frame_stack > 1}
        asked = [name for name, value in unfit.items() if value]
        if asked:
            raise EnvError(
                f"env.{asked[0]} cannot be used with {config.id}: it is for Gymnasium environments with one agent; "
                "put PettingZoo's or SuperSuit's wrappers around the environment in your own factory"
            )
        return env
    if type(env.unwrapped).__module__ == "gymnasium.envs.box2d.bipedal_walker":
        env = RecreatedWorld(env)
    if config.atari:
        try:
            env = atari.preprocess(env)
        except (AttributeError, TypeError, ValueError) as error:
            raise EnvError(f"env.atari=true does not fit env.id={config.id!r}: {error}") from error
        # The limit counts the agent's steps, of four frames each, so it is outside the frame skip.
        env = wrappers.TransformReward(_limit(env, config), _sign)
    for wrapper in config.wrappers:
        env = _wrap(env, wrapper)
    if config.frame_stack > 1:
        plain = isinstance(env.observation_space, gym.spaces.Box)
        env = FrameStack(env, config.frame_stack) if plain else wrappers.FrameStackObservation(env, config.frame_stack)
    refuse_stateful_wrappers(env)
    return env


def _sign(reward: Any) -> float:
    return float((reward > 0) - (reward < 0))


def _find_factory(name: str) -> Callable[..., Any] | None:
    """What `package.module:make_env` names; None if the module has no such name but Gymnasium registered it."""
    module_name, _, attribute = name.partition(":")
    module = _import(module_name, name)
    found = getattr(module, attribute, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    if found is not None:
        raise EnvError(
            f"env.id={name!r}: {attribute} of {module_name} is {type(found).__name__}, not a function that returns an environment"
        )
    if attribute in gym.registry:
        return None
    public = [key for key in vars(module) if not key.startswith("_")] + list(gym.registry)
    raise EnvError(f"env.id={name!r}: the module {module_name} has no {attribute}{_did_you_mean(attribute, public)}")


def _import(module_name: str, name: str) -> Any:
    """Import the module; also from the working directory, as on a command line."""
    try:
        with env_errors(f"env.id={name!r}", f"importing {module_name}"):
            return importlib.import_module(module_name)
    except EnvError as raised:
        error = raised.__cause__
        if not isinstance(error, ModuleNotFoundError):
            raise
        if error.name == "pettingzoo":
            raise MissingExtraError(f'env.id={name!r} needs PettingZoo; type: pip install "inchworm[marl]"') from None
        top = module_name.partition(".")[0]
        if error.name == top and os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.append(os.getcwd())
            return _import(module_name, name)
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            hint = package_hint(name) or "install it, or start in the directory that holds it"
            raise EnvError(f"env.id={name!r}: there is no module {error.name}; {hint}") from None
        raise


def _make_registered(config: EnvConfig) -> Env:
    limits: dict[str, Any] = {"frameskip": 1} if config.atari else {"max_episode_steps": config.max_episode_steps}
    try:
        # Gymnasium's passive checker is left out: every value is checked when it is written into the rows.
        env = gym.make(config.id, disable_env_checker=True, **limits, **config.kwargs)
    except gym.error.DependencyNotInstalled as error:
        spec = gym.registry.get(config.id)
        entry = str(spec.entry_point) if spec is not None else ""
        for extra in ("box2d", "mujoco"):
            if extra in entry:
                raise MissingExtraError(f'{config.id} needs the {extra} extra; type: pip install "inchworm[{extra}]"') from error
        raise MissingExtraError(f"{config.id} needs a package that is not installed: {error}") from error
    except (gym.error.UnregisteredEnv, gym.error.DeprecatedEnv) as error:
        near, package = _did_you_mean(config.id.rpartition(":")[2], gym.registry), package_hint(config.id)
        hint = near if package is None or near else f"; {package}"
        raise EnvError(f"env.id={config.id!r} is not registered with Gymnasium{hint}") from error
    except gym.error.Error as error:
        raise EnvError(f"env.id={config.id!r}: {error}") from error
    except (Exception, SystemExit) as error:
        newest = _newest_version(config.id)
        if isinstance(error, ImportError) and newest != config.id:  # as MuJoCo's v2 and v3, which Gymnasium has dropped
            raise EnvError(f"env.id={config.id!r} cannot be made by this version of Gymnasium; use {newest}") from error
        if not config.kwargs and not isinstance(error, TypeError):  # the environment's own error
            with env_errors(f"env.id={config.id!r}", "making the environment"):
                raise
        raise EnvError(
            f"env.id={config.id!r} could not be made with env.kwargs={brief(config.kwargs)}: {type(error).__name__}: {error}"
        ) from error
    return env


def _newest_version(id: str) -> str:
    """The id with the highest version that is registered; the id itself if it has none."""
    spec = gym.registry.get(id)
    others = [] if spec is None else [each for each in gym.registry.values() if (each.namespace, each.name) == (spec.namespace, spec.name)]
    return max(others, key=lambda each: each.version or 0).id if others else id


def _limit(env: Any, config: EnvConfig) -> Env:
    if is_team_env(env):
        return cast(Env, as_team(env, config.max_episode_steps))
    if config.max_episode_steps is None:
        return cast(Env, env)
    return wrappers.TimeLimit(env, config.max_episode_steps)


def _wrap(env: Env, config: WrapperConfig) -> Env:
    reason = REFUSED_WRAPPERS.get(config.name)
    if reason is not None:
        raise ConfigError(f"env.wrappers: {config.name} is refused: {reason}")
    known = [name for name in wrappers.__all__ if name != "vector"]
    if config.name not in known:
        raise ConfigError(f"env.wrappers: gymnasium.wrappers has no {config.name}{_did_you_mean(config.name, known)}")
    try:
        wrapped: Env = getattr(wrappers, config.name)(env, **config.kwargs)
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise MissingExtraError(f"env.wrappers: {config.name} needs a package that is not installed: {error}") from error
    except Exception as error:  # a wrapper checks its arguments with any error type
        raise ConfigError(f"env.wrappers: {config.name} could not be made with {brief(config.kwargs)}: {error}") from error
    return wrapped


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = close_names(name, known)
    return f"; did you mean {near[0]}?" if near else ""
