"""Tests of JAX-native environments stepped from the host: the VectorEnv contract, gymnax's interface, and what is refused."""

from __future__ import annotations

import sys

import gymnasium as gym
import jax.numpy as jnp
import numpy as np
import pytest

from inchworm.backends.jax.native import JaxVectorEnv, read_space
from inchworm.backends.jax.worlds import GymnaxEnv, make_jax_env
from inchworm.config.sections import EnvConfig, WrapperConfig
from inchworm.core.errors import ConfigError, EnvError, MissingExtraError
from inchworm.env.check import check_env
from inchworm.env.source import make_vector_env

CARTPOLE = EnvConfig(id="gymnax:CartPole-v1", num_envs=3, max_episode_steps=9)


def actions(step: int) -> np.ndarray:
    return (np.arange(3) + step) % 2


def test_gymnax_environments_keep_the_contract():
    pytest.importorskip("gymnax")
    report = check_env("gymnax:CartPole-v1", steps=60)
    assert report.ok, report.problems


def test_the_last_observation_is_that_before_the_reset():
    pytest.importorskip("gymnax")
    env = make_vector_env(CARTPOLE, seed=4)
    assert isinstance(env, JaxVectorEnv)
    before = np.array(env.reset().observations)
    for number in range(9):
        step = env.step(actions(number))
    assert [ended.lane for ended in step.ended] == [0, 1, 2]
    assert step.truncated.all()
    assert not step.terminated.any()
    again = make_vector_env(CARTPOLE.replace(max_episode_steps=50), seed=4)
    assert np.array_equal(again.reset(seeds=[ended.seed for ended in step.ended]).observations, before)
    for number in range(9):
        untouched = again.step(actions(number))
    for ended in step.ended:
        assert np.array_equal(ended.final_observation, untouched.observations[ended.lane])
        assert not np.array_equal(ended.final_observation, step.observations[ended.lane])
    assert step.episode_starts.all()


def test_state_is_restored_bit_for_bit_and_also_by_replay():
    pytest.importorskip("gymnax")
    one = make_vector_env(CARTPOLE, seed=4)
    one.reset()
    for number in range(5):
        one.step(actions(number))
    state = one.state_dict()
    without = {**state, "copies": [{key: value for key, value in copy.items() if key != "state"} for copy in state["copies"]]}
    others = [make_vector_env(CARTPOLE, seed=9) for _ in range(2)]
    for other, saved in zip(others, (state, without)):
        other.load_state_dict(saved)
        assert not other.inexact
    for number in range(5, 12):
        expected = one.step(actions(number))
        for other in others:
            step = other.step(actions(number))
            assert np.array_equal(step.observations, expected.observations)
            assert [ended.seed for ended in step.ended] == [ended.seed for ended in expected.ended]


def test_parameters_and_limits_come_from_the_config():
    pytest.importorskip("gymnax")
    config = CARTPOLE.replace(kwargs={"gravity": 0.0}, max_episode_steps=7)
    env = make_vector_env(config)
    assert env.native.max_episode_steps == 7
    for text in ("gravity", "length"):
        with pytest.raises(EnvError, match=text):
            make_vector_env(CARTPOLE.replace(kwargs={"no_such_thing": 1}))


def test_what_cannot_be_honoured_is_refused_in_one_line():
    pytest.importorskip("gymnax")
    changes = [{"num_workers": 2}, {"frame_stack": 4}, {"wrappers": (WrapperConfig(name="ClipReward"),)}]
    for change in changes:
        with pytest.raises(ConfigError, match=f"env.{next(iter(change))}=.*stepped by JAX"):
            make_vector_env(CARTPOLE.replace(**change))
    with pytest.raises(EnvError, match="did you mean gymnax:CartPole-v1"):
        make_vector_env("gymnax:CartPol-v1")
    with pytest.raises(EnvError, match="gymnax has no environment 'Nowhere'; it has CartPole-v1"):
        make_vector_env("gymnax:Nowhere")
    with pytest.raises(EnvError, match="no global state"):
        make_vector_env(CARTPOLE, global_state=True)
    with pytest.raises(EnvError, match="no reset options"):
        make_vector_env(CARTPOLE).set_reset_options({"low": 0})
    with pytest.raises(EnvError, match="no JAX-native world"):
        make_jax_env(EnvConfig(id="LunarLander-v3"))


def test_without_gymnax_the_line_to_type_is_shown(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnax", None)
    with pytest.raises(MissingExtraError, match=r'pip install "inchworm\[jax-envs\]"'):
        make_vector_env("gymnax:Catch-bsuite")  # not made by another test


def test_without_jax_the_line_to_type_is_shown(monkeypatch):
    monkeypatch.delitem(sys.modules, "inchworm.backends.jax.native", raising=False)
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(MissingExtraError, match=r'pip install "inchworm\[jax-envs\]"'):
        make_vector_env("gymnax:Catch-bsuite")  # not made by another test


class Params:
    max_steps_in_episode = 3


class Counting:
    """An environment of the user's with gymnax's interface: counts to its limit; a Python integer as first state."""

    def reset_env(self, key, params):
        del key, params
        return {"time": jnp.zeros(1), "parity": 0}, {"time": 0}

    def step_env(self, key, state, action, params):
        del key, params
        time = state["time"] + 1
        return {"time": jnp.ones(1) * time, "parity": time % 2}, {"time": time}, action, time < 0, {}

    def is_truncated(self, state, params):
        return state["time"] >= params.max_steps_in_episode

    def observation_space(self, params):
        del params
        return gym.spaces.Dict({"time": gym.spaces.Box(0, 10, (1,), np.float32), "parity": gym.spaces.Discrete(2)})

    def action_space(self, params):
        del params
        return gym.spaces.Discrete(2)


def test_any_object_with_the_interface_is_an_environment():
    env = JaxVectorEnv(GymnaxEnv(Counting(), Params()), 2)
    assert env.reset().observations["time"].tolist() == [[0.0], [0.0]]
    for number in range(3):
        step = env.step(np.array([1, 0]))
        assert step.rewards.tolist() == [1.0, 0.0]
        assert len(step.ended) == (2 if number == 2 else 0)
    assert step.ended[0].final_observation["time"].tolist() == [3.0]
    assert step.ended[0].final_observation["parity"] == 1
    with pytest.raises(EnvError, match="it has no step_env, reset_env"):
        GymnaxEnv(object(), None)
    with pytest.raises(EnvError, match="object is not a space"):
        read_space(object())
