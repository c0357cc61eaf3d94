"""A4: a disk that is really full: a small tmpfs in a private mount namespace.

`python -m faults.durability_full_disk MOUNT KIND NUMBER`, in that namespace, runs one round and prints what went wrong.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from faults import runs
from faults.durability_child import fill
from faults.programme import Outcome, Work, child_environment, procedure

UPDATES = 8
SIZE = "8m"
KINDS = ("for a while", "to the end", "from the start")
UNSHARE = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--mount", "--map-root-user")


@cache
def possible() -> bool:
    """Whether this machine lets us mount in a private namespace."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, timeout=20).returncode == 0


@procedure("A4", full=20, test=1, needs="unshare --mount with tmpfs", possible=possible)
def full_disk(work: Work) -> Outcome:
    """a really full disk (tmpfs of 8 MB): for a while in the middle, to the end, from the start; then freed.

    Must: training continues, and the first save after freeing succeeds; full to the end: exit code not 0 and a message; then the same
        command ends with the bits of the undisturbed run.
    Rounds of the three kinds in turns.
    """
    outcome = Outcome()
    expected = runs.undisturbed(work.scratch / "undisturbed", runs.command(runs.arguments(UPDATES)))
    for number in work.each():
        mount = work.scratch / f"disk-{number}"
        mount.mkdir()
        child = [sys.executable, "-m", "faults.durability_full_disk", str(mount), str(number % len(KINDS)), str(number)]
        ended = subprocess.run([*UNSHARE, *child], env=child_environment(), capture_output=True, text=True, timeout=3 * runs.LIMIT)
        problem = ended.stdout.strip() or (f"code {ended.returncode}: {ended.stderr[-400:]}" if ended.returncode else "")
        if not problem:
            different = runs.differences(runs.fingerprint(mount.with_suffix(".copy")), expected)
            problem = f"other bits in {different}" if different else ""
        outcome.check(not problem, f"round {number}, full {KINDS[number % len(KINDS)]}: {problem}")
    return outcome


def one_round(mount: Path, kind: str, at: int) -> str:
    """Mount, run with a full disk, free, run again; returns what was wrong. The finished run is copied out of the mount."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(mount)], check=True, capture_output=True)
    filler = mount / "filler"
    hooks = {"for a while": ["fill", str(at), str(at + 3), str(filler)], "to the end": ["fill", str(at), "-1", str(filler)]}
    if kind == "from the start":
        fill(filler)
    output = mount.with_suffix(".output")  # the child's own output must not need room on the full disk
    ended = runs.run(runs.command([*runs.arguments(UPDATES), "--run.directory", str(mount)], hooks=hooks.get(kind, ())), output)
    full = os.strerror(errno.ENOSPC) in ended.error and runs.RUN in ended.error and "Traceback" not in ended.error
    if (ended.code == 0) != (kind == "for a while") or ended.code < 0 or not full:
        return f"code {ended.code}: {ended.error[-300:]}"
    if kind == "to the end":
        checkpoint = runs.newest(mount / runs.RUN)
        if checkpoint is None or checkpoint.step < at - 1:
            return f"the newest checkpoint is of step {checkpoint and checkpoint.step}, but {at - 1} had been saved"
    if kind != "for a while":
        filler.unlink()
        ended = runs.run(runs.command([*runs.arguments(UPDATES), "--run.directory", str(mount)]), output)
        if ended.code:
            return f"after freeing: code {ended.code}: {ended.error[-300:]}"
    shutil.copytree(mount / runs.RUN, mount.with_suffix(".copy"))
    return runs.leftovers(mount)


if __name__ == "__main__":
    sys.stdout.write(" ".join(one_round(Path(sys.argv[1]), KINDS[int(sys.argv[2])], 2 + int(sys.argv[3]) // 3 % 3).split()))
