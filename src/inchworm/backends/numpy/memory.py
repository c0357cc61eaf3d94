"""LSTM and GRU in NumPy (step 4 of 9), one row after another.

With x the input of a layer, h its state, σ the logistic function and * the product by elements (torch's equations):

    LSTM   i, f, o = σ(W x + U h + b)    g = tanh(W x + U h + b)          c' = f * c + i * g     h' = o * tanh(c')
    GRU    r, z = σ(W x + U h + b)       n = tanh(W x + b + r * (U h + d))                       h' = n + z * (h - n)

All gates come from one matrix product with [x, h]. Since σ(v) = ½ + ½ tanh(v / 2), one pass of tanh serves them all: the weights of
the σ gates are stored halved, which is exact in binary.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from inchworm.core.types import Array, Tree
from inchworm.policy.layout import MemoryLayout


class Memory:
    """The recurrent layers of a policy, arranged for acting. It holds only weights; the state belongs to the caller."""

    def __init__(self, layout: MemoryLayout, weights: Mapping[str, np.ndarray]) -> None:
        self.layout = layout
        arrange = _lstm_matrix if layout.kind == "lstm" else _gru_matrix
        parts = ("input.weight", "input.bias", "state.weight", "state.bias")
        self._layers = [arrange(*[weights[f"memory.{layer}.{part}"] for part in parts]) for layer in range(layout.layers)]
        self._dtype = self._layers[0][0].dtype
        self._half = self._dtype.type(0.5)

    def empty(self, num_lanes: int) -> Tree:
        """The initial state, in the weights' dtype."""
        return self.layout.empty(num_lanes, self._dtype)

    def step(self, rows: np.ndarray, state: Tree, episode_starts: Array) -> tuple[np.ndarray, Tree]:
        """Reset where an episode starts, then read [B, in]; return features [B, size] and the new state, in new arrays."""
        try:
            before = [state[name] for name in self.layout.names]
        except (KeyError, TypeError, IndexError):
            raise self.layout.refusal(state, len(rows)) from None
        if before[0].shape != (len(rows), self.layout.layers, self.layout.size):
            raise self.layout.refusal(state, len(rows))
        if np.any(episode_starts):
            before = [np.where(np.asarray(episode_starts)[:, None, None], self._dtype.type(0), part) for part in before]
        after = [np.empty(part.shape, self._dtype) for part in before]
        advance = self._lstm if self.layout.kind == "lstm" else self._gru
        for layer, (matrix, bias) in enumerate(self._layers):
            rows = advance(rows, matrix, bias, [part[:, layer] for part in before], [part[:, layer] for part in after])
        return rows, dict(zip(self.layout.names, after))

    def over(self, rows: np.ndarray, state: Tree, episode_starts: Array) -> np.ndarray:
        """Features [L, N, size] of whole sequences [L, N, in], one row after another."""
        features = np.empty((*rows.shape[:2], self.layout.size), self._dtype)
        for time, (row, starts) in enumerate(zip(rows, episode_starts)):
            features[time], state = self.step(row, state, starts)
        return features

    def _lstm(
        self, rows: np.ndarray, matrix: np.ndarray, bias: np.ndarray, before: list[np.ndarray], after: list[np.ndarray]
    ) -> np.ndarray:
        (hidden, cell), (new_hidden, new_cell), size = before, after, self.layout.size
        gates = np.concatenate((rows, hidden), 1).dot(matrix)  # [B, 4 size]: input, forget, output, cell
        np.add(gates, bias, gates)
        np.tanh(gates, gates)
        opened = gates[:, : 3 * size]
        np.multiply(opened, self._half, opened)
        np.add(opened, self._half, opened)
        np.multiply(gates[:, size : 2 * size], cell, new_cell)
        entering = gates[:, 3 * size :]
        np.multiply(entering, gates[:, :size], entering)
        np.add(new_cell, entering, new_cell)
        np.tanh(new_cell, new_hidden)
        np.multiply(new_hidden, gates[:, 2 * size : 3 * size], new_hidden)
        return new_hidden

    def _gru(self, rows: np.ndarray, matrix: np.ndarray, bias: np.ndarray, before: list[np.ndarray], after: list[np.ndarray]) -> np.ndarray:
        (hidden,), (new_hidden,), size = before, after, self.layout.size
        gates = np.concatenate((rows, hidden), 1).dot(matrix)  # [B, 4 size]: reset, update, new of the input, new of the memory
        np.add(gates, bias, gates)
        opened = gates[:, : 2 * size]
        np.tanh(opened, opened)
        np.multiply(opened, self._half, opened)
        np.add(opened, self._half, opened)
        new, recalled = gates[:, 2 * size : 3 * size], gates[:, 3 * size :]
        np.multiply(recalled, gates[:, :size], recalled)
        np.add(new, recalled, new)
        np.tanh(new, new)
        np.subtract(hidden, new, new_hidden)
        np.multiply(new_hidden, gates[:, size : 2 * size], new_hidden)
        np.add(new_hidden, new, new_hidden)
        return new_hidden


def _lstm_matrix(w: np.ndarray, b: np.ndarray, u: np.ndarray, d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[in + size, 4 size] and [4 size]: input, forget and output gate halved, then the cell."""
    both, bias = np.concatenate([w, u], 1), b + d  # [4 size, in + size]
    into, forget, cell, out = range(4)
    blocks, biases = np.split(both, 4), np.split(bias, 4)
    half = both.dtype.type(0.5)
    matrix = np.concatenate([*(blocks[gate] * half for gate in (into, forget, out)), blocks[cell]])
    return np.ascontiguousarray(matrix.T), np.concatenate([*(biases[gate] * half for gate in (into, forget, out)), biases[cell]])


def _gru_matrix(w: np.ndarray, b: np.ndarray, u: np.ndarray, d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[in + size, 4 size] and [4 size]: reset and update gate halved, then the new memory's part from the input and from the memory."""
    size, half = len(u) // 3, u.dtype.type(0.5)
    opened = np.concatenate([w[: 2 * size], u[: 2 * size]], 1) * half
    of_input = np.concatenate([w[2 * size :], np.zeros_like(u[2 * size :])], 1)
    of_memory = np.concatenate([np.zeros_like(w[2 * size :]), u[2 * size :]], 1)
    bias = np.concatenate([(b + d)[: 2 * size] * half, b[2 * size :], d[2 * size :]])
    return np.ascontiguousarray(np.concatenate([opened, of_input, of_memory]).T), bias
