"""C8: a machine with almost no shared memory, descriptors or processes left."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from faults.processes_tools import (
    RUN,
    WORLD,
    descendants,
    differences,
    fingerprint,
    fresh,
    seconds,
    shared_names,
    started,
    train_command,
    undisturbed,
)
from faults.programme import Outcome, Work, procedure

MOUNT = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
STRANGER = 54_000 + os.getpid() % 1000
"""A user id that nobody has: the limit on processes counts per user, and does not bind root."""


@dataclass(frozen=True)
class Case:
    """One limit: what stands before the trainer's command."""

    name: str
    prefix: tuple[str, ...]
    flags: tuple[str, ...] = ()
    must_work: bool = False
    """Whether an error, however clear, is too little: nothing that the trainer needs is missing."""


FILES = "+dac_override"  # the interpreter may lie where only root may look
AS_STRANGER = ("setpriv", f"--reuid={STRANGER}", "--clear-groups", f"--inh-caps={FILES}", f"--ambient-caps={FILES}")
SMALL_SHARED = ("unshare", "-m", "sh", "-c", MOUNT, "sh")
CASES = (
    Case("10 descriptors", ("prlimit", "--nofile=10:10")),
    Case("64 descriptors", ("prlimit", "--nofile=64:64"), must_work=True),
    Case("/dev/shm of 1 MB", SMALL_SHARED, must_work=True),
    Case("/dev/shm of 1 MB, rows of 4 MB", SMALL_SHARED, ("big",), must_work=True),
    Case("32 descriptors", ("prlimit", "--nofile=32:32")),
    Case("20 descriptors", ("prlimit", "--nofile=20:20")),
    Case("14 descriptors", ("prlimit", "--nofile=14:14")),
    *(Case(f"{number} processes", (*AS_STRANGER, "prlimit", f"--nproc={number}:{number}")) for number in (1, 2, 4)),
    Case("8 processes", (*AS_STRANGER, "prlimit", "--nproc=8:8"), must_work=True),
)


@functools.cache
def _may() -> bool:
    """Whether this machine lets us mount, limit and change the user."""
    if any(shutil.which(name) is None for name in ("unshare", "prlimit", "setpriv")):
        return False
    trials = ([*SMALL_SHARED, "true"], [*AS_STRANGER, "true"])
    return all(subprocess.run(trial, capture_output=True, timeout=10, check=False).returncode == 0 for trial in trials)


@procedure(
    "C8",
    title="/dev/shm of 1 MB, few file descriptors, few processes",
    must="it works with the same bits, or one clear line; no signal, no hang, no worker left",
    full=len(CASES),
    test=1,
    needs="unshare, prlimit and setpriv, with the right to use them",
    possible=_may,
)
def limits(work: Work) -> Outcome:
    """A small run with 4 workers under each limit."""
    outcome = Outcome()
    kinds = {case.flags for case in CASES[: work.count]}
    wanted = {flags: undisturbed(_command(flags), fresh(work.scratch / f"undisturbed{len(flags)}")) for flags in kinds}
    times: list[float] = []
    worked: list[str] = []
    for number in work.each():
        case = CASES[number % len(CASES)]
        problem, works = _one(case, fresh(work.scratch / f"{number}"), wanted[case.flags], times)
        outcome.check(not problem, f"{case.name}: {problem}")
        worked += [case.name] if works else []
    outcome.figures = {"longest run": seconds(times, 1), "works under": "; ".join(worked)}
    outcome.notes.append(
        "rows of 4 MB: observations of 256 kB on 8 lanes; the limit on processes is set for a user id that nobody else has"
    )
    return outcome


def _command(flags: Sequence[str]) -> list[str]:
    if "big" in flags:
        command = train_command("--policy.hidden-sizes", "4", updates=2, steps=16)
        return [part.replace(WORLD, "faults.processes_worlds:Big") for part in command]
    return train_command(updates=3)


def _one(case: Case, directory: Path, wanted: dict[str, str], times: list[float]) -> tuple[str, bool]:
    """What was not well, and whether the run worked."""
    for part in (directory.parent, directory):
        part.chmod(0o777)
    names, began = shared_names(), time.monotonic()
    with started([*case.prefix, *_command(case.flags)], directory, HOME=str(directory)) as child:
        code = child.code_within(60)
        left = descendants(child.pid)
        said = child.said()
    times.append(time.monotonic() - began)
    if code is None:
        return f"it hung; {said[-300:]}", False
    if left or shared_names() - names:
        return f"it left processes {left} or names {sorted(shared_names() - names)[:3]}", False
    if code == 0:
        different = differences(fingerprint(directory / RUN), wanted)
        return (f"these files differ: {different}" if different else ""), True
    return _judge_error(case, code, said), False


def _judge_error(case: Case, code: int, said: str) -> str:
    if code < 0 or code > 128:
        return f"a signal ended it: code {code}; {said[-300:]}"
    if case.must_work:
        return f"it must work, but ended with {code}: {said[-500:]}"
    clear = re.search(r"^inchworm: .{20,}", said, re.MULTILINE)
    if "Traceback" in said or clear is None:
        return f"no clear line: {said[-700:]}"
    return ""
