"""LSTM and GRU in JAX (steps 4 and 8 of 9): one `lax.scan` over the rows of all sequences, with the equations of `backends/numpy/memory`.

What a layer reads of its input, W x + b, is one product for all rows; only the product with the state is left inside the scan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from inchworm.core.types import Tree
from inchworm.policy.layout import MemoryLayout


class Past(NamedTuple):
    """The memory of sequences [L, N]."""

    state: Tree
    """[N, layers, size] before the first row."""
    starts: Array
    """[L, N] bool: reset before reading this row."""


def run_memory(layout: MemoryLayout, params: Mapping[str, Array], rows: Array, past: Past) -> tuple[Array, Tree]:
    """Features [L, N, size] of sequences [L, N, in] that begin with `past`, and the state [N, layers, size] after the last row."""
    after: dict[str, list[Array]] = {name: [] for name in layout.names}
    advance = _lstm if layout.kind == "lstm" else _gru
    for layer in range(layout.layers):
        w, b, u, d = (params[f"memory.{layer}.{part}"] for part in ("input.weight", "input.bias", "state.weight", "state.bias"))
        begin = tuple(past.state[name][:, layer].astype(rows.dtype) for name in layout.names)
        of_input = rows @ w.T + b  # [L, N, gates · size]

        def step(state: tuple[Array, ...], row: tuple[Array, Array], u: Array = u, d: Array = d) -> tuple[tuple[Array, ...], Array]:
            read, starts = row
            state = advance(read, tuple(jnp.where(starts[:, None], 0, part) for part in state), u, d)
            return state, state[0]

        if len(rows) == 1:  # acting, and the successors of cut rows
            end, features = step(begin, (of_input[0], past.starts[0]))
            rows = features[None]
        else:
            end, rows = lax.scan(step, begin, (of_input, past.starts))
        for name, part in zip(layout.names, end):
            after[name].append(part)
    return rows, {name: jnp.stack(parts, 1) for name, parts in after.items()}


def _lstm(of_input: Array, state: tuple[Array, ...], u: Array, d: Array) -> tuple[Array, ...]:
    """(h', c') from W x + b [N, 4 size] and (h, c)."""
    hidden, cell = state
    into, forget, new, out = jnp.split(of_input + (hidden @ u.T + d), 4, axis=-1)
    cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(into) * jnp.tanh(new)
    return jax.nn.sigmoid(out) * jnp.tanh(cell), cell


def _gru(of_input: Array, state: tuple[Array, ...], u: Array, d: Array) -> tuple[Array, ...]:
    """(h',) from W x + b [N, 3 size] and (h,)."""
    (hidden,) = state
    size = hidden.shape[-1]
    of_memory = hidden @ u.T + d
    opened = jax.nn.sigmoid(of_input[:, : 2 * size] + of_memory[:, : 2 * size])
    reset, update = opened[:, :size], opened[:, size:]
    new = jnp.tanh(of_input[:, 2 * size :] + reset * of_memory[:, 2 * size :])
    return (new + update * (hidden - new),)
