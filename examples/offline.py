"""Collect and learn separately: write rollouts to files, inspect them, and learn from the files without an environment.

python examples/offline.py [STEPS]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from inchworm import (
    PolicyConfig,
    PolicySpec,
    PPOConfig,
    PPOOptimizer,
    PPOTrainer,
    Rollout,
    TorchPolicy,
    combine_rollouts,
    compute_advantages,
)

CONFIG = PPOConfig(learning_rate=1e-3, rollout_steps=128, update_epochs=2, minibatch_size=256, target_kl=0.05)


def collect(directory: Path, num_rollouts: int) -> tuple[list[Path], PolicySpec]:
    """Collect rollouts with one policy, and write each to a file."""
    with PPOTrainer("mlp", "CartPole-v1", CONFIG, num_envs=8, seed=0) as trainer:
        files = [trainer.collect_rollouts().save(directory / f"rollout_{index}.safetensors") for index in range(num_rollouts)]
        return files, PolicySpec(trainer.env.observation_space, trainer.env.action_space, PolicyConfig())


def main(steps: int = 8_192, epochs: int = 3) -> list[float]:
    torch.set_num_threads(1)  # small networks learn faster on one thread; PPOTrainer sets this by run.threads
    directory = Path(tempfile.mkdtemp(prefix="inchworm-"))
    files, spec = collect(directory, num_rollouts=max(2, steps // (8 * CONFIG.rollout_steps)))

    policy = TorchPolicy(spec, seed=0)
    rollout = combine_rollouts([Rollout.load(file) for file in files])  # concatenated along lanes
    result = compute_advantages(policy, rollout, CONFIG)
    print(f"{rollout.num_valid} steps in {len(files)} files, {len(rollout.episodes)} episodes, {rollout.nbytes / 1e6:.1f} MB")
    print(f"advantages before learning: mean {result.advantages.mean():.3f}, std {result.advantages.std():.3f}")

    optimizer = PPOOptimizer(policy, CONFIG)
    losses = []
    for epoch in range(epochs):
        for file in files:
            # Values and advantages come from the current critic, log-probs of the behaviour policy from the file. The KL stop keeps
            # the policy close to the data, and `staleness` is the age of the data in updates.
            stats = optimizer.update(Rollout.load(file))
            losses.append(stats["loss"])
        print(f"epoch {epoch}: loss {stats['loss']:.3f}, kl {stats['approx_kl']:.4f}, staleness {stats['staleness']:.0f}")
    return losses


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
