"""G6: a clock that is set back by an hour during a run, and time zones that change: nothing but the clock looks different."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from faults.programme import Outcome, Work, procedure
from faults.resume_runs import bits, command, differing, flags, settings

UPDATES, STOP = 60, 20
SECONDS = 120.0
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
"""Moves Python's own clocks. The one that measures durations is left alone, because nobody can set it."""


class Clock:
    """The wall clock of a process, which can be set while it runs."""

    def __init__(self, directory: Path, library: str | None) -> None:
        """With `library`, libfaketime's, the whole process sees it; without, all that is written in Python."""
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
        """So many seconds away from the true time, at once."""
        text = f"{seconds:+d}" if self._is_library else str(seconds)
        temporary = self._file.with_suffix(".new")
        temporary.write_text(text)
        temporary.rename(self._file)

    def seen(self) -> float:
        """How far a new process finds the clock to be off, in seconds: whether this works at all."""
        line = [sys.executable, "-c", "import time; print(time.time())"]
        found = subprocess.run(line, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=30, check=True)
        return float(found.stdout) - time.time()


def train_with(words: list[str], directory: Path, clock: Clock, zone: str, run: Path, jump: int) -> tuple[int, str, int]:
    """Train, and set the clock by `jump` and back all the while, so that it jumps inside every kind of step.

    Exit code, what was said, and how often the clock was set once rows were there.
    """
    line = [sys.executable, "-m", "inchworm", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TZ": zone, **clock.environment}
    deadline, times = time.monotonic() + SECONDS, 0
    with subprocess.Popen(line, cwd=directory, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        try:
            while child.poll() is None and time.monotonic() < deadline:
                if (run / "metrics.jsonl").exists():
                    times += 1
                    clock.set(jump if times % 2 else 0)
                time.sleep(0.003)
            _, said = child.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            _, said = child.communicate()
    return child.returncode, said.decode(errors="replace"), times


def in_order(run: Path) -> str:
    """Whether rows follow each other and no duration is negative; what is not so."""
    rows = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
    iterations = [row["iteration"] for row in rows]
    if iterations != list(range(1, len(rows) + 1)):
        return f"the rows are of iterations {iterations}"
    times = [(row["iteration"], name, value) for row in rows for name, value in row.items() if name.endswith("seconds")]
    wrong = [entry for entry in times if not 0 <= entry[2] < 3000]
    return f"durations are below 0 or an hour long: {wrong}" if wrong or not times else ""


def _settings() -> dict[str, Any]:
    """Long enough for the clock to be set on the way, with a checkpoint at every third update."""
    data = settings("discrete", "numpy", checkpoint_interval=3)
    data["run"]["total_timesteps"] *= 3
    return data


def one_round(outcome: Outcome, directory: Path, number: int, expected: dict[str, str]) -> tuple[str, int]:
    """A run whose clock jumps on the way, and one that is stopped and goes on an hour earlier, in another time zone."""
    clock = Clock(directory / "clock", None)
    jump = (-3600, 3600, -86_400 * 400)[number % 3]
    zone, other = ZONES[number % len(ZONES)], ZONES[(number + 1) % len(ZONES)]
    words = ["train", "CartPole-v1", *flags(_settings()), "--quiet"]
    run = directory / "runs" / "jumps"
    code, said, times = train_with([*words, "--run.name=jumps", f"--run.max-iterations={UPDATES}"], directory, clock, zone, run, jump)
    wrong = differing(bits(run), expected) or in_order(run)
    outcome.check(
        code == 0 and not wrong and times > 1, f"the clock jumped by {jump} s, {times} times: exit code {code}, {wrong}; {said[-300:]}"
    )

    library = next(iter(glob.glob(LIBRARY)), None)
    clock = Clock(directory / "another-clock", library)
    run, clock_now = directory / "runs" / "stopped", {**clock.environment, "TZ": other}
    begun = command(*words, "--run.name=stopped", f"--run.max-iterations={STOP}", cwd=directory, **clock.environment, TZ=zone)
    clock.set(jump)
    works = abs(clock.seen() - jump) < 60
    ended = command("resume", "stopped", f"--run.max-iterations={UPDATES}", "--quiet", cwd=directory, **clock_now)
    wrong = differing(bits(run), expected) or in_order(run)
    outcome.check(begun[0] == ended[0] == 0 and not wrong, f"resumed {jump} s away, {zone} to {other}: {wrong}; {begun} {ended}")
    outcome.check(works, f"the clock could not be set: it was found {clock.seen():.0f} s off instead of {jump} s")
    return "libfaketime" if library else "the same patch, because libfaketime is not installed", times


@procedure(
    "G6",
    title="The clock set back by an hour during a run and before a resume; other time zones",
    must="durations 0 or more, rows in order, the resume unaffected, bits equal",
    full=6,
    usual=6,
    test=1,
)
def clock_jumps(work: Work) -> Outcome:
    """Back by an hour, on by an hour, back by more than a year, in turns."""
    outcome, jumps, kind = Outcome(), 0, ""
    words = ["train", "CartPole-v1", *flags(_settings()), "--run.name=whole", f"--run.max-iterations={UPDATES}"]
    code, said = command(*words, "--quiet", cwd=work.scratch)
    outcome.check(code == 0, f"undisturbed: exit code {code}: {said[-300:]}")
    expected = bits(work.scratch / "runs" / "whole")
    for number in work.each():
        directory = work.scratch / str(number)
        directory.mkdir()
        kind, times = one_round(outcome, directory, number, expected)
        jumps += times
    outcome.figures["jumps of the clock during runs"] = f"{jumps}"
    outcome.notes.append(f"during a run the clocks of Python are set by a patch; between a stop and a resume the clock is set by {kind}")
    outcome.notes.append("the clock that measures durations is left alone, because nobody can set it")
    return outcome
