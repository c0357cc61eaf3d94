"""Environments that take a given time for a step, computing or sleeping, for benchmarks of where they run; importable in any process."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np


class Timed(gym.Wrapper[Any, Any, Any, Any]):
    """An environment whose step takes `seconds` longer: the core is busy, or with `sleeps` free."""

    def __init__(self, env: gym.Env[Any, Any], seconds: float, *, sleeps: bool = False) -> None:
        super().__init__(env)
        self._seconds, self._sleeps = seconds, sleeps

    def step(self, action: Any) -> Any:
        """Step after the time."""
        if self._sleeps:
            time.sleep(self._seconds)
        else:
            # Processor time of this thread: a core that is shared does half as many steps, as it would with a real simulation.
            end = time.thread_time() + self._seconds
            while time.thread_time() < end:
                pass
        return self.env.step(action)


class Endless(gym.Env[np.ndarray, np.ndarray]):
    """Episodes of 100,000 steps with observations of 8 and actions of 4 numbers: what has to be kept of an episode grows long."""

    observation_space = gym.spaces.Box(-1, 1, (8,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (4,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin."""
        super().reset(seed=seed, options=options)
        self._left = 100_000
        return self.observation_space.sample() * 0, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Count."""
        self._left -= 1
        return np.full(8, action[0], np.float32).clip(-1, 1), 0.0, False, self._left == 0, {}


def cartpole(seconds: float = 0.0, *, sleeps: bool = False) -> gym.Env[Any, Any]:
    """CartPole with steps that take so long."""
    return Timed(gym.make("CartPole-v1"), seconds, sleeps=sleeps)
