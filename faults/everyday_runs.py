"""G5 and G6: a long run whose workers are killed, and clocks and time zones that change during a run."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from faults import runs
from faults.programme import Outcome, Work, procedure
from faults.resume import flags, settings
from faults.runs import RUN, Child, shared_names, wait_for, workers_of

WORKERS = 4
JUDGED_MINUTES = 60
"""From this length on the slope of memory and the drift of speed mean something and are judged; before, they are only measured."""
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
        self.moments.append(moment)
        self.resident.append(runs.status_number(child.pid, "VmRSS") / 1024)
        self.descriptors.append(runs.count_descriptors(child.pid))
        self.threads.append(runs.status_number(child.pid, "Threads"))
        self.zombies = {pid: self.zombies.get(pid, moment) for pid in runs.zombies(child.pid)}
        self.longest_zombie = max([self.longest_zombie, *(moment - since for since in self.zombies.values())])
        self.saved |= {path.name for path in (child.directory / RUN / "checkpoints").glob("step-*")}


@procedure("G5", full=480, usual=3, test=0)
def soak(work: Work) -> Outcome:
    """A soak of `count` minutes: 4 workers, one killed every minute, a checkpoint every minute.

    Must: memory grows at most 1 MB an hour after 10 minutes, descriptors, threads and /dev/shm flat, speed drifts at most 2 %, no error.
    `count` minutes.
    """
    return soak_for(60.0 * work.count, work)


def soak_for(length: float, work: Work) -> Outcome:
    """A soak of `length` seconds; below ten minutes kills and checkpoints come every tenth of it."""
    outcome, samples, kills, rng = Outcome(), Samples(), 0, random.Random(work.seed)
    every = min(60.0, length / 10)
    with _started(work.scratch / "pilot", 0):  # how long an iteration takes here: intervals are counted in iterations
        time.sleep(min(2.0, length))
    iteration = statistics.median(row["seconds"] for row in _timing(work.scratch / "pilot"))
    directory, names, pause = work.scratch / "soak", shared_names(), min(1.0, length / 100)
    with _started(directory, max(1, round(every / iteration))) as child:
        began, next_kill = time.monotonic(), every / 2
        for number in work.each(round(length / pause)):
            time.sleep(max(0.0, began + number * pause - time.monotonic()))
            if not child.running():
                break
            moment = time.monotonic() - began
            samples.take(child, moment)
            victims = workers_of(child.pid)
            if moment >= next_kill and len(victims) == WORKERS:  # the one before has been replaced
                kills += 1
                os.kill(rng.choice(victims), signal.SIGKILL)
                next_kill = max(next_kill + every, moment)
        alive = wait_for(lambda: len(workers_of(child.pid)) == WORKERS, 60.0) is not None
        outcome.check(alive, f"at the end the run or its workers were gone: {child.errors()[-300:]}")
        if child.running():
            os.kill(child.pid, signal.SIGINT)
        code, errors = child.code_within(runs.LIMIT), child.errors()
    outcome.check(code == 130 and "Traceback" not in errors and "inchworm: " not in errors, f"it ended with {code}: {errors[-300:]}")
    outcome.check(not shared_names() - names, f"left in /dev/shm: {sorted(shared_names() - names)[:3]}")
    _judge(outcome, work, samples, length, every, kills, directory)
    return outcome


@contextlib.contextmanager
def _started(directory: Path, interval: int) -> Iterator[Child]:
    """A run without an end, after its first iteration. More restarts are allowed, because the default is ten in ten minutes."""
    flags = ("--run.checkpoint-interval", str(interval), "--env.worker-restarts", "30")
    rows = directory / RUN / "metrics.jsonl"
    with runs.started(runs.train_command(*flags, workers=WORKERS, updates=10**9, steps=128), directory) as child:
        wait_for(lambda: (rows.exists() and rows.stat().st_size) or not child.running(), runs.LIMIT)
        if not child.running():
            raise RuntimeError(f"the run did not begin: {child.errors()[-500:]}")
        yield child


def _timing(directory: Path) -> list[dict[str, float]]:
    lines = (directory / RUN / "timing.jsonl").read_text().splitlines()
    return [{name.rpartition("/")[2]: value for name, value in json.loads(line).items()} for line in lines if line.endswith("}")]


def _judge(outcome: Outcome, work: Work, samples: Samples, length: float, every: float, kills: int, directory: Path) -> None:
    warm = min(60.0 * WARM_UP_MINUTES, length / 5)
    first = next((index for index, moment in enumerate(samples.moments) if moment >= warm), 0)
    for name in ("descriptors", "threads"):  # medians: a file that is being written at a moment does not count
        values = getattr(samples, name)[first:]
        quarter = max(1, len(values) // 4)
        early, late = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
        outcome.check(late <= early, f"{name}: {early:g} at first, {late:g} at last")
    outcome.check(not work.late(samples.longest_zombie, 5.0), f"a zombie for {samples.longest_zombie:.1f} s")
    due = length / max(every, 10.0)
    outcome.check(kills >= 1 if work.reduced else kills >= max(1, due - 1), f"only {kills} kills")
    if not work.reduced:
        enough = max(1, (0.9 if every >= 60 else 0.5) * due)
        outcome.check(len(samples.saved) >= enough, f"only {len(samples.saved)} checkpoints were seen")
    slope = slope_of(samples.moments[first:], samples.resident[first:]) * 3600
    speeds = [row["steps_per_second"] for row in _timing(directory)]
    speeds = speeds[len(speeds) // (6 if length < 60 * JUDGED_MINUTES else 20) :]
    half = len(speeds) // 2
    drift = statistics.median(speeds[half:]) / statistics.median(speeds[:half]) - 1.0
    if length >= 60 * JUDGED_MINUTES:
        outcome.check(slope <= SLOPE_MB, f"memory grew by {slope:.2f} MB an hour")
        outcome.check(abs(drift) <= DRIFT, f"speed drifted by {100 * drift:+.1f} %")
    else:
        outcome.notes.append(
            f"a soak of {length / 60:g} minutes: the slope of memory (a few pages, scaled up to an hour) and the drift of speed (the "
            f"machine's other work) mean nothing yet; they are measured, and judged from {JUDGED_MINUTES} minutes on"
        )
    outcome.notes.append("there is no tracking server yet; below ten minutes kills and checkpoints come every tenth of the length")
    outcome.figures = {
        "length": f"{length / 60:g} min",
        "kills": str(kills),
        "checkpoints seen": str(len(samples.saved)),
        "memory": f"{samples.resident[first]:.1f} to {samples.resident[-1]:.1f} MB, slope {slope:+.1f} MB/h",
        "drift of speed": f"{100 * drift:+.1f} %",
        "descriptors and threads": f"{samples.descriptors[-1]} and {samples.threads[-1]}",
    }


def slope_of(moments: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the least-squares line."""
    return statistics.linear_regression(moments, values).slope if len(set(moments)) > 1 else 0.0


UPDATES, STOP = 60, 20
LIBRARY = "/usr/lib/*/faketime/libfaketime.so.1"
ZONES = ("UTC", "Asia/Kolkata", "Pacific/Kiritimati", "America/St_Johns")
PATCH = """import os, time
_real = time.time, time.time_ns, time.localtime, time.gmtime
def _back():
    try:
        return float(open(os.environ["CLOCK_FILE"]).read() or 0)
    except (OSError, ValueError):
        return 0.0
time.time = lambda: _real[0]() + _back()
time.time_ns = lambda: _real[1]() + int(_back() * 1e9)
time.localtime = lambda *given: _real[2](*(given or (time.time(),)))
time.gmtime = lambda *given: _real[3](*(given or (time.time(),)))
"""
"""Moves Python's wall clocks. The monotonic clock is left alone, because it cannot be set."""


class Clock:
    """The wall clock of a process, which can be set while it runs: with `library` (libfaketime) for all code, else for Python code."""

    def __init__(self, directory: Path, library: str | None) -> None:
        directory.mkdir()
        self._file = directory / "clock"
        self._is_library = library is not None
        self.set(0)
        if library:
            self.environment = {"LD_PRELOAD": library, "FAKETIME_TIMESTAMP_FILE": str(self._file), "FAKETIME_NO_CACHE": "1"}
            self.environment |= {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}
        else:
            (directory / "sitecustomize.py").write_text(PATCH)
            path = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH", "")]))
            self.environment = {"PYTHONPATH": path, "CLOCK_FILE": str(self._file)}

    def set(self, seconds: int) -> None:
        """Set the clock, atomically, to this many seconds from the true time."""
        temporary = self._file.with_suffix(".new")
        temporary.write_text(f"{seconds:+d}" if self._is_library else str(seconds))
        temporary.rename(self._file)

    def offset(self) -> float:
        """How far off a new process finds the clock, in seconds."""
        line = [sys.executable, "-c", "import time; print(time.time())"]
        found = subprocess.run(line, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=runs.LIMIT, check=True)
        return float(found.stdout) - time.time()


@procedure("G6", full=6, test=1)
def clock_jumps(work: Work) -> Outcome:
    """The clock set back by an hour during a run and before a resume; other time zones.

    Must: durations 0 or more, rows in order, the resume unaffected, bits equal.
    Back by an hour, forward by an hour, back by more than a year, in turns.
    """
    data = settings("discrete", "numpy", checkpoint_interval=3)
    data["run"]["total_timesteps"] *= 3  # long enough for the clock to be set during the run
    command = runs.command(["train", "CartPole-v1", *flags(data), "--run.directory=.", f"--run.name={RUN}", "--quiet"])
    whole, part = [*command, f"--run.max-iterations={UPDATES}"], [*command, f"--run.max-iterations={STOP}"]
    resume = runs.command(["resume", RUN, f"--run.max-iterations={UPDATES}", "--quiet"])
    outcome, jumps = Outcome(), 0
    expected = runs.undisturbed(work.scratch / "whole", whole)
    library = next(iter(glob.glob(LIBRARY)), None)
    for number in work.each():
        jump = (-3600, 3600, -86_400 * 400)[number % 3]
        zone, other = ZONES[number % len(ZONES)], ZONES[(number + 1) % len(ZONES)]
        directory, times = runs.fresh(work.scratch / f"{number}"), 0
        clock = Clock(directory / "clock", None)
        with runs.started(whole, directory, **clock.environment, TZ=zone) as child:
            deadline = time.monotonic() + runs.LIMIT
            while child.running() and time.monotonic() < deadline:
                if (directory / RUN / "metrics.jsonl").exists():  # the clock jumps inside every kind of step
                    times += 1
                    clock.set(jump if times % 2 else 0)
                time.sleep(0.003)
            code = child.code_within(0)
        jumps += times
        wrong = runs.differences(runs.fingerprint(directory / RUN), expected) or _timing_problem(directory / RUN)
        fine = code == 0 and not wrong and times > 1
        outcome.check(fine, f"the clock jumped by {jump} s, {times} times: exit code {code}, {wrong}; {child.errors()[-300:]}")

        directory = runs.fresh(work.scratch / f"{number}-stopped")
        clock = Clock(directory / "clock", library)
        begun = runs.run(part, directory, **clock.environment, TZ=zone)
        clock.set(jump)
        offset = clock.offset()
        ended = runs.run(resume, directory, **clock.environment, TZ=other)
        wrong = runs.differences(runs.fingerprint(directory / RUN), expected) or _timing_problem(directory / RUN)
        outcome.check(begun.code == ended.code == 0 and not wrong, f"resumed {jump} s away, {zone} to {other}: {wrong}; {begun} {ended}")
        outcome.check(abs(offset - jump) < 60, f"the clock could not be set: it was {offset:.0f} s off instead of {jump} s")
    outcome.figures["jumps of the clock during runs"] = f"{jumps}"
    kind = "libfaketime" if library else "the same patch, because libfaketime is not installed"
    outcome.notes.append(f"during a run the clocks of Python are set by a patch; between a stop and a resume the clock is set by {kind}")
    outcome.notes.append("the monotonic clock is left alone, because it cannot be set")
    return outcome


def _timing_problem(run: Path) -> str:
    """Rows out of order, or durations that are negative or an hour long; empty if there are none."""
    rows = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
    iterations = [row["iteration"] for row in rows]
    if iterations != list(range(1, len(rows) + 1)):
        return f"the rows are of iterations {iterations}"
    times = [(row["iteration"], name, value) for row in rows for name, value in row.items() if name.endswith("seconds")]
    wrong = [entry for entry in times if not 0 <= entry[2] < 3000]
    return f"durations are below 0 or an hour long: {wrong}" if wrong or not times else ""
