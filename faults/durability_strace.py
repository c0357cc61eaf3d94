"""A function in a forked child whose system calls strace records, or makes fail one at a time.

The libraries are imported once for hundreds of children. A child waits until strace is attached, so that recording starts with the
function and not with the start of Python. strace counts calls by name and thread, so a point is (name, number): the number-th call of
that name in some thread. Only points whose call touches the directory under test are used.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

from faults import runs
from faults.runs import Ended

CALLS = ("mkdir", "mkdirat", "openat", "write", "fsync", "fdatasync", "rename", "renameat", "renameat2") + (
    "unlink", "unlinkat", "rmdir", "ftruncate"
)  # fmt: skip
_LINE = re.compile(r"^(\d+) +(\w+)\((.*)")


def run_forked(function: Callable[[], int], directory: Path, *, strace: Sequence[str] = (), limit: float = runs.LIMIT) -> Ended:
    """Run `function` in a forked child in `directory`, with a strace of these options attached to it."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        (waiting, release), (ready, tell) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            os.close(release)
            _run_in_child(function, directory, (tell, waiting), out.fileno(), error.fileno())
        os.close(waiting)
        os.close(tell)
        watcher, status = None, None
        try:
            os.read(ready, 1)  # calls before this are not counted
            os.close(ready)
            if strace:
                watcher = subprocess.Popen(
                    ["strace", "-p", str(child), *strace], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
                )
                attached = runs.wait_for(lambda: "TracerPid:\t0\n" not in Path(f"/proc/{child}/status").read_text(), 60, 0.001)
                if attached is None:
                    raise RuntimeError(f"strace could not attach to process {child}")
            os.write(release, b"!")

            def has_ended() -> bool:
                nonlocal status
                pid, code = os.waitpid(child, os.WNOHANG)
                status = code if pid else None
                return bool(pid)

            runs.wait_for(has_ended, limit, 0.001)
        finally:
            os.close(release)
            if status is None:
                os.kill(child, 9)
                status = os.waitpid(child, 0)[1]
            if watcher is not None:
                try:
                    watcher.communicate(timeout=30)
                except subprocess.TimeoutExpired:
                    watcher.kill()
                    watcher.communicate()
        for file in (out, error):
            file.seek(0)
        return Ended(os.waitstatus_to_exitcode(status), out.read().decode(errors="replace"), error.read().decode(errors="replace"))


def _run_in_child(function: Callable[[], int], directory: Path, gate: tuple[int, int], out: int, error: int) -> NoReturn:
    """Report on `gate[0]` that the child is ready, wait on `gate[1]`, run the function and exit with its code."""
    code = 70
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(error, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.chdir(directory)
        os.write(gate[0], b"!")
        if os.read(gate[1], 1):
            code = function()
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


@cache
def _main() -> Callable[[Sequence[str]], int]:
    """The command line, run once here so that children need not import anything."""
    from inchworm.cli.main import main

    before = Path.cwd()
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(directory)
        try:
            main([*runs.arguments(1), "--quiet"])
        finally:
            os.chdir(before)
    return main


def inchworm(arguments: Sequence[str]) -> Callable[[], int]:
    """The command line as a function for a forked child."""
    main = _main()
    return lambda: main(list(arguments))


@dataclass(frozen=True)
class Call:
    """One system call of a log."""

    thread: int
    name: str
    text: str

    @property
    def failed(self) -> bool:
        return " = -1 " in self.text


@dataclass(frozen=True, order=True)
class Point:
    """The `number`-th call of `name`."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name} {self.number}"


@cache
def possible() -> bool:
    """Whether strace is installed and may attach to processes."""
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, timeout=20).returncode == 0


def _options(log: Path, calls: Iterable[str]) -> list[str]:
    names = ",".join(f"?{name}" for name in calls)  # "?" accepts names that this machine lacks
    return ["-f", "-y", "-qq", "-s", "0", "-o", str(log), "-e", f"trace={names}"]


def trace(function: Callable[[], int], directory: Path, log: Path, *, calls: Iterable[str] = CALLS) -> list[Call]:
    """Run a function in a child and return its calls in the order in which they began."""
    ended = run_forked(function, directory, strace=_options(log, calls))
    if ended.code:
        raise RuntimeError(f"the traced child ended with code {ended.code}: {ended.error[-500:]}")
    matches = map(_LINE.match, log.read_text(errors="replace").splitlines())
    return [Call(int(match[1]), match[2], match[3]) for match in matches if match]


def points(calls: Sequence[Call], below: Path) -> list[Point]:
    """Every point at which a call touches something below a directory, in the order of the log."""
    counts: Counter[tuple[int, str]] = Counter()
    found: dict[Point, None] = {}
    for call in calls:
        counts[call.thread, call.name] += 1
        if str(below) in call.text or f'"{below.name}' in call.text:  # an absolute path, or one relative to the child's directory
            found[Point(call.name, counts[call.thread, call.name])] = None
    return list(found)


def inject(
    run: Callable[[], int], directory: Path, point: Point, fault: str, log: Path, *, onwards: bool = False
) -> tuple[Ended, list[str]]:
    """Run a function in a child with a fault (`signal=SIGKILL`, `error=ENOSPC`) at a point, or from there on.

    Returns how it ended, and the calls that were made to fail.
    """
    rule = f"inject={point.name}:{fault}:when={point.number}{'+' if onwards else ''}"
    ended = run_forked(run, directory, strace=[*_options(log, [point.name]), "-e", rule])
    return ended, [line for line in log.read_text(errors="replace").splitlines() if "INJECTED" in line]
