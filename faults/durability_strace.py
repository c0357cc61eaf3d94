"""Serves section A: system calls of a child, seen and made to fail one at a time with strace.

strace counts calls by name and by thread, so a point is (name, number): the number-th call of that name in some thread. Points are
those whose call touches the directory under test; what Python itself opens and writes at its start is none of our business.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from faults import durability_runs as runs
from faults.durability_fork import run_forked

CALLS = (
    "mkdir",
    "mkdirat",
    "openat",
    "write",
    "fsync",
    "fdatasync",
    "rename",
    "renameat",
    "renameat2",
    "unlink",
    "unlinkat",
    "rmdir",
    "ftruncate",
)
_LINE = re.compile(r"^(\d+) +(\w+)\((.*)")


@dataclass(frozen=True)
class Call:
    """One system call, as the log has it."""

    thread: int
    name: str
    text: str

    @property
    def failed(self) -> bool:
        """Whether it returned an error."""
        return " = -1 " in self.text


@dataclass(frozen=True, order=True)
class Point:
    """The `number`-th call of `name`."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name} number {self.number}"


@cache
def possible() -> bool:
    """Whether strace is here and may trace."""
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, timeout=20).returncode == 0


def trace(function: Callable[[], int], directory: Path, log: Path, *, calls: Iterable[str] = CALLS) -> list[Call]:
    """Run a function in a child to its end and give back the calls that it made."""
    ended = run_forked(function, directory, strace=_options(log, calls))
    if ended.code:
        raise RuntimeError(f"the traced child ended with code {ended.code}: {ended.error[-500:]}")
    return read_log(log)


def _options(log: Path, calls: Iterable[str]) -> list[str]:
    names = ",".join(f"?{name}" for name in calls)  # "?" lets a name that this machine lacks pass
    return ["-f", "-y", "-qq", "-s", "0", "-o", str(log), "-e", f"trace={names}"]


def read_log(log: Path) -> list[Call]:
    """The calls of a log, in the order in which they began."""
    found = []
    for line in log.read_text(errors="replace").splitlines():
        match = _LINE.match(line)
        if match:
            found.append(Call(int(match[1]), match[2], match[3]))
    return found


def points(calls: Sequence[Call], below: Path) -> list[Point]:
    """Every point at which a call touches something below a directory, in the order of the log."""
    counts: Counter[tuple[int, str]] = Counter()
    found: dict[Point, None] = {}
    for call in calls:
        counts[call.thread, call.name] += 1
        if str(below) in call.text or f'"{below.name}' in call.text:  # an absolute path, or one that begins where the child is
            found[Point(call.name, counts[call.thread, call.name])] = None
    return list(found)


def inject(
    function: Callable[[], int], directory: Path, point: Point, fault: str, log: Path, *, onwards: bool = False
) -> tuple[runs.Ended, list[str]]:
    """Run a function in a child with a fault (`signal=SIGKILL`, `error=ENOSPC`) at a point, or from there on.

    Gives how it ended, and the calls that were made to fail.
    """
    rule = f"inject={point.name}:{fault}:when={point.number}{'+' if onwards else ''}"
    ended = run_forked(function, directory, strace=[*_options(log, [point.name]), "-e", rule])
    return ended, [line for line in log.read_text(errors="replace").splitlines() if "INJECTED" in line]
