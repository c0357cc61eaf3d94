"""Signals on the command line: SIGTERM and SIGHUP do what Ctrl-C does, each with its own exit code, and leaving takes bounded time.

They belong to the process, so what was received is kept for the process, too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LEAVE_SECONDS = 1.5
"""How long closing may take once everything is saved: then nothing is left that would be lost by going."""

_received: list[int] = []


class Interrupted(KeyboardInterrupt):
    """A KeyboardInterrupt by its own name: where the plain one passes through `exec`, as in making a dataclass, Python ends by the

    signal instead of by our exit code, even if it was caught.
    """


def exit_code() -> int:
    """As shells have it: 130 interrupted (Ctrl-C), 143 terminated, 129 hung up."""
    return 128 + (_received[0] if _received else signal.SIGINT)


def raise_if_received() -> None:
    """Leave now if a signal came while others' code was running that may have swallowed it, such as an import."""
    if _received:
        raise Interrupted


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP become what Ctrl-C is. Signals belong to the main thread; elsewhere nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _received.clear()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup asks for
            signal.signal(number, _interrupt if number == signal.SIGINT else _pass_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    del frame
    _received.append(number)
    raise Interrupted


def _pass_on(number: int, frame: FrameType | None) -> None:
    """To whoever has SIGINT now: training, which saves first, or what leaves at once."""
    del frame
    _received.append(number)
    signal.raise_signal(signal.SIGINT)


@contextmanager
def leaving() -> Iterator[None]:
    """Inside, everything is saved and only closing is left: if that takes long, the process goes without."""

    def go() -> None:
        os._exit(exit_code())

    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except (OSError, ValueError):
                continue
    timer = threading.Timer(LEAVE_SECONDS, go)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
