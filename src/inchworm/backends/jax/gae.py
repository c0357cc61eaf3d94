"""Step 6 of 9: one pass of the critic over a rollout, then advantages by the recursion backwards in time, as a reverse `lax.scan`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from inchworm.backends.jax.network import (
    Inputs,
    Params,
    Past,
    Scales,
    critic,
    merge_leading,
    normalized_inputs,
    reward_units,
    shared_features,
)
from inchworm.backends.jax.samples import Steps
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.sequences import join_sequences, split_into_sequences

MANY_LANES = 64
"""From so many lanes on, rows are computed one after another: an estimate of where a row takes longer than a step of a compiled loop."""
VALUE_CHUNK = 16_384
"""Rows that the critic reads at once."""
VALUE_NUMBERS = 2**24
"""The most numbers in those rows: of observations larger than 1,024 numbers, such as images, fewer are read at once."""


def compute_gae(
    rewards: Array, values: Array, next_values: Array, terminated: Array, truncated: Array, gamma: Any, gae_lambda: Any
) -> Array:
    """Generalised advantage estimates, each argument and the result [T, B] (Schulman et al. 2016, equations 11 to 16).

    A terminated row has no next value. Neither it nor a truncated row sees the advantages after it, but a truncated row
    keeps its next value: V of the true successor, which `next_values` holds.
    """
    deltas = rewards + jnp.where(terminated, 0, gamma * next_values) - values  # [T, B]
    carries = jnp.where(terminated | truncated, 0, jnp.full_like(deltas, gamma * gae_lambda))  # [T, B]
    return (row_by_row if deltas.shape[1] >= MANY_LANES else by_doubling)(deltas, carries)


def compute_vtrace(
    rewards: Array,
    values: Array,
    next_values: Array,
    terminated: Array,
    truncated: Array,
    log_ratios: Array,
    gamma: Any,
    gae_lambda: Any,
    clip: Any,
) -> tuple[Array, Array]:
    """V-trace's advantages and value targets, each [T, B], as derived in `backends/numpy/gae`."""
    deltas = rewards + jnp.where(terminated, 0, gamma * next_values) - values  # [T, B]
    carries = jnp.where(terminated | truncated, 0, jnp.full_like(deltas, gamma * gae_lambda))
    ratios = jnp.minimum(jnp.exp(log_ratios), clip).astype(deltas.dtype)
    sums = (row_by_row if deltas.shape[1] >= MANY_LANES else by_doubling)(ratios * deltas, carries * ratios)
    return deltas + carries * jnp.concatenate([sums[1:], jnp.zeros_like(sums[:1])]), values + sums


def row_by_row(deltas: Array, carries: Array) -> Array:
    """A_t = delta_t + carry_t A_{t+1} [T, B], from the last row to the first."""

    def row(after: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        delta, carry = now
        advantage = delta + carry * after
        return advantage, advantage

    return lax.scan(row, jnp.zeros(deltas.shape[1:], deltas.dtype), (deltas, carries), reverse=True)[1]


def by_doubling(deltas: Array, carries: Array) -> Array:
    """The same in log2 T passes over all rows, for few lanes, whose rows take less time than a step of a compiled loop.

    After pass k, a row holds the sum over the 2^k rows from it on, and the product of their carries (Hillis & Steele 1986).
    """
    num_steps = len(deltas)
    nothing = jnp.zeros_like(deltas)

    def double(index: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        total, product = sums
        ahead = [lax.dynamic_slice_in_dim(jnp.concatenate([part, nothing]), 1 << index, num_steps) for part in sums]
        return total + product * ahead[0], product * ahead[1]

    sums: tuple[Array, Array] = lax.fori_loop(0, max(0, num_steps - 1).bit_length(), double, (deltas, carries))
    return sums[0]


def shift_values(values: Array, cut_places: Array, cut_values: Array) -> Array:
    """V of each row's true successor [T, B]: the next row's value, and at cut rows the value given there [K].

    `cut_places` [K] is t · B + b; a place of T · B or more is padding and is left out.
    """
    following = jnp.concatenate([values[1:], values[-1:]])  # [T, B]
    return following.reshape(-1).at[cut_places].set(cut_values, mode="drop").reshape(values.shape)


class Estimates(NamedTuple):
    """The critic's estimates for a rollout, each [T, B] in reward units."""

    values: Array
    next_values: Array
    """V of the true successor of each row."""
    advantages: Array
    returns: Array


def compute_advantages(
    spec: PolicySpec, params: Params, scales: Scales, steps: Steps, length: int, gamma: Any, gae_lambda: Any, vtrace_clip: float = 1.0
) -> Estimates:
    """One pass of the critic over a rollout and the successors of its cut rows, then the advantages: a pure function.

    With a memory, rows are read by the sequences of `length` steps that learning reads.
    """
    shape = steps.rewards.shape
    rows, cuts = (steps.flat, steps.images, steps.world, steps.valid), steps.cuts
    at_cuts = (cuts.flat, cuts.images, cuts.world, cuts.valid)
    if spec.memory is None:
        together = jax.tree.map(lambda leaf, cut: jnp.concatenate([leaf, cut]), merge_leading(rows), at_cuts)
        found = critic_rows(spec, params, normalized_inputs(spec, scales, *together))  # [T · B + K]
        values, successors = jnp.split(reward_units(scales, found), [shape[0] * shape[1]])
        values = values.reshape(shape)
    else:
        sequences = jax.tree.map(lambda leaf: split_into_sequences(jnp.asarray(leaf), length), (rows, steps.starts))  # [L, N, …]
        past = Past(steps.memory, sequences[1])
        found = critic_rows(spec, params, normalized_inputs(spec, scales, *merge_leading(sequences[0])), past)
        values = join_sequences(reward_units(scales, found).reshape(past.starts.shape), *shape)
        after = Past(cuts.memory, jnp.zeros((1, len(cuts.valid)), bool))
        successors = reward_units(scales, critic_rows(spec, params, normalized_inputs(spec, scales, *at_cuts), after))
    next_values = shift_values(values, cuts.places, successors)
    given = (steps.rewards, values, next_values, steps.terminated, steps.truncated)
    if not isinstance(steps.log_ratios, tuple):
        advantages, returns = compute_vtrace(*given, steps.log_ratios, gamma, gae_lambda, vtrace_clip)
        return Estimates(values, next_values, advantages, returns)
    advantages = compute_gae(*given, gamma, gae_lambda)
    return Estimates(values, next_values, advantages, advantages + values)


def critic_rows(spec: PolicySpec, params: Params, inputs: Inputs, past: Past | None = None) -> Array:
    """The value head's output [N]; without memory in chunks, so that a rollout does not need the memory of all its activations."""
    if past is not None:
        return critic(spec, params, inputs, shared_features(spec, params, inputs, past)[0])

    def one(row: Inputs) -> Array:
        rows: Inputs = jax.tree.map(lambda leaf: leaf[None], row)
        return critic(spec, params, rows, shared_features(spec, params, rows, None)[0])[0]

    row_size = sum(int(np.prod(leaf.shape[1:])) for leaf in jax.tree.leaves(inputs))
    chunk = max(1, min(VALUE_CHUNK, VALUE_NUMBERS // max(1, row_size)))
    if len(inputs.valid) <= chunk:
        return critic(spec, params, inputs, shared_features(spec, params, inputs, None)[0])
    found: Array = lax.map(one, inputs, batch_size=chunk)
    return found
