"""Step 6 of 9: one pass of the critic over a rollout, then advantages by the recursion backwards in time."""

from __future__ import annotations

import torch
from torch import Tensor

from inchworm.backends.numpy import gae as reference
from inchworm.config.sections import PPOConfig
from inchworm.core.protocols import Policy
from inchworm.core.types import Advantages
from inchworm.rollout.rollout import Rollout


def compute_gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Generalised advantage estimates, each argument and the result [T, B] (Schulman et al. 2016, equations 11 to 16).

    On the CPU the recursion runs in NumPy on the same memory: T steps of a few numbers each are all overhead in torch.
    """
    if rewards.device.type == "cpu":
        r, v, w, ended, cut = (tensor.detach().numpy() for tensor in (rewards, values, next_values, terminated, truncated))
        return torch.from_numpy(reference.compute_gae(r, v, w, ended, cut, gamma, gae_lambda))
    return gae_on_device(rewards, values, next_values, terminated, truncated, gamma, gae_lambda)


def gae_on_device(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """The recursion with tensors only, for devices whose memory NumPy cannot read."""
    advantages = rewards + torch.where(terminated, 0, gamma * next_values) - values  # [T, B] the deltas, for now
    carries = torch.where(terminated | truncated, 0, torch.full_like(advantages, gamma * gae_lambda))  # [T, B]
    for t in range(len(advantages) - 2, -1, -1):
        advantages[t] += carries[t] * advantages[t + 1]
    return advantages


def compute_advantages(policy: Policy, rollout: Rollout, config: PPOConfig) -> Advantages:
    """Values, values of the true successors, advantages and returns of a rollout of tensors under the current critic."""
    values, at_cuts = reference.critic_values(policy, rollout, config)  # [T, B], [K]
    next_values = torch.cat([values[1:], values[-1:]])
    rows = rollout.cut_rows.long()
    next_values[rows[:, 0], rows[:, 1]] = at_cuts
    advantages = compute_gae(rollout.rewards, values, next_values, rollout.terminated, rollout.truncated, config.gamma, config.gae_lambda)
    return Advantages(values, next_values, advantages, advantages + values)
