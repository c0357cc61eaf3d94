"""Metrics as lines of JSON in the run's directory. Serves the loop; what it writes is the run's own record.

`metrics.jsonl` holds what the config and the seed decide, `timing.jsonl` what the clock decides (names that begin with `timing/`),
so that two equal runs have equal metrics, byte for byte, interrupted or not.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inchworm.config.reading import dump_yaml
from inchworm.core.tensor_file import read_bytes, sync_directory, write_atomically


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


METRICS = "metrics.jsonl"
TIMING = "timing.jsonl"
TIMING_PREFIX = "timing/"
_COUNTERS = ("iteration", "env_steps")


class JsonlTracker:
    """Appends one row per call to each file, flushed at once, so that a killed run loses no finished row.

    A row that cannot be written, because the disk is full say, is kept and written with the next one.
    """

    def __init__(self, run_dir: str | Path) -> None:
        """Rows go to `run_dir`, after those that are there."""
        self.directory = Path(run_dir)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._files = {name: RowFile(self.directory / name) for name in (METRICS, TIMING)}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One row at `step` env steps; numbers that are not finite become null. `iteration` among the metrics numbers the row."""
        iteration = {"iteration": int(metrics["iteration"])} if "iteration" in metrics else {}
        head: dict[str, Any] = {**iteration, "env_steps": int(step)}
        timing = {name: value for name, value in metrics.items() if name.startswith(TIMING_PREFIX)}
        others = {name: value for name, value in metrics.items() if name not in timing and name not in _COUNTERS}
        if others:
            self._append(METRICS, head | {name: _plain(others[name]) for name in sorted(others)})
        if timing:
            self._append(TIMING, head | {name.removeprefix(TIMING_PREFIX): _plain(timing[name]) for name in sorted(timing)})

    def log_params(self, params: Mapping[str, Any]) -> None:
        """The config, as `config.yaml`, unless the run has one."""
        path = self.directory / "config.yaml"
        if not path.exists():
            write_atomically(path, dump_yaml(dict(params)))

    def log_artifact(self, path: Path) -> None:
        """Nothing to do: files of the run lie in its directory already."""

    def counts(self) -> dict[str, int]:
        """How many rows each file has so far, with those that still wait."""
        return {name: file.count for name, file in self._files.items()}

    def flush(self) -> None:
        """Write what still waits; raises `OSError` if that is impossible."""
        for file in self._files.values():
            file.flush()

    def sync(self) -> None:
        """Make all rows survive a power loss. Another thread may do this while rows are added."""
        synced = [file.sync() for file in self._files.values()]
        if any(synced):
            sync_directory(self.directory)

    def truncate_after(self, iteration: int) -> None:
        """Drop the rows after `iteration`, and a row that a kill cut short: the run goes on from there and writes them again."""
        self.close()
        for file in self._files.values():
            rows = read_complete_rows(file.path)
            self._rewrite(file.path, [row for row in rows if (parsed := _parse(row)) is not None and _iteration(parsed) <= iteration])

    def truncate_to(self, counts: Mapping[str, int]) -> list[str]:
        """Keep so many rows of each file; says what is missing, a sentence each."""
        self.close()
        problems = []
        for name, file in self._files.items():
            rows, wanted = read_complete_rows(file.path), int(counts.get(name, 0))
            self._rewrite(file.path, rows[:wanted])
            if len(rows) < wanted:
                problems.append(f"{file.path} has {len(rows)} rows, and had {wanted} when the checkpoint was written")
        return problems

    def last_iteration(self) -> int:
        """Of the rows that are there; 0 if there are none."""
        rows = read_rows(self.directory / METRICS)
        return max((_iteration(row) for row in rows), default=0)

    def close(self) -> None:
        """Close the files; a later row opens them again. What cannot be written even now is lost, with a warning."""
        for file in self._files.values():
            file.close()

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        self._files[name].append(json.dumps(row).encode() + b"\n")

    def _rewrite(self, path: Path, rows: list[bytes]) -> None:
        """Put just these rows into a file, whole or not at all, unless that is what it holds."""
        if path.exists() and read_bytes(path) != b"".join(rows):
            write_atomically(path, b"".join(rows))


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The complete rows of such a file; none if there is no file."""
    return [parsed for row in read_complete_rows(Path(path)) if (parsed := _parse(row)) is not None]


def _iteration(row: Mapping[str, Any]) -> int:
    number: int = row.get("iteration", 0)
    return number


def _parse(row: bytes) -> dict[str, Any] | None:
    """A row, or None for one that is no row."""
    try:
        parsed = json.loads(row)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) and type(parsed.get("iteration", 0)) is int else None


def _plain(value: Any) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None
