"""Messages between a vector env and its worker processes, which share one private socket each.

A message is one byte for its kind and, for most kinds, a JSON header and raw bytes. The two messages of every step, `STEP` and
`STEPPED`, are a single byte: the data of the step is in shared memory.
"""

from __future__ import annotations

import functools
import io
import json
import math
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np

from inchworm.config.sections import EnvConfig
from inchworm.core.errors import EnvError
from inchworm.core.spaces import Path, Space, build_tree, leaf_dtype, leaf_shape
from inchworm.env.episodes import Replay
from inchworm.env.make import Env, make_env
from inchworm.env.step_arrays import tree_leaves

# From the vector env to a worker.
SETUP, ATTACH, RESET, STEP, OPTIONS, REPLAY, GET_STATES, SET_STATES, CLOSE = b"u", b"m", b"r", b"s", b"o", b"p", b"g", b"t", b"c"
# From a worker to the vector env.
HELLO, DONE, STEPPED, ENDED, STATES, ALIVE, ERROR, EXITING, CLOSED = b"h", b"d", b"S", b"E", b"G", b".", b"!", b"X", b"C"

_SINGLE_BYTE = (STEP, STEPPED, DONE, ALIVE)
_SIZES = struct.Struct("<IQ")  # bytes of the JSON header, bytes of the raw part


class Message(NamedTuple):
    """A received message."""

    kind: bytes
    header: Any = None
    raw: bytes = b""
    descriptors: tuple[int, ...] = ()


def pack(kind: bytes, header: Any = None, raw: bytes = b"") -> bytes:
    """Encode a message."""
    if kind in _SINGLE_BYTE:
        return kind
    text = json.dumps(header).encode()
    return b"".join((kind, _SIZES.pack(len(text), len(raw)), text, raw))


def receive(connection: socket.socket, *, descriptors: int = 0) -> Message:
    """Wait for one message, with up to `descriptors` file descriptors attached to its first byte; `EOFError` if the peer is gone."""
    received: list[int] = []
    if descriptors:
        kind, received, _, _ = socket.recv_fds(connection, 1, descriptors)
    else:
        kind = connection.recv(1)
    if not kind:
        raise EOFError
    if kind in _SINGLE_BYTE:
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


def pack_factory(make: EnvConfig | Callable[[], Env]) -> bytes:
    """Pickle what workers create environments from, with the Gymnasium spec of an id that the user's script registered."""
    specs = []
    if isinstance(make, EnvConfig):
        spec = gym.registry.get(make.id)
        specs = [spec] if spec is not None and not str(spec.entry_point).startswith(("gymnasium.", "ale_py.")) else []
        make = functools.partial(make_env, make)
    try:
        return cloudpickle.dumps((make, specs))  # type: ignore[no-any-return]
    except Exception as error:  # pickling runs the user's code, which may raise anything
        raise EnvError(
            f"the environment factory cannot be sent to worker processes ({type(error).__name__}: {error}); "
            "use env.num_workers=0, or a function that creates everything it needs itself"
        ) from error


def pack_replay(jobs: Sequence[Replay]) -> bytes:
    """Encode replays as a message to a worker: the actions follow the header, copy after copy, leaf after leaf."""
    header = {
        "copies": [job.copy for job in jobs],
        "seeds": [job.seed for job in jobs],
        "options": [job.options for job in jobs],
        "lengths": [len(tree_leaves(job.actions)[0]) for job in jobs],
    }
    raw = b"".join(part.tobytes() for job in jobs for part in tree_leaves(job.actions))
    return pack(REPLAY, header, raw)


def unpack_replay(message: Message, action_space: Space, lanes_per_copy: int) -> list[Replay]:
    """Decode the replays that `pack_replay` encoded."""
    header, raw = message.header, io.BytesIO(message.raw)

    def read(length: int, _: Path, leaf: Space) -> np.ndarray:
        shape = (length, *([] if lanes_per_copy == 1 else [lanes_per_copy]), *leaf_shape(leaf))
        return np.frombuffer(raw.read(math.prod(shape) * leaf_dtype(leaf).itemsize), leaf_dtype(leaf)).reshape(shape)

    columns = (header[name] for name in ("copies", "seeds", "options", "lengths"))
    return [
        Replay(copy, seed, options, build_tree(action_space, functools.partial(read, length)))
        for copy, seed, options, length in zip(*columns)
    ]
