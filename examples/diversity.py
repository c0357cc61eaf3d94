"""A diversity bonus: one policy learns several ways of moving, told apart by a discriminator that is a custom loss.

    python examples/diversity.py [STEPS]

The observation holds a skill that is drawn at reset. The reward is how well the discriminator recognises the skill from where the agent is
(Eysenbach et al. 2019): each skill learns to go where the others do not.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from inchworm import PPOConfig, PPOTrainer, Rollout
from inchworm.train.callbacks import BaseCallback

SKILLS, STEPS = 4, 16


class Plane(gym.Env[np.ndarray, np.ndarray]):
    """A point in a square, without rewards; the observation is (x, y, skill as one-hot)."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (2 + SKILLS,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin in the middle with a skill."""
        super().reset(seed=seed)
        self.place, self.steps, self.skill = np.zeros(2), 0, int(self.np_random.integers(SKILLS))
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move by at most 0.1."""
        self.place, self.steps = np.clip(self.place + 0.1 * np.asarray(action), -1, 1), self.steps + 1
        over = self.steps == STEPS
        return self._observation(), 0.0, False, over, {"skill": self.skill, "x": self.place[0], "y": self.place[1]} if over else {}

    def _observation(self) -> np.ndarray:
        return np.concatenate([self.place, np.eye(SKILLS)[self.skill]]).astype(np.float32)


class Discriminator(nn.Module):
    """Recognises the skill from the place alone."""

    def __init__(self) -> None:
        super().__init__()
        self.guess = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, SKILLS))

    def forward(self, next_observations: Tensor, valid: Tensor) -> Tensor:
        """The loss."""
        return -(self.recognised(next_observations) * valid).sum() / valid.sum().clamp(min=1)

    def recognised(self, observations: Tensor) -> Tensor:
        """[..., 2 + skills] -> [...] the log-probability of the right skill."""
        return (self.guess(observations[..., :2]).log_softmax(-1) * observations[..., 2:]).sum(-1)


class Diversity(BaseCallback):
    """Rewards what the discriminator recognises, compared with guessing."""

    def __init__(self, discriminator: Discriminator) -> None:
        self.discriminator = discriminator

    def on_rollout(self, state: Any, rollout: Rollout) -> Rollout:
        """Learn from other rewards."""
        with torch.no_grad():
            bonus = self.discriminator.recognised(torch.from_numpy(rollout.next_observations)).numpy() + np.float32(math.log(SKILLS))
        return replace(rollout, rewards=rollout.rewards + bonus)


def main(steps: int = 60_000) -> np.ndarray:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        discriminator = Discriminator()
    config = PPOConfig(learning_rate=1e-3, rollout_steps=64, update_epochs=4, num_minibatches=4, gamma=0.9)
    with PPOTrainer("mlp", Plane, config, num_envs=16, seed=0, backend="torch", callbacks=[Diversity(discriminator)]) as trainer:
        trainer.train(total_timesteps=steps, custom_loss_fns=[discriminator])
        ended = trainer.collect_rollouts(4 * STEPS).episodes
    places = np.array(
        [np.mean([(one.info["x"], one.info["y"]) for one in ended if one.info["skill"] == skill], 0) for skill in range(SKILLS)]
    )
    apart = min(np.linalg.norm(places[a] - places[b]) for a in range(SKILLS) for b in range(a))
    print("\n".join(f"skill {skill} ends at {place.round(2)}" for skill, place in enumerate(places)))
    print(f"the closest two end {apart:.2f} apart")
    return places


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
