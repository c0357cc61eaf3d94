"""The work of the benchmark of simulators on a device: a tensor CartPole with continuous pushes, and the settings of all sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from torch import Tensor

from examples.device_env import TensorCartPole


@dataclass(frozen=True)
class Settings:
    """Those of rsl_rl's examples, with a small network."""

    num_envs: int = 4096
    rollout_steps: int = 24
    update_epochs: int = 5
    num_minibatches: int = 4
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "tanh"


class PushedCartPole(TensorCartPole):
    """CartPole whose action [B, 1] is the force: rsl_rl has no discrete actions."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.single_action_space: gym.Space[Any] = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Push by -1 to 1 times the force of CartPole."""
        return super().step((actions[:, 0].clamp(-1, 1) + 1) / 2)


def make_env(settings: Settings) -> PushedCartPole:
    """The simulator of one side."""
    return PushedCartPole(settings.num_envs)
