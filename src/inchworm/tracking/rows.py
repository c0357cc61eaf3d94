"""Serves the JSONL tracker: one file of rows that is only ever appended to, and never holds half a row for long."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from inchworm.files import read_bytes


class RowFile:
    """Rows go to the file at once; those that cannot be written wait here, in order, for the next attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._waiting: list[bytes] = []
        self._written = 0
        self._whole: int | None = None  # the size to cut back to, while a write is under way or after one that failed
        self._told = False
        self._is_new = False

    @property
    def count(self) -> int:
        """Rows so far, with those that wait."""
        if self._descriptor is None:
            return len(read_complete_rows(self.path)) + len(self._waiting)
        return self._written + len(self._waiting)

    def append(self, row: bytes) -> None:
        """Add a row; if it cannot be written, it is kept, with one warning until it works again."""
        self._waiting.append(row)
        try:
            self.flush()
        except OSError as error:
            if not self._told:
                warnings.warn(f"{error}; training goes on, and the row is written with a later one", stacklevel=2)
            self._told = True

    def flush(self) -> None:
        """Write what waits, all of it or nothing."""
        if not self._waiting:
            return
        try:
            descriptor = self._open()
            if self._whole is not None:  # half a row of an attempt that failed
                os.ftruncate(descriptor, self._whole)
            self._whole = os.fstat(descriptor).st_size
            _write_all(descriptor, b"".join(self._waiting))
            self._written += len(self._waiting)
            self._whole, self._waiting, self._told = None, [], False
        except OSError as error:
            self._cut_back()
            raise OSError(error.errno, f"{error.strerror} while writing {len(self._waiting)} row(s)", str(self.path)) from error

    def sync(self) -> bool:
        """Make the rows survive a power loss; says whether the file is new to its directory."""
        descriptor = self._descriptor
        if descriptor is None:
            return False
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} while syncing", str(self.path)) from error
        is_new, self._is_new = self._is_new, False
        return is_new

    def close(self) -> None:
        """Write what waits, or warn that it is lost, and close the file."""
        try:
            self.flush()
        except OSError as error:
            warnings.warn(f"{error}; they are lost", stacklevel=3)
            self._waiting = []
        descriptor, self._descriptor, self._told = self._descriptor, None, False
        if descriptor is not None:
            os.close(descriptor)

    def _open(self) -> int:
        """The file for appending, without the half row that a killed writer may have left."""
        if self._descriptor is None:
            self._is_new = not self.path.exists()
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            try:
                rows = read_complete_rows(self.path)
                os.ftruncate(descriptor, sum(map(len, rows)))
            except OSError:
                os.close(descriptor)
                raise
            self._descriptor, self._written, self._whole = descriptor, len(rows), None
        return self._descriptor

    def _cut_back(self) -> None:
        """Remove half a row now if that works; the next attempt tries again."""
        if self._descriptor is not None and self._whole is not None:
            try:
                os.ftruncate(self._descriptor, self._whole)
            except OSError:
                return


def read_complete_rows(path: Path) -> list[bytes]:
    """Every line that has its end; none if there is no file."""
    content = read_bytes(path) if path.exists() else b""
    return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)


def _write_all(descriptor: int, content: bytes) -> None:
    """A full disk may take a part of it and only then refuse."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]
