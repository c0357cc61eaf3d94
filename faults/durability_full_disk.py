"""A4: a disk that is really full: a small tmpfs in a mount namespace of our own."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from faults import durability_runs as runs
from faults.durability_child import fill
from faults.programme import Outcome, Work, procedure

UPDATES = 8
SIZE = "8m"


@cache
def possible() -> bool:
    """Whether we may mount in a namespace of our own."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*_unshare(), "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, timeout=20).returncode == 0


def _unshare() -> list[str]:
    return ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]


@procedure(
    "A4",
    title="a really full disk (tmpfs of 8 MB): for a while in the middle, to the end, from the start; then freed",
    must="training goes on, and the first save after freeing succeeds; full to the end: exit code not 0 and a message; "
    "then the same command ends with the bits of the undisturbed run",
    full=20,
    test=1,
    needs="unshare --mount with tmpfs",
    possible=possible,
)
def full_disk(work: Work) -> Outcome:
    """Rounds in turns: full for three updates, full to the end, full before the start."""
    outcome = Outcome()
    expected = runs.undisturbed(work.scratch / "undisturbed", runs.arguments(UPDATES))
    rounds: tuple[Callable[[Path, int], str], ...] = (_for_a_while, _to_the_end, _from_the_start)
    for number in work.each():
        mount = work.scratch / f"disk-{number}"
        mount.mkdir()
        ended = subprocess.run(
            [*_unshare(), sys.executable, "-P", "-c", _PROGRAM, str(runs.HERE.parent), str(mount), str(number % len(rounds)), str(number)],
            env=runs.environment(), capture_output=True, text=True, timeout=3 * runs.LIMIT,
        )  # fmt: skip
        lines = ended.stdout.splitlines()
        problem = (
            lines[-1].removeprefix("problem: ") if lines and lines[-1].startswith("problem: ") else ended.stderr[-400:] or "it said nothing"
        )
        if lines and lines[-1] == "problem: ":
            problem = ""
        different = _different(work.scratch / f"disk-{number}.copy", expected) if not problem else ""
        outcome.check(not problem and not different, f"round {number}: {problem or 'other bits in ' + different}")
    return outcome


_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from faults import durability_full_disk
print("problem: " + " ".join(durability_full_disk.one_round(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])).split()))
"""


def one_round(mount: Path, kind: int, number: int) -> str:
    """In the namespace: mount, run, free, run; what was wrong. The finished run is copied beside the mount, to be compared outside."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(mount)], check=True, capture_output=True)
    problem = (_for_a_while, _to_the_end, _from_the_start)[kind](mount, 2 + number // 3 % 3)
    if problem:
        return problem
    left = runs.leftovers(mount)
    shutil.copytree(mount / runs.NAME, mount.with_suffix(".copy"))
    return f"left behind: {', '.join(left[:3])}" if left else ""


def _different(copy: Path, expected: dict[str, str]) -> str:
    return runs.differences(runs.fingerprint(copy), expected)


def _for_a_while(mount: Path, at: int) -> str:
    """Full from one rollout to another: the run ends well, and says what was wrong meanwhile."""
    hooks = ["fill", str(at), str(at + 3), str(mount / "filler")]
    ended = runs.run(runs.command(runs.arguments(UPDATES), hooks=hooks), mount)
    if ended.code:
        return f"it ended with code {ended.code}: {ended.error[-300:]}"
    return "" if _says_full(ended.error) else f"nothing was said of a full disk: {ended.error[-300:]}"


def _to_the_end(mount: Path, at: int) -> str:
    """Full from one rollout on: a code and a message; freed, the same command makes up for all of it."""
    hooks = ["fill", str(at), "-1", str(mount / "filler")]
    ended = runs.run(runs.command(runs.arguments(UPDATES), hooks=hooks), mount)
    if ended.code <= 0 or not _says_full(ended.error):
        return f"full to the end: code {ended.code}: {ended.error[-300:]}"
    checkpoint = runs.newest(mount / runs.NAME)
    if checkpoint is None or checkpoint.step < at - 1:
        return f"the checkpoint before is gone: {checkpoint and checkpoint.step}, {at - 1} had been saved"
    return _freed(mount)


def _from_the_start(mount: Path, at: int) -> str:
    """Full before anything: refused with a message."""
    del at
    fill(mount / "filler")
    ended = runs.run(runs.command(runs.arguments(UPDATES)), mount)
    if ended.code <= 0 or not _says_full(ended.error):
        return f"full from the start: code {ended.code}: {ended.error[-300:]}"
    return _freed(mount)


def _freed(mount: Path) -> str:
    (mount / "filler").unlink()
    ended = runs.run(runs.command(runs.arguments(UPDATES)), mount)
    return f"after freeing: code {ended.code}: {ended.error[-300:]}" if ended.code else ""


def _says_full(error: str) -> bool:
    """One message, not a traceback, with the error and a path."""
    return os.strerror(errno.ENOSPC) in error and runs.NAME in error and "Traceback" not in error
