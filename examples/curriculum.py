"""Two curricula: one by success in a maze, which needs no code, and one by overriding `collect_rollouts`, which the training loop calls.

    python examples/curriculum.py [STEPS]

The difficulty changes when an episode begins and never within one.
"""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from inchworm import CurriculumConfig, PolicyConfig, PPOConfig, PPOTrainer, Rollout
from inchworm.worlds.toys import Maze

LENGTHS = {1: 4, 2: 8, 3: 16}


class LongCorridor(gym.Env[np.ndarray, int]):
    """Walk right to the end of a corridor. `set_difficulty` makes it longer; a step costs 0.05, arriving gives 1."""

    observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)
    length = LENGTHS[1]

    def set_difficulty(self, level: int) -> None:
        """Set the length; it is called before a reset, in every copy."""
        self.length = LENGTHS[level]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start at the left end."""
        super().reset(seed=seed)
        self.cell = 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move left (0) or right (1)."""
        self.cell = max(0, self.cell + (1 if action == 1 else -1))
        arrived = self.cell == self.length
        return self._observation(), 1.0 if arrived else -0.05, arrived, False, {"length": float(self.length)}

    def _observation(self) -> np.ndarray:
        return np.array([self.cell / 16, self.length / 16], np.float32)


class CurriculumTrainer(PPOTrainer):
    """Difficulty 1, 2 after 30 % of the run, 3 after 60 %: what `CurriculumPPOTrainer` does, written out."""

    planned_steps = 0

    @property
    def difficulty(self) -> int:
        """The difficulty at the current progress."""
        progress = self.total_timesteps / max(1, self.planned_steps)
        return 1 + (progress >= 0.3) + (progress >= 0.6)

    def collect_rollouts(self, n_steps: int | None = None) -> Rollout:
        """Set the difficulty of the next episodes, then collect as usual."""
        self.env.call("set_difficulty", self.difficulty)
        return super().collect_rollouts(n_steps)

    def train(self, total_timesteps: int | None = None, *args: Any, **kwargs: Any) -> dict[str, list[float]]:
        """Store the target, which `difficulty` depends on."""
        self.planned_steps = total_timesteps or self.config.run.total_timesteps
        return super().train(total_timesteps, *args, **kwargs)


def make_env() -> gym.Env[Any, Any]:
    return gym.wrappers.TimeLimit(LongCorridor(), max_episode_steps=64)


def corridor(steps: int) -> dict[str, list[float]]:
    """The trainer with an overridden `collect_rollouts`."""
    config = PPOConfig(learning_rate=2e-3, rollout_steps=64, num_minibatches=4, update_epochs=8)
    with CurriculumTrainer("mlp", make_env, config, num_envs=8, seed=0) as trainer:
        history = trainer.train(total_timesteps=steps)
    shown = list(zip(history["timesteps"], history["episode/length"], history["mean_reward"]))
    for timesteps, length, reward in shown[:: max(1, len(shown) // 8)]:
        print(f"{timesteps:7.0f} steps  corridor {length:5.1f}  mean return {reward:6.2f}")
    return history


def maze(steps: int) -> dict[str, list[float]]:
    """A maze with one reward: it begins next to the goal, and farther away as the policy succeeds."""
    config = PPOConfig(learning_rate=1e-3, rollout_steps=128, num_minibatches=4)
    curriculum = CurriculumConfig(mode="adaptive", max_level=12, window=30)
    with PPOTrainer(
        PolicyConfig(), lambda: Maze(9, levels=12), config, num_envs=16, num_workers=0, seed=0, curriculum=curriculum
    ) as trainer:
        history = trainer.train(total_timesteps=steps)
    shown = list(zip(history["timesteps"], history["curriculum/level"], history["mean_reward"]))
    for timesteps, level, reward in shown[:: max(1, len(shown) // 8)]:
        print(f"{timesteps:7.0f} steps  level {level:4.1f}  success {reward:6.2f}")
    return history


def main(steps: int = 16_000, maze_steps: int = 300_000) -> dict[str, list[float]]:
    maze(maze_steps)
    return corridor(steps)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
