"""Step 1 of 9 in JAX: environments of gymnax, brax, navix and craftax as a `NativeEnv`.

Each adapter wraps an object with the package's interface, keeps it from resetting by itself, and tells how episodes end. An id such as
`navix:Navix-Empty-8x8-v0` has the package make it.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from inchworm.backends.jax.native import NativeEnv, device_dtype, fit_to_space, read_space
from inchworm.backends.jax.threefry import typed_keys
from inchworm.config.sections import EnvConfig
from inchworm.core.errors import EnvError, MissingExtraError, close_names
from inchworm.core.spaces import Space, build_tree, leaf_shape
from inchworm.core.types import Array, Tree

_GYMNAX = ("step_env", "reset_env", "is_truncated", "action_space", "observation_space")
"""What an object with gymnax's interface has."""
BRAX_STEPS = 1000
"""The time limit of a brax environment that is not given one: that of brax's own training."""


class AdaptedEnv:
    """What the adapters share: a package's state is one tree of arrays, which also holds what a step showed.

    Subclasses set the spaces and write `begin` and `advance`. Keys are given as plain numbers: a state that keeps one can then be saved.
    """

    observation_space: Space
    action_space: Space
    max_episode_steps: int | None

    def begin(self, key: Array) -> tuple[Tree, Tree]:
        """The first observation and state of an episode, in any types."""
        raise NotImplementedError

    def advance(self, key: Array, state: Tree, action: Tree) -> tuple[Tree, Tree, Array, Array, Array]:
        """Observation, state, reward, and whether the episode is terminated and at its time limit, in any types."""
        raise NotImplementedError

    def reset(self, key: Array) -> tuple[Tree, Tree]:
        """The first observation and state of an episode; the state has the types that it has after a step."""
        data = jax.random.key_data(key)
        observation, state = self.begin(data)
        action = build_tree(self.action_space, lambda _, own: jnp.zeros(leaf_shape(own), device_dtype(own)))
        after = jax.eval_shape(lambda given: self.advance(data, given, action)[1], state)
        state = jax.tree.map(lambda value, like: jnp.asarray(value, like.dtype).reshape(like.shape), state, after)
        return fit_to_space(self.observation_space, observation), state

    def step(self, key: Array, state: Tree, action: Tree) -> tuple[Tree, Tree, Array, Array, Array]:
        """One step; where both ends come together the episode is terminated."""
        observation, after, reward, terminated, limit = self.advance(jax.random.key_data(key), state, action)
        terminated, limit = (jnp.asarray(flag, bool).reshape(()) for flag in (terminated, limit))
        shown = fit_to_space(self.observation_space, observation)
        return shown, after, jnp.asarray(reward, jnp.float32).reshape(()), terminated, limit & ~terminated


class GymnaxEnv(AdaptedEnv):
    """An object with the interface of gymnax 1.0: `reset_env`, `step_env`, `is_truncated`, spaces by parameters.

    Its own `step`, which resets by itself and so hides the last observation, is not called.
    """

    def __init__(self, env: Any, params: Any) -> None:
        missing = [name for name in _GYMNAX if not callable(getattr(env, name, None))]
        if missing:
            raise EnvError(f"{type(env).__name__} does not have gymnax's interface of version 1.0: it has no {', '.join(missing)}")
        self._env, self._params = env, params
        self.observation_space, self.action_space = read_space(env.observation_space(params)), read_space(env.action_space(params))
        limit = getattr(params, "max_steps_in_episode", None)
        self.max_episode_steps = int(limit) if limit is not None else None

    def begin(self, key: Array) -> tuple[Tree, Tree]:
        """The first observation and state."""
        observation, state = self._env.reset_env(typed_keys(key), self._params)
        return observation, state

    def advance(self, key: Array, state: Tree, action: Tree) -> tuple[Tree, Tree, Array, Array, Array]:
        """gymnax tells both ends apart."""
        observation, after, reward, terminated, _ = self._env.step_env(typed_keys(key), state, action, self._params)
        return observation, after, reward, terminated, self._env.is_truncated(after, self._params)


class BraxEnv(AdaptedEnv):
    """An environment of brax, without wrappers, with a time limit; its own code has none."""

    def __init__(self, env: Any, max_episode_steps: int = BRAX_STEPS) -> None:
        if not isinstance(env.observation_size, int):
            raise EnvError(f"{type(env).__name__} shows several observations ({env.observation_size}); only one vector can be read")
        self._env, self.max_episode_steps = env, max_episode_steps
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (env.observation_size,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (env.action_size,), np.float32)

    def begin(self, key: Array) -> tuple[Tree, Tree]:
        """The first observation, and the state with the number of steps."""
        state = self._env.reset(key)
        return state.obs, (state, jnp.zeros((), jnp.int32))

    def advance(self, key: Array, state: Tree, action: Tree) -> tuple[Tree, Tree, Array, Array, Array]:
        """`done` is the end of a task."""
        del key
        after, time = self._env.step(state[0], action), state[1] + 1
        return after.obs, (after, time), after.reward, after.done, time >= self.max_episode_steps


class NavixEnv(AdaptedEnv):
    """An environment of navix. Its `step` resets only a step that is already over, which here never is."""

    def __init__(self, env: Any) -> None:
        self._env, self.max_episode_steps = env, int(env.max_steps)
        self.observation_space, self.action_space = read_space(env.observation_space), read_space(env.action_space)

    def begin(self, key: Array) -> tuple[Tree, Tree]:
        """The first observation and time step."""
        timestep = self._env.reset(key)
        return timestep.observation, timestep

    def advance(self, key: Array, state: Tree, action: Tree) -> tuple[Tree, Tree, Array, Array, Array]:
        """A time step tells how the episode ended."""
        del key
        running = state.replace(step_type=jnp.zeros((), state.step_type.dtype))  # a constant, so that no reset is computed
        after = self._env.step(running, action)
        return after.observation, after, after.reward, after.is_termination(), after.is_truncation()


class CraftaxEnv(AdaptedEnv):
    """An environment of craftax: gymnax's interface, with one flag for the ends of a game and the time limit alike."""

    def __init__(self, env: Any, params: Any) -> None:
        self._env, self._params, self.max_episode_steps = env, params, int(params.max_timesteps)
        self.observation_space, self.action_space = read_space(env.observation_space(params)), read_space(env.action_space(params))

    def begin(self, key: Array) -> tuple[Tree, Tree]:
        """The first observation and state."""
        observation, state = self._env.reset_env(key, self._params)
        return observation, state

    def advance(self, key: Array, state: Tree, action: Tree) -> tuple[Tree, Tree, Array, Array, Array]:
        """An end that is there also at time 0 is one of the game."""
        observation, after, reward, done, _ = self._env.step_env(key, state, action, self._params)
        terminated = self._env.is_terminal(after.replace(timestep=jnp.zeros_like(after.timestep)), self._params)
        return observation, after, reward, terminated, done


def make_gymnax(config: EnvConfig, name: str) -> GymnaxEnv:
    """The environment of an id such as `gymnax:CartPole-v1`.

    `env.kwargs` are fields of its parameters, such as gravity, or arguments of its constructor.
    """
    gymnax = importlib.import_module("gymnax")
    known = list(getattr(gymnax, "registered_envs", ()))
    if name not in known:
        near = close_names(name, known, most=3)
        listed = f"did you mean {' or '.join(f'gymnax:{each}' for each in near)}?" if near else f"it has {', '.join(known)}"
        raise EnvError(f"env.id={config.id!r}: gymnax has no environment {name!r:.80}; {listed}")
    default = gymnax.make(name)[1]
    fields = {field.name for field in dataclasses.fields(default)}
    own = {key: value for key, value in config.kwargs.items() if key not in fields}
    try:
        env, params = gymnax.make(name, **own)
    except TypeError as error:
        raise EnvError(
            f"env.id={config.id!r} cannot be made with env.kwargs={own}: {error}; its parameters are {', '.join(sorted(fields))}"
        ) from error
    changed = {key: value for key, value in config.kwargs.items() if key in fields}
    if config.max_episode_steps is not None:
        if "max_steps_in_episode" not in fields:
            raise EnvError(f"env.id={config.id!r} has no time limit that env.max_episode_steps could change; leave it null")
        changed["max_steps_in_episode"] = config.max_episode_steps
    return GymnaxEnv(env, params.replace(**changed) if changed else params)


def _brax(config: EnvConfig, name: str) -> AdaptedEnv:
    made = importlib.import_module("brax.envs").get_environment(name, **config.kwargs)
    return BraxEnv(made, config.max_episode_steps or BRAX_STEPS)


def _navix(config: EnvConfig, name: str) -> AdaptedEnv:
    limit = {} if config.max_episode_steps is None else {"max_steps": config.max_episode_steps}
    return NavixEnv(importlib.import_module("navix").make(name, **limit, **config.kwargs))


def _craftax(config: EnvConfig, name: str) -> AdaptedEnv:
    made = importlib.import_module("craftax.craftax_env").make_craftax_env_from_name(name, auto_reset=False)
    limit = {} if config.max_episode_steps is None else {"max_timesteps": config.max_episode_steps}
    return CraftaxEnv(made, made.default_params.replace(**limit, **config.kwargs))


_MAKERS: dict[str, Callable[[EnvConfig, str], AdaptedEnv]] = {"gymnax": make_gymnax, "brax": _brax, "navix": _navix, "craftax": _craftax}


def is_of_package(env_id: str) -> bool:
    """Whether an id names an environment that a JAX package makes."""
    return ":" in env_id and env_id.partition(":")[0] in _MAKERS


def make_of_package(config: EnvConfig) -> NativeEnv:
    """The environment of an id such as `brax:ant`; `env.kwargs` are the package's own."""
    package, _, name = config.id.partition(":")
    try:
        return _MAKERS[package](config, name)
    except ImportError as error:
        typed = '"inchworm[jax-envs]"' if package == "gymnax" else package
        raise MissingExtraError(f"{config.id} needs {package} ({error}); type: pip install {typed}") from error
    except EnvError:
        raise
    except Exception as error:  # each refuses names and arguments in its own way
        raise EnvError(f"env.id={config.id!r} cannot be made with env.kwargs={config.kwargs}: {type(error).__name__}: {error}") from error
