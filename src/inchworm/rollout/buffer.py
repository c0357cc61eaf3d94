"""Step 5 of 9: the writer of a rollout. One row per step, and after T rows one `Rollout` that owns the arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import optree

from inchworm.errors import RolloutError
from inchworm.rollout.checks import action_dtype, freeze
from inchworm.rollout.rollout import Rollout
from inchworm.spaces import Space, build_tree, leaf_dtype, leaf_shape
from inchworm.types import Array, EpisodeRecord, Tree

_FLAT: dict[str, Any] = {
    "log_probs": np.float32,
    "rewards": np.float32,
    "terminated": np.bool_,
    "truncated": np.bool_,
    "episode_starts": np.bool_,
    "valid": np.bool_,
}


class _Column:
    """One field's arrays: rows that look like `example`, leaf by leaf."""

    def __init__(self, name: str, example: Tree) -> None:
        self._name = name
        self._paths = optree.tree_paths(example)
        self._examples, self._structure = optree.tree_flatten(example)
        self._leaves: list[tuple[Any, np.ndarray, tuple[int, ...], np.dtype[Any]]] = []

    def allocate(self, rows: int) -> None:
        """Fresh arrays of that many rows; nothing is filled in, because every row will be."""
        self._leaves = [
            (path, np.empty((rows, *row.shape), row.dtype), row.shape, row.dtype) for path, row in zip(self._paths, self._examples)
        ]

    def write(self, index: int, row: Tree) -> None:
        """Copy one row in. Neither NumPy's broadcasting nor a lossy cast may bend a wrong row into shape."""
        for path, array, shape, dtype in self._leaves:
            value = row
            for key in path:
                value = value[key]
            if type(value) is not np.ndarray or value.shape != shape or value.dtype != dtype:
                value = self._fitted(value, path, shape, dtype)
            array[index] = value

    def _fitted(self, value: Any, path: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        array = np.asarray(value)
        if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
            name = ".".join(map(str, (self._name, *path)))
            raise RolloutError(f"{name}: got {array.dtype}{list(array.shape)}, expected {dtype}{list(shape)}")
        return array

    def copied(self, row: Tree) -> Tree:
        """A checked copy of one row, to be written later."""
        one = _Column(self._name, optree.tree_unflatten(self._structure, self._examples))
        one.allocate(1)
        one.write(0, row)
        return optree.tree_map(lambda leaf: leaf[0, ...], one.tree())

    def tree(self) -> Tree:
        """The arrays as they are now."""
        return optree.tree_unflatten(self._structure, [array for _, array, _, _ in self._leaves])

    def take(self) -> Tree:
        """The arrays, read-only from now on; the column lets go of them."""
        arrays = freeze(self.tree())
        self._leaves = []
        return arrays


class RolloutBuffer:
    """Rows in, one rollout out. Private to a collector, which calls `add` each step, `add_cut` where an episode ended, then `get`."""

    def __init__(self, num_steps: int, num_lanes: int, examples: dict[str, Tree], state_every: int) -> None:
        self.num_steps, self.num_lanes, self.state_every = num_steps, num_lanes, state_every
        self._columns = {name: _Column(name, example) for name, example in examples.items()}
        self._observations, self._actions = self._columns["observations"], self._columns["actions"]
        self._policy_state, self._global_state = self._columns["policy_state"], self._columns["global_state"]
        self._flat = [self._columns[name] for name in _FLAT]
        self._cut_observations = _Column("cut_observations", _one_lane(examples["observations"]))
        self._cut_state = _Column("cut_state", _one_lane(examples["policy_state"]))
        self._all_valid = np.ones(num_lanes, np.bool_)
        self.reset()

    @classmethod
    def create(
        cls,
        num_steps: int,
        num_lanes: int,
        observation_space: Space,
        action_space: Space,
        *,
        state: Tree = (),
        state_every: int = 1,
        global_state: Tree = (),
    ) -> Self:
        """A buffer for T steps of B lanes; `state` [B, *mem] and `global_state` [E, *] are examples of one row of theirs."""
        if num_steps < 0 or num_lanes < 0 or state_every < 1:
            raise RolloutError(f"a buffer of num_steps={num_steps}, num_lanes={num_lanes}, state_every={state_every} cannot be made")
        examples = {
            "observations": build_tree(observation_space, lambda _, leaf: np.empty((num_lanes, *leaf_shape(leaf)), leaf_dtype(leaf))),
            "actions": build_tree(action_space, lambda _, leaf: np.empty((num_lanes, *leaf_shape(leaf)), action_dtype(leaf))),
            **{name: np.empty(num_lanes, dtype) for name, dtype in _FLAT.items()},
            "policy_state": optree.tree_map(np.asarray, state),
            "global_state": optree.tree_map(np.asarray, global_state),
        }
        return cls(num_steps, num_lanes, examples, state_every)

    def __len__(self) -> int:
        """Rows so far."""
        return self._row

    def reset(self) -> None:
        """Forget everything and begin with fresh arrays; a rollout that was handed over keeps its own."""
        for column in self._columns.values():
            column.allocate(self.num_steps)
        self._policy_state.allocate(-(-self.num_steps // self.state_every))
        self._row = 0
        self._cuts: dict[tuple[int, int], tuple[Tree, Tree]] = {}

    def add(
        self,
        *,
        observations: Tree,
        actions: Tree,
        log_probs: Array,
        rewards: Array,
        terminated: Array,
        truncated: Array,
        episode_starts: Array,
        valid: Array | None = None,
        state: Tree = (),
        global_state: Tree = (),
    ) -> None:
        """Copy the next row in, every leaf [B, …]. `state` is the memory before `observations` was read."""
        row = self._row
        if row == self.num_steps:
            raise RolloutError(f"the buffer is full ({row} rows); call get() for the rollout, then reset() for fresh arrays")
        self._observations.write(row, observations)
        self._actions.write(row, actions)
        flat = (log_probs, rewards, terminated, truncated, episode_starts, self._all_valid if valid is None else valid)
        for column, value in zip(self._flat, flat):
            column.write(row, value)
        if row % self.state_every == 0:
            self._policy_state.write(row // self.state_every, state)
        self._global_state.write(row, global_state)
        self._row = row + 1

    def add_cut(self, lane: int, observation: Tree, state: Tree = ()) -> None:
        """The true successor [*obs] of the row just added, in a lane whose episode ended there, before the reset.

        Call it for every lane that ended; `state` [*mem] is the lane's memory after reading its last observation.
        """
        row = self._row - 1
        if row < 0 or not 0 <= lane < self.num_lanes:
            raise RolloutError(f"add_cut: there is no row of lane {lane} yet ({self._row} rows of {self.num_lanes} lanes); call add first")
        if (row, lane) in self._cuts:
            raise RolloutError(f"add_cut: lane {lane} already has its successor at row {row}; call it once")
        if row < self.num_steps - 1 and self._columns["terminated"].tree()[row, lane]:
            return  # nothing follows a terminated row, so only a lane's last row keeps it
        self._cuts[row, lane] = (self._cut_observations.copied(observation), self._cut_state.copied(state))

    def get(
        self,
        *,
        last_observations: Tree,
        last_state: Tree = (),
        policy_version: int | Array = 0,
        weights_fingerprint: int | Array = 0,
        episodes: Sequence[EpisodeRecord] = (),
    ) -> Rollout:
        """The rollout. It owns the arrays from now on; `reset` before the next `add`.

        `last_observations` [B, *obs] is what the next act would read: the successor of the last row, except in lanes that ended
        there, which `add_cut` has told. `last_state` [B, *mem] is the memory after reading the last row's observations.
        """
        if self._row != self.num_steps:
            raise RolloutError(f"the buffer holds {self._row} of {self.num_steps} rows; add the rest before get()")
        self._check_cuts()
        cut_rows = self._write_cuts(last_observations, last_state)
        return Rollout(
            **{name: column.take() for name, column in self._columns.items()},
            cut_rows=freeze(cut_rows),
            cut_observations=self._cut_observations.take(),
            cut_state=self._cut_state.take(),
            policy_version=freeze(np.full(self.num_lanes, policy_version, np.int32)),
            weights_fingerprint=freeze(np.full(self.num_lanes, weights_fingerprint, np.uint64)),
            episodes=tuple(episodes),
        )

    def _check_cuts(self) -> None:
        """A row that ended without its successor would be bootstrapped from the next episode."""
        truncated, terminated = self._columns["truncated"].tree(), self._columns["terminated"].tree()
        needed = truncated.copy()  # [T, B]
        needed[-1:] |= terminated[-1:]
        for row, lane in np.argwhere(needed).tolist():
            if (row, lane) not in self._cuts:
                raise RolloutError(f"lane {lane} ended at row {row} without its true successor; call add_cut({lane}, …) after that add")

    def _write_cuts(self, last_observations: Tree, last_state: Tree) -> np.ndarray:
        """Fill the cut arrays: the truncated rows, then the last row of every lane. Returns cut_rows [K, 2], sorted by (t, b)."""
        last = self.num_steps - 1
        keys = sorted(key for key in self._cuts if key[0] < last)
        keys += [(last, lane) for lane in range(self.num_lanes) if last >= 0]
        self._cut_observations.allocate(len(keys))
        self._cut_state.allocate(len(keys))
        for index, (row, lane) in enumerate(keys):
            observation, state = self._cuts.get((row, lane)) or (_at(last_observations, lane), _at(last_state, lane))
            self._cut_observations.write(index, observation)
            self._cut_state.write(index, state)
        return np.array(keys, np.int32).reshape(-1, 2)


def _one_lane(example: Tree) -> Tree:
    return optree.tree_map(lambda leaf: np.empty(leaf.shape[1:], leaf.dtype), example)


def _at(tree: Tree, lane: int) -> Tree:
    return optree.tree_map(lambda leaf: leaf[lane], tree)
