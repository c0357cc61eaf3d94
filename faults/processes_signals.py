"""C7: signals at random moments, one or two of them, and a reader that goes away."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from faults.processes_launch import PHASES, VARIABLE, read_phase
from faults.processes_tools import (
    LIMIT_SECONDS,
    RUN,
    Child,
    differences,
    fingerprint,
    finished,
    fresh,
    is_gone,
    seconds,
    shared_names,
    started,
    train_command,
    undisturbed,
    wait_for,
    workers_of,
)
from faults.processes_worlds import STEP_SECONDS
from faults.programme import Outcome, Work, procedure

SAVED, SCORED, UPDATES = 4, 5, 20
"""A checkpoint every 4 iterations, and one before each evaluation, every 5."""
FLAGS = (
    *("--run.checkpoint-interval", str(SAVED), "--run.keep-checkpoints", "30"),
    *("--evaluation.interval", str(SCORED), "--evaluation.episodes", "8"),
)
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@dataclass(frozen=True)
class Case:
    """One run that is disturbed."""

    phase: str
    signals: tuple[signal.Signals, ...] = (signal.SIGINT,)
    slow: bool = False
    """Whether an iteration takes seconds, so that a second signal comes before its end; it is stepped by two workers then."""

    def __str__(self) -> str:
        return f"{' and '.join(number.name for number in self.signals)} in {self.phase}"


def cases(count: int) -> list[Case]:
    """`count` times SIGINT, phase after phase; and for every ten of them two of each other kind."""
    others = [
        Case("collect", (signal.SIGINT, signal.SIGINT), slow=True),
        Case("collect", (signal.SIGTERM, signal.SIGTERM), slow=True),
        *(Case(phase, (number,)) for number in (signal.SIGTERM, signal.SIGHUP) for phase in ("learn", "save")),
    ]
    return [Case(PHASES[number % len(PHASES)]) for number in range(count)] + others * (count // 10)


@procedure(
    "C7",
    title="SIGINT at random moments (start-up, collect, learn, save, evaluation); a second one; SIGTERM; SIGHUP; stdout closed",
    must="one checkpoint, exit 130 (143, 129) within 10 s; a second signal: out within 2 s; nothing corrupt; the resumed run bit-identical",
    full=50,
    test=1,
)
def signals(work: Work) -> Outcome:
    """Disturb, judge what is on the disk, give the command again, compare with the undisturbed run."""
    outcome = Outcome()
    moment = random.Random(work.seed)
    wanted = undisturbed(command(), fresh(work.scratch / "undisturbed"))
    first: list[float] = []
    second: list[float] = []
    todo = cases(work.count) if work.count >= 10 else [Case(PHASES[(number + 1) % 5]) for number in range(work.count)]
    for number in work.each(len(todo)):
        case = todo[number]
        problem = _one(case, fresh(work.scratch / f"{number}"), moment, wanted, second if len(case.signals) == 2 else first)
        outcome.check(not problem, f"{number}, {case}: {problem}")
    for number in range(work.count // 10):
        problem = _reader_gone(fresh(work.scratch / f"reader{number}"), wanted)
        outcome.check(not problem, f"reader gone, {number}: {problem}")
    outcome.figures = {"longest until out": seconds(first), "longest after a second signal": seconds(second)}
    outcome.notes.append(
        "a fifth of the moments is in start-up, where before the run exists nothing can be saved: then no debris is left; while the "
        "interpreter itself starts, the signal ends it as it would any program (a shell shows 130, 143 and 129 then, too)"
    )
    return outcome


def command(entrance: str = "inchworm", workers: int = 0) -> list[str]:
    """The run of this procedure; in how many processes its copies are stepped changes no number."""
    return train_command(*FLAGS, entrance=entrance, workers=workers, updates=UPDATES)


def _one(case: Case, directory: Path, moment: random.Random, wanted: dict[str, str], waits: list[float]) -> str:
    phase = directory / "phase"
    names = shared_names()
    entrance = "inchworm" if case.phase == "start-up" else "faults.processes_launch"
    variables = {VARIABLE: str(phase), STEP_SECONDS: "0.02" if case.slow else "0.0002"}
    with started(command(entrance, 2 * case.slow), directory, **variables) as child:
        if not _reach(case, child, phase, moment):
            return f"the phase was not reached: {child.said()[-300:]}"
        pids = workers_of(child.pid)
        problem = _signal(case, child, moment, waits)
        said = child.said()
    if wait_for(lambda: all(is_gone(pid) for pid in pids), 2.0) is None:
        return "its workers are left"
    if problem == "it ended by itself":  # the moment was after the end: there is nothing to resume
        return differences(fingerprint(directory / RUN), wanted)
    return problem or _disk(case, directory, said) or (shared_names() - names and "names in /dev/shm") or _resumed(directory, wanted)


def _reach(case: Case, child: Child, phase: Path, moment: random.Random) -> bool:
    """Wait for a random moment in the phase."""
    if case.phase == "start-up":
        time.sleep(moment.uniform(0.05, 0.9))
        return True
    begun = moment.randint(0, 12) if case.phase in ("collect", "learn") and not case.slow else moment.randint(0, 2)
    for _ in range(begun + 1):  # not always the first one
        left = wait_for(lambda: read_phase(phase) != case.phase or not child.running(), LIMIT_SECONDS, 0.0005)
        there = wait_for(lambda: read_phase(phase) == case.phase or not child.running(), LIMIT_SECONDS, 0.0005)
        if left is None or there is None:
            return False
    time.sleep(moment.uniform(0.0, 0.004))
    return True


def _signal(case: Case, child: Child, moment: random.Random, waits: list[float]) -> str:
    """Send the signals and wait for the end: what was not well about that."""
    if not child.running():
        return "it ended by itself" if child.code_within(0) == 0 else f"it ended before any signal: {child.said()[-300:]}"
    for place, number in enumerate(case.signals):
        if place:
            time.sleep(moment.uniform(0.05, 1.0))
        began = time.monotonic()
        os.kill(child.pid, number)
    code = child.code_within(30)
    took = time.monotonic() - began
    waits.append(took)
    if code == 0:
        return "it ended by itself"
    early = case.phase == "start-up" and not (child.directory / RUN / "config.yaml").exists()
    right = (CODES[case.signals[0]], -case.signals[0]) if early else (CODES[case.signals[0]],)
    if code not in right:
        return f"exit code {code} instead of {right[0]}: {child.said()[-400:]}"
    limit = 2.0 if len(case.signals) == 2 else 10.0
    return f"it took {took:.1f} s" if took > limit else ""


def _disk(case: Case, directory: Path, said: str) -> str:
    """What is wrong with the files that an interrupted run left."""
    from inchworm.core.errors import InchwormError
    from inchworm.run.checkpoint import TrainingCheckpointer

    run = directory / RUN
    if "Traceback" in said and (run.exists() or "inchworm" in said):
        return f"a traceback: {said[-400:]}"
    debris = [str(path) for path in directory.rglob("*") if "tmp" in path.name.lower() or path.name.startswith(".")]
    if debris:
        return f"debris: {debris[:3]}"
    if not (run / "config.yaml").exists():
        return "" if not run.exists() else f"a directory that is no run: {sorted(path.name for path in run.iterdir())}"
    checkpointer = TrainingCheckpointer(run / "checkpoints")
    try:
        steps = [checkpointer.load(path).step for path in checkpointer.all()]
    except InchwormError as error:
        return f"a checkpoint is corrupt: {error}"
    rows = (run / "metrics.jsonl").read_text().count("\n") if (run / "metrics.jsonl").exists() else 0
    last = rows if len(case.signals) == 1 else (steps[-1] if steps else 0)
    due = sorted({*range(SAVED, last + 1, SAVED), *range(SCORED, last + 1, SCORED), *([last] if last else [])})
    if [step for step in steps if step] != due:  # a run that had not finished an iteration may have saved its beginning
        return f"after {rows} iterations there are checkpoints of {steps}, not of {due}"
    return ""


def _resumed(directory: Path, wanted: dict[str, str]) -> str:
    code, said = finished(command(), directory)
    if code != 0:
        return f"the same command again ended with {code}: {said[-400:]}"
    different = differences(fingerprint(directory / RUN), wanted)
    return f"after the resume these differ from the undisturbed run: {different}" if different else ""


def _reader_gone(directory: Path, wanted: dict[str, str]) -> str:
    """As `inchworm train … | head -1`: the run goes on to its end, silently."""
    loud = [part for part in command() if part != "--quiet"]
    with started(loud, directory, stdout=subprocess.PIPE, **{STEP_SECONDS: "0.0002"}) as child:
        assert child.process.stdout is not None
        child.process.stdout.readline()
        child.process.stdout.close()
        code = child.code_within(LIMIT_SECONDS)
        said = child.said()
    if code != 0 or "Traceback" in said:
        return f"exit code {code}: {said[-400:]}"
    return differences(fingerprint(directory / RUN), wanted)
