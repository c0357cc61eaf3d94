"""Metrics as lines of JSON in the run's directory.

`metrics.jsonl` holds what is determined by config and seed, `timing.jsonl` what depends on the clock or the machine (names that
begin with `timing/` or `system/`), so that two equal runs have byte-identical metrics, interrupted or not. `hashes.jsonl` holds hashes
of what was computed (`train/stages`).
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from inchworm.config.reading import dump_yaml
from inchworm.core.tensor_file import read_bytes, sync_directory, write_atomically


class RowFile:
    """A file of rows. Each is written at once; rows that cannot be written are kept, in order, for the next attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._waiting: list[bytes | Callable[[], bytes]] = []
        self._written = 0
        self._whole: int | None = None  # the size to cut back to, while a write is under way or after one that failed
        self._warned = False
        self._is_new = False

    @property
    def count(self) -> int:
        """Number of rows, including those not yet written."""
        if self._descriptor is None:
            return len(read_complete_rows(self.path)) + len(self._waiting)
        return self._written + len(self._waiting)

    def append(self, row: bytes | Callable[[], bytes], *, together: int = 1) -> None:
        """Add a row, or what makes it: it is made and written with those before it when there are `together` of them, or by `flush`.

        If it cannot be written it is kept, with one warning until writing works again.
        """
        self._waiting.append(row)
        if len(self._waiting) < together:
            return
        try:
            self.flush()
        except OSError as error:
            if not self._warned:
                warnings.warn(f"{error}; training continues, and the row will be written with a later one", stacklevel=2)
            self._warned = True

    def flush(self) -> None:
        """Write the pending rows, all of them or none."""
        if not self._waiting:
            return
        rows = [row if isinstance(row, bytes) else row() for row in self._waiting]
        self._waiting = [*rows]
        try:
            descriptor = self._open()
            if self._whole is not None:  # a partial row of a failed attempt
                os.ftruncate(descriptor, self._whole)
            self._whole = os.fstat(descriptor).st_size
            left = memoryview(b"".join(rows))
            while left:  # a full disk may accept a part before it fails
                left = left[os.write(descriptor, left) :]
            self._written += len(rows)
            self._whole, self._waiting, self._warned = None, [], False
        except OSError as error:
            if self._descriptor is not None and self._whole is not None:
                with suppress(OSError):  # remove a partial row; the next attempt tries again
                    os.ftruncate(self._descriptor, self._whole)
            raise OSError(error.errno, f"{error.strerror} while writing {len(self._waiting)} row(s)", str(self.path)) from error

    def sync(self) -> bool:
        """Sync the rows to disk; return whether the file is new in its directory."""
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
        """Write the pending rows, or warn that they are lost, and close the file."""
        try:
            self.flush()
        except OSError as error:
            warnings.warn(f"{error}; these rows are lost", stacklevel=3)
            self._waiting = []
        descriptor, self._descriptor, self._warned = self._descriptor, None, False
        if descriptor is not None:
            os.close(descriptor)

    def _open(self) -> int:
        """Open the file for appending, and remove a partial row that a killed writer may have left."""
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


def read_complete_rows(path: Path) -> list[bytes]:
    """Every complete line of a file; none if it does not exist."""
    content = read_bytes(path) if path.exists() else b""
    return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)


METRICS = "metrics.jsonl"
TIMING = "timing.jsonl"
HASHES = "hashes.jsonl"
HASHES_TOGETHER = 16
"""Rows of hashes that are made and written at a time; a kill loses fewer, of which a resumed run needs none."""
TIMING_PREFIX = "timing/"  # left out in its file
_COUNTERS = ("iteration", "env_steps")


class JsonlTracker:
    """Appends one row per call to each file, flushed at once, so that a killed run loses no complete row.

    A row that cannot be written, for example because the disk is full, is kept and written with the next one.
    """

    def __init__(self, run_dir: str | Path) -> None:
        """Append to the files in `run_dir`."""
        self.directory = Path(run_dir)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._files = {name: RowFile(self.directory / name) for name in (METRICS, TIMING, HASHES)}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one row at `step` env steps; non-finite numbers become null. The metric `iteration`, if given, numbers the row."""
        iteration = {"iteration": int(metrics["iteration"])} if "iteration" in metrics else {}
        head: dict[str, Any] = {**iteration, "env_steps": int(step)}
        timing = {name: value for name, value in metrics.items() if name.startswith((TIMING_PREFIX, "system/"))}
        others = {name: value for name, value in metrics.items() if name not in timing and name not in _COUNTERS}
        for file, values in ((METRICS, others), (TIMING, timing)):
            if values:
                row = head | {name.removeprefix(TIMING_PREFIX): _plain(values[name]) for name in sorted(values)}
                self._files[file].append(json.dumps(row).encode() + b"\n")

    def log_hashes(self, make_row: Callable[[], Mapping[str, Any]]) -> None:
        """Log the hashes of an iteration. Several rows are made and written together, while the code is in the processor's cache."""
        self._files[HASHES].append(lambda: json.dumps(make_row()).encode() + b"\n", together=HASHES_TOGETHER)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Write the config as `config.yaml`, unless it exists."""
        path = self.directory / "config.yaml"
        if not path.exists():
            write_atomically(path, dump_yaml(dict(params)))

    def log_artifact(self, path: Path) -> None:
        """Do nothing: the run's files are in its directory already."""

    def counts(self) -> dict[str, int]:
        """Number of rows of each file, including those not yet written."""
        return {name: file.count for name, file in self._files.items()}

    def flush(self) -> None:
        """Write the pending rows; raises `OSError` on failure."""
        for file in self._files.values():
            file.flush()

    def sync(self) -> None:
        """Sync all rows to disk. Another thread may call this while rows are added."""
        synced = [file.sync() for file in self._files.values()]
        if any(synced):
            sync_directory(self.directory)

    def truncate_after(self, iteration: int) -> None:
        """Remove the rows after `iteration`, and partial rows: the resumed run writes them again."""
        self.close()
        for file in self._files.values():
            rows = read_complete_rows(file.path)
            self._rewrite(
                file.path, [row for row in rows if (parsed := _parse(row)) is not None and parsed.get("iteration", 0) <= iteration]
            )

    def truncate_to(self, counts: Mapping[str, int]) -> list[str]:
        """Keep the first rows of each file, as many as `counts` tells; return what is missing, a sentence each."""
        self.close()
        problems = []
        for name, file in self._files.items():
            rows, wanted = read_complete_rows(file.path), int(counts.get(name, 0))
            self._rewrite(file.path, rows[:wanted])
            if len(rows) < wanted:
                problems.append(f"{file.path} has {len(rows)} rows, and had {wanted} when the checkpoint was written")
        return problems

    def last_iteration(self) -> int:
        """The highest iteration in the rows; 0 if there are none."""
        return max((row.get("iteration", 0) for row in read_rows(self.directory / METRICS)), default=0)

    def close(self) -> None:
        """Close the files; a later row opens them again. Rows that still cannot be written are lost, with a warning."""
        for file in self._files.values():
            file.close()

    def _rewrite(self, path: Path, rows: list[bytes]) -> None:
        """Replace a file's content by these rows, atomically, if it differs."""
        if path.exists() and read_bytes(path) != b"".join(rows):
            write_atomically(path, b"".join(rows))


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Read the complete rows of a metrics file; none if it does not exist."""
    return [parsed for row in read_complete_rows(Path(path)) if (parsed := _parse(row)) is not None]


def _parse(row: bytes) -> dict[str, Any] | None:
    """Parse a row; None if it is not valid."""
    try:
        parsed = json.loads(row)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) and type(parsed.get("iteration", 0)) is int else None


def _plain(value: Any) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None
