"""Custom losses: functions that name what they need and return a scalar. They are added to PPO's loss and logged by name.

    python examples/custom_loss.py [STEPS]

CartPole is symmetric under reflection. `mirror_symmetry` penalises policies that are not.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from inchworm import PPOConfig, PPOTrainer, TorchPolicy


def mirror_symmetry(policy: TorchPolicy, observations: Tensor, valid: Tensor) -> Tensor:
    """Squared difference between the policy in a mirrored state and the mirrored policy; observations [L, N, 4], valid [L, N]."""
    flat = observations.flatten(0, 1)  # [L·N, 4]
    here = policy.network.action_outputs(flat).softmax(-1)  # [L·N, 2]
    mirrored = policy.network.action_outputs(-flat).softmax(-1).flip(-1)  # [L·N, 2]
    weight = valid.flatten() / valid.sum().clamp(min=1)  # invalid rows have weight 0
    return ((here - mirrored).square().sum(-1) * weight).sum()


def entropy_floor(entropy: Tensor, valid: Tensor) -> Tensor:
    """Penalise a mean entropy below 0.3."""
    mean = (entropy * valid).sum() / valid.sum().clamp(min=1)
    return 0.1 * torch.relu(0.3 - mean)


def main(steps: int = 20_000) -> dict[str, list[float]]:
    config = PPOConfig(learning_rate=1e-3, gamma=0.98, gae_lambda=0.8, rollout_steps=32, update_epochs=10, minibatch_size=256)
    with PPOTrainer("mlp", "CartPole-v1", config, num_envs=8, seed=0, backend="torch") as trainer:
        history = trainer.train(total_timesteps=steps, custom_loss_fns=[mirror_symmetry, entropy_floor])
        for name in ("loss", "loss/mirror_symmetry", "grad_norm/mirror_symmetry", "loss/entropy_floor"):
            print(f"{name:28} first {history[name][0]:9.5f}   last {history[name][-1]:9.5f}")
        print(trainer.evaluate(episodes=20))
    return history


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
