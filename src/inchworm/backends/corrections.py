"""What an update corrects in a rollout: for weights that it was not collected with (before step 9), and the scale of rewards (step 6).

Three policies meet in an update: the behaviour policy b, whose log-probs are in the rollout, the current policy p, and a proximal policy q
that bounds how far p may move. PPO takes b for q. The decoupled objective (Hilton, Cobbe & Schulman 2021, "Batch size-invariance for policy
optimization", section 3) has them apart: the clip is on p / q, and every sample's advantage is weighted by q / b. Here q is an average of
past weights that moves once per update, so it is constant within an update: its log-probs take the place of those in the rollout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import optree

from inchworm.config.sections import PPOConfig
from inchworm.core.protocols import Policy
from inchworm.core.types import Array, Minibatch, Tree, Weights
from inchworm.policy.statistics import GLOBAL_STATE, OBSERVATIONS, VALUES, RunningMeanStd
from inchworm.rollout.rollout import Rollout
from inchworm.rollout.sequences import join_sequences, lane_states, sequence_states, split_into_sequences

_NOT_AVERAGED = {OBSERVATIONS, VALUES, GLOBAL_STATE}
_MOST_LOG = 80.0
"""exp(80) is the largest round power that float32 holds."""


def row_log_probs(policy: Policy, rollout: Rollout, config: PPOConfig, shared: Tree | None = None) -> Any:
    """The log-probs [T, B] of the recorded actions under the current weights; invalid rows must be filled.

    The rollout may be one of tensors; then `shared` is its `lane_states`.
    """
    length = config.sequence_length_for(rollout.num_steps, memory=bool(optree.tree_leaves(rollout.policy_state)))
    nothing = rollout.rewards
    fields = {
        "observations": rollout.observations,
        "actions": rollout.actions,
        "log_probs": rollout.log_probs,
        "episode_starts": rollout.episode_starts,
        "valid": rollout.valid,
        "global_state": lane_states(rollout) if shared is None else shared,
        **dict.fromkeys(("advantages", "returns", "values"), nothing),  # no log-prob depends on them
    }
    memory = sequence_states(rollout.policy_state, rollout.num_steps, length, rollout.state_every)
    steps = split_into_sequences(fields, length)
    if rollout.context:
        steps["context"] = rollout.context[0], split_into_sequences(rollout.context[1], length)
    minibatch = Minibatch(**steps, policy_state=memory)
    return join_sequences(policy.evaluate(minibatch).log_probs, rollout.num_steps, rollout.num_lanes)


def log_ratios_of(log_probs: np.ndarray, rollout: Rollout) -> np.ndarray:
    """log p / b of every row [T, B]; 0 in invalid rows."""
    found: np.ndarray = np.where(rollout.valid, log_probs - rollout.log_probs, 0).astype(np.float32)
    return found


def importance_metrics(log_ratios: np.ndarray) -> dict[str, float]:
    """How far the behaviour policy is from the current one, by log p / b of all valid rows [n].

    The measures are the largest distance of a ratio from 1, the effective sample size and the KL.

    The effective sample size is (Σr)² / Σr² as a share of the rows, 0 to 1 (Kong 1992). The KL is that of the behaviour policy from the
    current one, E_b[r - 1 - log r], which is never negative (Schulman 2020, "Approximating KL divergence").
    """
    logs = log_ratios.astype(np.float64)
    if not len(logs):
        return {"ratio_error": 0.0, "effective_sample_size": 1.0, "behavior_kl": 0.0}
    largest = float(np.finfo(np.float32).max)
    if not np.isfinite(logs).all():
        return {"ratio_error": largest, "effective_sample_size": 0.0, "behavior_kl": largest}
    scaled = np.exp(logs - logs.max())  # so that no square overflows
    ratios = np.exp(np.minimum(logs, _MOST_LOG))
    return {
        "ratio_error": min(largest, float(np.abs(ratios - 1).max())),
        "effective_sample_size": min(1.0, float(scaled.sum() ** 2 / np.square(scaled).sum()) / len(logs)),
        "behavior_kl": min(largest, float((ratios - 1 - logs).mean())),
    }


class OldData(NamedTuple):
    """A rollout of other weights, as an update sees it before its first step."""

    metrics: dict[str, float]
    log_ratios: np.ndarray
    """[T, B] log p / b."""
    log_probs: np.ndarray | None = None
    """[T, B] of the proximal policy, in the decoupled objective."""
    weights: np.ndarray | None = None
    """[T, B] q / b, by which it weights advantages."""


class ProximalWeights:
    """The exponential moving average of the weights after every update, corrected for its beginning as Adam's means are.

    With a decay of 0 it is the current weights. Normalisers are not averaged: the proximal policy sees what the current one sees.
    """

    def __init__(self, decay: float) -> None:
        self.decay, self._total = decay, 0.0
        self._mean: Weights = {}

    @property
    def started(self) -> bool:
        """Whether there is an average."""
        return self._total > 0

    def add(self, weights: Mapping[str, np.ndarray]) -> None:
        """Let the weights after an update in."""
        before = self.decay * self._total
        self._total = before + 1.0
        for name, weight in weights.items():
            if weight.dtype.kind != "f" or name.partition(".")[0] in _NOT_AVERAGED:
                continue
            kept = self._mean.get(name)
            share = weight / weight.dtype.type(self._total)
            self._mean[name] = share if kept is None or not before else kept * weight.dtype.type(before / self._total) + share

    def within(self, weights: Mapping[str, np.ndarray]) -> Weights:
        """These weights with the average in its place; themselves as long as there is none."""
        return {**weights, **self._mean}

    def state_dict(self) -> dict[str, Any]:
        """The average and how much is in it."""
        return {"total": self._total, "mean": dict(self._mean)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._total = float(state["total"])
        self._mean = {name: np.array(weight) for name, weight in state["mean"].items()}


def decoupled(old: OldData, proximal: np.ndarray, rollout: Rollout) -> OldData:
    """The same with the log-probs [T, B] of the proximal policy, and the weights that follow from them."""
    weights = np.exp(np.minimum(log_ratios_of(proximal, rollout), _MOST_LOG))
    return old._replace(log_probs=np.where(rollout.valid, proximal, rollout.log_probs).astype(np.float32), weights=weights)


def describe_distance(metrics: Mapping[str, float], config: PPOConfig) -> str | None:
    """Why a rollout is too far from the current policy to take steps on it, in a few words; None if it is not."""
    least, most = config.min_effective_sample_size, config.max_behavior_kl
    effective, divergence = metrics["effective_sample_size"], metrics["behavior_kl"]
    if least is not None and not effective >= least:
        return f"effective_sample_size is {effective:.2g}, below ppo.min_effective_sample_size={least:g}"
    if most is not None and not divergence <= most:
        shown = f"{divergence:.2g}" if math.isfinite(divergence) else "infinite"
        return f"behavior_kl is {shown}, above ppo.max_behavior_kl={most:g}"
    return None


# With `ppo.scale_rewards`, before step 6, rewards are divided by the running standard deviation of the discounted return.
#
# The scale is that of `NormalizeReward` of Gymnasium and `VecNormalize` of Stable-Baselines3, computed inside learn: rollouts hold the
# rewards that the environment gave, and a rollout from disk is scaled like a fresh one.

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
