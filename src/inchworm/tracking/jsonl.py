"""Metrics as lines of JSON in the run's directory. Serves the loop; what it writes is the run's own record.

`metrics.jsonl` holds what the config and the seed decide, `timing.jsonl` what the clock decides (names that begin with `timing/`),
so that two equal runs have equal metrics, byte for byte, interrupted or not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from inchworm.files import write_atomically

METRICS = "metrics.jsonl"
TIMING = "timing.jsonl"
TIMING_PREFIX = "timing/"
_COUNTERS = ("iteration", "env_steps")


class JsonlTracker:
    """Appends one row per call to each file, flushed at once, so that a killed run loses no finished row."""

    def __init__(self, run_dir: str | Path) -> None:
        """Rows go to `run_dir`, after those that are there."""
        self.directory = Path(run_dir)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, BinaryIO] = {}

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
            path.write_text(yaml.safe_dump(dict(params), sort_keys=False), encoding="utf-8")

    def log_artifact(self, path: Path) -> None:
        """Nothing to do: files of the run lie in its directory already."""

    def truncate_after(self, iteration: int) -> None:
        """Drop the rows after `iteration`, and a row that a kill cut short: the run goes on from there and writes them again."""
        self.close()
        for name in (METRICS, TIMING):
            path = self.directory / name
            if path.exists():
                rows = path.read_bytes().splitlines(keepends=True)
                kept = b"".join(row for row in rows if _is_kept(row, iteration))
                if kept != b"".join(rows):
                    write_atomically(path, kept)

    def close(self) -> None:
        """Close the files; a later row opens them again."""
        while self._files:
            self._files.popitem()[1].close()

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        if name not in self._files:
            self._files[name] = _open_after_last_row(self.directory / name)
        self._files[name].write(json.dumps(row).encode() + b"\n")
        self._files[name].flush()


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The complete rows of such a file; none if there is no file."""
    path = Path(path)
    rows = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [parsed for row in rows if (parsed := _parse(row)) is not None]


def _open_after_last_row(path: Path) -> BinaryIO:
    """The file for appending, without the half row that a killed writer may have left."""
    content = path.read_bytes() if path.exists() else b""
    file = path.open("ab")
    if content and not content.endswith(b"\n"):
        file.truncate(content.rfind(b"\n") + 1)
    return file


def _is_kept(row: bytes, iteration: int) -> bool:
    parsed = _parse(row)
    return parsed is not None and int(parsed.get("iteration", 0)) <= iteration


def _parse(row: bytes) -> dict[str, Any] | None:
    """A row, or None for one that was cut short."""
    if not row.endswith(b"\n"):
        return None
    try:
        parsed = json.loads(row)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _plain(value: Any) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None
