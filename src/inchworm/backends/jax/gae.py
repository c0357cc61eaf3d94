"""Step 6 of 9: advantages by the recursion backwards in time, as a reverse `lax.scan`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

UNROLL = 16
"""Rows of one pass of the compiled loop: a row of a few lanes takes less time than the loop around it."""


def compute_gae(
    rewards: Array, values: Array, next_values: Array, terminated: Array, truncated: Array, gamma: Any, gae_lambda: Any
) -> Array:
    """Generalised advantage estimates, each argument and the result [T, B] (Schulman et al. 2016, equations 11 to 16).

    A terminated row has no next value. Neither it nor a truncated row sees the advantages after it, but a truncated row
    keeps its next value: V of the true successor, which `next_values` holds.
    """
    deltas = rewards + jnp.where(terminated, 0, gamma * next_values) - values  # [T, B]
    carries = jnp.where(terminated | truncated, 0, jnp.full_like(deltas, gamma * gae_lambda))  # [T, B]

    def row(after: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        delta, carry = now
        advantage = delta + carry * after
        return advantage, advantage

    nothing = jnp.zeros(deltas.shape[1:], deltas.dtype)  # [B] after the last row
    return lax.scan(row, nothing, (deltas, carries), reverse=True, unroll=UNROLL)[1]


def shift_values(values: Array, cut_places: Array, cut_values: Array) -> Array:
    """V of each row's true successor [T, B]: the next row's value, and at cut rows the value given there [K].

    `cut_places` [K] is t · B + b; a place of T · B or more is padding and is left out.
    """
    following = jnp.concatenate([values[1:], values[-1:]])  # [T, B]
    return following.reshape(-1).at[cut_places].set(cut_values, mode="drop").reshape(values.shape)
