"""Serves section A: a function in a forked child, under strace where wanted. The libraries are imported once for hundreds of children.

The child waits until strace has hold of it, so that what is counted begins with the function, not with Python's own start.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import BinaryIO

from faults.durability_runs import LIMIT, Ended, arguments

FAILED = 70


def run_forked(function: Callable[[], int], directory: Path, *, strace: Sequence[str] = (), limit: float = LIMIT) -> Ended:
    """Run `function` in a child of its own in `directory`; `strace` are the options of a strace that watches it."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        (waiting, release), (ready, tell) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            os.close(release)
            _be_child(function, directory, (tell, waiting), out.fileno(), error.fileno())
        os.close(waiting)
        os.close(tell)
        watcher = None
        try:
            os.read(ready, 1)  # what it does before is not to be counted
            os.close(ready)
            watcher = _watch(child, strace) if strace else None
            os.write(release, b"!")
            code = _wait(child, limit)
        finally:
            os.close(release)
            _end(child, watcher)
        return Ended(code, _text(out), _text(error))


def _be_child(function: Callable[[], int], directory: Path, gate: tuple[int, int], out: int, error: int) -> None:
    """The child's whole life; never returns. `gate` is where it says that it is ready, and where it waits."""
    code = FAILED
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


def _watch(child: int, options: Sequence[str]) -> subprocess.Popen[bytes]:
    """A strace that has hold of the child."""
    watcher = subprocess.Popen(
        ["strace", "-p", str(child), *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    until = time.monotonic() + 20
    while time.monotonic() < until and watcher.poll() is None:
        if "TracerPid:\t0\n" not in Path(f"/proc/{child}/status").read_text():
            return watcher
        time.sleep(0.001)
    watcher.kill()
    raise RuntimeError(f"strace did not get hold of process {child}: {watcher.communicate()[1].decode(errors='replace')[-300:]}")


def _wait(child: int, limit: float) -> int:
    """The child's exit code, or minus the signal that killed it; one that hangs is killed."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, 9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _end(child: int, watcher: subprocess.Popen[bytes] | None) -> None:
    """Nobody stays: the child has gone unless something went wrong above, and strace goes with it."""
    if watcher is not None:
        try:
            watcher.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            watcher.kill()
            watcher.communicate()
    try:
        if os.waitpid(child, os.WNOHANG)[0] == 0:
            os.kill(child, 9)
            os.waitpid(child, 0)
    except ChildProcessError:
        return


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def inchworm(arguments: Sequence[str]) -> Callable[[], int]:
    """The command line as a function for a forked child."""
    from inchworm.cli.main import main

    _import_all(main)
    return lambda: main(list(arguments))


@cache
def _import_all(main: Callable[[Sequence[str]], int]) -> None:
    """Run the command once here, so that children find imported what it needs."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(directory)
        try:
            main([*arguments(1), "--quiet"])
        finally:
            os.chdir(before)
