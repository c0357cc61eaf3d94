"""G1: collectors in processes and on Ray that are killed, and the process that learns from them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

from faults import runs
from faults.programme import Outcome, Work, procedure
from faults.runs import RUN, Child, fresh, wait_for

UPDATES, COLLECTORS = 30, 4
MARKS = {"async": "inchworm.collect.async_collector", "ray": "ray::CollectorActor"}
"""What the command line of a collector's process contains."""


def command(engine: str, staleness: int, *, updates: int = UPDATES) -> list[str]:
    """A run of four collectors of two copies each."""
    flags = ["--collect.engine", engine, "--collect.staleness", str(staleness), "--collect.num-collectors", str(COLLECTORS)]
    flags += ["--collect.restarts", "1000", "--run.checkpoint-interval", "5"]
    flags += ["--collect.ray-cpus", "0.25"] if engine == "ray" else []
    return runs.train_command(*flags, workers=0, updates=updates, steps=64)


def collectors_of(child: Child, engine: str) -> list[int]:
    """The collectors' processes, among all that descend from the trainer."""
    found = []
    for pid in runs.descendants(child.pid):
        with contextlib.suppress(OSError):
            if MARKS[engine] in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.append(pid)
    return found


@procedure("G1", full=20, test=0)
def collectors_killed(work: Work) -> Outcome:
    """kill -9 of a random collector at random moments, in processes and on Ray, and of the process that learns.

    Must: the collector is back within 10 s; the final weights, metrics and checkpoints are those of collectors in one process (so that
    every rollout was learned from once); after the learner's death no process is left (the helpers of Ray
      itself: within two minutes), and the run resumes to the same bits.
    `count` collectors of each engine; a quarter as many learners.
    """
    outcome, rng = Outcome(), random.Random(work.seed)
    back: dict[str, list[float]] = {"async": [], "ray": []}
    expected = {stale: runs.undisturbed(work.scratch / f"undisturbed-{stale}", command("local", stale)) for stale in (0, 1)}
    for engine, stale in (("async", 1), ("ray", 0)):
        done = 0
        for number in range(work.count + 5):
            if done >= work.count:
                break
            done += _kill_collectors(
                fresh(work.scratch / f"{engine}-{number}"),
                engine,
                stale,
                work,
                rng,
                expected[stale],
                back[engine],
                outcome,
                work.count - done,
            )
        outcome.check(done >= work.count, f"{engine}: only {done} of {work.count} collectors could be killed")
        for number in range(max(1, work.count // 4)):
            _kill_learner(fresh(work.scratch / f"{engine}-learner-{number}"), engine, stale, rng, expected[stale], outcome)
    outcome.figures = {f"longest until replaced, {engine}": runs.longest(times) for engine, times in back.items()}
    return outcome


def _kill_collectors(
    directory: Path,
    engine: str,
    stale: int,
    work: Work,
    rng: random.Random,
    expected: dict[str, str],
    back: list[float],
    outcome: Outcome,
    most: int,
) -> int:
    """One run with up to five kills; return how many there were."""
    kills = 0
    with runs.started(command(engine, stale), directory) as child:
        wait_for(lambda: len(collectors_of(child, engine)) == COLLECTORS or not child.running(), runs.LIMIT)
        while kills < min(5, most) and child.running():
            time.sleep(rng.uniform(0.0, 0.4))
            pids = collectors_of(child, engine)
            if len(pids) < COLLECTORS:
                continue
            victim, began = rng.choice(pids), time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            kills += 1
            again = wait_for(lambda: not child.running() or len(set(collectors_of(child, engine)) - {victim}) == COLLECTORS, 60)  # noqa: B023
            took = time.monotonic() - began
            if child.running():
                outcome.check(again is not None and not work.late(took, 10.0), f"{engine}: replaced after {took:.1f} s")
                back.append(took)
        code = child.code_within(runs.LIMIT)
        different = runs.differences(runs.fingerprint(directory / RUN), expected)
        outcome.check(code == 0 and not different, f"{engine}: ended with {code}; these differ: {different}; {child.errors()[-300:]}")
    return kills


def _kill_learner(directory: Path, engine: str, stale: int, rng: random.Random, expected: dict[str, str], outcome: Outcome) -> None:
    """Kill the process that learns after its first checkpoint; then repeat the command."""
    with runs.started(command(engine, stale), directory) as child:
        wait_for(lambda: runs.last_iteration(directory / RUN / "metrics.jsonl") >= 5 or not child.running(), runs.LIMIT)
        time.sleep(rng.uniform(0.0, 0.3))
        mine, left = collectors_of(child, engine), runs.descendants(child.pid)
        if child.running():
            os.kill(child.pid, signal.SIGKILL)
            for pids, seconds in ((mine, 30), (left, 120)):  # two helpers of Ray itself wait a minute for their dead cluster
                gone = wait_for(lambda: all(map(runs.is_gone, pids)), seconds, 0.1)  # noqa: B023
                alive = [pid for pid in pids if not runs.is_gone(pid)]
                outcome.check(gone is not None, f"{engine}: {seconds} s after the learner's death these are left: {alive}")
    ended = runs.run(command(engine, stale), directory)
    different = runs.differences(runs.fingerprint(directory / RUN), expected)
    outcome.check(
        ended.code == 0 and not different, f"{engine}: resumed, ended with {ended.code}; these differ: {different}; {ended.error[-300:]}"
    )
