"""Replay of stored rollouts: every rollout is written to a file, and each update also learns from an earlier one that still counts.

python examples/stored_rollouts.py [STEPS]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from inchworm import PPOConfig, PPOTrainer, Rollout, combine_rollouts

# An old rollout is used as long as its weights are at most 4 updates old. The ratios of its samples are not 1 to begin with:
# `effective_sample_size` tells how many of them count, and an update on too few is skipped.
CONFIG = PPOConfig(
    learning_rate=1e-3,
    gamma=0.98,
    gae_lambda=0.8,
    rollout_steps=32,
    update_epochs=4,
    minibatch_size=128,
    max_staleness=4,
    min_effective_sample_size=0.3,
)


def main(steps: int = 20_000, age: int = 2) -> list[float]:
    directory = Path(tempfile.mkdtemp(prefix="inchworm-"))
    files: list[Path] = []
    sizes = []
    with PPOTrainer("mlp", "CartPole-v1", CONFIG, num_envs=8, seed=0) as trainer:
        while trainer.total_timesteps < steps:
            fresh = trainer.collect_rollouts()
            earlier = [Rollout.load(file) for file in files[-age:][:1]]
            files.append(fresh.save(directory / f"{len(files):05d}.safetensors"))
            stats = trainer.learn(combine_rollouts([fresh, *earlier]))
            sizes.append(stats["effective_sample_size"])
        print(f"{len(files)} rollouts in {directory}; the oldest learned from is {stats['staleness']:.0f} updates old")
        print(f"effective sample size: {min(sizes):.2f} to {max(sizes):.2f}; {trainer.evaluate(episodes=20)}")
    return sizes


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
