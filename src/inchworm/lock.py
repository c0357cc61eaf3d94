"""Serves the run's directory: one process writes to it at a time. The system drops the lock when the process ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from inchworm.errors import InchwormError


def take_lock(path: Path, what: str) -> int:
    """Lock the file `path` for this process: the descriptor that holds the lock. `what` is what it protects, for a message."""
    try:
        # Never through a link: a directory from elsewhere could point at a file that is then emptied.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InchwormError(f"{what} cannot be locked: {error}") from None
    try:
        _lock(descriptor, path, what)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int, path: Path, what: str) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise InchwormError(f"{what} cannot be locked: {path} is no regular file; remove it")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "that has just begun"
        raise InchwormError(f"{what} is in use by process {holder}; wait for it, or stop it first") from None
    except OSError as error:
        raise InchwormError(f"{what} cannot be locked: {error}") from None
    with contextlib.suppress(OSError):  # on a full disk the lock holds all the same, only nobody can read whose it is
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
