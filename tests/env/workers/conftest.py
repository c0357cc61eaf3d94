"""No process, descriptor or shared memory may survive a test of worker processes."""

import contextlib
import gc
import os

import pytest


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def children():
    return {process for process in os.listdir("/proc") if process.isdigit() and _parent(process) == os.getpid()}


def _parent(process):
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
    return None


@pytest.fixture
def resources():
    """Counts open descriptors and child processes."""
    return lambda: (descriptors(), len(children()))


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    before = descriptors(), children()
    yield
    assert (descriptors(), children()) == before
    with open("/proc/self/maps") as file:
        assert "memfd:inchworm" not in file.read()  # shared memory has no name in any directory, only this one in the kernel
    assert not [name for name in os.listdir("/dev/shm") if "inchworm" in name]
