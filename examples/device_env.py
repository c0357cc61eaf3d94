"""A simulator whose lanes are torch tensors, as Isaac Lab's and ManiSkill's: CartPole, all lanes in one operation. Copy it for your own.

python examples/device_env.py [STEPS]
"""

from __future__ import annotations

import math
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from inchworm import PPOConfig, PPOTrainer

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
TOTAL, POLE_MOMENT = CART + POLE, POLE * HALF_LENGTH
X_LIMIT, ANGLE_LIMIT = 2.4, 12 * math.pi / 180


class TensorCartPole:
    """CartPole-v1 with `num_envs` lanes on a device. A lane is reset in the step in which its episode ends.

    The observation before that reset is in `info["final_observation"]`. `get_state` and `set_state` are optional: with them a run that
    is resumed has the same bits as one that was not interrupted.
    """

    def __init__(self, num_envs: int, device: str = "cpu", max_episode_steps: int = 500) -> None:
        self.num_envs, self.device, self.max_episode_steps = num_envs, torch.device(device), max_episode_steps
        high = np.array([2 * X_LIMIT, np.inf, 2 * ANGLE_LIMIT, np.inf], np.float32)
        self.single_observation_space = gym.spaces.Box(-high, high)
        self.single_action_space = gym.spaces.Discrete(2)
        self._generator = torch.Generator(self.device)
        self._lanes = torch.zeros((4, num_envs), device=self.device)  # x, its speed, the pole's angle, its speed
        self._steps = torch.zeros(num_envs, dtype=torch.int64, device=self.device)

    def _first(self, count: int) -> Tensor:
        return torch.rand((4, count), generator=self._generator, device=self.device) * 0.1 - 0.05

    def reset(self, *, seed: int | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Begin an episode in every lane; return observations [B, 4]."""
        if seed is not None:
            self._generator.manual_seed(seed)
        self._lanes.copy_(self._first(self.num_envs))
        self._steps.zero_()
        return self._lanes.t().contiguous(), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Move every lane by its action [B]: observations [B, 4], rewards, terminated and truncated [B], and the info."""
        x, speed, angle, turning = lanes = self._lanes
        force = actions.to(torch.float32) * (2 * FORCE) - FORCE
        sine, cosine = angle.sin(), angle.cos()
        push = (force + POLE_MOMENT * turning.square() * sine) / TOTAL
        turn = (GRAVITY * sine - cosine * push) / (HALF_LENGTH * (4 / 3 - POLE * cosine.square() / TOTAL))
        move = push - POLE_MOMENT * turn * cosine / TOTAL
        for part, change in ((x, speed), (speed, move), (angle, turning), (turning, turn)):
            part.add_(change, alpha=SECONDS)  # in place: these are rows of `lanes`
        self._steps += 1
        terminated = (x.abs() > X_LIMIT) | (angle.abs() > ANGLE_LIMIT)
        truncated = (self._steps >= self.max_episode_steps) & ~terminated
        observations, info = torch.empty((self.num_envs, 4), device=self.device), dict[str, Any]()
        observations.t().copy_(lanes)  # in a third of the time of lanes.t().contiguous()
        over = (terminated | truncated).nonzero()[:, 0]
        if len(over):
            info["final_observation"] = observations
            lanes[:, over] = first = self._first(len(over))
            self._steps[over] = 0
            observations = observations.index_copy(0, over, first.t())
        return observations, torch.ones(self.num_envs, device=self.device), terminated, truncated, info

    def get_state(self) -> dict[str, Tensor]:
        """All that the next steps depend on."""
        return {"lanes": self._lanes, "steps": self._steps, "generator": self._generator.get_state()}

    def set_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `get_state` returned."""
        self._lanes.copy_(state["lanes"])
        self._steps.copy_(state["steps"])
        self._generator.set_state(state["generator"].cpu())


def main(steps: int = 400_000) -> dict[str, list[float]]:
    config = PPOConfig(rollout_steps=32, num_minibatches=4, update_epochs=4, learning_rate=3e-3, gae_lambda=0.95)
    with PPOTrainer("mlp", TensorCartPole(num_envs=256), config) as trainer:
        print(trainer.size)
        history = trainer.train(total_timesteps=steps)
        print(f"mean return of the last {len(trainer.episode_rewards)} episodes: {np.mean(trainer.episode_rewards or [np.nan]):.0f}")
    return dict(history)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
