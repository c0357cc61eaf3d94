"""Step 1 of 9, in a process of its own: `python -m inchworm.env.workers.program` steps some copies and writes their rows to shared memory.

A worker is a fresh interpreter: it never imports the user's script nor a learning framework. Whatever happens in it, from
the constructor on, goes back as text with its traceback; a worker dies with its parent. What a worker holds can be rebuilt
without it (`rebuild.py`), so it may end at any moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import cloudpickle
import gymnasium as gym
import numpy as np

from inchworm.core.errors import EnvError, InchwormError
from inchworm.core.spaces import build_tree, leaf_dtype, leaf_shape, leaves, space_to_dict
from inchworm.env.episodes import Replay
from inchworm.env.local import Block
from inchworm.env.restore import Restore, pack_tree, unpack_tree
from inchworm.env.step_arrays import map_shared
from inchworm.env.workers import messages as channel
from inchworm.env.workers.messages import Message
from inchworm.env.workers.process import Waiter

_TEXT_LIMIT = 10_000
_BEAT_SECONDS = 1.0
_AWAKE_SECONDS = 200e-6
"""How long a worker waits for its next step before it sleeps: longer than a policy needs to act for some tens of lanes."""


class Worker:
    """Answers the messages of one vector env until it is told to close or the other side is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._waiter = Waiter(_AWAKE_SECONDS)
        self._waiter.watch(connection.fileno())
        self._descriptors = 1  # that may still come: the shared memory's
        self._block: Block | None = None
        self._last_beat = time.monotonic()

    def run(self) -> None:
        """Serve."""
        try:
            while self._answer(self._next()):
                pass
        except (EOFError, ConnectionError):
            if self._block is not None:
                self._block.close(BaseException)

    def _next(self) -> Message:
        self._waiter.wait()
        return channel.receive(self._connection, descriptors=self._descriptors)

    def _answer(self, message: Message) -> bool:
        """Do what the message says; False once there is nothing left to do."""
        try:
            answer = self._HANDLERS[message.kind](self, message)
        except (SystemExit, MemoryError) as error:  # no fault of the environment's code: another process may get further
            self._die(error)
        except BaseException as error:  # also a KeyboardInterrupt that an environment raises
            answer = channel.pack(channel.ERROR, self._report(error))
        self._connection.sendall(answer)
        return message.kind != channel.CLOSE

    def _die(self, error: BaseException) -> NoReturn:
        """End at once, with a last word if there is memory for one."""
        with contextlib.suppress(OSError, MemoryError):
            self._connection.sendall(channel.pack(channel.GONE, self._report(error)))
        os._exit(1)

    def _setup(self, message: Message) -> bytes:
        sys.path[:] = message.header["path"]
        make, specs = cloudpickle.loads(message.raw)  # from our own parent, over a private socket
        for spec in specs:
            gym.registry.setdefault(spec.id, spec)
        header = message.header
        self._block = found = Block(make, header["first_copy"], header["num_copies"], global_state=header["global_state"])
        shared = found.global_state_space
        described = [
            space_to_dict(found.observation_space),
            space_to_dict(found.action_space),
            found.keeps_states,
            found.lanes_per_copy,
            None if shared is None else space_to_dict(shared),
        ]
        return channel.pack(channel.HELLO, described)

    def _attach(self, message: Message) -> bytes:
        if not message.descriptors:
            raise EnvError("the shared memory could not be opened: too many open files; raise ulimit -n")
        (descriptor,) = message.descriptors
        try:
            memory = map_shared(descriptor)
        finally:
            os.close(descriptor)
        block, num_copies = self._made(), message.header["num_copies"]
        rows, _ = block.carve(num_copies, memory)
        block.attach(rows)
        self._descriptors = 0
        return channel.pack(channel.DONE)

    def _reset(self, message: Message) -> bytes:
        self._made().reset(message.header["copies"], message.header["seeds"])
        return channel.pack(channel.DONE)

    def _step(self, _: Message) -> bytes:
        ended = self._made().step()
        return channel.pack(channel.ENDED, ended) if ended else channel.STEPPED

    def _options(self, message: Message) -> bytes:
        self._made().set_options(message.header["copies"], message.header["options"])
        return channel.pack(channel.DONE)

    def _replay(self, message: Message) -> bytes:
        header, taken = message.header, 0
        results = []
        for copy, seed, options, length in zip(header["copies"], header["seeds"], header["options"], header["lengths"]):
            actions, taken = self._actions(message.raw, taken, length)
            results.append(self._made().replay(Replay(copy, seed, options, actions), self._beat))
        return channel.pack(channel.ENDED, results)

    def _actions(self, raw: bytes, start: int, length: int) -> tuple[Any, int]:
        """The next `length` actions of a message, leaf after leaf, and where the following ones begin."""
        parts, width = {}, self._made().lanes_per_copy
        for path, space in leaves(self._made().action_space):
            shape, dtype = (length, *([] if width == 1 else [width]), *leaf_shape(space)), leaf_dtype(space)
            parts[path] = np.frombuffer(raw, dtype, int(np.prod(shape)), start).reshape(shape)
            start += parts[path].nbytes
        return build_tree(self._made().action_space, lambda path, _: parts[path]), start

    def _get_states(self, _: Message) -> bytes:
        return channel.pack(channel.STATES, *pack_tree(self._made().get_states()))

    def _set_states(self, message: Message) -> bytes:
        jobs = zip(*(message.header[name] for name in ("copies", "seeds", "options")), unpack_tree(message.header, message.raw))
        self._made().set_states([Restore(*job) for job in jobs])
        return channel.pack(channel.DONE)

    def _close(self, _: Message) -> bytes:
        return channel.pack(channel.CLOSED, self._block.close(BaseException) if self._block is not None else [])

    def _beat(self) -> None:
        """Say now and then that a long replay is under way."""
        if time.monotonic() - self._last_beat > _BEAT_SECONDS:
            self._last_beat = time.monotonic()
            self._connection.sendall(channel.ALIVE)

    def _made(self) -> Block:
        if self._block is None:
            raise RuntimeError("the worker has no environments yet")
        return self._block

    def _report(self, error: BaseException) -> dict[str, Any]:
        failed = self._block.failed if self._block is not None else None
        return {
            "type": type(error).__name__,
            "text": _text(error)[:_TEXT_LIMIT],
            "traceback": "" if isinstance(error, InchwormError) else _frames(error)[-2 * _TEXT_LIMIT :],
            "lane": None if failed is None else failed.lane,
            "seed": None if failed is None else failed.seed,
        }

    _HANDLERS: dict[bytes, Callable[[Worker, Message], bytes]] = {  # noqa: RUF012
        channel.STEP: _step,
        channel.SETUP: _setup,
        channel.ATTACH: _attach,
        channel.RESET: _reset,
        channel.OPTIONS: _options,
        channel.REPLAY: _replay,
        channel.GET_STATES: _get_states,
        channel.SET_STATES: _set_states,
        channel.CLOSE: _close,
    }


def _text(error: BaseException) -> str:
    """What an error says, even if it cannot say it."""
    try:
        return str(error)
    except Exception:
        return "(its text cannot be made)"


def _frames(error: BaseException) -> str:
    """The tracebacks of an error and its causes, innermost cause first, each text cut short."""
    parts: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(parts) < 5:
        notes = "".join(f"\n{note}" for note in getattr(seen, "__notes__", ()))
        parts.append(f"{''.join(traceback.format_tb(seen.__traceback__))}{type(seen).__name__}: {_text(seen)[:1000]}{notes}")
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return "\n\n".join(reversed(parts))


def _die_with(parent: int) -> None:
    """Ask the kernel (Linux) to kill this process when the parent dies, even if an environment never returns."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(1)


def main(arguments: list[str]) -> None:
    """`worker DESCRIPTOR PARENT`: serve the socket; PARENT is the process to die with, or 0."""
    descriptor, parent = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if parent:
        _die_with(parent)
    os.set_inheritable(descriptor, False)
    with socket.socket(fileno=descriptor) as connection:
        Worker(connection).run()


if __name__ == "__main__":
    main(sys.argv[1:])
