"""Memory, against a task that cannot be solved without it: a cue at the start, a choice at the end, nothing in between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inchworm.config.sections import PolicyConfig, PPOConfig
from inchworm.train.trainer import PPOTrainer
from inchworm.worlds.toys import MemoryCorridor, MixedMemoryCorridor

PPO = PPOConfig(
    rollout_steps=63, sequence_length=63, num_minibatches=4, update_epochs=4, learning_rate=3e-3, ent_coef=0.01, gamma=0.99, gae_lambda=0.95
)
"""A rollout is three whole episodes of the corridor of 20 in each lane, and one sequence."""


def success(env: Any, kind: str, steps: int, *, seed: int = 0, ppo: PPOConfig = PPO) -> float:
    """The share of right turns in 200 greedy episodes after training; training stops early once 100 episodes in a row went right."""

    def solved(state: Any, metrics: Any) -> bool:
        del state, metrics
        recent = [episode.info["is_success"] for episode in trainer.collector.recent]
        return not (len(recent) == 100 and np.mean(recent) >= 0.99)

    policy = PolicyConfig(kind=kind, hidden_sizes=(32,), memory_size=32, log_std_init=-1.0)  # type: ignore[arg-type]
    with PPOTrainer(policy, env, ppo, num_envs=16, seed=seed) as trainer:
        trainer.train(steps, callback=solved)
        rate = trainer.evaluate(200).success_rate
    assert rate is not None
    return rate


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_cue_is_remembered_over_a_few_steps(kind: str) -> None:
    assert success(lambda: MemoryCorridor(5), kind, 20_000) >= 0.95  # without memory 0.5


@pytest.mark.slow
@pytest.mark.parametrize("env", [MemoryCorridor, MixedMemoryCorridor])
def test_a_cue_is_remembered_over_20_steps(env: Any) -> None:
    assert success(env, "lstm", 60_000) >= 0.95


def test_without_memory_it_is_chance() -> None:
    assert success(lambda: MemoryCorridor(5), "mlp", 20_000) == pytest.approx(0.5, abs=0.14)  # 4 standard errors of 200 fair coins
