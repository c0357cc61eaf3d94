"""Step 7 of 9: [T, B] rows become [L, N] sequences, and shuffled columns of them become minibatches.

Leaves are only reshaped, swapped and indexed, so NumPy arrays and every backend's tensors pass alike. Column
`chunk * B + lane` holds the rows `chunk * L … chunk * L + L - 1` of one lane.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree

from inchworm.core.errors import RolloutError
from inchworm.core.types import Array, Tree
from inchworm.rollout.rollout import Rollout


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


def join_sequences(leaf: Any, num_steps: int, num_lanes: int) -> Any:
    """The way back: [L, ceil(T / L) * B, …] -> [T, B, …], without the padding."""
    length, rest = leaf.shape[0], tuple(leaf.shape[2:])
    by_chunk = leaf.reshape((length, leaf.shape[1] // num_lanes, num_lanes, *rest)).swapaxes(0, 1)  # [T/L, L, B, …]
    return by_chunk.reshape((by_chunk.shape[0] * length, num_lanes, *rest))[:num_steps]


def sequence_states(policy_state: Tree, num_steps: int, length: int, spacing: int = 0) -> Tree:
    """The memory recorded every S rows, [ceil(T / S), B, *mem], as [N, *mem]: what each sequence begins with. S must divide L.

    `spacing` is S; 0 if it is not known, and then any that so many rows may have been recorded at.
    """

    def columns(leaf: Any) -> Any:
        chosen = leaf[:: _every(leaf.shape[0], num_steps, length, spacing)]
        return chosen.reshape((chosen.shape[0] * chosen.shape[1], *chosen.shape[2:]))

    return optree.tree_map(columns, policy_state)


def _every(recorded: int, num_steps: int, length: int, known: int) -> int:
    """Which of so many recorded memories are those of sequences' first rows: every first, second, …"""
    needed = -(-num_steps // length)
    if needed == 1 or (recorded == needed and not known):
        return max(1, recorded // max(1, needed))
    for spacing in [known] if known else range(1, length):
        if length % spacing == 0 and -(-num_steps // spacing) == recorded:
            return length // spacing
    raise RolloutError(
        f"the rollout's memory is recorded {recorded} times in {num_steps} steps, so that no sequences of {length} steps begin there; "
        "set ppo.sequence_length to a multiple of what it was when the rollout was collected"
    )


@dataclass(frozen=True, slots=True)
class Room:
    """Sequences [L, N] with one row more before each that forgets, and some at the end.

    There are D rows then, a round number more than L: kernels are prepared anew for every shape that they meet.
    """

    depth: int
    """D"""
    places: np.ndarray
    """[L · N] where in the D · N rows each row went."""
    emptied: np.ndarray
    """[K] which of the D · N rows stand before one that forgets."""


def make_room(starts: np.ndarray) -> Room:
    """Room to forget in, where `starts` [L, N] is true; what a sequence begins with is known, so its first row needs none."""
    length, count = starts.shape
    forgets = starts.copy()
    forgets[0] = False
    moved = np.cumsum(forgets, axis=0)  # [L, N] rows later than before
    places = (moved + np.arange(length)[:, None]) * count + np.arange(count)
    return Room(length + _rounded(int(moved[-1].max())), places.reshape(-1), places[forgets] - count)


def _rounded(number: int) -> int:
    """Up to a multiple of 4, or of the eighth part of the power of two below it: at most an eighth is added to what is large."""
    step = max(4, 1 << max(0, number.bit_length() - 4))
    return -(-number // step) * step


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


def successor_observations(rollout: Rollout) -> Tree:
    """What each step led to, [T, B, *obs]: the next row's observation, and at cut rows the true successor.

    Where a row is terminated and not its lane's last, this is the first observation of the lane's next episode: nothing
    followed, so nothing there may be used. Leaves are only indexed, so a backend's tensors pass as arrays do.
    """
    time, lane = rollout.cut_rows[:, 0], rollout.cut_rows[:, 1]
    following = np.minimum(np.arange(1, rollout.num_steps + 1), rollout.num_steps - 1)  # [T]

    def shifted(leaf: Array, cuts: Array) -> Array:
        successors = leaf[following]  # [T, B, *obs]: indexing by an array makes a copy
        successors[time, lane] = cuts
        return successors

    return optree.tree_map(shifted, rollout.observations, rollout.cut_observations)


def harmless(rollout: Rollout) -> Rollout:
    """The rollout with a living row's observation, action and log-prob wherever no agent lived: no forward pass meets garbage.

    Zeros would not do: a space need not contain them (`Discrete(3, start=1)`), and a mask of zeros forbids every action.
    Rewards stay there, if they are numbers: a recursion may run through such rows.
    """
    valid = rollout.valid
    if valid.all() or not valid.any():
        return rollout
    alive = tuple(np.argwhere(valid)[0])  # (t, b) of the first living row
    read_at_cuts = valid[rollout.cut_rows[:, 0], rollout.cut_rows[:, 1]] | rollout.cut_valid  # [K] an agent may join there
    read = {name: getattr(rollout, name) for name in ("observations", "actions", "log_probs")}
    rows = {name: optree.tree_map(lambda leaf: leaf[alive], tree) for name, tree in read.items()}
    changed = {name: _filled(tree, valid, rows[name]) for name, tree in read.items()}
    changed["cut_observations"] = _filled(rollout.cut_observations, read_at_cuts, rows["observations"])
    changed["rewards"] = np.where(valid | np.isfinite(rollout.rewards), rollout.rewards, np.float32(0))
    return dataclasses.replace(rollout, **changed)


def _filled(tree: Tree, keep: np.ndarray, row: Tree) -> Tree:
    """The tree with `row` wherever `keep` is false."""
    return optree.tree_map(lambda leaf, fill: np.where(keep.reshape(*keep.shape, *[1] * np.ndim(fill)), leaf, fill), tree, row)


WORLD, PLACE = "world", "place"
"""What a central critic is told: the state of a lane's copy, and which of the copy's lanes it is."""


def lane_states(rollout: Rollout) -> Tree:
    """What a central critic reads for each lane: {world: [T, B, *] the state of its copy, place: [T, B] its number there}, or `()`.

    Leaves are only indexed, so a backend's tensors pass, too; places are an array.
    """
    if not optree.tree_leaves(rollout.global_state):
        return ()
    copies, places = np.divmod(np.arange(rollout.num_lanes), rollout.lanes_per_copy)  # [B]
    world = optree.tree_map(lambda leaf: leaf[:, copies], rollout.global_state)
    return {WORLD: world, PLACE: np.tile(places, (rollout.num_steps, 1))}


def cut_lane_states(rollout: Rollout) -> Tree:
    """The same at the true successors of the cut rows, each leaf [K, …]."""
    if not optree.tree_leaves(rollout.global_state):
        return ()
    return {WORLD: rollout.cut_global_state, PLACE: rollout.cut_rows[:, 1] % rollout.lanes_per_copy}
