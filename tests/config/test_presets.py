import pytest

from inchworm.config.presets import PRESETS, config_for, small_fast_config
from inchworm.config.sections import TrainingConfig

MUJOCO = ["HalfCheetah-v5", "Hopper-v5", "Walker2d-v5"]
NAMES = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "Pendulum-v1", "LunarLander-v3", "Skirmish-v0", *MUJOCO]


def test_every_promised_environment_has_a_preset() -> None:
    assert list(PRESETS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_for_its_environment_and_is_evaluated_and_saved_during_training(name: str) -> None:
    config = config_for(name)
    assert config == PRESETS[name].config
    assert config.env.id == name
    iterations = config.run.total_timesteps // (config.env.num_envs * config.ppo.rollout_steps)
    assert 0 < config.evaluation.interval <= iterations / 2
    assert 0 < config.run.checkpoint_interval <= iterations / 2


@pytest.mark.parametrize("name", ["MountainCar-v0", *MUJOCO])
def test_observations_of_uneven_scales_are_normalised(name: str) -> None:
    policy = PRESETS[name].config.policy
    assert policy.normalize_observations
    assert policy.normalize_values


def test_an_environment_without_preset_gets_the_defaults() -> None:
    config = config_for("Taxi-v3")
    assert config.env.id == "Taxi-v3"
    assert config.ppo == TrainingConfig().ppo


def test_the_small_config_is_a_short_cartpole_run() -> None:
    config = small_fast_config()
    assert config.env.id == "CartPole-v1"
    assert config.run.total_timesteps <= 20_000
