"""Whole runs of a trainer, and all that two equal runs must have in common."""

from typing import Any

import numpy as np
import optree

from inchworm.config.sections import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.tracking.jsonl import METRICS
from inchworm.train.trainer import PPOTrainer

STEPS, LANES = 8, 2
BATCH = STEPS * LANES
SMALL = PolicyConfig(hidden_sizes=(8,))
PARTS = ("weights", "learner", "collector", "state", "callbacks", "trackers")


def small_config(
    *, iterations: int = 6, policy: PolicyConfig = SMALL, ppo: PPOConfig | None = None, evaluation: EvalConfig | None = None, **run: Any
) -> TrainingConfig:
    """Iterations of 8 steps of 2 lanes with a small network in torch; without evaluations and a report unless they are asked for."""
    return TrainingConfig(
        env=EnvConfig(id="CartPole-v1", num_envs=LANES),
        policy=policy,
        ppo=ppo or PPOConfig(rollout_steps=STEPS, num_minibatches=2, update_epochs=1),
        evaluation=evaluation or EvalConfig(interval=0, final_episodes=0),
        run=RunConfig(**{"total_timesteps": iterations * BATCH, "backend": "torch", "report": False, **run}),
    )


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in optree.tree_leaves(tree, none_is_leaf=True)]


def outcome(trainer: PPOTrainer) -> dict[str, Any]:
    """The state to the bit and the rows of metrics, timing apart."""
    state = trainer.full_state()
    rows = {} if trainer.run_dir is None else {METRICS: (trainer.run_dir / METRICS).read_bytes()}
    return {**{part: bits(state[part]) for part in PARTS}, **rows}


def finish(trainer: PPOTrainer, *arguments: Any, resume: bool = False, **options: Any) -> dict[str, Any]:
    """Train to the end and close: the outcome."""
    with trainer:
        if resume:
            trainer.load_checkpoint()
        trainer.train(*arguments, **options)
        return outcome(trainer)
