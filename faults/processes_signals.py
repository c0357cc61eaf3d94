"""C7: signals at random moments, one or two of them, and a reader of the output that goes away.

`python -m faults.processes_signals train …` is the command line with the current phase written where another process can read it.
"""

from __future__ import annotations

import functools
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import runs
from faults.processes_worlds import STEP_SECONDS
from faults.programme import Outcome, Work, procedure
from faults.runs import RUN, Child, fresh, is_gone, shared_names, wait_for, workers_of

PHASES = ("start-up", "collect", "learn", "save", "evaluation")
VARIABLE = "FAULTS_PHASE"
SAVED, SCORED, UPDATES = 4, 5, 20
"""A checkpoint every 4 iterations, and one before each evaluation, every 5."""
FLAGS = (
    *("--run.checkpoint-interval", str(SAVED), "--run.keep-checkpoints", "30"),
    *("--evaluation.interval", str(SCORED), "--evaluation.episodes", "8"),
)
COMMAND = runs.train_command(*FLAGS, workers=0, updates=UPDATES)
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def main() -> int:
    """Run `inchworm` with methods wrapped so that each writes its phase to one byte of a file."""
    from inchworm.backends.learner import BaseLearner
    from inchworm.cli.main import main as command_line
    from inchworm.collect.collector import RolloutCollector
    from inchworm.evaluate.evaluator import PolicyEvaluator
    from inchworm.run.checkpoint import TrainingCheckpointer

    path = Path(os.environ[VARIABLE])
    path.write_bytes(bytes(1))
    with path.open("r+b") as file:
        page = mmap.mmap(file.fileno(), 1)

    def mark(owner: Any, name: str, phase: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def marked(*arguments: Any, **keywords: Any) -> Any:
            before, page[0] = page[0], PHASES.index(phase) + 1
            try:
                return original(*arguments, **keywords)
            finally:
                page[0] = before

        setattr(owner, name, marked)

    mark(RolloutCollector, "collect", "collect")
    mark(BaseLearner, "update", "learn")
    mark(TrainingCheckpointer, "save", "save")
    mark(PolicyEvaluator, "evaluate", "evaluation")
    return command_line()


@dataclass(frozen=True)
class Case:
    """One run that is interrupted."""

    phase: str
    signals: tuple[signal.Signals, ...] = (signal.SIGINT,)
    slow: bool = False
    """Whether an iteration takes seconds, so that a second signal comes before its end; two workers step it then."""

    def __str__(self) -> str:
        return f"{' and '.join(number.name for number in self.signals)} in {self.phase}"


def cases(count: int) -> list[Case]:
    """`count` times SIGINT, phase after phase; and for every ten of them two of each other kind."""
    if count < 10:
        return [Case(PHASES[(number + 1) % 5]) for number in range(count)]
    others = [
        Case("collect", (signal.SIGINT, signal.SIGINT), slow=True),
        Case("collect", (signal.SIGTERM, signal.SIGTERM), slow=True),
        *(Case(phase, (number,)) for number in (signal.SIGTERM, signal.SIGHUP) for phase in ("learn", "save")),
    ]
    return [Case(PHASES[number % len(PHASES)]) for number in range(count)] + others * (count // 10)


@procedure("C7", full=50, test=1)
def signals(work: Work) -> Outcome:
    """SIGINT at random moments (start-up, collect, learn, save, evaluation); a second one; SIGTERM; SIGHUP; stdout closed.

    Must: one checkpoint, exit 130 (143, 129) within 10 s; a second signal: out within 2 s; nothing corrupt; the resumed run bit-identical.
    Interrupt, check what is on the disk, run the command again, compare with the undisturbed run.
    """
    outcome, rng, todo = Outcome(), random.Random(work.seed), cases(work.count)
    expected = runs.undisturbed(work.scratch / "undisturbed", COMMAND)
    times: dict[int, list[float]] = {1: [], 2: []}
    for number in work.each(len(todo)):
        problem = _interrupt(todo[number], fresh(work.scratch / f"{number}"), work, rng, expected, times[len(todo[number].signals)])
        outcome.check(not problem, f"{number}, {todo[number]}: {problem}")
    for number in range(work.count // 10):  # as in `inchworm train … | head -1`: the run continues to its end, silently
        directory = work.scratch / f"reader{number}"
        loud = [part for part in COMMAND if part != "--quiet"]
        with runs.started(loud, directory, stdout=subprocess.PIPE, **{STEP_SECONDS: "0.0002"}) as child:
            assert child.process.stdout is not None
            child.process.stdout.readline()
            child.process.stdout.close()
            code = child.code_within(runs.LIMIT)
        different = runs.differences(runs.fingerprint(directory / RUN), expected)
        fine = code == 0 and "Traceback" not in child.errors() and not different
        outcome.check(fine, f"reader gone, {number}: exit code {code}; these differ: {different}; {child.errors()[-400:]}")
    outcome.figures = {"longest until out": runs.longest(times[1]), "longest after a second signal": runs.longest(times[2])}
    outcome.notes.append(
        "a fifth of the moments is in start-up, where before the run exists nothing can be saved: then no debris is left; while the "
        "interpreter itself starts, the signal ends it as it would any program (a shell shows 130, 143 and 129 then, too)"
    )
    return outcome


def _interrupt(case: Case, directory: Path, work: Work, rng: random.Random, expected: dict[str, str], times: list[float]) -> str:
    """What was wrong with one run that was interrupted and resumed; empty if nothing."""
    phase, names = directory / "phase", shared_names()
    entrance = "inchworm" if case.phase == "start-up" else "faults.processes_signals"
    command = runs.train_command(*FLAGS, entrance=entrance, workers=2 * case.slow, updates=UPDATES)
    with runs.started(command, directory, **{VARIABLE: str(phase), STEP_SECONDS: "0.02" if case.slow else "0.0002"}) as child:
        if not _reach(case, child, phase, rng):
            return f"the phase was not reached: {child.errors()[-300:]}"
        pids = workers_of(child.pid)
        if child.running():
            for place, number in enumerate(case.signals):
                if place:
                    time.sleep(rng.uniform(0.05, 1.0))
                began = time.monotonic()
                os.kill(child.pid, number)
            child.code_within(60)
            times.append(time.monotonic() - began)
        code = child.code_within(0)
    if (gone := wait_for(lambda: all(is_gone(pid) for pid in pids), 60.0)) is None or work.late(gone, 2.0):
        return "its workers are left"
    if code == 0:  # the moment was after the end: there is nothing to resume
        return runs.differences(runs.fingerprint(directory / RUN), expected)
    early = case.phase == "start-up" and not (directory / RUN / "config.yaml").exists()
    if code != CODES[case.signals[0]] and not (early and code == -case.signals[0]):
        return f"exit code {code} instead of {CODES[case.signals[0]]}: {child.errors()[-400:]}"
    if work.late(times[-1], 2.0 if len(case.signals) == 2 else 10.0):
        return f"it took {times[-1]:.1f} s"
    problem = _disk_problem(case, directory, child.errors())
    if problem or shared_names() - names:
        return problem or "names in /dev/shm"
    ended = runs.run(COMMAND, directory)
    different = runs.differences(runs.fingerprint(directory / RUN), expected)
    if ended.code or different:
        return f"the same command again ended with {ended.code}; these differ: {different}; {ended.error[-400:]}"
    return ""


def _reach(case: Case, child: Child, path: Path, rng: random.Random) -> bool:
    """Wait for a random moment in the phase, not always in its first occurrence."""
    if case.phase == "start-up":
        time.sleep(rng.uniform(0.05, 0.9))
        return True

    def is_in_phase() -> bool:
        data = path.read_bytes() if path.exists() else b""
        return bool(data and data[0]) and PHASES[data[0] - 1] == case.phase

    number = rng.randint(0, 12) if case.phase in ("collect", "learn") and not case.slow else rng.randint(0, 2)
    for _ in range(number + 1):
        for wanted in (False, True):
            if wait_for(lambda: is_in_phase() == wanted or not child.running(), runs.LIMIT, 0.0005) is None:  # noqa: B023
                return False
    time.sleep(rng.uniform(0.0, 0.004))
    return True


def _disk_problem(case: Case, directory: Path, errors: str) -> str:
    """What is wrong with the files that an interrupted run left."""
    from inchworm.core.errors import InchwormError
    from inchworm.run.checkpoint import TrainingCheckpointer

    run = directory / RUN
    if "Traceback" in errors and (run.exists() or "inchworm" in errors):
        return f"a traceback: {errors[-400:]}"
    debris = [str(path) for path in directory.rglob("*") if "tmp" in path.name.lower() or path.name.startswith(".")]
    if debris:
        return f"debris: {debris[:3]}"
    if not (run / "config.yaml").exists():
        return f"a directory that is not a run: {sorted(path.name for path in run.iterdir())}" if run.exists() else ""
    checkpointer = TrainingCheckpointer(run / "checkpoints")
    try:
        steps = [checkpointer.load(path).step for path in checkpointer.all()]
    except InchwormError as error:
        return f"a checkpoint is corrupt: {error}"
    rows = (run / "metrics.jsonl").read_text().count("\n") if (run / "metrics.jsonl").exists() else 0
    # A second signal, or one in an evaluation, ends the run at once: what is saved is a snapshot, which fast iterations may have passed.
    at_once = len(case.signals) > 1 or case.phase == "evaluation"
    last = (steps[-1] if steps else 0) if at_once else rows
    due = sorted({*range(SAVED, last + 1, SAVED), *range(SCORED, last + 1, SCORED), *([last] if last else [])})
    if [step for step in steps if step] != due:  # a run that had not finished an iteration may have saved its beginning
        return f"after {rows} iterations there are checkpoints of {steps}, not of {due}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
