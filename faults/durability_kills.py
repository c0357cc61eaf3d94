"""A1, A7 and A10: a trainer killed at random moments, two trainers on one run, and the cost of checkpoints."""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from faults import runs
from faults.programme import Outcome, Work, benchmark, procedure
from inchworm.core.errors import CorruptFileError

UPDATES = 20
PHASES = ("save", "learn", "save", "collect")
"""In turns: half of all kills are inside a save."""
CHAINS = (1, 2, 1, 3)
"""Number of kills of one run, one after another, before it may end."""
FIRST_STEP_SECONDS = 10.0
AT_THE_END = 0.15
"""Share of kills in the last phases of a run, which are the fewest and do the most."""


@dataclass
class Chain:
    """One run that is killed several times."""

    directory: Path
    length: int
    threaded: bool
    """Whether every save runs in a background thread, which the library does only where saves are rare."""
    problems: list[str] = field(default_factory=list)
    kills: list[str] = field(default_factory=list)
    """The phase of each kill."""
    lost: int = 0
    first_row: float | None = None
    expected_step: int = 0
    """The iteration from which the next start must continue."""
    is_over: bool = False

    @property
    def run(self) -> Path:
        return self.directory / runs.RUN

    def kill(self, phase: str, durations: dict[str, list[float]], rng: random.Random) -> bool:
        """Start or restart the run with a timer and check what the kill leaves. False if the run ended before its kill."""
        taken = sorted(durations[phase])
        left = 1 - self.expected_step / UPDATES  # of the run
        number = 1 + int(rng.random() * len(taken) * left)
        if rng.random() < AT_THE_END:
            number = max(1, round(len(taken) * left) - rng.randrange(2))
        microseconds = int(1e6 * rng.random() * taken[len(taken) // 2])
        note = self.directory / "note"
        hooks = ["kill", phase, str(number), str(microseconds), str(note), *(["thread"] if self.threaded else [])]
        self.directory.mkdir(exist_ok=True)
        ended = runs.run(runs.command(runs.arguments(UPDATES), hooks=hooks), self.directory)
        self._check_resumed(ended.out)
        if ended.code == 0:
            self.expected_step = UPDATES  # it ended before the kill
            return False
        self.kills.append(phase)
        if ended.code != -9 or note.read_bytes().decode().strip() != phase:
            self.problems.append(f"a start ended with code {ended.code}: {ended.error[-300:]}")
        try:
            checkpoint = runs.newest(self.run)
        except (CorruptFileError, OSError, UserWarning) as error:
            self.problems.append(f"after a kill in {phase}: {error}")
            return True
        self.expected_step = 0 if checkpoint is None else checkpoint.step
        lost = runs.last_iteration(self.run / "metrics.jsonl") - self.expected_step
        self.lost = max(self.lost, lost)
        if lost > 1 + self.threaded:
            self.problems.append(f"after a kill in {phase} {lost} intervals were lost")
        return True

    def _check_resumed(self, out: str) -> None:
        if self.expected_step and f"{runs.env_steps(self.expected_step):,} steps" not in out:
            self.problems.append(f"it did not continue from iteration {self.expected_step}: {out[:200]!r}")

    def finish(self, expected: dict[str, str], work: Work, outcome: Outcome) -> None:
        """Run the same command to the end; every kill of the chain is judged by the result."""
        self.is_over = True
        timing = self.run / "timing.jsonl"  # metrics repeats the lost rows exactly, timing does not
        before = set(timing.read_bytes().splitlines()) if timing.exists() else set()
        began = time.monotonic()
        with runs.started(runs.command(runs.arguments(UPDATES)), self.directory) as child:
            while child.running() and time.monotonic() < began + runs.LIMIT:
                if self.first_row is None and timing.exists() and set(timing.read_bytes().splitlines()) - before:
                    self.first_row = time.monotonic() - began
                time.sleep(0.005)
            code = child.code_within(0)
        if code != 0:
            self.problems.append(f"the restart ended with code {code}: {child.errors()[-300:]}")
        self._check_resumed((self.directory / "stdout").read_text())
        different = runs.differences(runs.fingerprint(self.run), expected)
        if different:
            self.problems.append(f"other bits in {different}")
        if work.late(self.first_row or 0.0, FIRST_STEP_SECONDS):
            self.problems.append(f"the first new step came {self.first_row:.1f} s after the restart")
        if left := runs.leftovers(self.run):
            self.problems.append(left)
        for kill in self.kills:
            outcome.check(not self.problems, f"killed in {' then '.join(self.kills)} ({kill}): {'; '.join(self.problems)}")
        if not self.problems:
            shutil.rmtree(self.directory)


@procedure("A1", full=200, test=2)
def killed_trainers(work: Work) -> Outcome:
    """kill -9 of the trainer at random moments (half inside a save, a quarter each in learn and collect), then the same command again.

    Must: every run resumes from a verified checkpoint and ends with the bits of the undisturbed one; lost work at most 1 interval; first
        new step within 10 s.
    Each kill counts once; it passes if its restart and the end of its run are right.
    """
    outcome, rng = Outcome(), random.Random(work.seed)
    expected = runs.undisturbed(work.scratch / "undisturbed", runs.command(runs.arguments(UPDATES)))
    times = work.scratch / "times"
    ended = runs.run(runs.command(runs.arguments(UPDATES), hooks=["time", str(times)]), work.scratch / "timed")
    if ended.code:
        raise RuntimeError(f"the timed run ended with code {ended.code}: {ended.error[-500:]}")
    durations: dict[str, list[float]] = json.loads(times.read_text())
    chains: list[Chain] = []
    for number in work.each():
        phase = PHASES[number % len(PHASES)]
        if not chains or chains[-1].is_over or not chains[-1].kill(phase, durations, rng):
            if chains and not chains[-1].is_over:  # it ended before the kill
                chains[-1].finish(expected, work, outcome)
            directory = work.scratch / f"chain-{len(chains)}"
            chains.append(Chain(directory, CHAINS[len(chains) % len(CHAINS)], threaded=len(chains) % 3 == 2))
            while not chains[-1].kill(phase, durations, rng):
                shutil.rmtree(directory)
        if len(chains[-1].kills) == chains[-1].length or number + 1 == work.count:
            chains[-1].finish(expected, work, outcome)
    kills = [kill for chain in chains for kill in chain.kills]
    first = [chain.first_row for chain in chains if chain.first_row is not None]
    outcome.figures = {
        "kills in save, learn, collect": ", ".join(str(kills.count(phase)) for phase in ("save", "learn", "collect")),
        "runs": f"{len(chains)}, with up to {max(CHAINS)} kills each",
        "most work lost": f"{max(chain.lost for chain in chains if not chain.threaded)} interval",
        "longest wait from the restart to its first new step": runs.longest(first),
        "kills of runs that save in a thread": str(sum(len(chain.kills) for chain in chains if chain.threaded)),
    }
    outcome.notes.append("a third of the runs is forced to save in a thread; these may lose 2 intervals")
    outcome.notes.append("the kill is a SIGKILL from a kernel timer, set to a random time inside the phase")
    return outcome


REFUSED_SECONDS = 1.0
STALE = ("its own", "of another running process", "garbage", "empty")
"""Content of a lock file that no process holds."""


@procedure("A7", full=20, test=1, alone=True)
def two_trainers(work: Work) -> Outcome:
    """a second trainer on a run (train, resume), and locks left by killed ones, with and without env workers.

    Must: the second refuses within 1 s and names the holder's process; every stale lock is ignored.
    Each round: a holder, a second trainer that must refuse, a kill -9 of the holder, a third trainer that must start at once.
    """
    outcome, waits, lives = Outcome(), [], []
    starts = []
    for _ in range(3):  # how long the command takes to start, read its arguments and end
        began = time.monotonic()
        runs.run(runs.command(["config", "CartPole-v1"]), work.scratch)
        starts.append(time.monotonic() - began)
    start_up = statistics.median(starts)
    for number in work.each():
        directory = work.scratch / f"round-{number}"
        arguments = [*runs.arguments(100_000), "--num-workers", "2" if number % 3 == 2 else "0"]
        with runs.started(runs.command(arguments), directory) as holder:
            checkpoints = directory / runs.RUN / "checkpoints"
            runs.wait_for(lambda: any(checkpoints.glob("step-*")) or not holder.running(), runs.LIMIT)  # noqa: B023
            if not holder.running():
                raise RuntimeError(f"the holder ended before its first checkpoint: {holder.errors()[-500:]}")
            second = ["resume", runs.RUN] if number % 2 else arguments
            began = time.monotonic()
            ended = runs.run(runs.command(second), directory)
            lives.append(time.monotonic() - began)
            waits.append(max(0.0, lives[-1] - start_up))
            refused = ended.code == 1 and str(holder.pid) in ended.error and holder.running()
            outcome.check(
                refused and not work.late(waits[-1], REFUSED_SECONDS),
                f"round {number}, {second[0]}: code {ended.code} after {lives[-1]:.2f} s, holder {holder.pid}: {ended.error[-200:]}",
            )
            holder.process.kill()
            holder.process.wait()
        stale = STALE[number % len(STALE)]
        lock, rows = directory / runs.RUN / "lock", directory / runs.RUN / "metrics.jsonl"
        if stale != "its own":
            lock.write_text({"of another running process": f"{os.getppid()}\n", "garbage": "\0\xff!", "empty": ""}[stale])
        before = runs.last_iteration(rows)
        target = str(runs.env_steps(before + 2))
        ended = runs.run(runs.command([*arguments, "--run.total-timesteps", target, "--quiet"]), directory)
        problem = f"code {ended.code}, iteration {runs.last_iteration(rows)} after {before}: {ended.error[-300:]}"
        if outcome.check(not ended.code and runs.last_iteration(rows) >= before + 2, f"round {number}, a stale lock ({stale}): {problem}"):
            shutil.rmtree(directory)
    outcome.figures["longest time to refuse"] = f"{max(waits):.2f} s after start-up; {max(lives):.2f} s with it"
    outcome.notes.append(f"start-up ({start_up:.2f} s here), the median time to print a config, is subtracted")
    return outcome


@procedure("A10", full=1, test=0, alone=True)
def checkpoint_cost(work: Work) -> Outcome:
    """Cost of a checkpoint a minute.

    Must: at most 1 % of profiled training time.
    `benchmarks/checkpoint_cost.py`: the time of a save in the training thread, with all its checks, as a share of a minute.
    """
    module = benchmark("checkpoint_cost")
    works = list(module.ITERATIONS.items())
    outcome = Outcome()
    for number in work.each(len(works)):
        name, iterations = works[number]
        row = module.measure(name, iterations)
        outcome.check(row["share"] <= 0.01, f"{name}: {row['share']:.2%}")
        outcome.figures[name] = f"{row['share']:.2%} ({1e3 * row['save']:.0f} ms for {row['bytes'] / 1e6:.2g} MB)"
    outcome.notes.append("counted as if every save ran in the training thread, which is the most it can cost")
    return outcome
