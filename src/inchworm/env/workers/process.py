"""A worker process as its parent sees it: start it, send and receive messages, wait for it, detect its death, end it in bounded time."""

from __future__ import annotations

import builtins
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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from inchworm.core.errors import WorkerError
from inchworm.env.workers import messages
from inchworm.env.workers.messages import Message

TEXT_LIMIT = 10_000
"""Most characters of a message from a process."""

POLL_SECONDS = 0.5
"""How often a process that owes an answer is checked for having exited: its socket stays open while a child of it holds the other end."""


class WorkerDied(Exception):
    """A worker has exited, or was killed because it hung; `WorkerProcess.exit_reason` has the details."""


class WorkerTraceback(Exception):
    """The cause of a `WorkerError`: its text is the traceback in the worker, which cannot be sent as it is."""

    def __str__(self) -> str:
        return f"\nTraceback in the worker:\n{self.args[0]}"


def start_child(*command: str, output: IO[bytes] | None = None) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a fresh interpreter with a command such as `-m MODULE`, followed by the descriptor of its socket; return it and our socket.

    It is in a separate process group, so that Ctrl-C in the terminal reaches only the parent. Call it in `deferred_signals`.
    """
    ours, theirs = socket.socketpair()
    arguments = [sys.executable, "-P", *command[:2], str(theirs.fileno()), *command[2:]]
    with theirs:
        try:
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "process_group": 0}
            return subprocess.Popen(arguments, pass_fds=(theirs.fileno(),), **options), ours
        except OSError:
            ours.close()
            raise


class WorkerProcess:
    """A worker process that steps the copies from `first_copy` on. When it dies, `restart` starts another in its place."""

    program, name = "inchworm.env.workers.program", "env worker"
    count, timeout_setting = "env.num_workers (0: none)", "env.worker_timeout if a step"
    descriptors = 0
    """How many descriptors a message from it may bring."""

    def __init__(self, index: int, first_copy: int, num_copies: int, timeout: float) -> None:
        self.index, self.num_copies = index, num_copies
        self.copies = range(first_copy, first_copy + num_copies)
        self.lanes_per_copy = 1  # until it has described its environments
        self._timeout = timeout
        self._start()

    def _start(self) -> None:
        self._reason = ""  # why it ended, where that is known better than from its exit code
        # A worker exits with the thread that started it, so only the main thread asks for that (prctl(2)).
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        try:
            with deferred_signals():
                self.process, self.connection = start_child("-m", self.program, str(parent))
            self.connection.settimeout(self._timeout)
        except OSError as error:
            raise WorkerError(
                f"{self} could not be started: {error}; use fewer {self.count}, or raise the limits of processes, "
                "open files and memory (ulimit -u, -n, -v)"
            ) from None

    def restart(self) -> None:
        """End this process and start a new one in its place."""
        self.end()
        self._start()

    def end(self) -> None:
        """Kill the process if it is running, reap it and close its socket."""
        self.process.kill()
        self.process.wait()
        self.connection.close()

    def kill(self, reason: str) -> None:
        """Kill a process that hangs; `reason` is what `exit_reason` then reports."""
        if self.process.poll() is None:
            self._reason = reason
            self.process.kill()

    def ask(self, data: bytes, timeout: float, descriptor: int | None = None) -> Message:
        """Send a message to this worker alone and wait for its answer."""
        self.send(data, descriptor)
        poll = select.poll()
        poll.register(self.connection.fileno(), select.POLLIN)
        deadline = time.monotonic() + timeout
        while True:
            if poll.poll(POLL_SECONDS * 1000):
                message = self.receive()
                if message.kind not in (messages.ALIVE, messages.WARNING):
                    return message
                deadline = time.monotonic() + timeout
            elif self.has_died(overdue=timeout if time.monotonic() > deadline else None):
                raise WorkerDied

    def send(self, data: bytes, descriptor: int | None = None) -> None:
        """Send a message, and a descriptor with its first byte. A dead worker is noticed later, when its answer is awaited."""
        try:
            if descriptor is None:
                self.connection.sendall(data)
            else:
                socket.send_fds(self.connection, [data], [descriptor])
        except TimeoutError:
            self.kill(f"accepted no message for {self._timeout:g} s")
        except OSError:
            pass

    def receive(self) -> Message:
        """Receive the message that has begun to arrive. `WorkerDied` if the worker has; `WorkerError` if its environment raised."""
        try:
            message = messages.receive(self.connection, descriptors=self.descriptors)
        except TimeoutError:
            self.kill(f"stopped in the middle of an answer for {self._timeout:g} s")
            raise WorkerDied from None
        except (EOFError, OSError):
            raise WorkerDied from None
        if message.kind == messages.ERROR:
            traceback = message.header["traceback"]
            raise WorkerError(f"{self}: {message.header['text']}") from (WorkerTraceback(traceback) if traceback else None)
        if message.kind == messages.EXITING:
            self._reason = f"exited: {' '.join(message.header['text'].split())}"
            raise WorkerDied
        if message.kind == messages.WARNING:
            repeat_warning(message.header)
        return message

    def has_died(self, *, overdue: float | None = None) -> bool:
        """Whether the process has ended. With `overdue`, the seconds it was given to answer, it is killed if it has not."""
        if overdue is not None:
            self.kill(f"gave no answer within {overdue:g} s; raise {self.timeout_setting} may take longer")
        return overdue is not None or self.process.poll() is not None

    @property
    def lanes(self) -> range:
        """The lanes of its copies."""
        return range(self.copies.start * self.lanes_per_copy, self.copies.stop * self.lanes_per_copy)

    def __str__(self) -> str:
        first, last = self.lanes[0], self.lanes[-1]
        return f"{self.name} {self.index} ({f'lane {first}' if first == last else f'lanes {first} to {last}'})"

    def exit_reason(self) -> str:
        """Describe how a process that `WorkerDied` ended."""
        if self._reason:
            return self._reason
        try:
            code = self.process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        return describe_exit(code)


def describe_exit(code: int) -> str:
    """Say how a process ended, by the exit code that `subprocess` reports."""
    if code >= 0:
        return f"exited with code {code}"
    name = {number.value: number.name for number in signal.Signals}.get(-code, f"signal {-code}")
    return f"was killed by {name}" + (" (perhaps out of memory)" if name == "SIGKILL" else "")


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Defer SIGINT and SIGTERM to the end of the block: a process whose start they interrupted would have no owner to end it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread and interrupt only that
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


def end_processes(workers: Sequence[WorkerProcess], grace: float) -> list[str]:
    """Ask workers to close, then SIGTERM, then SIGKILL, `grace` seconds apart; return what went wrong while closing."""
    try:
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.connection.settimeout(grace)
                worker.connection.sendall(messages.pack(messages.CLOSE))
        problems = _wait_for_exit(workers, grace)
        for worker in workers:
            worker.process.terminate()
        _wait_for_exit(workers, grace)
    finally:  # also when a second Ctrl-C arrives meanwhile
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.end()
    return problems


def _wait_for_exit(workers: Sequence[WorkerProcess], grace: float) -> list[str]:
    """Wait until the workers have closed their sockets by exiting; return the problems that they reported."""
    problems: list[str] = []
    deadline = time.monotonic() + grace
    left = {worker.connection.fileno(): worker for worker in workers if worker.process.poll() is None}
    poll = select.poll()
    for descriptor in left:
        poll.register(descriptor, select.POLLIN)
    while left:
        events = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not events:
            break
        for descriptor, _ in events:
            try:
                message = messages.receive(left[descriptor].connection)
                if message.kind == messages.WARNING:
                    repeat_warning(message.header)
                problems += message.header if message.kind == messages.CLOSED else []
            except (EOFError, OSError):
                poll.unregister(descriptor)
                worker = left.pop(descriptor)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(0.0, deadline - time.monotonic()))
    return problems


def describe_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int) -> dict[str, Any]:
    """A warning as plain data for `repeat_warning` in the parent, which may lack its class."""
    known = next(base.__name__ for base in category.__mro__ if base.__module__ == "builtins")
    return {"text": str(message)[:TEXT_LIMIT], "category": known, "file": filename, "line": lineno}


_repeated: dict[Any, Any] = {}
"""The registry of warnings from workers: the filters of this process show the same one from several workers once."""


def repeat_warning(warning: Mapping[str, Any]) -> None:
    """Emit a warning of a worker in this process, whose filters and style apply to it."""
    category = getattr(builtins, warning["category"])
    warnings.warn_explicit(warning["text"], category, warning["file"], warning["line"], registry=_repeated)


_MAX_LONG_WAITS = 2
"""Spinning pauses after this many consecutive waits that outlast it. A worker sees a single one between two rollouts."""
_BUSY_CORE_SECONDS = 1e-3
"""If sched_yield() takes longer than this, another process is using the core; blocking is then faster than spinning."""
_BUSY_CORE_WAITS = 200
"""How many waits then block at once, before spinning is tried again."""

_yield_cpu: Callable[[], None] = getattr(os, "sched_yield", functools.partial(time.sleep, 0.0))


class Waiter:
    """Waits until one of some descriptors is readable: spins for up to `spin_seconds`, yielding the CPU on each try, then blocks.

    Waking a blocked process can take longer than an environment step, which is why both ends of a socket spin first.
    """

    def __init__(self, spin_seconds: float) -> None:
        self._poll, self._spin_seconds = select.poll(), spin_seconds
        self._long_waits = 0  # in a row
        self._blocking_waits = 0  # still to come

    def register(self, descriptor: int) -> None:
        """Wait for this descriptor too."""
        self._poll.register(descriptor, select.POLLIN)

    def unregister(self, descriptor: int) -> None:
        """Stop waiting for this descriptor, which is about to be closed."""
        self._poll.unregister(descriptor)

    def wait(self, seconds: float | None = None) -> list[tuple[int, int]]:
        """Return the descriptors that are readable or closed by their peer; empty after `seconds` without any."""
        poll, now = self._poll.poll, time.perf_counter
        began = last = now()
        if self._blocking_waits:
            self._blocking_waits -= 1
        elif self._long_waits < _MAX_LONG_WAITS:
            end = began + self._spin_seconds
            while not (events := poll(0)) and last < end:
                _yield_cpu()
                before, last = last, now()
                if last - before > _BUSY_CORE_SECONDS:
                    self._blocking_waits = _BUSY_CORE_WAITS
            if events:
                self._long_waits = 0
                return events
        events = poll(None if seconds is None else max(0.0, seconds) * 1000)
        self._long_waits = 0 if now() - began < self._spin_seconds else self._long_waits + 1
        return events
