"""A run described by one typed config: create it, write it as YAML, read it back, train, and resume from the run directory.

python examples/structured_config.py [STEPS]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from inchworm import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, PPOTrainer, RunConfig, TrainingConfig, load_policy


def main(steps: int = 10_000, directory: str | None = None) -> TrainingConfig:
    root = Path(directory or tempfile.mkdtemp(prefix="inchworm-"))
    config = TrainingConfig(
        env=EnvConfig(id="CartPole-v1", num_envs=8),
        policy=PolicyConfig(hidden_sizes=(64, 64), normalize_observations=True),
        ppo=PPOConfig(learning_rate=1e-3, gamma=0.98, gae_lambda=0.8, rollout_steps=32, update_epochs=20, minibatch_size=256),
        evaluation=EvalConfig(interval=0, final_episodes=20),
        run=RunConfig(name="example", total_timesteps=steps, checkpoint_interval=10),
    )
    file = root / "config.yaml"
    file.write_text(config.to_yaml(), encoding="utf-8")
    config = TrainingConfig.from_yaml(file)  # checked: an error for a misspelt name suggests the nearest one

    with PPOTrainer(config.policy, config.env, config, run_dir=root / "run") as trainer:
        trainer.train()
        print(f"score after {trainer.total_timesteps} steps: {trainer.state.evaluations[-1]['mean_return']:.1f}")

    with PPOTrainer(config.policy, config.env, config, run_dir=root / "run") as trainer:
        trainer.load_checkpoint()  # weights, optimiser, normalisers, random streams, counters, environments
        trainer.train(total_timesteps=2 * steps)  # total, counted from the start of the run
        print(f"score after {trainer.total_timesteps} steps: {trainer.state.evaluations[-1]['mean_return']:.1f}")

    policy = load_policy(root / "run" / "policy.safetensors")  # acts in NumPy
    print("action for an upright pole:", policy.predict([0.0, 0.0, 0.0, 0.0]))
    return config


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
