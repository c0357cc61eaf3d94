"""Your own environment: a factory that returns a `gymnasium.Env`, here with an action mask.

python examples/own_env.py [STEPS]
inchworm check-env examples.own_env:make_env
inchworm train examples.own_env:make_env --env.kwargs '{length: 12}'
"""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from inchworm import PPOConfig, PPOTrainer, check_env


class Corridor(gym.Env[np.ndarray, int]):
    """Walk from a random cell to the last one. A step costs 0.1, arriving gives 1; moves into the left wall are illegal."""

    def __init__(self, length: int = 8) -> None:
        self.length = length
        self.observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)  # position, remaining distance
        self.action_space = spaces.Discrete(3)  # left, stay, right
        self.cell = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start anywhere but at the end. All randomness comes from `self.np_random`, which the seed controls."""
        super().reset(seed=seed)
        self.cell = int(self.np_random.integers(0, self.length - 1))
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move by -1, 0 or 1."""
        self.cell += int(action) - 1
        arrived = self.cell == self.length - 1
        return self._observation(), 1.0 if arrived else -0.1, arrived, False, {"is_success": arrived}

    def action_masks(self) -> np.ndarray:
        """Return which actions are legal now. inchworm calls this at every step."""
        return np.array([self.cell > 0, True, True])

    def _observation(self) -> np.ndarray:
        done = self.cell / (self.length - 1)
        return np.array([done, 1.0 - done], np.float32)


def make_env(length: int = 8) -> gym.Env[Any, Any]:
    """Create the environment. On the command line: `examples.own_env:make_env`, with `env.kwargs` as arguments."""
    return gym.wrappers.TimeLimit(Corridor(length), max_episode_steps=4 * length)


def main(steps: int = 8_000) -> float:
    report = check_env(make_env())
    print("check_env:", "no problems" if report.ok else report.problems)
    config = PPOConfig(learning_rate=2e-3, rollout_steps=64, num_minibatches=4, update_epochs=8)
    with PPOTrainer("mlp", make_env, config, num_envs=8, seed=0) as trainer:
        trainer.train(total_timesteps=steps)
        result = trainer.evaluate(episodes=50)
    print(result)
    return result.mean_return


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
