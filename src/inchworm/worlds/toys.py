"""Small environments that need memory: solvable with it, at chance level without.

Each is its own factory: `make_vector_env(MemoryCorridor)`, or the id `inchworm.worlds.toys:MemoryCorridor`.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from inchworm.core.spaces import MASK_KEY

LEFT, RIGHT, WALK = 0, 1, 2
_REACH = 0.5
"""The best `reach`, towards the side of the cue."""


class MemoryCorridor(gym.Env[Any, Any]):
    """A cue at the start, `length` empty steps, then a choice: reward 1 for turning to the side that the cue showed.

    The observation is (cue, here): the cue is -1 (left) or +1 (right) in the first observation and 0 afterwards; `here` is 1 in the last,
    where the choice is made. In between all observations are equal and actions have no effect, so a policy without memory is right half
    of the time. The last step's info has `is_success`.
    """

    def __init__(self, length: int = 20) -> None:
        if length < 1:
            raise ValueError(f"length={length} must be 1 or more: the steps between the cue and the choice")
        self.observation_space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space: spaces.Space[Any] = spaces.Discrete(2)
        self.length, self.place, self.cue = length, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin with a cue, left or right with equal probability."""
        super().reset(seed=seed, options=options)
        self.place, self.cue = 0, int(2 * self.np_random.integers(2) - 1)
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Walk; at the end, turn."""
        if self.place < self.length:
            self.place += 1
            return self._observe(), 0.0, False, False, {}
        turned = self._turn(action) == (RIGHT if self.cue > 0 else LEFT)
        return self._observe(), self._reward(action, turned), True, False, {"is_success": float(turned)}

    def _observe(self) -> Any:
        return np.array([self.cue if self.place == 0 else 0, self.place == self.length], np.float32)  # [2]

    def _turn(self, action: Any) -> int:
        return int(action)

    def _reward(self, action: Any, turned: bool) -> float:  # noqa: ARG002 - a subclass uses the action
        return float(turned)


class MixedMemoryCorridor(MemoryCorridor):
    """The memory corridor with action masks, dict observations and hybrid actions.

    The action is {"turn": left, right or walk; "reach": a number in -1 … 1}. The mask allows only walking, and at the end only turning;
    forbidden actions raise. At the end `reach` costs its squared distance from cue / 2, so it needs memory as well. Success depends on the
    turn alone; the best return is 1.
    """

    def __init__(self, length: int = 20) -> None:
        super().__init__(length)
        self.observation_space = spaces.Dict(
            {
                "cue": spaces.Box(-1.0, 1.0, (1,), np.float32),
                "here": spaces.Discrete(2),
                MASK_KEY: spaces.Dict({"turn": spaces.MultiBinary(3)}),
            }
        )
        self.action_space = spaces.Dict({"turn": spaces.Discrete(3), "reach": spaces.Box(-1.0, 1.0, (1,), np.float32)})

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Walk; at the end, turn."""
        if not self._legal()[self._turn(action)]:
            raise ValueError(f"turn={self._turn(action)} is illegal at place {self.place} of {self.length}")
        return super().step(action)

    def _legal(self) -> np.ndarray:
        end = self.place == self.length
        return np.array([end, end, not end], np.int8)  # [3]: left, right, walk

    def _observe(self) -> Any:
        cue, here = super()._observe()
        return {"cue": np.array([cue], np.float32), "here": np.int64(here), MASK_KEY: {"turn": self._legal()}}

    def _turn(self, action: Any) -> int:
        return int(action["turn"])

    def _reward(self, action: Any, turned: bool) -> float:
        reach = float(np.asarray(action["reach"]).reshape(-1)[0])
        return float(turned) - (reach - _REACH * self.cue) ** 2


class HideEntries(gym.ObservationWrapper[np.ndarray, Any, np.ndarray]):
    """Keeps only some entries of a flat observation."""

    def __init__(self, env: gym.Env[np.ndarray, Any], keep: tuple[int, ...]) -> None:
        super().__init__(env)
        seen = env.observation_space
        if not isinstance(seen, spaces.Box) or len(seen.shape) != 1:
            raise ValueError(f"cannot hide entries of {seen}; the observation space must be a Box of rank 1")
        self._keep = list(keep)
        self.observation_space = spaces.Box(seen.low[self._keep], seen.high[self._keep], dtype=seen.dtype.type)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Return the entries that are kept."""
        return observation[self._keep]


def PartialCartPole(**kwargs: Any) -> gym.Env[Any, Any]:
    """CartPole-v1 without velocities: the observation is (cart position, pole angle), so a policy must remember earlier steps."""
    return HideEntries(gym.make("CartPole-v1", **kwargs), (0, 2))
