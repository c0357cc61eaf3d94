"""Replace a worker that died or hung, and rebuild its copies by replay.

The parent knows each episode's seed, options and actions, so nothing is lost with a worker. Its replacement replays the running
episodes and repeats the message that the dead one did not answer; the rows then hold what they would have held. This is verified: if
the replay gives other results, the environment is not deterministic, and the run ends with an error.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from inchworm.core.errors import WorkerError, WorkerRestartWarning
from inchworm.env.episodes import EpisodeLedger, RunningEpisode
from inchworm.env.restore import pack_tree
from inchworm.env.step_arrays import StepRows, shown_arrays
from inchworm.env.workers import messages
from inchworm.env.workers.messages import Message
from inchworm.env.workers.process import WorkerDied, WorkerProcess

START_SECONDS = 60.0
"""The minimum time a worker is given to start: an interpreter and its imports, perhaps on a busy machine."""
_WINDOW_SECONDS = 600.0
"""Restarts are counted over this period."""


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """One message to each of some workers, and how to treat the answers."""

    messages: Mapping[WorkerProcess, bytes]
    moves: Container[int] = ()
    """The copies whose episodes the messages begin or replay: they need no replay before."""
    is_step: bool = False
    descriptor: int | None = None
    """A file descriptor that is sent with the messages."""
    timeout: float | None = None
    """Seconds until an answer is overdue, if other than the pool's."""


class RestartBudget:
    """Counts restarts: at most `limit` in ten minutes, and at most `limit` for one exchange, however long they take.

    `setting` is the name of the limit in a config.
    """

    def __init__(self, limit: int, setting: str = "env.worker_restarts") -> None:
        self._limit, self._setting = limit, setting
        self._restarts: list[tuple[float, str]] = []  # (time, which worker ended and why)

    def spend(self, worker: object, reason: str, running: str, attempt: int) -> None:
        """Count one restart, or raise if none is left. `running` says what the worker was doing."""
        now = time.monotonic()
        self._restarts = [restart for restart in self._restarts if restart[0] > now - _WINDOW_SECONDS]
        if attempt < self._limit and len(self._restarts) < self._limit:
            self._restarts.append((now, f"{worker} {_first_line(reason)}"))
            return
        if self._limit == 0:
            raise WorkerError(f"{worker} {reason}{running}; not restarted because {self._setting}=0")
        before = "; ".join(f"{text} ({count} x)" for text, count in Counter(text for _, text in self._restarts).items())
        raise WorkerError(
            f"{worker} {reason}{running}; not restarted: there were {max(attempt, len(self._restarts))} restarts before "
            f"({self._setting}={self._limit} within ten minutes): {before}"
        )

    @property
    def left(self) -> int:
        """How many restarts are left after the last one."""
        return self._limit - len(self._restarts)


class Rebuilder:
    """Replaces dead workers of one pool. The pool sets the attributes as its start proceeds: spaces, then memory, then episodes."""

    def __init__(self, factory: bytes, timeout: float, restarts: int, reads: Mapping[str, Any]) -> None:
        """`reads` says what `LocalCopies` read of each copy besides its steps."""
        self._factory, self._timeout, self._budget, self._reads = factory, timeout, RestartBudget(restarts), dict(reads)
        self.spaces: Any = None  # as every worker describes them
        self.attach: tuple[bytes, int] | None = None  # the message and the descriptor of the shared memory
        self.rows: StepRows | None = None
        self.ledger: EpisodeLedger | None = None

    def setup(self, worker: WorkerProcess) -> bytes:
        """The message that makes a worker create its copies."""
        copies = {"first_copy": worker.copies.start, "num_copies": worker.num_copies}
        header = {"path": sys.path, **copies, "reads": self._reads}
        return messages.pack(messages.SETUP, header, self._factory)

    def replace(self, worker: WorkerProcess, exchange: Exchange) -> Message | None:
        """Replace a dead worker and repeat its part of the exchange; return its answer, or None if it has no part."""
        began, attempt, reason = time.monotonic(), 0, worker.exit_reason()
        worker.end()  # from here on its rows do not change
        if self.rows is None:
            at_death, running = None, ", while its environments were created"
        else:
            at_death, width = _WorkerRows(self.rows, worker), worker.lanes_per_copy
            seeds = ", ".join(f"{copy * width}: {self.rows.seeds[copy]}" for copy in worker.copies)
            running = f", episode seeds by lane {seeds}"
        while True:
            self._budget.spend(worker, reason, running, attempt)
            try:
                answer, replayed = self._restart_worker(worker, exchange, at_death)
            except WorkerDied:
                again = worker.exit_reason()
                self._warn(f"{worker} {_first_line(reason)}; its replacement {_first_line(again)}")
                reason, attempt = again, attempt + 1
                continue
            steps = sum(episode.length for episode in replayed)
            work = f", replaying {steps} steps of {len(replayed)} running episodes" if replayed else ""
            self._warn(f"{worker} {_first_line(reason)}; it was replaced in {time.monotonic() - began:.2f} s{work}")
            return answer

    def _warn(self, what: str) -> None:
        warnings.warn(f"{what} ({self._budget.left} restarts left within ten minutes)", WorkerRestartWarning, stacklevel=2)

    def _restart_worker(
        self, worker: WorkerProcess, exchange: Exchange, at_death: _WorkerRows | None
    ) -> tuple[Message | None, list[RunningEpisode]]:
        """Start a new process, replay the running episodes, repeat the exchange; return the answer and what was replayed."""
        worker.restart()
        if self.spaces is not None:
            hello = worker.ask(self.setup(worker), max(self._timeout, START_SECONDS))
            if hello.header != self.spaces:
                raise WorkerError(
                    f"{worker} was replaced and has other spaces now: the factory must create the same environment every time"
                )
        if self.attach is not None:
            message, descriptor = self.attach
            worker.ask(message, self._timeout, descriptor)
        episodes = [] if self.ledger is None else self._replay(worker, exchange, self.ledger)
        before = None if self.rows is None else _WorkerRows(self.rows, worker)
        if at_death is not None and not exchange.is_step:
            at_death.check_same(episodes)
            at_death.restore_results()
        data = exchange.messages.get(worker)
        answer = None if data is None else worker.ask(data, exchange.timeout or self._timeout, exchange.descriptor)
        if at_death is not None and before is not None and exchange.is_step:
            at_death.check_between(before)
        return answer, episodes

    def _replay(self, worker: WorkerProcess, exchange: Exchange, ledger: EpisodeLedger) -> list[RunningEpisode]:
        """Replay the running episodes up to the exchange, except those that it begins or replays itself."""
        copies = list(worker.copies)
        options = [ledger.next_options[copy] for copy in copies]
        worker.ask(messages.pack(messages.OPTIONS, {"copies": copies, "options": options}), self._timeout)
        running = [copy for copy in copies if copy not in exchange.moves and ledger.episodes[copy] >= 0]
        episodes = [ledger.running_episode(copy, step_pending=exchange.is_step) for copy in running]
        if episodes:
            replays = messages.pack(messages.REPLAY, *pack_tree([episode.job for episode in episodes]))
            results = worker.ask(replays, self._timeout).header
            for episode, (total, length) in zip(episodes, results):
                if (total, length) != (episode.episode_return, episode.length):
                    was = (episode.episode_return, episode.length)
                    raise _diverged(episode.job.copy * worker.lanes_per_copy, f"return and length {(total, length)} instead of {was}")
        return episodes


class _WorkerRows:
    """A copy of one worker's rows, to compare with what its replacement writes there."""

    def __init__(self, rows: StepRows, worker: WorkerProcess) -> None:
        self._worker, lanes = worker, slice(worker.lanes.start, worker.lanes.stop)
        self._shown = [shown_arrays(rows, copy) for copy in worker.copies]  # views, [own copies][arrays]
        self._bytes = self._read()
        self._results = [array[lanes] for array in (rows.rewards, rows.terminated, rows.truncated, *rows.infos.values())]
        self._saved_results = [array.copy() for array in self._results]

    def _read(self) -> list[np.ndarray]:
        """What the copies show now, as bytes: [own copies][n] u8."""
        return [np.frombuffer(b"".join(array.tobytes() for array in shown), np.uint8) for shown in self._shown]

    def check_same(self, episodes: list[RunningEpisode]) -> None:
        """Check that the replayed copies show the observations that this copy holds."""
        now, first = self._read(), self._worker.copies.start
        for copy in (episode.job.copy for episode in episodes):
            if (now[copy - first] != self._bytes[copy - first]).any():
                raise _diverged(copy * self._worker.lanes_per_copy, "a different observation")

    def check_between(self, before: _WorkerRows) -> None:
        """Check that each byte of this copy, taken when the worker died in a step, is from `before` that step or from now, after it."""
        for copy, now, then, old in zip(self._worker.copies, self._read(), self._bytes, before._bytes):
            if ((then != old) & (then != now)).any():
                raise _diverged(copy * self._worker.lanes_per_copy, "a different observation")

    def restore_results(self) -> None:
        """Restore the rewards, flags and infos of the last step, which the replay has overwritten and the caller may not have read yet."""
        for array, saved in zip(self._results, self._saved_results):
            array[:] = saved


def _diverged(lane: int, what: str) -> WorkerError:
    return WorkerError(
        f"cannot rebuild lane {lane} after its worker died: replaying its episode gave {what}, so the environment is not "
        "deterministic; resume the run from its last checkpoint, or make the environment depend only on seed, options and actions"
    )


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
