"""A7: two trainers on one run."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path

from faults import durability_runs as runs
from faults.programme import Outcome, Work, procedure

REFUSED_SECONDS = 1.0
LONG = 10_000_000
STALE = ("its own", "of a living stranger", "garbage", "empty")
"""What stands in the lock file that nobody holds."""


@procedure(
    "A7",
    title="a second trainer on a run (train, resume), and locks left by killed ones, with and without env workers",
    must="the second refuses within 1 s and names the holder's process; every stale lock is ignored",
    full=20,
    test=1,
    alone=True,
)
def two_trainers(work: Work) -> Outcome:
    """Each round: a holder, a second one that must go, a kill -9 of the holder, a third one that must start at once."""
    outcome, waits, lives = Outcome(), [], []
    start_up = _start_up(work.scratch)
    for number in work.each():
        directory = work.scratch / f"round-{number}"
        directory.mkdir()
        workers = 2 if number % 3 == 2 else 0
        arguments = [*runs.arguments(LONG // runs.BATCH), "--num-workers", str(workers)]
        holder = _start(arguments, directory)
        try:
            _until_training(holder, directory / runs.NAME)
            second = ["resume", runs.NAME] if number % 2 else arguments
            began = time.monotonic()
            ended = runs.run(runs.command(second), directory)
            lives.append(time.monotonic() - began)
            waits.append(max(0.0, lives[-1] - start_up))
            outcome.check(
                ended.code == 1 and str(holder.pid) in ended.error and waits[-1] <= REFUSED_SECONDS and holder.poll() is None,
                f"round {number}, {second[0]}: code {ended.code} after {lives[-1]:.2f} s, holder {holder.pid}: {ended.error[-200:]}",
            )
        finally:
            holder.kill()
            holder.wait(timeout=10)
        problem = _stale_problem(directory, arguments, STALE[number % len(STALE)])
        if outcome.check(not problem, f"round {number}, a stale lock ({STALE[number % len(STALE)]}): {problem}"):
            shutil.rmtree(directory)
    outcome.figures["longest time to refuse"] = f"{max(waits):.2f} s after start-up; {max(lives):.2f} s with it"
    outcome.notes.append(
        f"start-up ({start_up:.2f} s here) is the median of how long the command takes to print its config, which is subtracted"
    )
    return outcome


def _start_up(scratch: Path) -> float:
    """How long the command takes to start, read its arguments and end."""
    taken = []
    for _ in range(3):
        began = time.monotonic()
        runs.run(runs.command(["config", "CartPole-v1"]), scratch)
        taken.append(time.monotonic() - began)
    return statistics.median(taken)


def _start(arguments: list[str], directory: Path) -> subprocess.Popen[bytes]:
    with (directory / "out").open("wb") as out:
        return subprocess.Popen(
            runs.command(arguments), cwd=directory, env=runs.environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )


def _until_training(process: subprocess.Popen[bytes], run: Path) -> None:
    """Wait for the first checkpoint, so that there is something to go on from."""
    until = time.monotonic() + runs.LIMIT
    while time.monotonic() < until and process.poll() is None:
        if any(path.name.startswith("step-") for path in run.glob("checkpoints/*")):
            return
        time.sleep(0.01)
    raise RuntimeError(f"the holder did not get as far as its first checkpoint: {(run.parent / 'out').read_text()[-500:]}")


def _stale_problem(directory: Path, arguments: list[str], content: str) -> str:
    """Whether the run of a killed trainer can be gone on with at once; whatever stands in its lock file."""
    lock = directory / runs.NAME / "lock"
    if content != "its own":
        lock.write_text({"of a living stranger": f"{os.getppid()}\n", "garbage": "\0\xff!", "empty": ""}[content])
    before = runs.last_iteration(directory / runs.NAME / "metrics.jsonl")
    target = (before + 2) * runs.BATCH
    ended = runs.run(runs.command([*arguments, "--run.total-timesteps", str(target), "--quiet"][:]), directory)
    if ended.code:
        return f"code {ended.code}: {ended.error[-300:]}"
    after = runs.last_iteration(directory / runs.NAME / "metrics.jsonl")
    return "" if after >= before + 2 else f"it stopped at iteration {after}, and {before} had been reached before"
