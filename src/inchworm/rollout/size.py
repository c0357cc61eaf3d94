"""Serves step 5 of 9: how much memory a rollout will take, known before any of it is taken."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np

from inchworm.errors import ConfigError
from inchworm.rollout.buffer import FLAT_DTYPES
from inchworm.rollout.checks import action_dtype
from inchworm.spaces import Space, leaf_dtype, leaf_shape, leaves

_MEMORY_FACTS = Path("/proc/meminfo")


def rollout_bytes(
    observation_space: Space,
    action_space: Space,
    num_steps: int,
    num_lanes: int,
    global_state_space: Space | None = None,
    num_copies: int = 0,
) -> int:
    """Bytes of a rollout's arrays: each datum once, in its own dtype, and the successor of every lane's last row."""
    observation = _value_bytes(observation_space)
    action: int = sum(action_dtype(space).itemsize * math.prod(leaf_shape(space)) for _, space in leaves(action_space))
    flat: int = sum(np.dtype(dtype).itemsize for dtype in FLAT_DTYPES.values())
    shared = 0 if global_state_space is None else _value_bytes(global_state_space)
    return num_lanes * (num_steps * (observation + action + flat) + observation + shared) + num_copies * num_steps * shared


def _value_bytes(space: Space) -> int:
    return sum(leaf_dtype(leaf).itemsize * math.prod(leaf_shape(leaf)) for _, leaf in leaves(space))


def check_fits(needed: int, *, what: str, use: str = "use fewer env.num_envs or ppo.rollout_steps") -> None:
    """Refuse what the machine has no memory for, before it is asked for it; `use` is what to do about it."""
    free = available_bytes()
    if free is not None and needed > free:
        raise ConfigError(f"{what} takes {in_words(needed)}, but {in_words(free)} of memory are free; {use}")


def available_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMORY_FACTS.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def in_words(count: int) -> str:
    """A number of bytes for people: 23.4 kB, 1.5 GB."""
    size, unit = float(count), "bytes"
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.3g} {unit}"
