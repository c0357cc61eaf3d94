"""Before step 6 of 9, with `ppo.scale_rewards`: rewards are divided by the running standard deviation of the discounted return.

The scale is that of `NormalizeReward` of Gymnasium and `VecNormalize` of Stable-Baselines3, computed inside learn: rollouts hold the
rewards that the environment gave, and a rollout from disk is scaled like a fresh one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from inchworm.core.types import Array
from inchworm.policy.statistics import RunningMeanStd
from inchworm.rollout.rollout import Rollout

MIN_VARIANCE = 1e-8
"""Returns that vary less than this count as constant and are not scaled."""


def discounted_sums(rewards: np.ndarray, starts: np.ndarray, ended: np.ndarray, before: np.ndarray, gamma: float) -> np.ndarray:
    """The discounted sum of the rewards of each row's episode up to that row [T, B]; `before` [B] holds the sums before row 0.

    The sum begins anew after a terminated or truncated row, and where an agent joins. It runs through invalid rows, whose rewards
    belong to the episode, too.
    """
    begins = starts.copy()  # [T, B]
    begins[1:] |= ended[:-1]
    discounts = np.where(begins, 0.0, gamma)  # [T, B]
    sums: np.ndarray = rewards.astype(np.float64)
    for t, row in enumerate(sums):
        row += discounts[t] * (sums[t - 1] if t else before)
    return sums


class RewardScaler:
    """The scale of rewards, and the running discounted return of each lane, which the next rollout continues.

    A rollout first enters the statistics and is then divided, all of it by the same number. Lanes are continued as long as their number
    stays; where it changes, as with rollouts combined differently, the sums begin at 0.
    """

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma
        self.statistics = RunningMeanStd()
        self.running = np.zeros(0)  # [B]

    @property
    def scale(self) -> float:
        """What rewards are divided by; 1 while returns do not vary."""
        return float(self.statistics.std) if self.statistics.var > MIN_VARIANCE else 1.0

    def __call__(self, rollout: Rollout) -> Rollout:
        """Add the valid rows of a rollout to the statistics, and return it with scaled rewards."""
        flags: tuple[Array, ...] = (rollout.rewards, rollout.episode_starts, rollout.terminated | rollout.truncated, rollout.valid)
        if rollout.on_device:
            self.add(*(flag.cpu().numpy() for flag in flags))
            return dataclasses.replace(rollout, rewards=rollout.rewards / self.scale)
        self.add(*flags)
        return dataclasses.replace(rollout, rewards=(rollout.rewards / self.scale).astype(rollout.rewards.dtype))

    def before(self, num_lanes: int) -> np.ndarray:
        """The running sums [B] that the next rollout of so many lanes continues."""
        return self.running if len(self.running) == num_lanes else np.zeros(num_lanes)

    def add(self, rewards: np.ndarray, starts: np.ndarray, ended: np.ndarray, valid: np.ndarray) -> None:
        """Add the valid ones of rows [T, B] to the statistics."""
        sums = discounted_sums(rewards, starts, ended, self.before(rewards.shape[1]), self.gamma)
        self.statistics.update(sums, where=valid)
        self.running = np.where(ended[-1], 0.0, sums[-1])

    def state_dict(self) -> dict[str, np.ndarray]:
        """The statistics and the running sums."""
        return {**self.statistics.state_dict(), "running": self.running.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.statistics.load_state_dict({name: value for name, value in state.items() if name != "running"})
        self.running = np.array(state["running"], np.float64)
