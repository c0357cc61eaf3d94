import gymnasium as gym
import pytest

from inchworm.config.presets import PRESETS, SIZES
from inchworm.config.sections import TrainingConfig
from inchworm.env.registry import config_for

MUJOCO = ["HalfCheetah-v5", "Hopper-v5", "Walker2d-v5"]
NAMES = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "Pendulum-v1", "LunarLander-v3", "LunarLanderContinuous-v3", *MUJOCO]


def test_every_promised_environment_has_a_preset() -> None:
    assert list(PRESETS) == NAMES


@pytest.mark.parametrize("name", [*NAMES, "Skirmish-v0"])
def test_a_preset_is_for_its_environment_and_is_evaluated_and_saved_during_training(name: str) -> None:
    config = config_for(name)
    assert config.env.id == name
    assert config.ppo != TrainingConfig().ppo
    iterations = config.run.total_timesteps // (config.env.num_envs * config.ppo.rollout_steps)
    assert 0 < config.evaluation.interval <= iterations / 2
    assert 0 < config.run.checkpoint_interval <= iterations / 2
    uneven_scales = name in ("Acrobot-v1", "MountainCar-v0", *MUJOCO)
    assert config.policy.normalize_observations == config.ppo.scale_rewards == uneven_scales
    assert not config.policy.normalize_values  # docs/decisions/0021


def test_targets_are_those_of_gymnasium_and_end_no_run() -> None:
    """A preset's target is reported; its window is one evaluation, so that it is compared after each."""
    targets = {name: PRESETS[name].config.convergence for name in NAMES if PRESETS[name].config.convergence.target is not None}
    solved = ["Acrobot-v1", "CartPole-v1", "LunarLander-v3", "LunarLanderContinuous-v3", "MountainCar-v0"]
    assert sorted(targets) == solved
    assert targets["CartPole-v1"].target == 475.0
    for name, convergence in targets.items():
        assert convergence.target == gym.spec(name).reward_threshold
        assert not convergence.stops
        assert (convergence.window, convergence.returns) == (PRESETS[name].config.evaluation.episodes, "evaluation")


@pytest.mark.parametrize("name", ["Taxi-v3", "CartPole-v0"])  # the second is in the registry of worlds
def test_an_environment_without_preset_gets_the_defaults(name: str) -> None:
    config = config_for(name)
    assert config.env.id == name
    assert config.replace(env=TrainingConfig().env) == TrainingConfig()


@pytest.mark.parametrize("size", SIZES)
def test_a_config_of_each_size_is_for_any_environment(size: str) -> None:
    config = SIZES[size]("Acrobot-v1")
    assert config.env.id == "Acrobot-v1"
    assert SIZES[size]().env.id == "CartPole-v1"
    batch = config.env.num_envs * config.ppo.rollout_steps
    assert config.ppo.minibatch_size is not None
    assert batch % config.ppo.minibatch_size == 0


def test_sizes_grow() -> None:
    configs = [make() for make in SIZES.values()]
    assert list(SIZES) == ["small", "medium", "large"]
    for grows in (
        [config.run.total_timesteps for config in configs],
        [config.env.num_envs for config in configs],
        [config.policy.hidden_sizes for config in configs],
        [config.ppo.minibatch_size for config in configs],
    ):
        assert sorted(grows) == grows
        assert len({*grows}) == 3
