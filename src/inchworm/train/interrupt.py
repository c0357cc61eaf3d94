"""Serves the loop: Ctrl-C. Once lets the iteration finish, if that is soon; twice stops at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from inchworm.train.loop import TrainingState

GRACE_SECONDS = 7.0
"""How long a running iteration may take to finish after Ctrl-C."""


@contextlib.contextmanager
def interruptible(state: TrainingState) -> Iterator[None]:
    """Inside, the first SIGINT asks the loop to stop after its iteration; a second one, or the end of the grace, raises.

    Outside the main thread there are no signals to catch, and nothing happens here.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A true signal to this very thread: it also wakes an environment that sleeps or waits, which a mere flag would not.
    timer = threading.Timer(GRACE_SECONDS, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    timer.daemon = True

    def on_signal(number: int, frame: FrameType | None) -> None:
        del number, frame
        if state.interrupted:
            raise KeyboardInterrupt
        state.interrupted = state.should_stop = True
        timer.start()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
