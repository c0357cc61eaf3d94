"""For G4: random configs that are in order, run for two updates."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np

from faults.everyday_fields import valid_data


def run_two_updates(seed: int, number: int, directory: Path) -> str:
    """Train with a random valid config; says what went wrong. One in forty has workers, one in four a memory."""
    from inchworm.config.sections import TrainingConfig
    from inchworm.train.trainer import PPOTrainer

    rng = np.random.default_rng([seed, 40, number])
    data = valid_data(rng, share=0.6)
    env, ppo, run = data["env"], data["ppo"], data.setdefault("run", {})
    steps = env["num_envs"] * ppo["rollout_steps"]
    if ppo.get("num_minibatches") and ppo["num_minibatches"] > steps:
        ppo["num_minibatches"] = steps
    run |= {"total_timesteps": 2 * steps, "max_iterations": None}
    if number % 4 == 1:
        data.setdefault("policy", {})["kind"] = ("lstm", "gru")[number // 4 % 2]
        run["backend"] = "torch"
    if number % 40 == 7:
        env["num_workers"] = 2
    data.setdefault("evaluation", {}).setdefault("episodes", 1)
    data["evaluation"].setdefault("final_episodes", 1)
    env.setdefault("max_episode_steps", 50)
    config = TrainingConfig.from_dict(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with PPOTrainer(config.policy, config.env, config, run_dir=directory) as trainer:
                history = trainer.train()
                failures = list(trainer.failures)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]} with {data}"
    if len(history["loss"]) != 2 or not all(math.isfinite(loss) for loss in history["loss"]):
        return f"losses {history['loss']} with {data}"
    return f"{failures} with {data}" if failures else ""
