"""Step 1 of 9 in JAX: JAX-native environments by their ids: Gymnasium's classic worlds as pure functions, and those of JAX packages.

Each classic world has the dynamics, rewards, ends and spaces of the environment that Gymnasium registers under the same id; only the
random numbers of a reset are others. Where Gymnasium computes in float64, these compute in JAX's default type, float32.
"""

from __future__ import annotations

import dataclasses
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from inchworm.backends.jax.native import JaxVectorEnv, NativeEnv, device_dtype, fit_to_space, read_space, refuse_settings, typed_keys
from inchworm.config.sections import EnvConfig
from inchworm.core.errors import EnvError, MissingExtraError, close_names
from inchworm.core.spaces import Space, build_tree, leaf_shape
from inchworm.core.types import Array, Tree


class Timed(NamedTuple):
    """The state of a world with a time limit."""

    values: tuple[Array, ...]
    """The world's own numbers, each a scalar."""
    time: Array
    """i32: steps since the reset."""


class ClassicWorld(ABC):
    """A world with a time limit. Subclasses set the spaces and write `first`, `move` and `observe`."""

    observation_space: Space
    action_space: Space

    def __init__(self, max_episode_steps: int) -> None:
        self.max_episode_steps: int | None = max_episode_steps

    @abstractmethod
    def first(self, key: Array) -> Array:
        """The first state [n]."""

    @abstractmethod
    def move(self, values: tuple[Array, ...], action: Array) -> tuple[tuple[Array, ...], Array, Array]:
        """The state, reward and terminated after one step."""

    def observe(self, values: tuple[Array, ...]) -> tuple[Array, ...]:
        """The numbers of an observation; by default the state."""
        return values

    def reset(self, key: Array) -> tuple[Array, Timed]:
        """The first observation and state of an episode."""
        values = tuple(self.first(key))
        return self._shown(values), Timed(values, jnp.zeros((), jnp.int32))

    def step(self, key: Array, state: Timed, action: Array) -> tuple[Array, Timed, Array, Array, Array]:
        """One step; the key is not used, because the world is deterministic."""
        del key
        values, reward, terminated = self.move(state.values, action)
        time = state.time + 1
        truncated = (time >= self.max_episode_steps) & ~terminated
        return self._shown(values), Timed(values, time), jnp.asarray(reward, jnp.float32), terminated, truncated

    def _shown(self, values: tuple[Array, ...]) -> Array:
        return jnp.stack(self.observe(values)).astype(jnp.float32)


def uniform(key: Array, low: float | np.ndarray, high: float | np.ndarray, size: int) -> Array:
    """Independent numbers [size], each between its bounds, in JAX's default float."""
    return jax.random.uniform(key, (size,), minval=jnp.asarray(low, float), maxval=jnp.asarray(high, float))


def _box(high: list[float], low: list[float] | None = None) -> gym.spaces.Box:
    top = np.array(high, np.float32)
    return gym.spaces.Box(-top if low is None else np.array(low, np.float32), top, dtype=np.float32)


class CartPole(ClassicWorld):
    """A pole on a cart, as CartPole-v1: 1 for every step until it falls or the cart leaves the track."""

    theta_limit, x_limit = 12 * 2 * np.pi / 360, 2.4
    observation_space = _box([2 * x_limit, np.inf, 2 * theta_limit, np.inf])
    action_space = gym.spaces.Discrete(2)

    def first(self, key: Array) -> Array:
        """All four numbers from -0.05 to 0.05."""
        return uniform(key, -0.05, 0.05, 4)

    def move(self, values: tuple[Array, ...], action: Array) -> tuple[tuple[Array, ...], Array, Array]:
        """One Euler step of 0.02 s with a force of 10 to the left or to the right."""
        gravity, pole_mass, total_mass, length, tau = 9.8, 0.1, 1.1, 0.5, 0.02
        x, x_dot, theta, theta_dot = values
        force = jnp.where(action == 1, 10.0, -10.0).astype(x.dtype)
        cos, sin = jnp.cos(theta), jnp.sin(theta)
        push = (force + pole_mass * length * theta_dot * theta_dot * sin) / total_mass
        theta_acc = (gravity * sin - cos * push) / (length * (4.0 / 3.0 - pole_mass * cos * cos / total_mass))
        x_acc = push - pole_mass * length * theta_acc * cos / total_mass
        x, theta = x + tau * x_dot, theta + tau * theta_dot
        fell = (jnp.abs(x) > self.x_limit) | (jnp.abs(theta) > self.theta_limit)
        return (x, x_dot + tau * x_acc, theta, theta_dot + tau * theta_acc), jnp.ones((), jnp.float32), fell


class MountainCar(ClassicWorld):
    """A car that must swing to climb, as MountainCar-v0: -1 for every step until it is at the top."""

    observation_space = _box([0.6, 0.07], [-1.2, -0.07])
    action_space = gym.spaces.Discrete(3)

    def first(self, key: Array) -> Array:
        """At rest, near the bottom."""
        return uniform(key, np.array([-0.6, 0.0]), np.array([-0.4, 0.0]), 2)

    def move(self, values: tuple[Array, ...], action: Array) -> tuple[tuple[Array, ...], Array, Array]:
        """Push to the left, not at all, or to the right."""
        position, velocity = values
        push = (action - 1).astype(velocity.dtype) * 0.001
        velocity = jnp.clip(velocity + push - 0.0025 * jnp.cos(3 * position), -0.07, 0.07)
        position = jnp.clip(position + velocity, -1.2, 0.6)
        velocity = jnp.where((position == -1.2) & (velocity < 0), 0.0, velocity)
        return (position, velocity), -jnp.ones((), jnp.float32), (position >= 0.5) & (velocity >= 0)


class Pendulum(ClassicWorld):
    """A pendulum to be swung up and held, as Pendulum-v1: minus a cost of angle, speed and torque; it never terminates."""

    observation_space = _box([1.0, 1.0, 8.0])
    action_space = _box([2.0])

    def first(self, key: Array) -> Array:
        """Any angle, and a speed from -1 to 1."""
        return uniform(key, np.array([-np.pi, -1.0]), np.array([np.pi, 1.0]), 2)

    def move(self, values: tuple[Array, ...], action: Array) -> tuple[tuple[Array, ...], Array, Array]:
        """One step of 0.05 s with a torque from -2 to 2."""
        angle, speed = values
        torque = jnp.clip(action[0], -2.0, 2.0).astype(angle.dtype)
        from_top = jnp.mod(angle + np.pi, 2 * np.pi) - np.pi
        cost = from_top * from_top + 0.1 * speed * speed + 0.001 * torque * torque
        speed = jnp.clip(speed + (15.0 * jnp.sin(angle) + 3.0 * torque) * 0.05, -8.0, 8.0)
        return (angle + speed * 0.05, speed), -cost, jnp.zeros((), bool)

    def observe(self, values: tuple[Array, ...]) -> tuple[Array, ...]:
        """The tip's place and the speed."""
        return jnp.cos(values[0]), jnp.sin(values[0]), values[1]


class Acrobot(ClassicWorld):
    """Two links to be swung up by a torque between them, as Acrobot-v1: -1 for every step until the tip is high enough."""

    observation_space = _box([1.0, 1.0, 1.0, 1.0, 4 * np.pi, 9 * np.pi])
    action_space = gym.spaces.Discrete(3)

    def first(self, key: Array) -> Array:
        """All four numbers from -0.1 to 0.1."""
        return uniform(key, -0.1, 0.1, 4)

    def move(self, values: tuple[Array, ...], action: Array) -> tuple[tuple[Array, ...], Array, Array]:
        """One Runge-Kutta step of 0.2 s with a torque of -1, 0 or 1."""
        state = jnp.stack(values)  # [4]: two angles, two speeds
        torque = (action - 1).astype(state.dtype)
        first = _acrobot_slope(state, torque)
        second = _acrobot_slope(state + 0.1 * first, torque)
        third = _acrobot_slope(state + 0.1 * second, torque)
        fourth = _acrobot_slope(state + 0.2 * third, torque)
        state = state + 0.2 / 6.0 * (first + 2 * second + 2 * third + fourth)
        one, two = (_wrapped(angle) for angle in state[:2])
        fast, faster = jnp.clip(state[2], -4 * np.pi, 4 * np.pi), jnp.clip(state[3], -9 * np.pi, 9 * np.pi)
        high = -jnp.cos(one) - jnp.cos(two + one) > 1.0
        return (one, two, fast, faster), jnp.where(high, 0.0, -1.0), high

    def observe(self, values: tuple[Array, ...]) -> tuple[Array, ...]:
        """The directions of both links and their speeds."""
        one, two, fast, faster = values
        return jnp.cos(one), jnp.sin(one), jnp.cos(two), jnp.sin(two), fast, faster


def _wrapped(angle: Array) -> Array:
    """The angle from -pi to pi; a step moves it by less than a turn."""
    return jnp.where(angle > np.pi, angle - 2 * np.pi, jnp.where(angle < -np.pi, angle + 2 * np.pi, angle))


def _acrobot_slope(state: Array, torque: Array) -> Array:
    """The derivative of [two angles, two speeds] by time, with links of length and mass 1 and their centres in the middle."""
    one, two, fast, faster = state
    cos, sin, gravity = jnp.cos(two), jnp.sin(two), 9.8
    d1 = 0.25 + (1.25 + cos) + 2.0
    d2 = (0.25 + 0.5 * cos) + 1.0
    phi2 = 0.5 * gravity * jnp.cos(one + two - np.pi / 2)
    phi1 = -0.5 * faster * faster * sin - faster * fast * sin + 1.5 * gravity * jnp.cos(one - np.pi / 2) + phi2
    acc2 = (torque + d2 / d1 * phi1 - 0.5 * fast * fast * sin - phi2) / (1.25 - d2 * d2 / d1)
    acc1 = -(d2 * acc2 + phi1) / d1
    return jnp.stack([fast, faster, acc1, acc2])


WORLDS: dict[str, tuple[Callable[[int], ClassicWorld], int]] = {
    "Acrobot-v1": (Acrobot, 500),
    "CartPole-v0": (CartPole, 200),
    "CartPole-v1": (CartPole, 500),
    "MountainCar-v0": (MountainCar, 200),
    "Pendulum-v1": (Pendulum, 200),
}
"""Gymnasium's id -> the world and the time limit that it is registered with."""


def make_world(config: EnvConfig) -> ClassicWorld | None:
    """The world with the dynamics of a config's id; None if there is none."""
    if config.id not in WORLDS:
        return None
    make, limit = WORLDS[config.id]
    return make(config.max_episode_steps or limit)


# Environments of gymnax, brax, navix and craftax as a `NativeEnv`.
#
# Each adapter wraps an object with the package's interface, keeps it from resetting by itself, and tells how episodes end. An id such as
# `navix:Navix-Empty-8x8-v0` has the package make it.

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


_made: dict[tuple[Any, ...], NativeEnv] = {}


def make_native(config: EnvConfig) -> NativeEnv:
    """The JAX-native environment of a config: a package's, or the world with the dynamics of Gymnasium's.

    It has no state, so equal configs get the same object, for which programs are compiled once per process.
    """
    refuse_settings(config)
    key = (config.id, config.max_episode_steps, repr(config.kwargs))
    if key not in _made:
        made = make_of_package(config) if is_of_package(config.id) else make_world(config)
        if made is None:
            raise EnvError(f"there is no JAX-native world for env.id={config.id!r}")
        _made[key] = made
    return _made[key]


def make_jax_env(config: EnvConfig, *, global_state: bool = False, keep_infos: Sequence[str] = (), **options: Any) -> JaxVectorEnv:
    """All copies of a config as one vector env."""
    if global_state:
        raise EnvError(f"env.id={config.id!r}: a JAX-native environment has no global state for a central critic")
    if keep_infos:
        raise EnvError(f"env.id={config.id!r}: a JAX-native environment has no infos to keep; leave collect.keep_infos out")
    return JaxVectorEnv(make_native(config), config.num_envs, **options)
