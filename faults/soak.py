"""G5: a long run with four workers, one of them killed every minute, a checkpoint every minute."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from faults.processes_tools import (
    RUN,
    Child,
    count_descriptors,
    fresh,
    shared_names,
    started,
    status_number,
    train_command,
    wait_for,
    workers_of,
    zombies,
)
from faults.programme import Outcome, Work, procedure

WORKERS = 4
MEANT_MINUTES = 60
"""From this length on the slope of memory and the drift of speed mean something and are judged; before it they are only measured."""
WARM_UP_MINUTES = 10
SLOPE_MB, DRIFT = 1.0, 0.02


@dataclass
class Samples:
    """What was seen of the trainer, once a second or more often."""

    moments: list[float] = field(default_factory=list)  # s since the first
    resident: list[float] = field(default_factory=list)  # MB
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    zombies: dict[int, float] = field(default_factory=dict)  # process -> when it was first seen dead
    longest_zombie: float = 0.0  # s
    saved: set[str] = field(default_factory=set)

    def take(self, child: Child, moment: float) -> None:
        """Look at the trainer."""
        self.moments.append(moment)
        self.resident.append(status_number(child.pid, "VmRSS") / 1024)
        self.descriptors.append(count_descriptors(child.pid))
        self.threads.append(status_number(child.pid, "Threads"))
        self.zombies = {pid: self.zombies.get(pid, moment) for pid in zombies(child.pid)}
        self.longest_zombie = max([self.longest_zombie, *(moment - since for since in self.zombies.values())])
        self.saved |= {path.name for path in (child.directory / RUN / "checkpoints").glob("step-*")}

    def after(self, moment: float) -> int:
        """The number of the first sample after a moment."""
        return next((index for index, each in enumerate(self.moments) if each >= moment), 0)


@procedure(
    "G5",
    title="A soak of so many minutes: 4 workers, one killed every minute, a checkpoint every minute",
    must="memory grows at most 1 MB an hour after 10 minutes, descriptors, threads and /dev/shm flat, speed drifts at most 2 %, no error",
    full=480,
    usual=3,
    test=0,
)
def soak(work: Work) -> Outcome:
    """`count` minutes."""
    return soak_for(60.0 * work.count, work)


def soak_for(length: float, work: Work) -> Outcome:
    """A soak of `length` seconds; below ten minutes kills and checkpoints come every tenth of it."""
    outcome = Outcome()
    every = min(60.0, length / 10)
    interval = max(1, round(every / _seconds_per_iteration(fresh(work.scratch / "pilot"))))
    directory, names, samples = fresh(work.scratch / "soak"), shared_names(), Samples()
    kills: list[int] = []
    with started(_command(interval), directory) as child:
        _begin(child)
        _watch(child, length, every, samples, kills, work)
        alive = wait_for(lambda: len(workers_of(child.pid)) == WORKERS, 10.0) is not None
        outcome.check(alive, f"at the end the run or its workers were gone: {child.said()[-300:]}")
        if child.running():
            os.kill(child.pid, signal.SIGINT)
        code, said = child.code_within(30), child.said()
    outcome.check(code == 130 and "Traceback" not in said and "inchworm: " not in said, f"it ended with {code}: {said[-300:]}")
    _judge(outcome, samples, length, every, len(kills), names, directory)
    return outcome


def _command(interval: int) -> list[str]:
    """A run that has no end of its own. The bound on restarts is raised, because ten kills in ten minutes are all it allows."""
    flags = ("--run.checkpoint-interval", str(interval), "--env.worker-restarts", "30")
    return train_command(*flags, workers=WORKERS, updates=10**9, steps=128)


def _begin(child: Child) -> None:
    """Wait until the run has iterated once, and holds all files that it will."""
    rows = child.directory / RUN / "metrics.jsonl"
    if wait_for(lambda: (rows.exists() and rows.stat().st_size) or not child.running(), 60) is None or not child.running():
        raise RuntimeError(f"the run did not begin: {child.said()[-500:]}")


def _seconds_per_iteration(directory: Path) -> float:
    """How long an iteration takes here, for a checkpoint a minute: intervals are counted in iterations."""
    with started(_command(0), directory) as child:
        _begin(child)
        time.sleep(2.0)
    return statistics.median(row["seconds"] for row in _timing(directory))


def _timing(directory: Path) -> list[dict[str, float]]:
    lines = (directory / RUN / "timing.jsonl").read_text().splitlines()
    return [{name.rpartition("/")[2]: value for name, value in json.loads(line).items()} for line in lines if line.endswith("}")]


def _watch(child: Child, length: float, every: float, samples: Samples, kills: list[int], work: Work) -> None:
    """Sample and kill, until the time is over or the run is."""
    who = random.Random(work.seed)
    pause = min(1.0, length / 100)
    began, next_kill = time.monotonic(), every / 2
    for number in work.each(round(length / pause)):
        time.sleep(max(0.0, began + number * pause - time.monotonic()))
        if not child.running():
            return
        moment = time.monotonic() - began
        samples.take(child, moment)
        victims = workers_of(child.pid)
        if moment >= next_kill and len(victims) == WORKERS:  # the one before has been replaced
            kills.append(who.choice(victims))
            os.kill(kills[-1], signal.SIGKILL)
            next_kill = max(next_kill + every, moment)


def _judge(outcome: Outcome, samples: Samples, length: float, every: float, kills: int, names: set[str], directory: Path) -> None:
    first = samples.after(min(60.0 * WARM_UP_MINUTES, length / 5))
    for name in ("descriptors", "threads"):
        early, late = _early_and_late(getattr(samples, name)[first:])
        outcome.check(late <= early, f"{name}: {early:g} at first, {late:g} at last")
    outcome.check(samples.longest_zombie <= 5.0, f"a zombie for {samples.longest_zombie:.1f} s")
    outcome.check(not shared_names() - names, f"left in /dev/shm: {sorted(shared_names() - names)[:3]}")
    due = length / max(every, 10.0)  # of a soak of seconds one is enough: a worker takes a second or more to come back
    outcome.check(kills >= max(1, due - 1), f"only {kills} kills")
    outcome.check(len(samples.saved) >= max(1, (0.9 if every >= 60 else 0.5) * due), f"only {len(samples.saved)} checkpoints were seen")
    slope = slope_of(samples.moments[first:], samples.resident[first:]) * 3600
    drift = _drift(directory, length)
    if length >= 60 * MEANT_MINUTES:
        outcome.check(slope <= SLOPE_MB, f"memory grew by {slope:.2f} MB an hour")
        outcome.check(abs(drift) <= DRIFT, f"speed drifted by {100 * drift:+.1f} %")
    else:
        outcome.notes.append(
            f"a soak of {length / 60:g} minutes: the slope of memory (a few pages, scaled up to an hour) and the drift of speed (the "
            f"machine's other work) mean nothing yet; they are measured, and judged from {MEANT_MINUTES} minutes on"
        )
    outcome.notes.append(
        "no tracking server flaps: there is none yet; below ten minutes kills and checkpoints come every tenth of the length"
    )
    outcome.figures = {
        "length": f"{length / 60:g} min",
        "kills": str(kills),
        "checkpoints seen": str(len(samples.saved)),
        "memory": f"{samples.resident[first]:.1f} to {samples.resident[-1]:.1f} MB, slope {slope:+.1f} MB/h",
        "drift of speed": f"{100 * drift:+.1f} %",
        "descriptors and threads": f"{samples.descriptors[-1]} and {samples.threads[-1]}",
    }


def _early_and_late(values: Sequence[int]) -> tuple[float, float]:
    """The usual value in the first and in the last quarter: a file that is being written at a moment does not count."""
    quarter = max(1, len(values) // 4)
    return statistics.median(values[:quarter]), statistics.median(values[-quarter:])


def _drift(directory: Path, length: float) -> float:
    """How much faster (+) or slower (-) the usual iteration was in the second half than in the first, after warming up."""
    speeds = [row["steps_per_second"] for row in _timing(directory)]
    speeds = speeds[len(speeds) // (6 if length < 60 * MEANT_MINUTES else 20) :]
    half = len(speeds) // 2
    return statistics.median(speeds[half:]) / statistics.median(speeds[:half]) - 1.0


def slope_of(moments: Sequence[float], values: Sequence[float]) -> float:
    """The slope of the straight line that is nearest to the values (least squares)."""
    return statistics.linear_regression(moments, values).slope if len(set(moments)) > 1 else 0.0
