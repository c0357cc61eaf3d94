"""Step 5 of 9: the writer of a rollout. One row per step, and after T rows one `Rollout` that owns the arrays."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import optree

from inchworm.core.errors import ConfigError, RolloutError
from inchworm.core.spaces import Space, build_tree, leaf_dtype, leaf_shape, leaves
from inchworm.core.types import Array, EnvStep, EpisodeRecord, PolicyStep, Tree
from inchworm.rollout.checks import action_dtype, freeze
from inchworm.rollout.rollout import Rollout

Target: TypeAlias = tuple[str, tuple[Any, ...], np.ndarray, tuple[int, ...], np.dtype[Any]]
"""Where a leaf goes: its name, its path in what is written, the array of all rows, and the shape and dtype of one row."""

_ROOT: list[tuple[Any, ...]] = [()]
"""The paths of a tree that is one array."""


class Column:
    """One field's arrays: rows that look like `example`, leaf by leaf."""

    def __init__(self, name: str, example: Tree) -> None:
        self._paths = optree.tree_paths(example)
        self._names = [".".join(map(str, (name, *path))) for path in self._paths]
        self._examples, self._structure = optree.tree_flatten(example)
        self._arrays: list[np.ndarray] = []

    def allocate(self, rows: int) -> None:
        """Fresh arrays of that many rows; nothing is filled in, because every row will be."""
        self._arrays = self._empty(rows)

    def targets(self, place: int) -> list[Target]:
        """Where the leaves of the value at `place` in `write_row`'s values go: into these arrays."""
        return self._aim(place, self._arrays)

    def copied(self, row: Tree) -> Tree:
        """A checked copy of one row, to be written later."""
        arrays = self._empty(1)
        write_row(self._aim(0, arrays), 0, (row,))
        return self._tree([array[0, ...] for array in arrays])

    def tree(self, part: Any = ()) -> Tree:
        """The arrays as they are now, or this part of them."""
        return self._tree([array[part] for array in self._arrays])

    def take(self) -> Tree:
        """The arrays, read-only from now on; the column lets go of them."""
        arrays, self._arrays = freeze(self._tree(self._arrays)), []
        return arrays

    def _empty(self, rows: int) -> list[np.ndarray]:
        return [np.empty((rows, *row.shape), row.dtype) for row in self._examples]

    def _aim(self, place: int, arrays: list[np.ndarray]) -> list[Target]:
        return [(name, (place, *path), a, a.shape[1:], a.dtype) for name, path, a in zip(self._names, self._paths, arrays)]

    def _tree(self, arrays: list[np.ndarray]) -> Tree:
        if self._paths == _ROOT:  # almost everybody
            return arrays[0]
        return optree.tree_unflatten(self._structure, arrays)


def write_row(targets: Iterable[Target], index: int, values: tuple[Any, ...]) -> None:
    """Copy one row in. Neither NumPy's broadcasting nor a lossy cast may bend a wrong row into shape."""
    for name, path, array, shape, dtype in targets:
        value: Any = values
        for key in path:
            value = value[key]
        if type(value) is not np.ndarray or value.shape != shape or value.dtype != dtype:
            value = _fitted(name, value, shape, dtype)
        array[index] = value


def _fitted(name: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    array = np.asarray(value)
    if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise RolloutError(f"{name}: got {array.dtype}{list(array.shape)}, expected {dtype}{list(shape)}")
    return array


class Cuts:
    """The true successors of rows where a lane was cut off, with the memory and the global state there."""

    def __init__(self, observation: Tree, state: Tree, global_state: Tree = ()) -> None:
        examples = {"observations": observation, "state": state, "global_state": global_state, "valid": np.empty((), np.bool_)}
        self._columns = {f"cut_{name}": Column(f"cut_{name}", example) for name, example in examples.items()}
        self._known: dict[tuple[int, int], tuple[Tree, ...]] = {}

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._known

    def add(self, key: tuple[int, int], *successor: Tree) -> None:
        """The successor of row t of lane b, `key` being (t, b): observation, memory, global state, whether an agent lives there."""
        self._known[key] = tuple(column.copied(part) for column, part in zip(self._columns.values(), successor, strict=True))

    def take(self, num_steps: int, num_lanes: int, *last: Tree) -> dict[str, Tree]:
        """The rollout's cut fields, sorted by (t, b): the rows that were told, and the last row of every lane, each of `last` [B, …]."""
        end, lanes = num_steps - 1, num_lanes if num_steps else 0
        keys = sorted(key for key in self._known if key[0] < end) + [(end, lane) for lane in range(lanes)]
        for column in self._columns.values():
            column.allocate(len(keys))
        targets = [target for place, column in enumerate(self._columns.values()) for target in column.targets(place)]
        if lanes:  # of all lanes at once, as if they were one row
            write_row([(n, p, a[None, -lanes:], (lanes, *s), d) for n, p, a, s, d in targets], 0, last)
        for index, key in enumerate(keys):
            if key in self._known:  # always, before the last row
                write_row(targets, index, self._known[key])
        cut_rows = freeze(np.array(keys, np.int32).reshape(-1, 2))
        return {"cut_rows": cut_rows, **{name: column.take() for name, column in self._columns.items()}}


FLAT_DTYPES: dict[str, Any] = {
    "log_probs": np.float32,
    "rewards": np.float32,
    "terminated": np.bool_,
    "truncated": np.bool_,
    "episode_starts": np.bool_,
    "valid": np.bool_,
}

# The fields of a row, by when they become known.
_SEEN = ("observations", "episode_starts", "valid", "global_state")
_ACTED = ("actions", "log_probs")
_MOVED = ("rewards", "terminated", "truncated")


class RolloutBuffer:
    """Rows in, one rollout out. Private to a collector, which calls `add` each step, `add_cut` where an episode ended, then `get`.

    `add` writes a whole row; `seen`, `acted` and `moved` write its parts as they become known.
    """

    def __init__(self, num_steps: int, num_lanes: int, examples: dict[str, Tree], state_every: int) -> None:
        self.num_steps, self.num_lanes, self.state_every = num_steps, num_lanes, state_every
        self._columns = {name: Column(name, example) for name, example in examples.items()}
        self._one_lane = [_one_lane(examples[name]) for name in ("observations", "policy_state", "global_state")]
        copies = len((optree.tree_leaves(examples["global_state"]) or [range(num_lanes)])[0])
        self._lanes_per_copy = max(1, num_lanes // max(1, copies))
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
            **{name: np.empty(num_lanes, dtype) for name, dtype in FLAT_DTYPES.items()},
            "policy_state": optree.tree_map(np.asarray, state),
            "global_state": optree.tree_map(np.asarray, global_state),
        }
        return cls(num_steps, num_lanes, examples, state_every)

    def __len__(self) -> int:
        """Rows so far."""
        return self._row

    def reset(self) -> None:
        """Discard all rows and begin with fresh arrays; a rollout that was returned keeps its own."""
        columns = self._columns
        for column in columns.values():
            column.allocate(self.num_steps)
        columns["policy_state"].allocate(-(-self.num_steps // self.state_every))
        self._row, self._cuts = 0, Cuts(*self._one_lane)
        self._seen, self._acted, self._moved = (
            [target for place, name in enumerate(names) for target in columns[name].targets(place)] for names in (_SEEN, _ACTED, _MOVED)
        )
        self._memory = columns["policy_state"].targets(0)
        self._episode_starts, self._terminated, self._valid = (columns[name].tree() for name in ("episode_starts", "terminated", "valid"))

    def seen(self, before: EnvStep, state: Tree) -> tuple[Tree, Array, Array]:
        """Begin the next row: what there is to act on, and the memory [B, *mem] before that is read.

        Returns the row's own observations, episode_starts and valid, which are not written again.
        """
        row = self._row
        if row == self.num_steps:
            raise _full(row)
        write_row(self._seen, row, (before.observations, before.episode_starts, before.valid, before.global_state))
        if self._memory and row % self.state_every == 0:
            write_row(self._memory, row // self.state_every, (state,))
        return self._columns["observations"].tree(row), self._episode_starts[row], self._valid[row]

    def acted(self, step: PolicyStep) -> None:
        """Write what the policy did."""
        write_row(self._acted, self._row, (step.actions, step.log_probs))

    def moved(self, after: EnvStep) -> None:
        """Finish the row with its result."""
        write_row(self._moved, self._row, (after.rewards, after.terminated, after.truncated))
        self._row += 1

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
        valid = self._all_valid if valid is None else valid
        step = EnvStep(observations, rewards, terminated, truncated, episode_starts, valid, global_state=global_state)
        self.seen(step, state)
        self.acted(PolicyStep(actions, actions, log_probs, state))
        self.moved(step)

    def add_cut(self, lane: int, observation: Tree, state: Tree = (), global_state: Tree = (), *, valid: bool = True) -> None:
        """The true successor [*obs] of the row just added, in a lane whose episode ended there, before the reset.

        Call it for every lane that ended; `state` [*mem] is the lane's memory after reading its last observation, `global_state` [*] its
        copy's, at the successor, where the lane's agent lives if it is `valid`.
        """
        row = self._row - 1
        if not self._seen:
            raise _full(self._row)
        if row < 0 or not 0 <= lane < self.num_lanes:
            raise RolloutError(f"add_cut: there is no row of lane {lane} yet ({self._row} rows of {self.num_lanes} lanes); call add first")
        if (row, lane) in self._cuts:
            raise RolloutError(f"add_cut: lane {lane} already has its successor at row {row}; call it once")
        if row < self.num_steps - 1 and self._terminated[row, lane]:
            return  # nothing follows a terminated row, so only a lane's last row keeps it
        self._cuts.add((row, lane), observation, state, global_state, valid)

    def get(
        self,
        *,
        last_observations: Tree,
        last_state: Tree = (),
        last_global_state: Tree = (),
        last_valid: Array | None = None,
        policy_version: int | Array = 0,
        weights_fingerprint: int | Array = 0,
        episodes: Sequence[EpisodeRecord] = (),
    ) -> Rollout:
        """The rollout. It owns the arrays from now on; `reset` before the next `add`.

        `last_observations` [B, *obs] is what the next act would read: the successor of the last row, except in lanes that ended
        there, which `add_cut` has told. `last_state` [B, *mem] is the memory after reading the last row's observations,
        `last_global_state` [E, *] and `last_valid` [B] belong to `last_observations`.
        """
        if len(self) != self.num_steps:
            raise RolloutError(f"the buffer holds {len(self)} of {self.num_steps} rows; add the rest before get()")
        self._check_cuts()
        self._seen, self._acted, self._moved, self._memory = [], [], [], []  # they would keep the arrays alive
        self._episode_starts = self._terminated = self._valid = None
        alive = self._all_valid if last_valid is None else last_valid
        last = (last_observations, last_state, repeat_copies(last_global_state, self._lanes_per_copy), alive)
        remembers = optree.tree_leaves(self._one_lane[1])
        return Rollout(
            **self._cuts.take(self.num_steps, self.num_lanes, *last),
            **{name: column.take() for name, column in self._columns.items()},
            state_every=self.state_every if remembers else 0,
            policy_version=freeze(np.full(self.num_lanes, policy_version, np.int32)),
            weights_fingerprint=freeze(np.full(self.num_lanes, weights_fingerprint, np.uint64)),
            episodes=tuple(episodes),
        )

    def _check_cuts(self) -> None:
        """A row that ended without its successor would be bootstrapped from the next episode."""
        needed = self._columns["truncated"].tree().copy()  # [T, B]
        needed[-1:] |= self._columns["terminated"].tree()[-1:]
        for row, lane in np.argwhere(needed).tolist():
            if (row, lane) not in self._cuts:
                raise RolloutError(f"lane {lane} ended at row {row} without its true successor; call add_cut({lane}, …) after that add")


def repeat_copies(global_state: Tree, lanes_per_copy: int) -> Tree:
    """[E, *] of copies as [B, *] of their lanes."""
    return optree.tree_map(lambda leaf: np.repeat(leaf, lanes_per_copy, 0), global_state)


def _one_lane(example: Tree) -> Tree:
    return optree.tree_map(lambda leaf: np.empty(leaf.shape[1:], leaf.dtype), example)


def _full(rows: int) -> RolloutError:
    return RolloutError(f"the buffer is full ({rows} rows); call get() for the rollout, then reset() for fresh arrays")


_MEMORY_FACTS = Path("/proc/meminfo")


def rollout_bytes(
    observation_space: Space,
    action_space: Space,
    num_steps: int,
    num_lanes: int,
    global_state_space: Space | None = None,
    num_copies: int = 0,
) -> int:
    """Bytes of a rollout's arrays: each datum once, in its own dtype, and the successor of every lane's last row."""
    observation = _value_bytes(observation_space)
    action: int = sum(action_dtype(space).itemsize * math.prod(leaf_shape(space)) for _, space in leaves(action_space))
    flat: int = sum(np.dtype(dtype).itemsize for dtype in FLAT_DTYPES.values())
    shared = 0 if global_state_space is None else _value_bytes(global_state_space)
    return num_lanes * (num_steps * (observation + action + flat) + observation + shared) + num_copies * num_steps * shared


def _value_bytes(space: Space) -> int:
    return sum(leaf_dtype(leaf).itemsize * math.prod(leaf_shape(leaf)) for _, leaf in leaves(space))


def check_fits(needed: int, *, what: str, use: str = "use fewer env.num_envs or ppo.rollout_steps") -> None:
    """Refuse what the machine has no memory for, before it is asked for it; `use` is what to do about it."""
    free = available_bytes()
    if free is not None and needed > free:
        raise ConfigError(f"{what} takes {in_words(needed)}, but {in_words(free)} of memory are free; {use}")


def available_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMORY_FACTS.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def in_words(count: int) -> str:
    """A number of bytes for people: 23.4 kB, 1.5 GB."""
    size, unit = float(count), "bytes"
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.3g} {unit}"
