"""Step 6 of 9: advantages by the recursion backwards in time; the reference for every backend, and what the CPU runs."""

from __future__ import annotations

import numpy as np
import optree

from inchworm.config import PPOConfig
from inchworm.protocols import Policy
from inchworm.rollout.rollout import Rollout
from inchworm.types import Advantages


def shift_values(values: np.ndarray, cut_rows: np.ndarray, cut_values: np.ndarray) -> np.ndarray:
    """V of each row's true successor [T, B]: the next row's value [T, B], and at cut rows [K, 2] the value given there [K]."""
    next_values = np.concatenate([values[1:], values[-1:]])  # [T, B]
    next_values[cut_rows[:, 0], cut_rows[:, 1]] = cut_values
    return next_values


def compute_gae(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    gamma: float,
    gae_lambda: float,
) -> np.ndarray:
    """Generalised advantage estimates [T, B] (Schulman et al. 2016, equations 11 to 16), in the dtype of `values`.

    A terminated row has no next value. Neither it nor a truncated row sees the advantages after it, but a truncated row
    keeps its next value: V of the true successor, which `next_values` holds.
    """
    dtype = values.dtype.type
    discount, decay = dtype(gamma), dtype(gamma * gae_lambda)
    # `where` instead of a product with 0: whatever stands in a terminated row's next value, it is not looked at.
    advantages: np.ndarray = rewards + np.where(terminated, dtype(0), discount * next_values) - values  # [T, B] the deltas, for now
    carries = np.where(terminated | truncated, dtype(0), decay)  # [T, B]
    for t in range(len(advantages) - 2, -1, -1):
        advantages[t] += carries[t] * advantages[t + 1]
    return advantages


def compute_advantages(policy: Policy, rollout: Rollout, config: PPOConfig) -> Advantages:
    """The current critic's view of a rollout: values, the values of the true successors, advantages and returns."""
    first_state = optree.tree_map(lambda leaf: leaf[0], rollout.policy_state)
    values = np.asarray(policy.value(rollout.observations, first_state, rollout.episode_starts))  # [T, B]
    cut_observations = optree.tree_map(lambda leaf: leaf[None], rollout.cut_observations)  # [1, K, *obs]
    goes_on = np.zeros((1, len(rollout.cut_rows)), bool)
    cut_values = np.asarray(policy.value(cut_observations, rollout.cut_state, goes_on))[0]  # [K]
    next_values = shift_values(values, rollout.cut_rows, cut_values)
    flags = (rollout.terminated, rollout.truncated)
    advantages = compute_gae(rollout.rewards, values, next_values, *flags, config.gamma, config.gae_lambda)
    return Advantages(values, next_values, advantages, advantages + values)
