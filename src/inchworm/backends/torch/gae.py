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
    return _sums(*_deltas(rewards, values, next_values, terminated, truncated, gamma, gae_lambda))


def _deltas(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """The error delta of each row's value, and how much of what comes after it counts, each [T, B]."""
    deltas = rewards + torch.where(terminated, 0, gamma * next_values) - values
    return deltas, torch.where(terminated | truncated, 0, torch.full_like(deltas, gamma * gae_lambda))


def _sums(deltas: Tensor, carries: Tensor) -> Tensor:
    """A_t = delta_t + carry_t A_{t+1} [T, B], from the last row to the first; `deltas` is overwritten."""
    for t in range(len(deltas) - 2, -1, -1):
        deltas[t] += carries[t] * deltas[t + 1]
    return deltas


def compute_vtrace(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    log_ratios: Tensor,
    gamma: float,
    gae_lambda: float,
    clip: float,
) -> tuple[Tensor, Tensor]:
    """V-trace's advantages and value targets, as derived in `backends/numpy/gae`; on the CPU computed there."""
    given = (rewards, values, next_values, terminated, truncated, log_ratios)
    if rewards.device.type == "cpu":
        r, v, w, ended, cut, logs = (tensor.detach().numpy() for tensor in given)
        advantages, targets = reference.compute_vtrace(r, v, w, ended, cut, logs, gamma, gae_lambda, clip)
        return torch.from_numpy(advantages), torch.from_numpy(targets)
    return vtrace_on_device(*given, gamma, gae_lambda, clip)


def vtrace_on_device(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    log_ratios: Tensor,
    gamma: float,
    gae_lambda: float,
    clip: float,
) -> tuple[Tensor, Tensor]:
    """The same with tensors only."""
    deltas, carries = _deltas(rewards, values, next_values, terminated, truncated, gamma, gae_lambda)
    ratios = log_ratios.exp().clamp(max=clip)
    sums = _sums(ratios * deltas, carries * ratios)
    following = torch.cat([sums[1:], torch.zeros_like(sums[:1])])
    return deltas + carries * following, values + sums


def compute_advantages(policy: Policy, rollout: Rollout, config: PPOConfig, log_ratios: Tensor | None = None) -> Advantages:
    """Values, values of the true successors, advantages and returns of a rollout of tensors under the current critic."""
    values, at_cuts = reference.critic_values(policy, rollout, config)  # [T, B], [K]
    next_values = torch.cat([values[1:], values[-1:]])
    rows = rollout.cut_rows.long()
    next_values[rows[:, 0], rows[:, 1]] = at_cuts
    given = (rollout.rewards, values, next_values, rollout.terminated, rollout.truncated)
    if log_ratios is not None:
        advantages, returns = compute_vtrace(*given, log_ratios, config.gamma, config.gae_lambda, config.vtrace_clip)
        return Advantages(values, next_values, advantages, returns)
    advantages = compute_gae(*given, config.gamma, config.gae_lambda)
    return Advantages(values, next_values, advantages, advantages + values)
