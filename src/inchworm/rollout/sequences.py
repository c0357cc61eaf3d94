"""Step 7 of 9: [T, B] rows become [L, N] sequences, and shuffled columns of them become minibatches.

Leaves are only reshaped, swapped and indexed, so NumPy arrays and every backend's tensors pass alike. Column
`chunk * B + lane` holds the rows `chunk * L … chunk * L + L - 1` of one lane.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import optree

from inchworm.types import Array, Tree


def num_sequences(num_steps: int, num_lanes: int, length: int) -> int:
    """N: how many sequences a rollout makes."""
    return -(-num_steps // length) * num_lanes


def split_into_sequences(tree: Tree, length: int) -> Tree:
    """Every leaf [T, B, …] as [L, ceil(T / L) * B, …]; a short last chunk repeats its last row, which `split_valid` marks."""
    return optree.tree_map(lambda leaf: _columns(_padded(leaf, length), length), tree)


def split_valid(valid: Array, length: int) -> Array:
    """`valid` [T, B] as [L, N], False where `split_into_sequences` repeated a row."""
    num_steps = valid.shape[0]
    rows = _padded(valid, length)
    if rows.shape[0] != num_steps:
        rows[num_steps:] = False  # indexing by an array made a copy: the rollout is not written to
    return _columns(rows, length)


def _padded(leaf: Any, length: int) -> Any:
    """[T, B, …] -> [ceil(T / L) * L, B, …], the last row repeated."""
    num_steps = leaf.shape[0]
    rows = -(-num_steps // length) * length
    return leaf if rows == num_steps else leaf[np.minimum(np.arange(rows), num_steps - 1)]


def _columns(leaf: Any, length: int) -> Any:
    chunks, num_lanes, rest = leaf.shape[0] // length, leaf.shape[1], tuple(leaf.shape[2:])
    by_chunk = leaf.reshape((chunks, length, num_lanes, *rest)).swapaxes(0, 1)  # [L, T/L, B, …]
    return by_chunk.reshape((length, chunks * num_lanes, *rest))  # [L, N, …]


def sequence_states(policy_state: Tree) -> Tree:
    """The recorded memory [ceil(T / L), B, *mem] as [N, *mem]: what each sequence begins with."""
    return optree.tree_map(lambda leaf: leaf.reshape((leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])), policy_state)


@functools.lru_cache(maxsize=16)
def minibatch_places(num_sequences: int, num_minibatches: int) -> tuple[np.ndarray, np.ndarray]:
    """How an epoch is cut: for each minibatch which places of the shuffle it takes, [m, n] int64, and which of them are real, [m, n].

    Minibatches differ by at most one sequence and are padded to one shape n; padding repeats a place and is not real.
    More minibatches than sequences make as many minibatches as sequences.
    """
    if num_minibatches < 1:
        raise ValueError(f"num_minibatches={num_minibatches} must be 1 or more")
    count = min(num_minibatches, num_sequences)
    if count == 0:
        return np.zeros((0, 0), np.int64), np.zeros((0, 0), np.bool_)
    least, longer = divmod(num_sequences, count)  # the first `longer` minibatches have one more
    sizes = least + (np.arange(count) < longer)  # [m]
    within = np.arange(sizes[0])  # [n]
    starts = np.cumsum(sizes) - sizes
    places, real = starts[:, None] + within % sizes[:, None], within < sizes[:, None]
    for array in (places, real):
        array.flags.writeable = False  # they are kept for the next epoch
    return places, real


def iter_minibatches(num_sequences: int, num_minibatches: int, permutation: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """One epoch as (columns [n] int64, real [n] bool), every sequence exactly once, in the order of `permutation`."""
    order = np.asarray(permutation, np.int64)
    if order.shape != (num_sequences,) or not np.array_equal(np.sort(order), np.arange(num_sequences)):
        raise ValueError(f"the shuffle must hold each of 0 … {num_sequences - 1} once; use rng.permutation({num_sequences})")
    places, real = minibatch_places(num_sequences, num_minibatches)
    yield from zip(order[places], real)


def select_sequences(tree: Tree, columns: Any) -> Tree:
    """These columns of every leaf: [L, N, …] -> [L, n, …]; `columns` is an index that the leaves understand."""
    return optree.tree_map(lambda leaf: leaf[:, columns], tree)
