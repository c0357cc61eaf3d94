"""Serves step 2: a worker that died or hung is replaced, and its copies are brought to where they stood, by replay.

The parent knows each episode's seed, options and actions, so nothing of a worker is lost with it. What it was asked when it died,
its successor is asked again, and the rows show what they would have shown. That this is so is checked, never assumed.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inchworm.core.errors import WorkerError, WorkerRestartWarning
from inchworm.env.episodes import EpisodeLedger, Replay, Standing
from inchworm.env.step_arrays import StepRows, tree_leaves
from inchworm.env.workers import messages as channel
from inchworm.env.workers.messages import Message, pack_replay
from inchworm.env.workers.process import Gone, WorkerProcess

START_SECONDS = 60.0
"""The least time that a worker has to start: an interpreter and its imports, perhaps on a busy machine."""
_WINDOW_SECONDS = 600.0
"""Within so many seconds restarts are counted."""


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """What the workers of a pool are asked in one go."""

    messages: Mapping[WorkerProcess, bytes]
    moves: Container[int] = ()
    """The copies that it brings somewhere itself, wherever they stood."""
    is_step: bool = False
    descriptor: int | None = None
    """What travels with the messages."""
    patience: float | None = None
    """Seconds that an answer may take, if not as many as usual."""


class Restarts:
    """Counts restarts: at most `limit` in ten minutes, and for one exchange never more, however long they take."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ends: list[tuple[float, str]] = []  # when, and who ended how

    def spend(self, process: WorkerProcess, how: str, running: str, attempt: int) -> None:
        """Count one, or raise if there is none left."""
        now = time.monotonic()
        self._ends = [end for end in self._ends if end[0] > now - _WINDOW_SECONDS]
        if attempt < self._limit and len(self._ends) < self._limit:
            self._ends.append((now, f"{process} {_first_line(how)}"))
            return
        if self._limit == 0:
            raise WorkerError(f"{process} {how}{running}; env.worker_restarts=0, so it is not replaced")
        before = "; ".join(f"{who} ({count} x)" for who, count in Counter(who for _, who in self._ends).items())
        raise WorkerError(
            f"{process} {how}{running}; there were {max(attempt, len(self._ends))} restarts of env workers before it "
            f"(env.worker_restarts={self._limit} within ten minutes): {before}"
        )

    @property
    def left(self) -> int:
        """How many more there may be now."""
        return self._limit - len(self._ends)


class Rebuilder:
    """Brings the workers of one pool back to life. The pool tells it what is known: spaces, then memory, then episodes."""

    def __init__(self, recipe: bytes, timeout: float, restarts: int, *, global_state: bool = False) -> None:
        self._recipe, self._timeout, self._restarts, self._global_state = recipe, timeout, Restarts(restarts), global_state
        self._spaces: Any = None  # as every worker describes them
        self._attach: tuple[bytes, int] | None = None  # the message and the descriptor of the shared memory
        self._rows: StepRows | None = None
        self._ledger: EpisodeLedger | None = None

    def setup(self, process: WorkerProcess) -> bytes:
        """The message that has a worker make its copies."""
        copies = {"first_copy": process.first_copy, "num_copies": process.num_copies}
        header = {"path": sys.path, **copies, "global_state": self._global_state}
        return channel.pack(channel.SETUP, header, self._recipe)

    def know_spaces(self, spaces: Any) -> None:
        """All workers have made their copies, with these spaces."""
        self._spaces = spaces

    def know_memory(self, attach: bytes, descriptor: int, rows: StepRows) -> None:
        """All workers have mapped the shared memory."""
        self._attach, self._rows = (attach, descriptor), rows

    def know_episodes(self, ledger: EpisodeLedger) -> None:
        """From now on this is where the copies' episodes are written down."""
        self._ledger = ledger

    def replace(self, process: WorkerProcess, exchange: Exchange) -> Message | None:
        """Put a new process in the place of one that is gone, and have it do the exchange: its answer, None if it has no part in it."""
        began, attempt = time.monotonic(), 0
        how = process.how_it_died()
        process.end()  # nobody writes the rows from here on
        was = None if self._rows is None else _OwnRows(self._rows, process)
        while True:
            self._restarts.spend(process, how, self._running(process), attempt)
            try:
                answer, replayed = self._revive(process, exchange, was)
            except Gone:
                again = process.how_it_died()
                self._tell(f"{process} {_first_line(how)}; its successor {_first_line(again)}")
                how, attempt = again, attempt + 1
                continue
            self._tell(f"{process} {_first_line(how)}; it was replaced in {time.monotonic() - began:.2f} s{replayed}")
            return answer

    def _tell(self, what: str) -> None:
        warnings.warn(f"{what} ({self._restarts.left} restarts are left within ten minutes)", WorkerRestartWarning, stacklevel=2)

    def _running(self, process: WorkerProcess) -> str:
        if self._rows is None:
            return ", while its environments were made"
        width = process.lanes_per_copy
        return ", episode seeds by lane " + ", ".join(f"{copy * width}: {self._rows.seeds[copy]}" for copy in process.copies)

    def _revive(self, process: WorkerProcess, exchange: Exchange, was: _OwnRows | None) -> tuple[Message | None, str]:
        """One attempt: the answer, and what was replayed for it in words."""
        process.restart()
        self._furnish(process)
        standing = self._bring_back(process, exchange)
        before = None if self._rows is None else _OwnRows(self._rows, process)
        if was is not None and not exchange.is_step:
            was.check_same([place.job for place in standing])
            was.put_back()
        data = exchange.messages.get(process)
        answer = None if data is None else process.ask(data, exchange.patience or self._timeout, exchange.descriptor)
        if was is not None and before is not None and exchange.is_step:
            was.check_between(before)
        steps = sum(place.length for place in standing)
        return answer, f" and replayed {steps} steps of {len(standing)} running episodes" if standing else ""

    def _furnish(self, process: WorkerProcess) -> None:
        """Have a new process make its copies and map the memory, as far as the pool has come."""
        if self._spaces is not None:
            hello = process.ask(self.setup(process), max(self._timeout, START_SECONDS))
            if hello.header != self._spaces:
                raise WorkerError(f"{process} was replaced and has other spaces now: the factory must make the same environment every time")
        if self._attach is not None:
            message, descriptor = self._attach
            process.ask(message, self._timeout, descriptor)

    def _bring_back(self, process: WorkerProcess, exchange: Exchange) -> list[Standing]:
        """Bring the copies to where they stood before the exchange, except those that it moves itself."""
        ledger = self._ledger
        if ledger is None:
            return []
        own = list(process.copies)
        options = [ledger.next_options[copy] for copy in own]
        process.ask(channel.pack(channel.OPTIONS, {"copies": own, "options": options}), self._timeout)
        begun = [copy for copy in own if copy not in exchange.moves and ledger.episodes[copy] >= 0]
        standing = [ledger.standing(copy, step_under_way=exchange.is_step) for copy in begun]
        if not standing:
            return []
        results = process.ask(pack_replay([place.job for place in standing]), self._timeout).header
        for place, (total, length) in zip(standing, results):
            if (total, length) != (place.episode_return, place.length):
                lane = place.job.copy * process.lanes_per_copy
                raise _astray(lane, f"return and length are {(total, length)}, and were {(place.episode_return, place.length)}")
        return standing


class _OwnRows:
    """A copy of what one worker's lanes show: what its successor's replay is compared with."""

    def __init__(self, rows: StepRows, process: WorkerProcess) -> None:
        self._process = process
        lanes, copies = slice(process.lanes.start, process.lanes.stop), slice(process.copies.start, process.copies.stop)
        shown = [*tree_leaves(rows.observations), *([rows.valid, rows.joined] if process.lanes_per_copy > 1 else [])]
        self._shown = [array[lanes] for array in shown] + [array[copies] for array in tree_leaves(rows.global_state)]
        self._rest = [rows.rewards[lanes], rows.terminated[lanes], rows.truncated[lanes]]
        self._seen = [self._bytes(array) for array in self._shown]  # [own copies, bytes] each
        self._kept = [array.copy() for array in self._rest]

    def _bytes(self, array: np.ndarray) -> np.ndarray:
        """A copy as [own copies, bytes] u8."""
        return np.frombuffer(array.tobytes(), np.uint8).reshape(self._process.num_copies, -1)

    def check_same(self, jobs: Sequence[Replay]) -> None:
        """The lanes that were replayed must show the observations that they showed."""
        for job in jobs:
            place = job.copy - self._process.first_copy
            if any((self._bytes(now)[place] != seen[place]).any() for now, seen in zip(self._shown, self._seen)):
                raise _astray(job.copy * self._process.lanes_per_copy, "they lead to another observation")

    def check_between(self, before: _OwnRows) -> None:
        """What stood here when the worker died in its step was before that step or after it, byte for byte, or a part of either."""
        for now, seen, old in zip(self._shown, self._seen, before._seen):
            odd = ((seen != old) & (seen != self._bytes(now))).any(1)  # [own copies]
            if odd.any():
                lane = (self._process.first_copy + int(odd.argmax())) * self._process.lanes_per_copy
                raise _astray(lane, "they lead to another observation")

    def put_back(self) -> None:
        """Show the rewards and flags of the last step again, over which the replay has written: somebody may not have read them yet."""
        for array, kept in zip(self._rest, self._kept):
            array[:] = kept


def _astray(lane: int, why: str) -> WorkerError:
    return WorkerError(
        f"lane {lane} could not be brought back after its env worker ended, because the same seed, options and actions do not repeat its "
        f"episode: {why}; resume the run from its last checkpoint, or make the environment a function of them"
    )


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
