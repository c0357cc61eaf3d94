"""Messages between a vector env and its worker processes, which share one private socket each.

A message is one byte for its kind and, for most kinds, a JSON header and raw bytes. The two messages of every step, `STEP` and
`STEPPED`, are a single byte: the data of the step is in shared memory.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, NamedTuple

# From the vector env to a worker.
SETUP, ATTACH, RESET, STEP, OPTIONS, REPLAY, GET_STATES, SET_STATES, CLOSE = b"u", b"m", b"r", b"s", b"o", b"p", b"g", b"t", b"c"
CALL = b"a"
# From a worker to the vector env.
HELLO, DONE, STEPPED, ENDED, STATES, ALIVE, ERROR, EXITING, CLOSED = b"h", b"d", b"S", b"E", b"G", b".", b"!", b"X", b"C"
RESULTS = b"v"  # of calls
WARNING = b"w"  # any number of these, before an answer

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
