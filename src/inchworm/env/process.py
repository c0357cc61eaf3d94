"""Serves step 2: one env worker process, seen from outside: how it is started, how it died, how it is ended in bounded time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from inchworm.env import channel


class WorkerProcess:
    """One worker process, seen from outside."""

    def __init__(self, index: int, first_copy: int, num_copies: int) -> None:
        self.index, self.first_copy, self.num_copies = index, first_copy, num_copies
        self.connection, theirs = socket.socketpair()
        # A worker dies with the thread that started it, so only the main thread asks for that (prctl(2)).
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        command = [sys.executable, "-P", "-m", "inchworm.env.worker", str(theirs.fileno()), str(parent)]
        with theirs:
            # A process group of its own: Ctrl-C in the terminal reaches the parent alone, from the first moment on.
            self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, process_group=0)

    @property
    def copies(self) -> range:
        """The copies that it steps."""
        return range(self.first_copy, self.first_copy + self.num_copies)

    def __str__(self) -> str:
        lanes = f"lane {self.first_copy}" if self.num_copies == 1 else f"lanes {self.copies[0]} to {self.copies[-1]}"
        return f"env worker {self.index} ({lanes})"

    def how_it_died(self) -> str:
        """Its end in words, once its socket is closed."""
        try:
            code = self.process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        if code >= 0:
            return f"exited with code {code}"
        name = {number.value: number.name for number in signal.Signals}.get(-code, f"signal {-code}")
        return f"was killed by {name}" + (" (perhaps out of memory)" if name == "SIGKILL" else "")


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
