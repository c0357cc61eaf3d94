"""Tests of which environments JAX steps itself, and of what is said about it."""

from __future__ import annotations

import pytest

from inchworm.backends.jax.native import JaxVectorEnv, most_truncations
from inchworm.backends.jax.scan_collector import ScanCollector
from inchworm.backends.jax.worlds import make_world
from inchworm.backends.registry import native_choice
from inchworm.cli.main import main
from inchworm.collect.collector import RolloutCollector
from inchworm.config.sections import EnvConfig, EvalConfig, PPOConfig, RunConfig, TrainingConfig, WrapperConfig
from inchworm.core.errors import ConfigError
from inchworm.train.trainer import PPOTrainer


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"native": False}, "env.native=false"),
        ({"jax_native": False}, "env.jax_native=false"),
        ({"num_workers": 2}, "env.num_workers=2"),
        ({"frame_stack": 3}, "env.frame_stack=3"),
        ({"wrappers": (WrapperConfig(name="ClipReward"),)}, r"env.wrappers=\['ClipReward'\]"),
        ({"kwargs": {"sutton_barto_reward": True}}, "env.kwargs="),
    ],
)
def test_settings_that_need_python_step_on_the_host_and_say_why(changes, why):
    chosen, reason = native_choice("jax", EnvConfig(id="CartPole-v1", **changes))
    assert not chosen
    assert reason.startswith("stepping CartPole-v1 on the host, because ")
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(reason)


def test_native_worlds_are_used_and_named():
    chosen, reason = native_choice("jax", EnvConfig(id="CartPole-v1", num_workers=0))
    assert chosen
    assert "JAX-native CartPole-v1" in reason
    assert "env.jax_native=false" in reason
    assert native_choice("jax", EnvConfig(id="gymnax:CartPole-v1")) == (True, "")
    assert native_choice("jax", EnvConfig(id="LunarLander-v3")) == (False, "")
    assert native_choice("numpy", EnvConfig(id="CartPole-v1")) == (False, "")


def test_a_trainer_steps_where_its_backend_does():
    small = PPOConfig(rollout_steps=4)
    with PPOTrainer("mlp", "Pendulum-v1", small, num_envs=2, backend="jax") as native:
        assert isinstance(native.env, JaxVectorEnv)
        assert isinstance(native.collector, ScanCollector)
        assert native.config.env.num_workers == 0
        assert any("JAX-native Pendulum-v1" in reason for reason in native.choices)
    with PPOTrainer("mlp", EnvConfig(id="Pendulum-v1", native=False), small, num_envs=2, num_workers=0, backend="jax") as host:
        assert isinstance(host.collector, RolloutCollector)
    with PPOTrainer("mlp", "gymnax:Pendulum-v1", small, num_envs=2, backend="numpy") as numpy:
        assert isinstance(numpy.env, JaxVectorEnv)
        assert isinstance(numpy.collector, RolloutCollector)


def test_a_native_run_is_trained_evaluated_and_resumed_from_the_command_line(tmp_path, capsys):
    run = str(tmp_path / "run")
    small = ["--ppo.rollout-steps", "8", "--ppo.update-epochs", "1", "--env.num-envs", "2", "--ppo.minibatch-size", "8"]
    where = ["--run.directory", str(tmp_path), "--run.name", "run", "--evaluation.final-episodes", "2"]
    assert main(["train", "CartPole-v1", "--backend", "jax", "--total-timesteps", "48", *small, *where]) == 0
    assert "using the JAX-native CartPole-v1" in "".join(capsys.readouterr())
    assert main(["resume", run, "--total-timesteps", "64"]) == 0
    assert main(["evaluate", run, "--episodes", "2"]) == 0
    assert "mean return" in "".join(capsys.readouterr())
    assert main(["resume", run, "--total-timesteps", "80", "--backend", "numpy"]) == 2
    assert "inside a compiled program" in "".join(capsys.readouterr())


def test_states_of_a_compiled_program_and_of_the_host_are_told_apart():
    settings = TrainingConfig(
        env=EnvConfig(id="CartPole-v1", num_envs=2), ppo=PPOConfig(rollout_steps=4), evaluation=EvalConfig(final_episodes=0),
        run=RunConfig(backend="jax"),
    )  # fmt: skip
    native = PPOTrainer("mlp", settings.env, settings)
    host = PPOTrainer("mlp", settings.env.replace(jax_native=False), settings)
    with pytest.raises(ConfigError, match="inside a compiled program"):
        host.collector.load_state_dict(native.collector.state_dict())
    with pytest.raises(ConfigError, match="stepped from the host"):
        native.collector.load_state_dict(host.collector.state_dict())


def test_slots_are_enough_for_all_truncations():
    world = make_world(EnvConfig(id="CartPole-v1", max_episode_steps=10))
    assert [most_truncations(world, steps) for steps in (1, 10, 11, 20, 21)] == [1, 1, 2, 2, 3]
    world.max_episode_steps = None
    assert most_truncations(world, 7) == 7
