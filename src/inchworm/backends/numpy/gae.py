"""Step 6 of 9: one pass of the critic over a rollout, then advantages backwards in time. The reference for all backends."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import optree

from inchworm.config.sections import PPOConfig
from inchworm.core.protocols import Policy, ReadsGlobalState, reads_context, reads_global_state
from inchworm.core.types import Advantages, Array, Tree
from inchworm.rollout.rollout import Rollout
from inchworm.rollout.sequences import cut_lane_states, join_sequences, lane_states, sequence_states, split_into_sequences

FEW_LANES = 8
"""Up to this many lanes Python's numbers are faster than NumPy's (measured: 2048 rows of one lane take 0.2 ms instead of 2.5)."""


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
    return _sums(*_deltas(rewards, values, next_values, terminated, truncated, gamma, gae_lambda)).astype(values.dtype)


def _deltas(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    gamma: float,
    gae_lambda: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The error delta of each row's value, and how much of what comes after it counts, each [T, B]."""
    # In float64, whatever the arrays are: T additions in a row stay exact enough, and both recursions give the same bits.
    # `where` instead of a product with 0: a terminated row's next value is not read, whatever it is.
    deltas: np.ndarray = rewards + np.where(terminated, 0.0, gamma * next_values.astype(np.float64)) - values
    return deltas, np.where(terminated | truncated, 0.0, gamma * gae_lambda)


def compute_vtrace(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    log_ratios: np.ndarray,
    gamma: float,
    gae_lambda: float,
    clip: float,
) -> tuple[np.ndarray, np.ndarray]:
    """V-trace's advantages and value targets, each [T, B], in the dtype of `values` (Espeholt et al. 2018, "IMPALA", section 4.1).

    With r_t = min(clip, p / b) of each row, from its `log_ratios`, the targets are v_t = V_t + Σ_k γ^k c_t … c_{t+k-1} r_{t+k} delta_{t+k},
    where c = lambda r. The advantage is delta_t + γ lambda (v_{t+1} - V_{t+1}): the step's own ratio is left to the policy's loss. With
    ratios of 1 it is GAE, with a lambda of 1 the paper's r_t + γ v_{t+1} - V_t.
    """
    deltas, carries = _deltas(rewards, values, next_values, terminated, truncated, gamma, gae_lambda)
    ratios = np.exp(np.minimum(log_ratios.astype(np.float64), math.log(clip)))  # [T, B] truncated
    sums = _sums(ratios * deltas, carries * ratios)  # v - V
    advantages = deltas + carries * np.concatenate([sums[1:], np.zeros_like(sums[:1])])
    return advantages.astype(values.dtype), (values + sums).astype(values.dtype)


def _sums(deltas: np.ndarray, carries: np.ndarray) -> np.ndarray:
    """A_t = delta_t + carry_t A_{t+1} [T, B], from the last row to the first; `deltas` may be overwritten."""
    if deltas.shape[1] <= FEW_LANES:
        return _by_lane(deltas, carries)
    for t in range(len(deltas) - 2, -1, -1):
        deltas[t] += carries[t] * deltas[t + 1]
    return deltas


def _by_lane(deltas: np.ndarray, carries: np.ndarray) -> np.ndarray:
    """The same with Python's numbers, lane by lane: for few lanes a NumPy call costs more than its arithmetic."""
    lanes = []
    for lane_deltas, lane_carries in zip(deltas.T[:, ::-1].tolist(), carries.T[:, ::-1].tolist()):
        advantage, lane = 0.0, []
        for delta, carry in zip(lane_deltas, lane_carries):
            advantage = delta + carry * advantage
            lane.append(advantage)
        lanes.append(lane)
    return np.array(lanes, np.float64).reshape(deltas.shape[::-1])[:, ::-1].T


def critic_values(policy: Policy, rollout: Rollout, config: PPOConfig) -> tuple[Array, Array]:
    """The values [T, B] of every row, and those [K] of the true successors of the cut rows.

    With a memory, rows are read by the sequences that learning reads, all at once instead of row after row; successors are read with the
    memory after their cut row. Arrays are only indexed and compared, so tensors work as well.
    """
    central, critic = reads_global_state(policy), cast(ReadsGlobalState, policy)
    shared: tuple[Tree, ...] = (lane_states(rollout), rollout.valid) if central else ()
    if reads_context(policy):
        return _context_values(cast(Any, policy), rollout)
    if not optree.tree_leaves(rollout.policy_state):
        values = critic.value(rollout.observations, rollout.policy_state, rollout.episode_starts, *shared)
    else:
        length = config.sequence_length_for(rollout.num_steps, memory=True)
        observations, starts, *more = split_into_sequences((rollout.observations, rollout.episode_starts, *shared), length)  # [L, N, …]
        state = sequence_states(rollout.policy_state, rollout.num_steps, length, rollout.state_every)
        values = join_sequences(critic.value(observations, state, starts, *more), rollout.num_steps, rollout.num_lanes)
    cuts: Tree = (rollout.cut_observations, rollout.cut_valid, cut_lane_states(rollout) if central else ())
    successors, valid, states = optree.tree_map(lambda leaf: leaf[None], cuts)  # [1, K, …]
    no_resets = valid != valid  # false everywhere, in the backend's arrays
    return values, critic.value(successors, rollout.cut_state, no_resets, *((states, valid) if central else ()))[0]


def _context_values(policy: Any, rollout: Rollout) -> tuple[Array, Array]:
    """The same for a policy that is conditioned on the rollout's task context, which has no memory."""
    at_cuts: Tree = ()
    if rollout.context:
        table, index = rollout.context
        at_cuts = table, index[rollout.cut_rows[:, 0], rollout.cut_rows[:, 1]][None]  # [1, K]
    values = policy.value(rollout.observations, (), rollout.episode_starts, context=rollout.context)
    successors = optree.tree_map(lambda leaf: leaf[None], rollout.cut_observations)  # [1, K, …]
    return values, policy.value(successors, (), rollout.cut_valid[None], context=at_cuts)[0]


def compute_advantages(policy: Policy, rollout: Rollout, config: PPOConfig, log_ratios: np.ndarray | None = None) -> Advantages:
    """Values, values of the true successors, advantages and returns of a rollout under the current critic.

    With the `log_ratios` [T, B] of the current policy to the one that collected, they are V-trace's, else GAE's.
    """
    values, at_cuts = map(np.asarray, critic_values(policy, rollout, config))  # [T, B], [K]
    next_values = shift_values(values, rollout.cut_rows, at_cuts)
    flags = (rollout.terminated, rollout.truncated)
    if log_ratios is not None:
        discounts = (config.gamma, config.gae_lambda, config.vtrace_clip)
        advantages, returns = compute_vtrace(rollout.rewards, values, next_values, *flags, log_ratios, *discounts)
        return Advantages(values, next_values, advantages, returns)
    advantages = compute_gae(rollout.rewards, values, next_values, *flags, config.gamma, config.gae_lambda)
    return Advantages(values, next_values, advantages, advantages + values)
