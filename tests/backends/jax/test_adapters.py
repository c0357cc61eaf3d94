"""Environments of other packages, by small objects with the same interfaces: resets, ends and the last observation."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inchworm.backends.jax.native import JaxVectorEnv
from inchworm.backends.jax.worlds import AdaptedEnv, BraxEnv, CraftaxEnv, GymnaxEnv, NavixEnv, is_of_package, make_native
from inchworm.config.sections import EnvConfig
from inchworm.core.errors import EnvError, MissingExtraError

LIMIT = 4


class Replaceable(NamedTuple):
    """A state with what the packages' have between them."""

    obs: Any
    reward: Any
    done: Any
    timestep: Any
    step_type: Any
    key: Any

    def replace(self, **changed: Any) -> Replaceable:
        return self._replace(**changed)

    @property
    def observation(self) -> Any:
        return self.obs

    def is_termination(self) -> Any:
        return self.step_type == 2

    def is_truncation(self) -> Any:
        return self.step_type == 1


class Space(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any
    minimum: Any
    maximum: Any
    n: Any = None


def first(key: Any) -> Replaceable:
    """Python's numbers and other types than after a step, as resets of packages have them."""
    return Replaceable(jnp.zeros(2), 0, jnp.zeros(()), 0, jnp.zeros((), jnp.int32), key)


def after(state: Replaceable, over: Any) -> Replaceable:
    time = jnp.asarray(state.timestep, jnp.int32) + 1
    kind = jnp.where(over, 2, jnp.where(time >= LIMIT, 1, 0))
    return Replaceable(jnp.full(2, time, jnp.float32), time * 1.0, over * 1.0, time, kind, jax.random.split(state.key)[0])


class Brax:
    observation_size, action_size = 2, 1

    def reset(self, rng):
        return first(rng)

    def step(self, state, action):
        return after(state, (action[0] > 0) & (state.timestep == 1))


class Navix:
    """Like navix's, `step` resets a time step that is over."""

    max_steps = LIMIT
    observation_space = Space((2,), jnp.float32, jnp.asarray(0), jnp.asarray(9))
    action_space = Space((), jnp.int32, jnp.asarray(0), jnp.asarray(1), jnp.asarray(2))

    def reset(self, key):
        return first(key)

    def step(self, timestep, action):
        moved = after(timestep, (action == 1) & (timestep.timestep == 1))
        return jax.tree.map(lambda old, new: jnp.where(timestep.step_type > 0, -99, new).astype(new.dtype), timestep, moved)


class Craftax:
    """Like craftax's, one flag for the time limit and the end of the game."""

    def reset_env(self, key, params):
        del params
        return jnp.zeros(2), first(key)

    def step_env(self, key, state, action, params):
        del key
        moved = after(state, (action == 1) & (state.timestep == 1))
        return moved.obs, moved, moved.reward, self.is_terminal(moved, params), {}

    def is_terminal(self, state, params):
        return (state.timestep >= params.max_timesteps) | (state.done > 0)

    def action_space(self, params=None):
        del params
        return gym.spaces.Discrete(2)

    def observation_space(self, params):
        del params
        return gym.spaces.Box(0.0, 9.0, (2,))


class Params(NamedTuple):
    max_timesteps: int = LIMIT


ADAPTED = {"brax": BraxEnv(Brax(), LIMIT), "navix": NavixEnv(Navix()), "craftax": CraftaxEnv(Craftax(), Params())}


@pytest.mark.parametrize("name", ADAPTED)
def test_ends_are_told_apart_and_the_last_observation_is_kept(name: str) -> None:
    """Lane 0 ends its task in the second step; lane 1 comes to its time limit, and both begin again."""
    native: AdaptedEnv = ADAPTED[name]
    assert native.max_episode_steps == LIMIT
    envs = JaxVectorEnv(native, 2)
    envs.reset()
    go, stay = (np.ones((1,), np.float32), -np.ones((1,), np.float32)) if name == "brax" else (np.int64(1), np.int64(0))
    seen = []
    for _ in range(LIMIT):
        step = envs.step(np.stack([go, stay]))
        seen.append((step.rewards.tolist(), step.terminated.tolist(), step.truncated.tolist(), step.observations[:, 0].tolist()))
    assert seen == [
        ([1, 1], [False, False], [False, False], [1, 1]),
        ([2, 2], [True, False], [False, False], [0, 2]),
        ([1, 3], [False, False], [False, False], [1, 3]),
        ([2, 4], [True, False], [False, True], [0, 0]),
    ]
    assert [ended.final_observation[0] for ended in step.ended] == [2, 4]
    assert all(np.asarray(part).dtype != object for part in jax.tree.leaves(envs.state_dict()))


class Hybrid:
    """gymnax's interface with actions of several parts."""

    def observation_space(self, params: Any) -> Any:
        return gym.spaces.Box(-1, 1, (2,), np.float32)

    def action_space(self, params: Any) -> Any:
        return gym.spaces.Dict({"a": gym.spaces.Discrete(2), "b": gym.spaces.Tuple([gym.spaces.Box(-1, 1, (2,), np.float32)])})

    def reset_env(self, key: Any, params: Any) -> Any:
        return jnp.zeros(2), jnp.zeros(())

    def step_env(self, key: Any, state: Any, action: Any, params: Any) -> Any:
        moved = state + action["a"] + action["b"][0].sum()
        return jnp.full(2, moved), moved, moved, False, {}

    def is_truncated(self, state: Any, params: Any) -> Any:
        return state > 100


def test_actions_may_have_several_parts() -> None:
    env = GymnaxEnv(Hybrid(), None)
    state = env.reset(jax.random.key(0))[1]
    action = {"a": jnp.ones((), jnp.int32), "b": (jnp.array([0.25, 0.5]),)}
    assert float(env.step(jax.random.key(1), state, action)[2]) == 1.75


def test_ids_of_packages_and_what_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [is_of_package(name) for name in ("brax:ant", "gymnax:CartPole-v1", "navix", "my.module:make")] == [True, True, False, False]
    for name in ("brax:ant", "craftax:Craftax-Symbolic-v1", "navix:Navix-Empty-8x8-v0"):
        package = name.partition(":")[0]
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtraError, match=rf"{name} needs {package} \(.*\); type: pip install {package}"):
            make_native(EnvConfig(id=name))

    class Several(Brax):
        observation_size = {"pixels": 3}  # noqa: RUF012

    with pytest.raises(EnvError, match="several observations"):
        BraxEnv(Several())
