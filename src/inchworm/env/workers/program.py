"""Step 1 of 9, in a worker process: `python -m inchworm.env.workers.program` steps some copies and writes their rows to shared memory.

A worker is a fresh interpreter: it imports neither the user's script nor a learning framework. Every error in it, from the constructor
on, is sent to the parent as text with its traceback, and it exits when its parent does. It holds nothing that `rebuild.py` cannot
recreate, so it may die at any moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import cloudpickle
import gymnasium as gym

from inchworm.core.errors import EnvError, InchwormError, describe_error, error_text
from inchworm.core.spaces import space_to_dict
from inchworm.env.episodes import Replay
from inchworm.env.local import LocalCopies
from inchworm.env.restore import Restore, pack_tree, unpack_tree
from inchworm.env.step_arrays import map_shared
from inchworm.env.workers import messages
from inchworm.env.workers.messages import Message
from inchworm.env.workers.process import TEXT_LIMIT, Waiter, describe_warning

_ALIVE_SECONDS = 1.0
"""How often a worker reports during a long replay that it is alive."""
_SPIN_SECONDS = 200e-6
"""How long a worker spins before it blocks: longer than a policy needs to act for some tens of lanes."""


class Worker:
    """Steps the copies of one worker process, as the messages of a vector env demand."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._waiter = Waiter(_SPIN_SECONDS)
        self._waiter.register(connection.fileno())
        self._descriptors = 1  # still expected: that of the shared memory
        self._copies: LocalCopies | None = None
        self._last_alive = time.monotonic()
        self._warnings: deque[bytes] = deque()  # that the next answer brings along

    def run(self) -> None:
        """Answer messages until `CLOSE` arrives or the parent is gone."""
        kind = b""
        try:
            while kind != messages.CLOSE:
                self._waiter.wait()
                message = messages.receive(self._connection, descriptors=self._descriptors)
                kind = message.kind
                try:
                    answer = self._HANDLERS[kind](self, message)
                except BaseException as error:  # also a KeyboardInterrupt that an environment raises
                    if isinstance(error.__cause__ if isinstance(error, EnvError) else error, SystemExit | MemoryError):
                        # Not an error in the environment's code: a new process may succeed.
                        with contextlib.suppress(OSError, MemoryError):
                            self._connection.sendall(messages.pack(messages.EXITING, self._report(error)))
                        os._exit(1)
                    answer = messages.pack(messages.ERROR, self._report(error))
                while self._warnings:
                    self._connection.sendall(self._warnings.popleft())
                self._connection.sendall(answer)
        except (EOFError, ConnectionError):
            if self._copies is not None:
                self._copies.close_all(BaseException)

    def setup(self, message: Message) -> bytes:
        """Create the copies and describe them."""
        header = message.header
        sys.path[:] = header["path"]
        make, specs = cloudpickle.loads(message.raw)  # from our own parent, over a private socket
        for spec in specs:
            gym.registry.setdefault(spec.id, spec)
        self._copies = block = LocalCopies(make, header["first_copy"], header["num_copies"], **header["reads"])
        described = [
            space_to_dict(block.observation_space),
            space_to_dict(block.action_space),
            block.keeps_states,
            block.lanes_per_copy,
            block.turn_based,
            None if block.global_state_space is None else space_to_dict(block.global_state_space),
            list(block.agents),
            [own.to_dict() for own in block.agent_spaces],
        ]
        return messages.pack(messages.HELLO, described)

    def attach(self, message: Message) -> bytes:
        """Map the shared memory whose descriptor came with the message."""
        if not message.descriptors:
            raise EnvError("the shared memory could not be opened: too many open files; raise ulimit -n")
        (descriptor,) = message.descriptors
        try:
            memory = map_shared(descriptor)
        finally:
            os.close(descriptor)
        block = self._created()
        rows, _ = block.allocate(message.header["num_copies"], memory)
        block.attach(rows)
        self._descriptors = 0
        return messages.pack(messages.DONE)

    def reset(self, message: Message) -> bytes:
        """Begin episodes."""
        self._created().reset(message.header["copies"], message.header["seeds"])
        return messages.pack(messages.DONE)

    def step(self, _: Message) -> bytes:
        """Step every copy with the actions in shared memory."""
        ended = self._created().step()
        return messages.pack(messages.ENDED, ended) if ended else messages.STEPPED

    def set_options(self, message: Message) -> bytes:
        """Set the options of the copies' next resets."""
        self._created().set_options(message.header["copies"], message.header["options"])
        return messages.pack(messages.DONE)

    def call(self, message: Message) -> bytes:
        """Call a method of some copies, or only look whether there is one; an error is an answer, because it changes no episode."""
        header, copies = message.header, self._created()
        if header["copies"] is None:
            return messages.pack(messages.RESULTS, {"problem": copies.check_method(header["name"])})
        try:
            results = copies.call(header["copies"], header["name"], header["arguments"], header["keywords"])
        except EnvError as error:
            return messages.pack(messages.RESULTS, {"problem": str(error)[:TEXT_LIMIT]})
        return messages.pack(messages.RESULTS, {"problem": None, "results": results})

    def replay(self, message: Message) -> bytes:
        """Replay episodes and return (return, steps) of each."""
        jobs = [Replay(*job) for job in unpack_tree(message.header, message.raw)]
        return messages.pack(messages.ENDED, self._created().replay(jobs, self._report_alive))

    def get_states(self, _: Message) -> bytes:
        """Return the states that environments offer themselves."""
        return messages.pack(messages.STATES, *pack_tree(self._created().get_states()))

    def set_states(self, message: Message) -> bytes:
        """Begin episodes and restore their environments' own states."""
        self._created().set_states([Restore(*job) for job in unpack_tree(message.header, message.raw)])
        return messages.pack(messages.DONE)

    def close(self, _: Message) -> bytes:
        """Close every environment and return what went wrong."""
        return messages.pack(messages.CLOSED, self._copies.close_all(BaseException) if self._copies is not None else [])

    _HANDLERS: dict[bytes, Callable[[Worker, Message], bytes]] = {  # noqa: RUF012
        messages.STEP: step,
        messages.SETUP: setup,
        messages.ATTACH: attach,
        messages.RESET: reset,
        messages.OPTIONS: set_options,
        messages.CALL: call,
        messages.REPLAY: replay,
        messages.GET_STATES: get_states,
        messages.SET_STATES: set_states,
        messages.CLOSE: close,
    }

    def show_warning(self, message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
        """Send a warning to the parent with the next answer: it may come from a thread of an environment. For `warnings.showwarning`."""
        self._warnings.append(messages.pack(messages.WARNING, describe_warning(message, category, filename, lineno)))

    def _created(self) -> LocalCopies:
        if self._copies is None:
            raise RuntimeError("the worker has no environments yet")
        return self._copies

    def _report_alive(self) -> None:
        if time.monotonic() - self._last_alive > _ALIVE_SECONDS:
            self._last_alive = time.monotonic()
            self._connection.sendall(messages.ALIVE)

    def _report(self, error: BaseException) -> dict[str, Any]:
        """What happened, in a line with the user's frames, and the traceback if there is more to see in it."""
        ours = isinstance(error, InchwormError)
        failed = self._copies.failed if self._copies is not None else None
        where = "" if failed is None else f"{failed.where()}: "
        notes = getattr(error, "__notes__", ())  # such as the lane that was being made
        return {
            "text": "\n  ".join([str(error) if ours else f"{where}{describe_error(error)}", *notes])[:TEXT_LIMIT],
            "traceback": "" if ours and error.__cause__ is None else format_traceback(error)[-2 * TEXT_LIMIT :],
        }


def format_traceback(error: BaseException) -> str:
    """Format the tracebacks of an error and its causes, innermost cause first, with long messages cut."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(parts) < 5:
        notes = "".join(f"\n{note}" for note in getattr(current, "__notes__", ()))
        parts.append(f"{''.join(traceback.format_tb(current.__traceback__))}{type(current).__name__}: {error_text(current, 1_000)}{notes}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\n\n".join(reversed(parts))


def main(arguments: list[str], serve: type[Worker] = Worker) -> None:
    """Serve the socket `DESCRIPTOR`; `PARENT` is the process to exit with, or 0. Then end, whatever threads are left running."""
    descriptor, parent = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if parent:
        if sys.platform == "linux":  # the kernel kills this process when the parent dies, even if an environment never returns
            pr_set_pdeathsig = 1
            ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:  # it died before that call
            os._exit(1)
    os.set_inheritable(descriptor, False)
    with socket.socket(fileno=descriptor) as connection:
        worker = serve(connection)
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # the parent's filters decide
            warnings.showwarning = worker.show_warning
            worker.run()
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or its reader is gone
            sys.stdout.flush()
        os._exit(0)  # the interpreter would wait for threads that environments left running


if __name__ == "__main__":
    main(sys.argv[1:])
