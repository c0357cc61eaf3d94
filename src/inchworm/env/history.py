"""Serves step 2: the actions and the returns of running episodes, in as little time a step as possible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from inchworm.env.memory import tree_leaves
from inchworm.types import Array, Tree


class ActionLog:
    """The last actions of all lanes, [step, B, *act] for each leaf; forgets what no running episode needs."""

    def __init__(self, actions: Tree, limit: int) -> None:
        self._live = tree_leaves(actions)
        self._limit = limit
        self._hold([np.empty((64, *live.shape), live.dtype) for live in self._live])
        self._first = 0  # the number of the step in row 0
        self._filled = 0

    @property
    def now(self) -> int:
        """The number of the next step."""
        return self._first + self._filled

    def append(self, starts: Array) -> None:
        """Keep the actions that now stand in the rows; episodes run since `starts` [E]."""
        filled = self._filled
        if filled == self._size:
            self._make_room(max(int(starts.min()), self.now - self._limit, self._first))
            filled = self._filled
        for buffer, live in self._pairs:
            buffer[filled] = live
        self._filled = filled + 1

    def _hold(self, buffers: list[np.ndarray]) -> None:
        self._buffers, self._size = buffers, len(buffers[0])
        self._pairs = list(zip(buffers, self._live))

    def _make_room(self, oldest: int) -> None:
        keep = slice(oldest - self._first, self._filled)
        length = keep.stop - keep.start
        fresh = [np.empty((max(64, 2 * length), *buffer.shape[1:]), buffer.dtype) for buffer in self._buffers]
        for new, old in zip(fresh, self._buffers):
            new[:length] = old[keep]
        self._hold(fresh)
        self._first, self._filled = oldest, length

    def holds(self, start: int) -> bool:
        """Whether nothing since this step was forgotten."""
        return start >= self._first

    def since(self, start: int, lanes: slice, end: int | None = None) -> list[np.ndarray]:
        """The actions of some lanes since a step, [n, *act] for each leaf; a copy's lanes are joined if it has several."""
        rows = slice(start - self._first, self._filled if end is None else end - self._first)
        width = lanes.stop - lanes.start
        return [buffer[rows, lanes.start].copy() if width == 1 else buffer[rows, lanes].copy() for buffer in self._buffers]

    def preload(self, actions: Sequence[Sequence[np.ndarray]], lanes_per_copy: int) -> np.ndarray:
        """Begin again with the actions of each copy [copy][leaf][n, *act], so aligned that all end now; their starts [E]."""
        longest = max((len(copy[0]) for copy in actions), default=0)
        self._hold([np.zeros((max(64, 2 * longest), *live.shape), live.dtype) for live in self._live])
        self._first, self._filled = 0, longest
        for index, copy in enumerate(actions):
            lanes = slice(index * lanes_per_copy, (index + 1) * lanes_per_copy)
            for buffer, saved in zip(self._buffers, copy):
                buffer[longest - len(saved) : longest, lanes] = saved[:, None] if lanes_per_copy == 1 else saved
        return np.array([longest - len(copy[0]) for copy in actions], np.int64)


def team_sums(rewards: Array, num_copies: int) -> Array:
    """[E] f64: what the lanes of each copy got together; the same bits for one copy as for many."""
    return rewards.reshape(num_copies, -1).astype(np.float64).sum(1)


class RunningReturns:
    """The returns of E running episodes so far. Rewards are kept as they come and added up now and then: a sum a step costs more."""

    _EVERY = 64

    def __init__(self, rewards: Array, num_copies: int) -> None:
        self._rewards, self._num_copies = rewards, num_copies
        self._rows = np.zeros((1 + self._EVERY, num_copies), np.float64)  # [1 + steps, E]: the sums, then what is not in them yet
        self._filled = 1
        self._is_plain = len(rewards) == num_copies

    def append(self) -> None:
        """Keep the rewards that now stand in the rows; a copy's lanes are added up if it has several."""
        filled = self._filled
        self._rows[filled] = self._rewards if self._is_plain else team_sums(self._rewards, self._num_copies)
        self._filled = filled + 1
        if filled == self._EVERY:
            self.sums()

    def sums(self) -> Array:
        """[E] f64, added one step after another as a replay adds them, so that both have the same bits; a view, writable."""
        np.add.accumulate(self._rows[: self._filled], 0, out=self._rows[: self._filled])
        self._rows[0] = self._rows[self._filled - 1]
        self._filled = 1
        return self._rows[0]

    def clear(self, copy: int) -> None:
        """A new episode begins in a copy."""
        self._rows[: self._filled, copy] = 0.0
