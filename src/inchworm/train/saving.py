"""Serves the loop: writing beside training. A save that is long and rare goes to a thread; training never writes what it was given."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

PAYS = 20
"""A save goes to a thread if at least so many times its duration has passed since the last one. With less between them a kill could
find several intervals unsaved, and little would be gained."""


class Saver:
    """Runs one job of writing at a time. The first is done here and timed; later ones beside training where that pays."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """The clock is there to be replaced in tests."""
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._seconds: float | None = None  # the last job took
        self._last = 0.0  # when the last job began

    @property
    def busy(self) -> bool:
        """Whether a job is under way in the thread."""
        return self._thread is not None and self._thread.is_alive()

    def run(self, job: Callable[[], object]) -> None:
        """Do a job, after the one before has ended. What goes wrong is raised here, or by `poll` or `wait` later."""
        self.wait()
        now = self._clock()
        beside = self._seconds is not None and now - self._last >= PAYS * self._seconds
        self._last = now
        if not beside:
            self._timed(job)
            return
        self._thread = threading.Thread(target=self._beside, args=(job,), name="inchworm-save", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Raise what went wrong beside training, if it is known by now."""
        if not self.busy:
            self.wait()

    def wait(self) -> None:
        """Wait for the job that is under way; raises what went wrong in it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _beside(self, job: Callable[[], object]) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread, which may have to be woken
        try:
            self._timed(job)
        except Exception as error:
            self._error = error

    def _timed(self, job: Callable[[], object]) -> None:
        began, self._seconds = self._clock(), None  # after one that failed the next is done here again, where its end is seen
        job()
        self._seconds = self._clock() - began
