"""Behaviour cloning from demonstrations, as a custom loss whose weight falls to 0 over the first half of the run.

python examples/demonstrations.py [STEPS]
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import fields
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

from inchworm import Actor, Loss, Minibatch, PolicyStep, PPOConfig, PPOTrainer, Rollout, RolloutCollector, TorchPolicy, make_vector_env

CONFIG = PPOConfig(learning_rate=1e-3, gamma=0.98, gae_lambda=0.8, rollout_steps=32, update_epochs=10, minibatch_size=256)


class Demonstrator(Actor):
    """Balances CartPole's pole by pushing to the side to which it falls."""

    def initial_state(self, num_lanes: int) -> tuple[()]:
        """No memory."""
        return ()

    def act(self, observations: Any, state: Any, episode_starts: Any, rng: Any, *, deterministic: bool = False) -> PolicyStep:
        """Push where pole angle and velocity point."""
        actions = (observations[:, 2] + observations[:, 3] > 0).astype(np.int64)
        return PolicyStep(actions, actions, np.zeros(len(actions), np.float32), ())


def demonstrate(steps: int) -> Rollout:
    """Rows of the demonstrator; they could come from `Rollout.load`, or from data of your own by `Rollout.from_dict`."""
    with contextlib.closing(make_vector_env("CartPole-v1", num_envs=4, seed=1)) as env:
        return RolloutCollector(env, Demonstrator(), seed=1).collect(steps)


class Imitation:
    """The negative log-likelihood of demonstrated actions, of some random rows at each call."""

    def __init__(self, demonstrations: Rollout, rows: int = 128, seed: int = 0) -> None:
        arrays = {"observations": demonstrations.observations, "actions": demonstrations.actions}
        self.tensors: Any = optree.tree_map(lambda array: torch.from_numpy(np.array(array)).flatten(0, 1), arrays)
        self.rows, self.stream = rows, np.random.default_rng(seed)

    def __call__(self, policy: TorchPolicy, minibatch: Minibatch) -> Tensor:
        """The loss; of the minibatch only its fields are used."""
        chosen = torch.from_numpy(self.stream.integers(0, len(self.tensors["actions"]), self.rows))
        shown = optree.tree_map(lambda tensor: tensor[chosen][None], self.tensors)  # [1, rows, ...]
        nothing: dict[str, Any] = {field.name: () for field in fields(minibatch)}
        return -policy.evaluate(Minibatch(**{**nothing, **shown})).log_probs.mean()

    def state_dict(self) -> dict[str, Any]:
        """Checkpoints hold the position of the stream."""
        return self.stream.bit_generator.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        self.stream.bit_generator.state = state


def main(steps: int = 10_000) -> tuple[float, float]:
    imitation = Loss(Imitation(demonstrate(250)), weight=lambda progress: max(0.0, 1.0 - 2.0 * progress), name="imitation")
    scores = []
    for losses in ([], [imitation]):
        with PPOTrainer("mlp", "CartPole-v1", CONFIG, num_envs=8, seed=0, backend="torch") as trainer:
            history = trainer.train(total_timesteps=steps, custom_loss_fns=losses)
            scores.append(float(np.mean(history["mean_reward"][-3:])))
    print(f"mean return of the last 100 episodes after {steps:,} steps: {scores[0]:.0f} alone, {scores[1]:.0f} with demonstrations")
    print(f"weight of the loss: first {history['loss_weight/imitation'][0]:.2f}, last {history['loss_weight/imitation'][-1]:.2f}")
    return scores[0], scores[1]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
