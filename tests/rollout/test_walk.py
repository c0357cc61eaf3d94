"""The walk of one data point, end to end: nothing is moved, mixed or lost between the world and the loss."""

import functools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from doubles.learners import tensors
from doubles.toys import Counter, SpacesEnv
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.backends.registry import compute_advantages
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.collect.collector import RolloutCollector
from inchworm.config.sections import PolicyConfig, PPOConfig
from inchworm.core.types import Minibatch
from inchworm.env.source import make_vector_env
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.rollout import Rollout
from inchworm.train.trainer import PPOTrainer


def test_the_value_of_the_true_successor_by_hand() -> None:
    """With V(s) = step and reward = step + 1, every number is known: next_values is step + 1 in each row, ended or not."""

    class StepCritic(NumpyPolicy):
        def value(self, observations: Any, state: Any = (), episode_starts: Any = ()) -> Any:
            return observations[..., 1].astype(np.float32)

    env = make_vector_env(functools.partial(Counter, 4, truncate=True), 2)  # it shows (episode seed, step)
    critic = StepCritic(PolicySpec(env.observation_space, env.action_space, PolicyConfig(hidden_sizes=(8,))))
    rollout = RolloutCollector(env, critic).collect(7)
    result = compute_advantages(critic, rollout, PPOConfig(gamma=0.5, gae_lambda=0.0))
    step = np.array([0, 1, 2, 3, 0, 1, 2], np.float32)
    assert result.next_values.T.tolist() == [(step + 1).tolist()] * 2  # 4 where it was cut at step 3, not the 0 of the next episode
    # lambda 0: A = r + gamma V' - V = (s + 1) + 0.5 (s + 1) - s = 1.5 + 0.5 s
    assert result.advantages.T.tolist() == [(1.5 + 0.5 * step).tolist()] * 2
    # lambda 1: A = delta + 0.5 A', but nothing after the cut counts before it: 3, 2.5 + 0.5 · 3, 2 + 0.5 · 4, 1.5 + 0.5 · 4; and 2.5, …
    result = compute_advantages(critic, rollout, PPOConfig(gamma=0.5, gae_lambda=1.0))
    assert result.advantages.T.tolist() == [[3.5, 4.0, 4.0, 3.0, 3.125, 3.25, 2.5]] * 2


def ratio_error(policy: TorchPolicy, rollout: Rollout) -> float:
    """The largest difference between the learner's log-probs and those recorded while acting."""
    held = tensors(rollout)
    fields = {name: held[name] for name in ("observations", "actions", "log_probs", "valid", "episode_starts")}
    minibatch = Minibatch(**fields, advantages=held.rewards, returns=held.rewards, values=held.rewards)
    return float(np.abs(policy.evaluate(minibatch).log_probs.detach().numpy() - rollout.log_probs).max())


IMAGE = spaces.Box(0, 255, (1, 10, 10), np.uint8)
MIXED = spaces.Dict({"image": IMAGE, "level": spaces.Discrete(4, start=-1), "parts": spaces.Tuple([spaces.MultiBinary(3)])})
HYBRID = spaces.Dict({"aim": spaces.Box(-1.0, 2.0, (2,)), "gear": spaces.Discrete(3, start=5), "slots": spaces.MultiDiscrete([2, 4])})
NORMALIZED = {"normalize_observations": True, "normalize_values": True}
TINY_CNN: dict[str, Any] = {"kind": "cnn", "cnn_filters": ((4, 3, 2), (4, 3, 1)), "cnn_features": 8}
WORLDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "CartPole-v1": ("CartPole-v1", {}),
    "Pendulum-v1 clipped": ("Pendulum-v1", NORMALIZED),
    "Pendulum-v1 squashed": ("Pendulum-v1", {"action_bounds": "tanh", "log_std_init": -0.5}),
    "masked hybrid actions, dict observations": (functools.partial(SpacesEnv, MIXED, HYBRID, mask="info"), NORMALIZED),
    "masked images and numbers": (functools.partial(SpacesEnv, MIXED, HYBRID, mask="info"), {**TINY_CNN, **NORMALIZED}),
}


@pytest.mark.parametrize("name", WORLDS)
def test_the_ratio_is_one_before_and_after_updates(name: str) -> None:
    env, options = WORLDS[name]
    config = PPOConfig(rollout_steps=24, num_minibatches=2, update_epochs=2, learning_rate=1e-2)
    with PPOTrainer(PolicyConfig(hidden_sizes=(16, 16), **options), env, config, num_envs=3, seed=1, backend="torch") as trainer:
        assert isinstance(trainer.policy, TorchPolicy)
        assert isinstance(trainer.collector.policy, TorchPolicy if "images" in name else NumpyPolicy)
        for update in range(4):  # with normalisers the first only moves their statistics
            rollout = trainer.collect_rollouts()
            assert ratio_error(trainer.policy, rollout) < 5e-5, f"before update {update}"
            stats = trainer.learn(rollout)
            assert stats.get("ratio_error", 0.0) < 1e-4
            assert stats["staleness"] == 0
        assert stats["grad_norm"] > 0  # the weights have moved
        assert ratio_error(trainer.policy, rollout) > 1e-3  # so the test can fail: that rollout is an old one now
