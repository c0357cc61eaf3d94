"""Tests of env/source.py: what was handed over is decided once."""

import functools
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from doubles.duel import DuelVectorEnv
from doubles.toys import Corridor
from inchworm import PPOTrainer
from inchworm.config.sections import EnvConfig
from inchworm.core.errors import ConfigError, EnvError
from inchworm.env.source import EnvSource, InProcessVectorEnv, env_source, make_vector_env
from inchworm.worlds.cartpole import NativeCartPole
from inchworm.worlds.toys import Sacrifice


def cartpole():
    return gym.make("CartPole-v1")


def cartpoles():
    return SyncVectorEnv([cartpole] * 3, autoreset_mode=AutoresetMode.DISABLED)


@pytest.mark.parametrize(
    ("make", "kind", "name", "copies"),
    [
        (lambda: "CartPole-v1", "id", "CartPole-v1", None),
        (lambda: EnvConfig(id="Acrobot-v1"), "config", "Acrobot-v1", None),
        (lambda: cartpole, "factory", f"{__name__}:cartpole", None),
        (lambda: Corridor, "factory", "doubles.toys:Corridor", None),
        (lambda: functools.partial(cartpole), "factory", "partial", None),
        (cartpole, "gymnasium", "CartPole-v1", 1),
        (Corridor, "gymnasium", "Corridor", 1),
        (Sacrifice, "pettingzoo", "inchworm.worlds.toys:Sacrifice", 1),
        (cartpoles, "gymnasium.vector", "SyncVectorEnv", 3),
        (lambda: InProcessVectorEnv(Corridor, 2), "vector", "InProcessVectorEnv", 2),
        (lambda: DuelVectorEnv(3), "vector", "doubles.duel:DuelVectorEnv", 3),
    ],
)
def test_what_was_handed_over(make, kind, name, copies):
    source = env_source(make())
    assert (source.kind, source.name, source.num_copies) == (kind, name, copies)
    assert source.can_be_copied == (copies is None)
    assert source.is_instance == (kind in ("gymnasium", "pettingzoo"))
    assert env_source(source) is source


@pytest.mark.parametrize("thing", [3, None, SimpleNamespace(num_lanes=2)])
def test_anything_else_is_refused(thing):
    with pytest.raises(EnvError, match="an environment must be an id"):
        make_vector_env(thing)


@pytest.mark.parametrize("mock", [Mock(), MagicMock(), Mock(spec=gym.Env), Mock(observation_space=spaces.Discrete(3))])
def test_mocks_are_refused_in_one_line(mock):
    with pytest.raises(EnvError, match=r"^(observation|action)_space of \w+ is (\w*Mock|NoneType), not a Gymnasium space; set it to"):
        PPOTrainer("mlp", mock)


def test_a_mock_of_an_environment_with_spaces_and_results_is_one():
    mock = Mock(spec=gym.Env, observation_space=spaces.Box(-1, 1, (2,)), action_space=spaces.Box(-1, 1, (1,)))
    assert env_source(mock).kind == "gymnasium"


def test_separate_copies_for_evaluation():
    config = EnvConfig(max_episode_steps=5)
    assert env_source("CartPole-v1").for_evaluation(config) == EnvSource(config, "config")
    for given in (cartpole, cartpole()):  # a registered environment can be made again
        again = env_source(given).for_evaluation(config)
        assert again is not None
        env = again.given()
        assert env is not given
        env.reset()
        assert [env.step(0)[3] for _ in range(5)] == [False] * 4 + [True]  # with the config's limit
    for alone in (Corridor(), Sacrifice(), InProcessVectorEnv(Corridor, 1)):
        assert env_source(alone).for_evaluation(config) is None


def test_a_vector_env_is_returned_with_the_attributes_it_lacks():
    duel = DuelVectorEnv(2)
    assert make_vector_env(duel) is duel
    assert (duel.global_state_space, duel.agents_leave) == (None, True)


def test_a_source_makes_the_vector_env_of_what_was_given():
    source = env_source(Corridor).with_config(EnvConfig(max_episode_steps=2))
    env = make_vector_env(source, 2)
    env.reset()
    actions = np.zeros(2, np.int64)
    assert not env.step(actions).truncated.any()
    assert env.step(actions).truncated.all()


def test_the_number_of_copies():
    for source in ("doubles.toys:Corridor", EnvConfig(id="doubles.toys:Corridor"), Corridor):
        env = make_vector_env(source, 2)
        assert isinstance(env, InProcessVectorEnv)
        assert (env.num_lanes, env.num_envs) == (2, 2)
        assert env.action_space == spaces.Discrete(2)
        assert make_vector_env(env) is env
    assert make_vector_env(Corridor).num_lanes == 8
    assert make_vector_env(EnvConfig(id="doubles.toys:Corridor", num_envs=5)).num_lanes == 5
    assert make_vector_env(EnvConfig(id="doubles.toys:Corridor", num_envs=5), 2, 0).num_lanes == 2
    with pytest.raises(ConfigError, match="num_envs=0"):
        make_vector_env(Corridor, 0)
    with pytest.raises(ConfigError, match="num_workers=9 is more than"):
        make_vector_env(EnvConfig(num_workers=2), 8, 9)


def test_one_environment_is_one_lane():
    instance = Corridor()
    env = make_vector_env(instance)
    assert env.num_lanes == 1
    for wrong in ({"num_envs": 2}, {"num_workers": 1}):
        with pytest.raises(EnvError, match="one environment is one lane in this process"):
            make_vector_env(instance, **wrong)


def test_native_is_chosen_where_it_pays():
    def kind(**changes):
        return type(make_vector_env(EnvConfig(**{"id": "CartPole-v1", "num_envs": 8, **changes})))

    assert kind() is NativeCartPole
    assert kind(num_envs=1) is NativeCartPole
    for plain in ({"native": False}, {"kwargs": {"sutton_barto_reward": True}}, {"frame_stack": 2}, {"id": "Acrobot-v1"}):
        assert kind(**plain) is InProcessVectorEnv
