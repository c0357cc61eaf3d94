"""Named, independent random streams, all derived from one seed and saved with the run.

A stream is derived from (run seed, purpose, counters): no stream depends on how many numbers another has drawn, so
workers, restarts and resumes do not change what any part of a run sees.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np


def _entropy(seed: int, purpose: str, counters: tuple[int, ...]) -> int:
    text = "/".join([str(seed), purpose, *map(str, counters)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def derive_seed(seed: int, purpose: str, *counters: int) -> int:
    """A 31-bit seed for what cannot take a generator, such as an environment's `reset`."""
    return _entropy(seed, purpose, counters) & 0x7FFF_FFFF


def episode_seed(seed: int, copy: int, episode: int) -> int:
    """The seed of one episode of one env copy; copies are numbered globally over all workers."""
    return derive_seed(seed, "episode", copy, episode)


def make_stream(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """The random stream of one owner."""
    return np.random.Generator(np.random.PCG64(_entropy(seed, purpose, counters)))


def stream_state(stream: np.random.Generator) -> dict[str, Any]:
    """A stream's position as plain data; integers are text, because they are wider than JSON readers promise."""
    state = stream.bit_generator.state
    inner = state["state"]
    return {
        "kind": state["bit_generator"],
        "state": str(inner["state"]),
        "inc": str(inner["inc"]),
        "has_uint32": int(state["has_uint32"]),
        "uinteger": int(state["uinteger"]),
    }


def restore_stream(state: Mapping[str, Any]) -> np.random.Generator:
    """The stream that `stream_state` described."""
    if state["kind"] != "PCG64":
        raise ValueError(f"a saved random stream is of kind {state['kind']!r}; this version knows PCG64 only")
    generator = np.random.PCG64(0)
    generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": int(state["state"]), "inc": int(state["inc"])},
        "has_uint32": int(state["has_uint32"]),
        "uinteger": int(state["uinteger"]),
    }
    return np.random.Generator(generator)
