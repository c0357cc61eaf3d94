"""Steps 1 and 2 of 9: the arrays that hold a step of all lanes, in ordinary or in shared memory.

Shared memory is an anonymous file (memfd) that is passed to workers as a descriptor: it never has a name, so nothing can
be left behind under one.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inchworm.core.errors import WorkerError
from inchworm.core.spaces import Space, build_tree, leaf_dtype, leaf_shape, tree_leaves
from inchworm.core.types import Array, Tree

_ALIGNMENT = 64
"""A cache line: arrays do not share one."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """Where B lanes in E copies write a step, and where they read what to do."""

    observations: Tree
    """[B, *obs] what to act on next."""
    final_observations: Tree
    """[B, *obs] the true last observation of lanes whose episode ended in this step; older data elsewhere."""
    actions: Tree
    """[B, *act] what to do in the next step."""
    rewards: Array
    """[B] f32"""
    terminated: Array
    """[B] bool"""
    truncated: Array
    """[B] bool"""
    seeds: Array
    """[E] i64: the seeds of the running episodes."""
    next_seeds: Array
    """[E] i64: the seeds of the episodes after them."""
    episodes: Array
    """[E] i64: the numbers of the running episodes, from 0; -1 before the first."""
    valid: Array
    """[B] bool: the lane has a living agent that `observations` belongs to. All true, and never written, where a copy is one lane."""
    joined: Array
    """[B] bool: `observations` is the first of an agent that joined a running episode in this step. All false where a copy is one lane."""
    final_valid: Array
    """[B] bool: whose agents would act on `final_observations`, being cut off alive. All true where a copy is one lane."""
    global_state: Tree = ()
    """[E, *] what a central critic sees besides the observations, once for each copy; `()` if there is none."""
    final_global_state: Tree = ()
    """[E, *] of copies whose episode ended in this step, before the reset; older data elsewhere."""
    global_state_space: Space | None = None
    """Of one copy."""
    infos: Mapping[str, Array] = field(default_factory=dict)
    """[B] f32 by name: the numbers of the step's `info` that are kept, NaN where it has none."""

    @property
    def lanes_per_copy(self) -> int:
        """How many adjacent lanes a copy fills."""
        return len(self.rewards) // max(1, len(self.seeds))

    def describe_episode(self, copy: int, seed: int) -> str:
        """`episode 3 with seed 99`, counted from 1: the one that runs in a copy, or the one that is about to begin."""
        number = int(self.episodes[copy]) + (1 if self.seeds[copy] == seed else 2)
        return f"episode {number} with seed {seed}"


def allocate_rows(
    observation_space: Space,
    action_space: Space,
    num_lanes: int,
    num_copies: int,
    buffer: mmap.mmap | None = None,
    *,
    global_state_space: Space | None = None,
    keep_infos: Sequence[str] = (),
) -> tuple[StepRows, int]:
    """The rows, and the bytes that a buffer for them needs. The same arguments always give the same layout.

    `num_lanes` is a multiple of `num_copies`: a copy's lanes are adjacent.
    """
    size = 0

    def take(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """The next array of zeros, from the buffer or, without one, from ordinary memory."""
        nonlocal size
        start, count = -(-size // _ALIGNMENT) * _ALIGNMENT, int(np.prod(shape))
        size = start + count * np.dtype(dtype).itemsize
        if buffer is None or count == 0:
            return np.zeros(shape, dtype)
        return np.frombuffer(buffer, dtype, count, start).reshape(shape)

    def batch(space: Space, count: int = num_lanes) -> Tree:
        return build_tree(space, lambda _, leaf: take((count, *leaf_shape(leaf)), leaf_dtype(leaf)))

    lanes, copies, shared = (num_lanes,), (num_copies,), global_state_space
    single = num_lanes == num_copies  # then an agent is alive for its copy's whole episode, and these flags need not be shared
    rows = StepRows(
        observations=batch(observation_space),
        final_observations=batch(observation_space),
        actions=batch(action_space),
        rewards=take(lanes, np.float32),
        terminated=take(lanes, np.bool_),
        truncated=take(lanes, np.bool_),
        seeds=take(copies, np.int64),
        next_seeds=take(copies, np.int64),
        episodes=take(copies, np.int64),
        valid=np.ones(lanes, np.bool_) if single else take(lanes, np.bool_),
        joined=np.zeros(lanes, np.bool_) if single else take(lanes, np.bool_),
        final_valid=np.ones(lanes, np.bool_) if single else take(lanes, np.bool_),
        global_state=() if shared is None else batch(shared, num_copies),
        final_global_state=() if shared is None else batch(shared, num_copies),
        global_state_space=shared,
        infos={name: take(lanes, np.float32) for name in keep_infos},
    )
    return rows, size


def open_shared(size: int) -> int:
    """The descriptor of `size` bytes of nameless shared memory; close it after the last mapping."""
    size = max(size, 1)
    create: Callable[[str], int] | None = getattr(os, "memfd_create", None)
    try:
        if create is not None:
            descriptor = create("inchworm")
        else:
            with tempfile.TemporaryFile() as file:  # unlinked as soon as it is made
                descriptor = os.dup(file.fileno())
        try:
            if size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):  # the kernel might try, and end other processes for it
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            os.ftruncate(descriptor, size)
            reserve: Callable[[int, int, int], None] | None = getattr(os, "posix_fallocate", None)
            if reserve is not None:  # what is not there is missed here, by an error, and not later, by a signal
                reserve(descriptor, 0, size)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise _no_memory(size, error) from None
    return descriptor


def map_shared(descriptor: int) -> mmap.mmap:
    """The shared memory of a descriptor, which may be closed then."""
    try:
        return mmap.mmap(descriptor, 0)
    except OSError as error:
        raise _no_memory(os.fstat(descriptor).st_size, error) from None


def _no_memory(size: int, error: OSError) -> WorkerError:
    return WorkerError(
        f"{size / 1e6:.1f} MB of memory to share with the env workers could not be had: {error}; "
        "use fewer env.num_envs, or env.num_workers=0"
    )


def observation_hash(rows: StepRows, copy: int) -> str:
    """A hash of what a copy shows."""
    digest = hashlib.sha256()
    for array in shown_arrays(rows, copy):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def shown_arrays(rows: StepRows, copy: int) -> list[np.ndarray]:
    """What a copy shows between two steps, as views: observations [*obs] (of k lanes [k, *obs], valid, joined) and its global state."""
    width, seen = rows.lanes_per_copy, tree_leaves(rows.observations)
    shared = [array[copy, ...] for array in tree_leaves(rows.global_state)]
    if width == 1:
        return [array[copy, ...] for array in seen] + shared
    lanes = slice(copy * width, (copy + 1) * width)
    return [array[lanes] for array in (*seen, rows.valid, rows.joined)] + shared
