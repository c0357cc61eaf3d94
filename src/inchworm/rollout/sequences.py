"""Step 7 of 9: [T, B] rows become [L, N] sequences, and shuffled columns of them become minibatches.

Leaves are only reshaped, swapped and indexed, so NumPy arrays and every backend's tensors work. Column
`chunk * B + lane` holds the rows `chunk * L … chunk * L + L - 1` of one lane.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree

from inchworm.core.errors import RolloutError
from inchworm.core.spaces import PLACE, WORLD
from inchworm.core.types import Advantages, Array, Tree
from inchworm.rollout.rollout import Rollout


def num_sequences(num_steps: int, num_lanes: int, length: int) -> int:
    """Return N, the number of sequences of a rollout."""
    return -(-num_steps // length) * num_lanes


def split_into_sequences(tree: Tree, length: int) -> Tree:
    """Reshape every leaf [T, B, …] to [L, ceil(T / L) * B, …]; a short last chunk is padded with its last row (see `split_valid`)."""

    def columns(leaf: Any) -> Any:
        num_steps, num_lanes, *rest = leaf.shape
        chunks = -(-num_steps // length)
        if chunks * length != num_steps:
            leaf = leaf[np.minimum(np.arange(chunks * length), num_steps - 1)]
        by_chunk = leaf.reshape((chunks, length, num_lanes, *rest)).swapaxes(0, 1)  # [L, T/L, B, …]
        return by_chunk.reshape((length, chunks * num_lanes, *rest))  # [L, N, …]

    return optree.tree_map(columns, tree)


def minibatch_fields(rollout: Rollout, advantages: Advantages, where: Callable[..., Array], *, successors: bool) -> dict[str, Tree]:
    """Select what minibatches are cut from, each [T, B, …]; `where` is the backend's. Invalid rows have nothing to learn: advantage 0."""
    return {
        "observations": rollout.observations,
        "actions": rollout.actions,
        "log_probs": rollout.log_probs,
        "rewards": rollout.rewards,
        "terminated": rollout.terminated,
        "truncated": rollout.truncated,
        "episode_starts": rollout.episode_starts,
        "advantages": where(rollout.valid, advantages.advantages, 0),
        "returns": where(rollout.valid, advantages.returns, advantages.values),
        "values": advantages.values,
        "next_observations": rollout.next_observations if successors else (),
        "extras": rollout.extras,
    }


def split_valid(valid: Array, length: int) -> Array:
    """Reshape `valid` [T, B] to [L, N], False where `split_into_sequences` padded."""
    columns = split_into_sequences(valid, length)
    num_steps, num_lanes = valid.shape
    if num_steps % length:
        columns[num_steps % length :, -num_lanes:] = False  # a copy, because it was padded
    return columns


def join_sequences(leaf: Any, num_steps: int, num_lanes: int) -> Any:
    """Undo `split_into_sequences`: [L, ceil(T / L) * B, …] -> [T, B, …], without the padding."""
    length, rest = leaf.shape[0], tuple(leaf.shape[2:])
    by_chunk = leaf.reshape((length, leaf.shape[1] // num_lanes, num_lanes, *rest)).swapaxes(0, 1)  # [T/L, L, B, …]
    return by_chunk.reshape((by_chunk.shape[0] * length, num_lanes, *rest))[:num_steps]


def sequence_states(policy_state: Tree, num_steps: int, length: int, spacing: int = 0) -> Tree:
    """Select the initial memory [N, *mem] of each sequence from what was recorded every S rows, [ceil(T / S), B, *mem].

    `spacing` is S, which must divide L; 0 if it is unknown: then it is any value that gives this number of records.
    """

    def columns(leaf: Any) -> Any:
        chosen = leaf[:: _state_stride(leaf.shape[0], num_steps, length, spacing)]
        return chosen.reshape((chosen.shape[0] * chosen.shape[1], *chosen.shape[2:]))

    return optree.tree_map(columns, policy_state)


def _state_stride(recorded: int, num_steps: int, length: int, known: int) -> int:
    """Return n if every n-th recorded memory is the one of a sequence's first row."""
    needed = -(-num_steps // length)
    if needed == 1 or (recorded == needed and not known):
        return max(1, recorded // max(1, needed))
    for spacing in [known] if known else range(1, length):
        if length % spacing == 0 and -(-num_steps // spacing) == recorded:
            return length // spacing
    raise RolloutError(
        f"the rollout's memory was recorded {recorded} times in {num_steps} steps, which does not fit sequences of {length} steps; "
        "set ppo.sequence_length to a multiple of its value when the rollout was collected"
    )


@dataclass(frozen=True, slots=True)
class ResetRows:
    """Sequences [L, N] with an extra row inserted before each row that resets the memory, padded to D rows."""

    depth: int
    """D: L plus a round number, because kernels are prepared anew for every shape."""
    places: np.ndarray
    """[L · N] the index of each row among the D · N rows."""
    inserted: np.ndarray
    """[K] the indices of the inserted rows among the D · N rows."""


def insert_reset_rows(starts: np.ndarray) -> ResetRows:
    """Plan a reset row before each row where `starts` [L, N] is true, except the first, whose initial memory is given."""
    length, count = starts.shape
    resets = starts.copy()
    resets[0] = False
    moved = np.cumsum(resets, axis=0)  # [L, N] by how many rows each row moves down
    places = (moved + np.arange(length)[:, None]) * count + np.arange(count)
    extra = int(moved[-1].max())
    step = max(4, 1 << max(0, extra.bit_length() - 4))  # a multiple of 4, or of 1/8 of the power of two below: large numbers grow by <= 1/8
    return ResetRows(length + -(-extra // step) * step, places.reshape(-1), places[resets] - count)


@functools.lru_cache(maxsize=16)
def minibatch_places(num_sequences: int, num_minibatches: int) -> tuple[np.ndarray, np.ndarray]:
    """Split an epoch: the places of the shuffle in each minibatch, [m, n] int64, and which of them are real, [m, n] bool.

    Minibatches differ by at most one sequence and are padded to one shape n; padding repeats a place and is not real.
    There are at most as many minibatches as sequences.
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
        array.flags.writeable = False  # cached for the next epoch
    return places, real


def iter_minibatches(num_sequences: int, num_minibatches: int, permutation: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Iterate over one epoch as (columns [n] int64, real [n] bool), every sequence exactly once, in the order of `permutation`."""
    order = np.asarray(permutation, np.int64)
    if order.shape != (num_sequences,) or not np.array_equal(np.sort(order), np.arange(num_sequences)):
        raise ValueError(f"permutation must contain each of 0 … {num_sequences - 1} once; use rng.permutation({num_sequences})")
    places, real = minibatch_places(num_sequences, num_minibatches)
    yield from zip(order[places], real)


def select_sequences(tree: Tree, columns: Any) -> Tree:
    """Select columns of every leaf: [L, N, …] -> [L, n, …]; `columns` is any index that the leaves accept."""
    return optree.tree_map(lambda leaf: leaf[:, columns], tree)


def fill_invalid_rows(rollout: Rollout) -> Rollout:
    """Fill invalid rows with a valid row's observation, action and log-prob, so that networks never see unset data.

    Zeros would not do: a space need not contain them (`Discrete(3, start=1)`), and a mask of zeros forbids every action.
    Finite rewards are kept, because the advantages of a central critic run through invalid rows.
    """
    valid = rollout.valid
    if valid.all() or not valid.any():
        return rollout
    first = tuple(np.argwhere(valid)[0])  # (t, b) of the first valid row

    def fill(tree: Tree, keep: np.ndarray, source: Tree) -> Tree:
        return optree.tree_map(
            lambda leaf, rows: np.where(keep.reshape(*keep.shape, *[1] * (rows.ndim - 2)), leaf, rows[first]), tree, source
        )

    changed = {name: fill(rollout[name], valid, rollout[name]) for name in ("observations", "actions", "log_probs")}
    read_at_cuts = valid[rollout.cut_rows[:, 0], rollout.cut_rows[:, 1]] | rollout.cut_valid  # [K] an agent may join there
    changed["cut_observations"] = fill(rollout.cut_observations, read_at_cuts, rollout.observations)
    changed["rewards"] = np.where(valid | np.isfinite(rollout.rewards), rollout.rewards, np.float32(0))
    return dataclasses.replace(rollout, **changed)


def lane_states(rollout: Rollout) -> Tree:
    """Return a central critic's input for each lane: {world: [T, B, *] its copy's state, place: [T, B] its number there}, or `()`.

    Leaves are only indexed, so tensors work as well as arrays; places are a NumPy array.
    """
    if not optree.tree_leaves(rollout.global_state):
        return ()
    copies, places = np.divmod(np.arange(rollout.num_lanes), rollout.lanes_per_copy)  # [B]
    world = optree.tree_map(lambda leaf: leaf[:, copies], rollout.global_state)
    return {WORLD: world, PLACE: np.tile(places, (rollout.num_steps, 1))}


def cut_lane_states(rollout: Rollout) -> Tree:
    """Return the same at the true successors of the cut rows, each leaf [K, …]."""
    if not optree.tree_leaves(rollout.global_state):
        return ()
    return {WORLD: rollout.cut_global_state, PLACE: rollout.cut_rows[:, 1] % rollout.lanes_per_copy}
