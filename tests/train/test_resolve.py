"""Every form in which the front door takes its arguments."""

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from doubles.toys import Corridor, Counter
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.core.errors import ConfigError, EnvError, InchwormError, SpaceError
from inchworm.core.types import PolicyStep, Tree
from inchworm.env.source import make_vector_env
from inchworm.policy.spec import PolicySpec
from inchworm.train.trainer import PPOTrainer

CARTPOLE = gym.make("CartPole-v1")
SPEC = PolicySpec(CARTPOLE.observation_space, CARTPOLE.action_space, PolicyConfig(hidden_sizes=(8,), activation="relu"))


class Mock:
    """An actor and nothing more."""

    def initial_state(self, num_lanes: int) -> Tree:
        return ()

    def act(
        self, observations: Tree, state: Tree, episode_starts: Any, rng: np.random.Generator, *, deterministic: bool = False
    ) -> PolicyStep:
        actions = np.ones(len(observations), np.int64)
        return PolicyStep(actions, actions, np.zeros(len(observations), np.float32), state)


def make_cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


ENVS: dict[str, tuple[Any, int, str]] = {
    "id": ("CartPole-v1", 8, "CartPole-v1"),
    "EnvConfig": (EnvConfig(id="CartPole-v1", num_envs=3), 3, "CartPole-v1"),
    "environment": (make_cartpole, 1, "CartPole-v1"),  # made anew in the test
    "factory": (make_cartpole, 8, f"{__name__}:make_cartpole"),
    "nameless factory": (functools.partial(gym.make, "CartPole-v1"), 8, "partial"),
    "VectorEnv": (lambda: make_vector_env("CartPole-v1", 2), 2, "NativeCartPole"),
}


@pytest.mark.parametrize("kind", ENVS)
def test_two_arguments_are_enough(kind: str) -> None:
    env, lanes, name = ENVS[kind]
    env = env() if kind in ("environment", "VectorEnv") else env
    with PPOTrainer("mlp", env) as trainer:
        assert trainer.collect_rollouts(4).num_lanes == trainer.env.num_lanes == trainer.config.env.num_envs == lanes
        assert trainer.config.env.id == name  # the run's record names the world that was trained in
        assert trainer.learn(trainer.collect_rollouts(4))["loss"] != 0.0
        assert trainer.config.ppo == PPOConfig()
    if kind == "VectorEnv":
        assert trainer.env is env


@pytest.mark.parametrize(
    ("policy", "config"),
    [
        ("mlp", PolicyConfig()),
        (PolicyConfig(hidden_sizes=(4,)), PolicyConfig(hidden_sizes=(4,))),
        (SPEC, SPEC.config),
        (TorchPolicy(SPEC, seed=5), SPEC.config),
        (NumpyPolicy(SPEC, seed=5), SPEC.config),
    ],
    ids=["name", "PolicyConfig", "PolicySpec", "TorchPolicy", "NumpyPolicy"],
)
def test_every_form_of_a_policy_collects_and_learns(policy: Any, config: PolicyConfig) -> None:
    with PPOTrainer(policy, "CartPole-v1", num_envs=2, seed=1) as trainer:
        if isinstance(policy, TorchPolicy):
            assert trainer.policy is policy
        if isinstance(policy, NumpyPolicy):
            assert isinstance(trainer.policy, TorchPolicy)  # NumPy only acts: its twin learns
            assert all(np.array_equal(value, policy.get_weights()[name]) for name, value in trainer.policy.get_weights().items())
        assert trainer.config.policy == config  # the run's record names the network that was trained
        before = trainer.policy.get_weights()
        trainer.learn(trainer.collect_rollouts(8))
        after, acting = trainer.policy.get_weights(), trainer.collector.policy.get_weights()
        assert any(not np.array_equal(before[name], value) for name, value in after.items())
        assert all(np.array_equal(acting[name], value) for name, value in after.items())


def test_the_seed_decides_weights_worlds_and_samples() -> None:
    def first(seed: int) -> list[bytes]:
        with PPOTrainer("mlp", "CartPole-v1", num_envs=2, seed=seed) as trainer:
            rollout = trainer.collect_rollouts(20)
            return [
                trainer.policy.get_weights()["actor.0.weight"].tobytes(),
                rollout.observations[0].tobytes(),
                rollout.actions.tobytes(),
                np.array([trainer.learn(rollout)["loss"]]).tobytes(),
            ]

    assert first(1) == first(1)
    assert all(one != other for one, other in zip(first(1), first(2), strict=True))


def test_cnn_by_name() -> None:
    class Image(Counter):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = spaces.Box(0, 255, (1, 36, 36), np.uint8)

        def _observe(self) -> np.ndarray:
            return np.zeros((1, 36, 36), np.uint8)

    with PPOTrainer("cnn", Image, num_envs=1) as trainer:
        assert trainer.config.policy.kind == "cnn"
        assert trainer.collector.policy is trainer.policy  # convolutions act where they learn
        assert trainer.collect_rollouts(2).observations.dtype == np.uint8


def test_an_actor_that_is_no_policy_can_collect_and_is_told_why_it_cannot_learn() -> None:
    with PPOTrainer(Mock(), "CartPole-v1", num_envs=2) as trainer:
        rollout = trainer.collect_rollouts(5)
        assert rollout.actions.all()
        with pytest.raises(ConfigError, match="Mock"):
            trainer.learn(rollout)


# ---- config and keywords


@pytest.mark.parametrize("wrong", [{"gamma": 0.9}, 3, "ppo", EnvConfig()])
def test_a_config_of_another_type_is_refused_in_words(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"PPOConfig or a TrainingConfig, not {type(wrong).__name__}"):
        PPOTrainer("mlp", "CartPole-v1", wrong)


def test_keywords_win_over_the_config() -> None:
    config = TrainingConfig(env=EnvConfig(id="Acrobot-v1", num_envs=5), run=RunConfig(seed=3, device="auto"), ppo=PPOConfig(gamma=0.5))
    with PPOTrainer("mlp", "CartPole-v1", config, num_envs=2, seed=9, backend="torch", device="cpu") as trainer:
        used = trainer.config
    assert (used.env.id, used.env.num_envs, used.run.seed, used.run.device, used.ppo.gamma) == ("CartPole-v1", 2, 9, "cpu", 0.5)
    with PPOTrainer("mlp", "CartPole-v1", config) as trainer:
        assert (trainer.config.run.seed, trainer.config.env.num_envs) == (3, 5)


def test_a_device_may_be_torchs_own() -> None:
    import torch

    with PPOTrainer("mlp", "CartPole-v1", num_envs=1, device=torch.device("cpu")) as trainer:  # type: ignore[arg-type]
        assert trainer.device == trainer.config.run.device == "cpu"


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"backend": "abacus"}, "backend"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"num_envs": 0}, "num_envs"),
    ],
)
def test_impossible_keywords_are_refused_in_words(keywords: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PPOTrainer("mlp", "CartPole-v1", **keywords)


def test_a_ppo_config_is_checked_against_the_lanes_that_are_asked_for() -> None:
    # 8 lanes x 32 steps = 256 would be too few, 16 x 32 = 512 is not
    wide = PPOConfig(rollout_steps=32, minibatch_size=512)
    PPOTrainer("mlp", "CartPole-v1", wide, num_envs=16).close()
    with pytest.raises(ConfigError, match=r"4 lanes x 32 steps = 128"):
        PPOTrainer("mlp", "CartPole-v1", wide, num_envs=4)


def test_what_was_handed_over_has_the_lanes_it_has() -> None:
    with pytest.raises(ConfigError, match=r"num_envs=4, but the .* has 1 lane"):
        PPOTrainer("mlp", make_cartpole(), num_envs=4)
    with pytest.raises(ConfigError, match=r"num_envs=4, but the NativeCartPole has 2 lane"):
        PPOTrainer("mlp", make_vector_env("CartPole-v1", 2), num_envs=4)
    PPOTrainer("mlp", make_cartpole(), num_envs=1).close()


def test_no_more_workers_than_lanes() -> None:
    config = TrainingConfig(env=EnvConfig(num_envs=8, num_workers=4))
    env = make_vector_env("CartPole-v1", 2)
    with PPOTrainer("mlp", env, config) as trainer:
        assert (trainer.config.env.num_envs, trainer.config.env.num_workers) == (2, 2)


def test_without_a_training_config_no_score_is_taken_while_training() -> None:
    for config in (None, PPOConfig()):
        with PPOTrainer("mlp", "CartPole-v1", config, num_envs=1) as trainer:
            assert (trainer.config.evaluation.interval, trainer.config.evaluation.final_episodes) == (0, 0)
    with PPOTrainer("mlp", "CartPole-v1", TrainingConfig(), num_envs=1) as trainer:
        assert trainer.config.evaluation == EvalConfig()


# ---- wrong use


@pytest.mark.parametrize("policy", ["mpl", object(), None, 3])
def test_what_is_no_policy_is_refused_in_words(policy: Any) -> None:
    with pytest.raises(ConfigError, match="policy"):
        PPOTrainer(policy, "CartPole-v1", num_envs=1)


@pytest.mark.parametrize("env", [None, 3, ["CartPole-v1"]])
def test_what_is_no_environment_is_refused_in_words(env: Any) -> None:
    with pytest.raises(EnvError, match="id, an EnvConfig"):
        PPOTrainer("mlp", env)


def test_environments_that_were_made_are_closed_if_the_policy_cannot_be() -> None:
    open_doors: list[int] = []

    class Door(Counter):
        def __init__(self) -> None:
            super().__init__()
            open_doors.append(1)

        def close(self) -> None:
            open_doors.pop()

    with pytest.raises(InchwormError):
        PPOTrainer(object(), Door, num_envs=3)  # type: ignore[arg-type]
    assert not open_doors
    env = make_vector_env(Door, 2)
    with pytest.raises(InchwormError):
        PPOTrainer(object(), env)  # type: ignore[arg-type]
    assert len(open_doors) == 2  # somebody else's stay open
    env.close()


def test_a_policy_of_other_spaces_is_refused_before_it_acts() -> None:
    with pytest.raises(SpaceError, match="observation"):
        PPOTrainer(SPEC, Corridor, num_envs=1)
    with pytest.raises(SpaceError, match="observation"):
        PPOTrainer(NumpyPolicy(SPEC), Corridor, num_envs=1)
    with pytest.raises(SpaceError, match="action"):
        PPOTrainer(SPEC, _cartpole_with_three_actions, num_envs=1)


def _cartpole_with_three_actions() -> gym.Env[Any, Any]:
    env = gym.make("CartPole-v1")
    env.action_space = spaces.Discrete(3)
    return env


@pytest.mark.parametrize("given", ["factory", "instance"])
def test_the_env_config_is_put_around_what_was_given(given: str) -> None:
    env = CartPoleEnv if given == "factory" else CartPoleEnv()  # without a limit of its own
    config = TrainingConfig(env=EnvConfig(max_episode_steps=3, frame_stack=2), ppo=PPOConfig(rollout_steps=8))
    with PPOTrainer("mlp", env, config, num_envs=2 if given == "factory" else None) as trainer:
        rollout = trainer.collect_rollouts(7)
        assert rollout.observations.shape[2:] == (2, 4)
        assert rollout.truncated[:, 0].tolist() == [False, False, True] * 2 + [False]


def test_arguments_cannot_reach_an_environment_that_is_made() -> None:
    with pytest.raises(EnvError, match=r"env.kwargs=\{'size': 3\} cannot reach"):
        PPOTrainer("mlp", CartPoleEnv(), TrainingConfig(env=EnvConfig(kwargs={"size": 3}), ppo=PPOConfig(rollout_steps=8)))
    with pytest.raises(ConfigError, match=r"env\.num_workers=2, but an environment instance stays in this process"):
        PPOTrainer("mlp", CartPoleEnv(), TrainingConfig(env=EnvConfig(num_envs=2, num_workers=2), ppo=PPOConfig(rollout_steps=8)))
