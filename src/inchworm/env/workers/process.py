"""Serves step 2: one env worker process, seen from outside: how it is started and asked, how it died, how it is ended in bounded time."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from inchworm.core.errors import WorkerError
from inchworm.env.workers import messages as channel
from inchworm.env.workers.messages import Message

LOOK_SECONDS = 0.5
"""How often a process that owes an answer is looked at: its socket outlives it where a child of it holds the other end."""


class Gone(Exception):
    """A worker has died, or was killed because it hung; `WorkerProcess.how_it_died` knows more."""


class WorkerProcess:
    """One worker process, seen from outside. When it dies, `restart` puts another in its place."""

    def __init__(self, index: int, first_copy: int, num_copies: int, timeout: float) -> None:
        self.index, self.first_copy, self.num_copies = index, first_copy, num_copies
        self.lanes_per_copy = 1  # until it has said how many
        self._timeout = timeout
        self._start()

    def _start(self) -> None:
        self._verdict = ""  # how it ended, where that is known better than from its exit code
        try:
            self.connection, theirs = socket.socketpair()
        except OSError as error:
            raise self._cannot_start(error) from None
        self.connection.settimeout(self._timeout)
        # A worker dies with the thread that started it, so only the main thread asks for that (prctl(2)).
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        command = [sys.executable, "-P", "-m", "inchworm.env.workers.program", str(theirs.fileno()), str(parent)]
        with theirs, _uninterrupted():
            try:
                # A process group of its own: Ctrl-C in the terminal reaches the parent alone, from the first moment on.
                self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, process_group=0)
            except OSError as error:
                self.connection.close()
                raise self._cannot_start(error) from None

    def _cannot_start(self, error: OSError) -> WorkerError:
        return WorkerError(
            f"{self} could not be started: {error}; use fewer env.num_workers (0: none), or raise the limits of processes, "
            "open files and memory (ulimit -u, -n, -v)"
        )

    def restart(self) -> None:
        """Put a new process in the place of this one, which is ended first."""
        self.end()
        self._start()

    def end(self) -> None:
        """Kill it if it lives, and leave nothing of it."""
        self.process.kill()
        self.process.wait()
        self.connection.close()

    def kill(self, why: str) -> None:
        """End a process that hangs; `why` is what is told of it."""
        if self.process.poll() is None:
            self._verdict = why
            self.process.kill()

    def ask(self, data: bytes, patience: float, descriptor: int | None = None) -> Message:
        """Send a message to this worker alone and wait for its answer."""
        self.send(data, descriptor)
        poll = select.poll()
        poll.register(self.connection.fileno(), select.POLLIN)
        deadline = time.monotonic() + patience
        while True:
            if poll.poll(LOOK_SECONDS * 1000):
                message = self.receive()
                if message.kind != channel.ALIVE:
                    return message
                deadline = time.monotonic() + patience
            else:
                self.look(patience if time.monotonic() > deadline else None)

    def send(self, data: bytes, descriptor: int | None = None) -> None:
        """Send a message, and a descriptor with its first byte. A worker that is gone is noticed when its answer is waited for."""
        try:
            if descriptor is None:
                self.connection.sendall(data)
            else:
                socket.send_fds(self.connection, [data], [descriptor])
        except TimeoutError:
            self.kill(f"took no message for {self._timeout:g} s")
        except OSError:
            pass

    def receive(self) -> Message:
        """The message that has begun to arrive. `Gone` if the worker is; `WorkerError` if its environment raised."""
        try:
            message = channel.receive(self.connection)
        except TimeoutError:
            self.kill(f"stopped in the middle of an answer for {self._timeout:g} s")
            raise Gone from None
        except (EOFError, OSError):
            raise Gone from None
        if message.kind == channel.ERROR:
            raise WorkerError(f"{self}{_in_words(message.header)}")
        if message.kind == channel.GONE:
            self._verdict = f"ended itself{_in_words(message.header)}"
            raise Gone
        return message

    def look(self, patience: float | None = None) -> None:
        """`Gone` if the process is, or if the patience with it is over."""
        if patience is not None:
            self.kill(f"gave no answer within {patience:g} s; raise env.worker_timeout if a step may take longer")
        if patience is not None or self.process.poll() is not None:
            raise Gone

    @property
    def copies(self) -> range:
        """The copies that it steps."""
        return range(self.first_copy, self.first_copy + self.num_copies)

    @property
    def lanes(self) -> range:
        """The lanes that they fill."""
        return range(self.copies.start * self.lanes_per_copy, self.copies.stop * self.lanes_per_copy)

    def __str__(self) -> str:
        first, last = self.lanes[0], self.lanes[-1]
        return f"env worker {self.index} ({f'lane {first}' if first == last else f'lanes {first} to {last}'})"

    def how_it_died(self) -> str:
        """Its end in words, once it is `Gone`."""
        if self._verdict:
            return self._verdict
        try:
            code = self.process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        if code >= 0:
            return f"exited with code {code}"
        name = {number.value: number.name for number in signal.Signals}.get(-code, f"signal {-code}")
        return f"was killed by {name}" + (" (perhaps out of memory)" if name == "SIGKILL" else "")


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block: a process whose start it interrupted would belong to nobody."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread, and interrupt that alone
        handlers = {}
    arrived: list[int] = []
    for number in handlers:
        signal.signal(number, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in arrived:
            signal.raise_signal(late)


def _in_words(report: Mapping[str, Any]) -> str:
    lane = "" if report["lane"] is None else f", lane {report['lane']}, episode seed {report['seed']}"
    traceback = f"\n\nTraceback in the worker:\n{report['traceback']}" if report["traceback"] else ""
    return f"{lane}: {report['type']}: {report['text']}{traceback}"


def end_processes(processes: Sequence[WorkerProcess], grace: float) -> list[str]:
    """Ask, then SIGTERM, then SIGKILL, with `grace` seconds after each of the first two; what went wrong while closing."""
    try:
        for process in processes:
            with contextlib.suppress(OSError):
                process.connection.settimeout(grace)
                process.connection.sendall(channel.pack(channel.CLOSE))
        problems = _until_gone(processes, grace)
        _signal(processes, signal.SIGTERM)
        _until_gone(processes, grace)
    finally:  # also when a second Ctrl-C arrives meanwhile
        _signal(processes, signal.SIGKILL)
        for process in processes:
            process.process.wait()
            process.connection.close()
    return problems


def _until_gone(processes: Sequence[WorkerProcess], grace: float) -> list[str]:
    """Wait until the workers have closed their sockets by exiting; what they said about closing."""
    problems: list[str] = []
    deadline = time.monotonic() + grace
    left = {process.connection.fileno(): process for process in processes if process.process.poll() is None}
    poll = select.poll()
    for descriptor in left:
        poll.register(descriptor, select.POLLIN)
    while left:
        events = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not events:
            break
        for descriptor, _ in events:
            try:
                message = channel.receive(left[descriptor].connection)
                problems += message.header if message.kind == channel.CLOSED else []
            except (EOFError, OSError):
                poll.unregister(descriptor)
                process = left.pop(descriptor)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.process.wait(max(0.0, deadline - time.monotonic()))
    return problems


def _signal(processes: Sequence[WorkerProcess], number: int) -> None:
    for process in processes:
        if process.process.poll() is None:
            process.process.send_signal(number)


_STRIKES = 2
"""Waits in a row that were too long for staying awake. One alone is what a worker sees between two rollouts."""
_CROWDED_SECONDS = 1e-3
"""Who gave the core away and got it back only now shares it with somebody who computes; one who sleeps is served before them."""
_CROWDED_WAITS = 200
"""So many waits are then slept, before the core is tried again."""

_give_way: Callable[[], None] = getattr(os, "sched_yield", functools.partial(time.sleep, 0.0))


class Waiter:
    """Waits until one of some descriptors has something to read; `awake` is how many seconds of it are not slept."""

    def __init__(self, awake: float) -> None:
        self._poll, self._awake = select.poll(), awake
        self._strikes = self._slept = 0

    def watch(self, descriptor: int) -> None:
        """Wait for this descriptor too."""
        self._poll.register(descriptor, select.POLLIN)

    def forget(self, descriptor: int) -> None:
        """No longer wait for this descriptor, which is about to be closed."""
        self._poll.unregister(descriptor)

    def wait(self, seconds: float | None = None) -> list[tuple[int, int]]:
        """The descriptors that have something to read, or whose other side is gone; empty after so many seconds without any."""
        began = time.perf_counter()
        if self._slept:
            self._slept -= 1
        elif self._strikes < _STRIKES:
            events = self._look(began)
            if events:
                self._strikes = 0
                return events
        events = self._poll.poll(None if seconds is None else max(0.0, seconds) * 1000)
        self._strikes = 0 if time.perf_counter() - began < self._awake else self._strikes + 1
        return events

    def _look(self, began: float) -> list[tuple[int, int]]:
        poll, now = self._poll.poll, time.perf_counter
        last, end = began, began + self._awake
        while not (events := poll(0)) and last < end:
            _give_way()
            before, last = last, now()
            if last - before > _CROWDED_SECONDS:
                self._slept = _CROWDED_WAITS
        return events
