"""Training with a central critic: whole runs in environments with state(), and what is refused."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from inchworm import (
    EnvConfig,
    NumpyPolicy,
    PolicyConfig,
    PolicyMap,
    PolicySpec,
    PPOConfig,
    PPOOptimizer,
    PPOTrainer,
    RolloutCollector,
    TorchPolicy,
    TrainingConfig,
    load_policy,
    make_vector_env,
)
from inchworm.core.errors import ConfigError, InchwormError, RolloutError

pytest.importorskip("pettingzoo")
from doubles.runs import bits
from inchworm.worlds.toys import DEATHS, JOINS, Comings, comings

PPO = PPOConfig(rollout_steps=16, num_minibatches=2, update_epochs=2)
CENTRAL = PolicyConfig(hidden_sizes=(8,), memory_size=8, central_critic=True)
WORLD = partial(comings, plan=JOINS, masks="key")


@pytest.mark.parametrize(
    ("config", "workers"), [({}, 0), ({"kind": "lstm"}, 2), ({"kind": "gru", "memory_place": "before", "normalize_observations": True}, 0)]
)
def test_the_ratio_is_1_with_masks_memory_deaths_and_joins(config: dict[str, Any], workers: int) -> None:
    settings = TrainingConfig(ppo=PPO, env=EnvConfig(num_envs=4, num_workers=workers))
    with PPOTrainer(CENTRAL.replace(**config), WORLD, settings) as trainer, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            rollout = trainer.collect_rollouts()
            assert rollout.global_state.shape == (16, 4, 3)  # once for each copy, of three lanes each
            assert not rollout.valid.all()
            stats = trainer.learn(rollout)
            assert stats.get("ratio_error", 0.0) < 5e-5
    assert stats["value_loss"] > 0


def test_the_policy_file_holds_the_critic_and_its_normaliser(tmp_path: Path) -> None:
    policy = CENTRAL.replace(kind="gru", normalize_observations=True, normalize_values=True)
    with PPOTrainer(policy, WORLD, PPO, num_envs=2) as trainer:
        trainer.learn(trainer.collect_rollouts())
        weights = trainer.policy.get_weights()
        acting = load_policy(trainer.save_policy(tmp_path / "policy.safetensors"))
    assert weights["global_state_normalizer.count"] > 0
    assert isinstance(acting, NumpyPolicy)
    assert acting.spec.global_state_space == spaces.Box(-np.inf, np.inf, (3,), np.float32)
    assert bits(weights) == bits(acting.get_weights())


def test_credit_after_death_needs_a_central_critic() -> None:
    """A custom network cannot train in such an environment, and no such policy learns from a rollout in which agents died."""

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 4)

        def forward(self, seen: Any) -> Any:
            out = self.layer(seen)
            return out[..., :3], out[..., 3]

        def action_outputs(self, seen: Any) -> Any:
            return self(seen)[0]

        def values(self, seen: Any) -> Any:
            return self(seen)[1]

    with make_vector_env(lambda: Comings(DEATHS), 2, global_state=True) as env:
        plain = PolicySpec(env.observation_space, env.action_space, PolicyConfig(hidden_sizes=(4,)))
        with pytest.raises(ConfigError, match="which only a central critic can value"):
            PPOTrainer(TorchPolicy(plain, network=Own()), env, PPO)
        collector = RolloutCollector(env, NumpyPolicy(plain))
        all_alive = collector.collect(2)  # of three agents in each of two copies the second dies after 2 steps
        some_dead = collector.collect(4)
    learner = PPOOptimizer(TorchPolicy(plain), PPO)
    assert learner.update(all_alive)["epochs"] > 0
    with pytest.raises(RolloutError, match="agents that died, so credit continues after death"):
        learner.update(some_dead)


def test_several_policies_with_central_critics(tmp_path: Path) -> None:
    several = PolicyMap(policies={"a": CENTRAL, "b": CENTRAL.replace(kind="gru")}, lane_map=["a", "b", "a"])
    with PPOTrainer(several, WORLD, PPO, num_envs=2, run_dir=tmp_path) as trainer, warnings.catch_warnings():
        warnings.simplefilter("error")
        history = trainer.train(100)
    assert max(*history["a/ratio_error"], *history["b/ratio_error"]) < 5e-5
    mixed = PolicyMap(policies={"a": CENTRAL, "b": PolicyConfig()}, lane_map=["a", "b", "a"])
    with pytest.raises(ConfigError, match="credited with rewards after death, which only a central critic can value"):
        PPOTrainer(mixed, WORLD, PPO, num_envs=2)


def test_what_cannot_be_is_refused_in_one_line() -> None:
    def refused(words: str, kind: type[InchwormError], build: Any) -> None:
        with pytest.raises(kind, match=words) as caught:
            build()
        assert "\n" not in str(caught.value)

    refused("state", InchwormError, lambda: PPOTrainer(CENTRAL, "CartPole-v1", PPO, num_envs=2))
    refused("does not learn a central critic", ConfigError, lambda: PPOTrainer(CENTRAL, WORLD, PPO, num_envs=2, backend="numpy").learner)
    with make_vector_env(WORLD, 2, global_state=True) as env:
        refused("set policy.central_critic=true, create it without global_state", ConfigError, lambda: PPOTrainer("mlp", env, PPO))
        other = PolicySpec(env.observation_space, env.action_space, CENTRAL, spaces.Box(-1, 1, (7,)))
        refused("made for the global state space", InchwormError, lambda: PPOTrainer(other, env, PPO))
