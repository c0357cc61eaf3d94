"""Runs with memory: by name, resumed to the bit, with any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest

from doubles.runs import bits, outcome
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.config.sections import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.policy.file import load_policy
from inchworm.train.loop import TrainingState as State
from inchworm.train.loop import default_training_step, run_training_loop
from inchworm.train.trainer import PPOTrainer, create_training_components

pytestmark = pytest.mark.filterwarnings("error:ratio_error")

STEPS, LANES = 14, 4
PPO = PPOConfig(rollout_steps=STEPS, num_minibatches=2, update_epochs=2, learning_rate=1e-2, sequence_length=5)  # 14 = 5 + 5 + 4


def config(kind: str, workers: int = 0, iterations: int = 4, **ppo: Any) -> TrainingConfig:
    return TrainingConfig(
        env=EnvConfig(id="CartPole-v1", num_envs=LANES, num_workers=workers),
        policy=PolicyConfig(kind=kind, hidden_sizes=(8,), memory_size=6, memory_layers=2),
        ppo=PPO.replace(**ppo),
        evaluation=EvalConfig(interval=0, final_episodes=0),
        run=RunConfig(total_timesteps=4 * STEPS * LANES, checkpoint_interval=2, max_iterations=iterations),
    )


def ran(whole: TrainingConfig, directory: Path, *, resume: bool = False) -> dict[str, Any]:
    with PPOTrainer(whole.policy, whole.env, whole, run_dir=directory) as trainer:
        if resume:
            trainer.load_checkpoint()
        trainer.train()
        memory = trainer.full_state()["collector"]["policy_state"]
        assert optree.tree_leaves(memory)[0].shape == (LANES, 2, 6)
        return {**outcome(trainer), "collector": bits(memory)}


@pytest.mark.parametrize(("kind", "workers"), [("lstm", 2), ("gru", 1)])
def test_killed_and_resumed_is_the_undisturbed_run_bit_for_bit_with_any_workers(kind: str, workers: int, tmp_path: Path) -> None:
    expected = ran(config(kind), tmp_path / "whole")
    ran(config(kind, workers, iterations=2), tmp_path / "parts")
    assert ran(config(kind, workers), tmp_path / "parts", resume=True) == expected


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_name_is_enough(kind: str, tmp_path: Path) -> None:
    with PPOTrainer(kind, "CartPole-v1", PPOConfig(rollout_steps=40, num_minibatches=2), num_envs=2, seed=1) as trainer:
        rollout = trainer.collect_rollouts()
        assert rollout.policy_state["hidden"].shape == (2, 2, 1, 64)  # at rows 0 and 32: never every row, never none
        assert trainer.learn(rollout)["ratio_error"] < 5e-5
        assert isinstance(trainer.collector.policy, NumpyPolicy)  # NumPy acts, torch learns
        assert trainer.evaluate(episodes=2).mean_return > 0
        path = trainer.save_policy(tmp_path / "policy.safetensors")
        assert load_policy(path).spec.config.kind == kind


def test_the_functional_loop_records_where_sequences_begin() -> None:
    whole = config("lstm", iterations=1)
    components = create_training_components(whole, "lstm")
    run_training_loop(State(), components, default_training_step)
    rollout = components.collector.collect(STEPS)
    assert len(rollout.policy_state["cell"]) == 3  # rows 0, 5 and 10
    components.collector.close()


def test_a_length_of_1_is_taken_at_its_word_and_auto_is_never_1() -> None:
    for length, recorded in ((1, STEPS), ("auto", 1)):
        with PPOTrainer("gru", "CartPole-v1", config("gru", sequence_length=length)) as trainer:
            assert len(trainer.collect_rollouts().policy_state["hidden"]) == recorded


def test_what_memory_cannot_do_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"policy.kind=lstm can be trained only with torch.*run.backend=torch"):
        PPOTrainer("lstm", "CartPole-v1", backend="numpy")
    with pytest.raises(ConfigError, match="use mlp, cnn, lstm or gru"):
        PPOTrainer("rnn", "CartPole-v1")
