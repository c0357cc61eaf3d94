"""Step 5 of 9: the writer of a rollout. One row per step; after T rows one `Rollout` takes over the arrays. Also: the size in bytes.

While a turn-based environment is stepped, every row is one move in each copy, and only the lane whose agent moves is valid. What a policy
learns from are its own decisions: what the agent saw at its turn, what it did, the rewards that it got until its next turn, and what it saw
then. `own_turns` makes these rows, so that advantages, sequences and memory work as they do anywhere else.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import optree

from inchworm.core.errors import ConfigError, RolloutError
from inchworm.core.spaces import Space, build_tree, leaf_dtype, leaf_shape, leaves
from inchworm.core.types import Array, EnvStep, EpisodeRecord, PolicyStep, Tree
from inchworm.rollout.fields import FLAT_DTYPES, action_dtype, freeze
from inchworm.rollout.rollout import Rollout

Target: TypeAlias = tuple[str, tuple[Any, ...], np.ndarray, tuple[int, ...], np.dtype[Any]]
"""Where a leaf is written: its name, its path in the values of `write_row`, the array of all rows, and the shape and dtype of one row."""


def allocate(examples: Mapping[str, Tree], rows: int) -> tuple[dict[str, Tree], list[Target]]:
    """Make unset arrays of `rows` rows of the form of each example; return them by name, and where `write_row` writes a row of them."""
    fields: dict[str, Tree] = {}
    targets: list[Target] = []
    for place, (name, example) in enumerate(examples.items()):
        paths, parts, structure = optree.tree_flatten_with_path(example)
        arrays = [np.empty((rows, *part.shape), part.dtype) for part in parts]
        fields[name] = optree.tree_unflatten(structure, arrays)
        for path, array in zip(paths, arrays):
            targets.append((".".join(map(str, (name, *path))), (place, *path), array, array.shape[1:], array.dtype))
    return fields, targets


def write_row(targets: Iterable[Target], index: int, values: tuple[Any, ...]) -> None:
    """Copy one row in. A wrong shape or a lossy cast is an error, where NumPy would broadcast or truncate."""
    for name, path, target, shape, dtype in targets:
        value: Any = values
        for key in path:
            value = value[key]
        if type(value) is not np.ndarray or value.shape != shape or value.dtype != dtype:
            array = np.asarray(value)
            if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
                raise RolloutError(f"{name}: got {array.dtype}{list(array.shape)}, expected {dtype}{list(shape)}")
        target[index] = value


INFO = "info/"
"""Prefix of the columns of a rollout's `extras` that hold numbers of the steps' infos."""

# The fields of a row, by when they become known.
_PARTS_OF_A_ROW = (
    ("observations", "episode_starts", "valid", "global_state"),
    ("actions", "log_probs"),
    ("rewards", "terminated", "truncated", "extras"),
    ("policy_state",),
)


class RolloutBuffer:
    """Rows in, one rollout out. Private to a collector, which calls `add` each step, `add_cut` where an episode ended, then `get`.

    `add` writes a whole row; `begin_row`, `add_action` and `end_row` write its parts as they become known.
    """

    def __init__(self, num_steps: int, num_lanes: int, examples: dict[str, Tree], state_every: int) -> None:
        self.num_steps, self.num_lanes, self.state_every = num_steps, num_lanes, state_every
        self._examples = examples
        self._cut_examples = {
            f"cut_{name.removeprefix('policy_')}": optree.tree_map(lambda leaf: np.empty(leaf.shape[1:], leaf.dtype), examples[name])
            for name in ("observations", "policy_state", "global_state", "valid")
        }
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
        infos: Sequence[str] = (),
    ) -> Self:
        """Make a buffer for T steps of B lanes; `state` [B, *mem] and `global_state` [E, *] are examples of one row.

        The steps' `infos` of these names become the columns `info/NAME` of `extras`.
        """
        if num_steps < 0 or num_lanes < 0 or state_every < 1:
            raise RolloutError(f"cannot make a buffer of num_steps={num_steps}, num_lanes={num_lanes}, state_every={state_every}")
        examples = {
            "observations": build_tree(observation_space, lambda _, leaf: np.empty((num_lanes, *leaf_shape(leaf)), leaf_dtype(leaf))),
            "actions": build_tree(action_space, lambda _, leaf: np.empty((num_lanes, *leaf_shape(leaf)), action_dtype(leaf))),
            **{name: np.empty(num_lanes, dtype) for name, dtype in FLAT_DTYPES.items()},
            "policy_state": optree.tree_map(np.asarray, state),
            "global_state": optree.tree_map(np.asarray, global_state),
            "extras": {f"{INFO}{name}": np.empty(num_lanes, np.float32) for name in infos} or (),
        }
        return cls(num_steps, num_lanes, examples, state_every)

    def __len__(self) -> int:
        """Number of rows so far."""
        return self._row

    def reset(self, num_steps: int | None = None) -> None:
        """Discard all rows and begin with fresh arrays, of another number of steps if one is given; a returned rollout keeps its own."""
        self._row, self.num_steps = 0, self.num_steps if num_steps is None else num_steps
        self._cuts: dict[tuple[int, int], tuple[Tree, ...]] = {}  # (t, b) -> the true successor: observation, memory, global state, valid
        self._fields: dict[str, Tree] = {}
        targets: list[list[Target]] = []
        for names in _PARTS_OF_A_ROW:
            rows = self.num_steps if names != ("policy_state",) else -(-self.num_steps // self.state_every)
            fields, part = allocate({name: self._examples[name] for name in names}, rows)
            self._fields |= fields
            targets.append(part)
        self._observed, self._acted, self._result, self._memory = targets

    def begin_row(self, before: EnvStep, state: Tree) -> tuple[Tree, Array, Array]:
        """Begin the next row with what the policy acts on, and its memory [B, *mem] before it reads that.

        Return views of the row's observations, episode_starts and valid, which are not written again.
        """
        row = self._row
        if row == self.num_steps:
            raise self._full()
        write_row(self._observed, row, (before.observations, before.episode_starts, before.valid, before.global_state))
        if self._memory and row % self.state_every == 0:
            write_row(self._memory, row // self.state_every, (state,))
        fields, observations = self._fields, self._fields["observations"]
        shown = observations[row] if type(observations) is np.ndarray else optree.tree_map(lambda leaf: leaf[row], observations)
        return shown, fields["episode_starts"][row], fields["valid"][row]

    def add_action(self, step: PolicyStep) -> None:
        """Write the policy's actions."""
        write_row(self._acted, self._row, (step.actions, step.log_probs))

    def end_row(self, after: EnvStep) -> None:
        """Finish the row with its result."""
        infos = {f"{INFO}{name}": column for name, column in after.infos.items()} if after.infos else ()
        write_row(self._result, self._row, (after.rewards, after.terminated, after.truncated, infos))
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
        self.begin_row(step, state)
        self.add_action(PolicyStep(actions, actions, log_probs, state))
        self.end_row(step)

    def add_cut(self, lane: int, observation: Tree, state: Tree = (), global_state: Tree = (), *, valid: bool = True) -> None:
        """Add the true successor [*obs] of the row just added, in a lane whose episode ended there, before the reset.

        Call it for every lane that ended. `state` [*mem] is the lane's memory after reading its last observation, `global_state` [*] its
        copy's state at the successor; `valid` tells whether the lane has an agent there.
        """
        row = self._row - 1
        if not self._fields:
            raise self._full()
        if row < 0 or not 0 <= lane < self.num_lanes:
            raise RolloutError(f"add_cut: there is no row of lane {lane} yet ({self._row} rows of {self.num_lanes} lanes); call add first")
        if (row, lane) in self._cuts:
            raise RolloutError(f"add_cut: lane {lane} already has its successor at row {row}; call it once")
        if row < self.num_steps - 1 and self._fields["terminated"][row, lane]:
            return  # nothing follows a terminated row; only a lane's last row keeps its successor
        fields, targets = allocate(self._cut_examples, 1)
        write_row(targets, 0, (observation, state, global_state, valid))  # a copy, checked here
        self._cuts[row, lane] = tuple(optree.tree_map(lambda leaf: leaf[0, ...], tree) for tree in fields.values())

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
        """Return the rollout, which takes over the arrays; call `reset` before the next `add`.

        `last_observations` [B, *obs] are the next observations to act on: the successors of the last row, except in lanes that ended
        there, whose successors came by `add_cut`. `last_state` [B, *mem] is the memory after reading the last row's observations,
        `last_global_state` [E, *] and `last_valid` [B] belong to `last_observations`.
        """
        if self._row != self.num_steps:
            raise RolloutError(f"the buffer holds {self._row} of {self.num_steps} rows; add the rest before get()")
        needed = self._fields["truncated"].copy()  # [T, B]
        needed[-1:] |= self._fields["terminated"][-1:]
        for row, lane in np.argwhere(needed).tolist():  # without its successor a row would be bootstrapped from the next episode
            if (row, lane) not in self._cuts:
                raise RolloutError(f"lane {lane} ended at row {row} without its true successor; call add_cut({lane}, …) after that add")
        per_lane = optree.tree_map(lambda leaf: np.repeat(leaf, self._lanes_per_copy, 0), last_global_state)  # [B, *]
        last = (last_observations, last_state, per_lane, self._all_valid if last_valid is None else last_valid)  # each [B, …]
        end, lanes = self.num_steps - 1, self.num_lanes if self.num_steps else 0
        keys = sorted(key for key in self._cuts if key[0] < end) + [(end, lane) for lane in range(lanes)]  # by (t, b)
        cuts, targets = allocate(self._cut_examples, len(keys))
        if lanes:  # all lanes at once, as if they were one row
            write_row([(n, p, a[None, -lanes:], (lanes, *s), d) for n, p, a, s, d in targets], 0, last)
        for index, key in enumerate(keys):
            if key in self._cuts:  # always, except in the last row
                write_row(targets, index, self._cuts[key])
        fields, self._fields = self._fields, {}  # keep no reference to the arrays
        self._observed, self._acted, self._result, self._memory = [], [], [], []
        arrays: dict[str, Any] = {
            **fields,
            **cuts,
            "cut_rows": np.array(keys, np.int32).reshape(-1, 2),
            "policy_version": np.full(self.num_lanes, policy_version, np.int32),
            "weights_fingerprint": np.full(self.num_lanes, weights_fingerprint, np.uint64),
        }
        state_every = self.state_every if optree.tree_leaves(self._cut_examples["cut_state"]) else 0
        return Rollout(**freeze(arrays), state_every=state_every, episodes=tuple(episodes))

    def _full(self) -> RolloutError:
        return RolloutError(f"the buffer is full ({self._row} rows); call get() for the rollout, then reset() for fresh arrays")


_MEMINFO = Path("/proc/meminfo")


def rollout_bytes(
    observation_space: Space,
    action_space: Space,
    num_steps: int,
    num_lanes: int,
    global_state_space: Space | None = None,
    num_copies: int = 0,
) -> int:
    """Return the bytes of a rollout's arrays, with the successor of every lane's last row."""
    observation, shared = (
        0 if space is None else sum(leaf_dtype(leaf).itemsize * math.prod(leaf_shape(leaf)) for _, leaf in leaves(space))
        for space in (observation_space, global_state_space)
    )
    action: int = sum(action_dtype(space).itemsize * math.prod(leaf_shape(space)) for _, space in leaves(action_space))
    flat: int = sum(np.dtype(dtype).itemsize for dtype in FLAT_DTYPES.values())
    return num_lanes * (num_steps * (observation + action + flat) + observation + shared) + num_copies * num_steps * shared


def check_fits(needed: int, *, what: str, use: str = "use fewer env.num_envs or ppo.rollout_steps") -> None:
    """Reject an allocation larger than the free memory before it is tried; `use` tells what to do."""
    free = available_bytes()
    if free is not None and needed > free:
        raise ConfigError(f"{what} takes {format_bytes(needed)}, but {format_bytes(free)} of memory are free; {use}")


def available_bytes() -> int | None:
    """Return the memory available without swapping; None if the system does not report it."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def format_bytes(count: int) -> str:
    """Format a number of bytes: 23.4 kB, 1.5 GB."""
    size, unit = float(count), "bytes"
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.3g} {unit}"


def hold_memory(after: Tree, before: Tree, moved: Array) -> Tree:
    """The memory [B, *mem] after a move: a lane whose agent has waited keeps the one from before."""
    return optree.tree_map(lambda new, old: np.where(moved.reshape(-1, *[1] * (new.ndim - 1)), new, old), after, before)


def own_turns(moves: Rollout) -> Rollout:
    """Keep the rows in which a lane's agent moved, with the rewards up to its next turn, or up to the end of its game.

    Lanes with fewer moves than others are padded with invalid rows at the end. The last move of a lane in a running game has no known
    result: it is left out, and what the agent saw then is the true successor of the move before it. `moves` must have the memory of
    every row (`state_every=1`).
    """
    valid, ended = moves.valid, moves.terminated | moves.truncated  # [T, B]
    num_steps, num_lanes = valid.shape
    times, lanes = np.arange(num_steps)[:, None], np.arange(num_lanes)
    latest = np.maximum.accumulate(np.where(valid, times, -1), axis=0)  # [T, B] the row of the lane's latest move, -1 before its first
    game = np.cumsum(ended, axis=0) - ended  # [T, B] how many of the lane's games ended before the row
    belongs = (latest >= 0) & (game == game[latest, lanes])  # [T, B] the row's reward is that of the latest move
    time, lane = np.nonzero(belongs)
    move = latest[time, lane]
    rewards = np.zeros(valid.shape)
    np.add.at(rewards, (move, lane), moves.rewards[time, lane])
    end = np.full(valid.shape, -1)  # [T, B] the row in which the game of a move ended before the agent's next turn, else -1
    through = np.zeros(valid.shape, np.int64)  # [T, B] the last row before the agent's next turn, or of its game
    through[move, lane] = time
    ends = ended[time, lane]
    end[move[ends], lane[ends]] = time[ends]
    last = latest[-1]  # [B]
    known = valid & ((end >= 0) | (times < last))  # [T, B] the moves whose result is known

    time, lane = np.nonzero(known)
    place = (np.cumsum(known, axis=0) - 1)[time, lane]
    counts = known.sum(axis=0)  # [B]
    length = max(1, int(counts.max(initial=0)))
    source = np.zeros((length, num_lanes), np.int64)  # [T', B] the row that each new row is made of; padding is made of the first
    source[place, lane] = time
    real = np.arange(length)[:, None] < counts  # [T', B]
    over = np.where(real, end[source, lanes], -1)  # [T', B]

    def pick(leaf: Array, rows: Array = source) -> Array:
        return leaf[rows, lanes]

    terminated, truncated = (pick(flag, over) & (over >= 0) for flag in (moves.terminated, moves.truncated))
    # A lane whose data ends before the last row is cut off there, unless its game ended: no advantage may come from its padding.
    short = np.flatnonzero((counts > 0) & (counts < length))
    truncated[counts[short] - 1, short] |= ~terminated[counts[short] - 1, short]

    cuts = truncated.copy()
    cuts[-1] = True
    rows, at = np.nonzero(cuts)  # [K] each, sorted by row and lane
    given = np.full(valid.shape, -1)
    given[moves.cut_rows[:, 0], moves.cut_rows[:, 1]] = np.arange(len(moves.cut_rows))
    by_limit = over[rows, at] >= 0  # the game ended here, so that its last observation was recorded, if anything follows it
    index = np.where(by_limit, given[over[rows, at], at], -1)  # [K] the number of that record
    follows = np.where(index < 0, last[at].clip(0), 0)  # [K] else the row of the agent's next turn

    def successors(leaf: Array, recorded: Array) -> Array:
        return np.where((index >= 0).reshape(-1, *[1] * (leaf.ndim - 2)), recorded[index], leaf[follows, at])

    return Rollout(
        observations=freeze(optree.tree_map(pick, moves.observations)),
        actions=freeze(optree.tree_map(pick, moves.actions)),
        log_probs=freeze(pick(moves.log_probs)),
        rewards=freeze(np.where(real, pick(rewards), 0.0).astype(np.float32)),
        terminated=freeze(terminated),
        truncated=freeze(truncated),
        episode_starts=freeze(pick(moves.episode_starts)),
        valid=freeze(real),
        policy_state=freeze(optree.tree_map(pick, moves.policy_state)),
        state_every=moves.state_every,
        cut_rows=freeze(np.stack([rows, at], axis=1).astype(np.int32)),
        cut_observations=freeze(optree.tree_map(successors, moves.observations, moves.cut_observations)),
        cut_state=freeze(optree.tree_map(successors, moves.policy_state, moves.cut_state)),
        cut_valid=freeze(real[rows, at] & ~terminated[rows, at]),
        extras=freeze(optree.tree_map(lambda leaf: pick(leaf, through[source, lanes]), moves.extras)),  # the infos that came with them
        policy_version=moves.policy_version,
        weights_fingerprint=moves.weights_fingerprint,
        episodes=moves.episodes,
    )
