"""Serves steps 1 and 2: what a vector env and its worker processes say to each other, over one private socket each.

A message is one byte that says its kind, and for most kinds a JSON header and raw bytes. The two messages of every step,
`STEP` and `STEPPED`, are that one byte alone: the data of the step lies in shared memory.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym

from inchworm.config.sections import EnvConfig
from inchworm.core.errors import EnvError
from inchworm.env.episodes import Replay
from inchworm.env.make import Env, make_env
from inchworm.env.step_arrays import tree_leaves

# From the vector env to a worker.
SETUP, ATTACH, RESET, STEP, OPTIONS, REPLAY, GET_STATES, SET_STATES, CLOSE = b"u", b"m", b"r", b"s", b"o", b"p", b"g", b"t", b"c"
# From a worker to the vector env.
HELLO, DONE, STEPPED, ENDED, STATES, ALIVE, ERROR, GONE, CLOSED = b"h", b"d", b"S", b"E", b"G", b".", b"!", b"X", b"C"

_BARE = (STEP, STEPPED, DONE, ALIVE)
_SIZES = struct.Struct("<IQ")  # bytes of the JSON header, bytes of the raw part


class Message(NamedTuple):
    """One message."""

    kind: bytes
    header: Any = None
    raw: bytes = b""
    descriptors: tuple[int, ...] = ()


def pack(kind: bytes, header: Any = None, raw: bytes = b"") -> bytes:
    """A message as bytes."""
    if kind in _BARE:
        return kind
    text = json.dumps(header).encode()
    return b"".join((kind, _SIZES.pack(len(text), len(raw)), text, raw))


def receive(connection: socket.socket, *, descriptors: int = 0) -> Message:
    """Wait for one message; `EOFError` if the other side is gone. Descriptors come with the kind of the message."""
    received: list[int] = []
    if descriptors:
        kind, received, _, _ = socket.recv_fds(connection, 1, descriptors)
    else:
        kind = connection.recv(1)
    if not kind:
        raise EOFError
    if kind in _BARE:
        return Message(kind)
    header_size, raw_size = _SIZES.unpack(_read(connection, _SIZES.size))
    header = json.loads(_read(connection, header_size))
    return Message(kind, header, bytes(_read(connection, raw_size)), tuple(received))


def _read(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    done = 0
    while done < size:
        count = connection.recv_into(view[done:])
        if count == 0:
            raise EOFError
        done += count
    return data


class _FromConfig:
    """A factory that a worker can be sent: the config as it is, made into an environment over there."""

    def __init__(self, config: EnvConfig) -> None:
        self.config = config

    def __call__(self) -> Env:
        return make_env(self.config)


def make_recipe(make: EnvConfig | Callable[[], Env]) -> bytes:
    """What workers make environments from. An id that the user's script registered goes along with its spec."""
    specs = []
    if isinstance(make, EnvConfig):
        spec = gym.registry.get(make.id)
        specs = [spec] if spec is not None and not str(spec.entry_point).startswith(("gymnasium.", "ale_py.")) else []
        make = _FromConfig(make)
    try:
        return cloudpickle.dumps((make, specs))  # type: ignore[no-any-return]
    except Exception as error:  # pickling runs the user's code, which may raise anything
        raise EnvError(
            f"the environment's factory cannot be sent to worker processes ({type(error).__name__}: {error}); "
            "use env.num_workers=0, or a function that makes everything it needs itself"
        ) from error


def pack_replay(jobs: Sequence[Replay]) -> bytes:
    """Replays as a message to a worker."""
    header = {
        "copies": [job.copy for job in jobs],
        "seeds": [job.seed for job in jobs],
        "options": [job.options for job in jobs],
        "lengths": [len(tree_leaves(job.actions)[0]) for job in jobs],
    }
    raw = b"".join(part.tobytes() for job in jobs for part in tree_leaves(job.actions))
    return pack(REPLAY, header, raw)
