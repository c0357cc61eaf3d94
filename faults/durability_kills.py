"""A1: the trainer is killed at any moment and started again with the same command; the end is the same, bit for bit."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from faults import durability_runs as runs
from faults.programme import Outcome, Work, procedure
from inchworm.core.errors import CorruptFileError

UPDATES = 20
PHASES = ("save", "learn", "save", "collect")
"""In turns: half of all kills are inside a save."""
CHAINS = (1, 2, 1, 3)
"""How many kills hit one run, one after another, before it may end."""
FIRST_STEP_SECONDS = 10.0
AT_THE_END = 0.15
"""Share of kills in the last phases of a run, where the fewest moments are and the most happens."""


@dataclass
class Chain:
    """One run that is killed several times."""

    directory: Path
    length: int
    problems: list[str] = field(default_factory=list)
    kills: list[str] = field(default_factory=list)
    """The phase of each kill."""
    lost: int = 0
    first_row: float | None = None
    expected_step: int | None = None
    """The iteration that the next start must go on from; None before the first kill."""
    is_over: bool = False
    beside: bool = False
    """Whether its saves are written in a thread beside training, which the library does where saves are rare."""

    @property
    def run(self) -> Path:
        """The run's own directory."""
        return self.directory / runs.NAME


@procedure(
    "A1",
    title="kill -9 of the trainer at random moments (half inside a save, a quarter each in learn and collect), then the same command again",
    must="every run resumes from a verified checkpoint and ends with the bits of the undisturbed one; lost work at most 1 interval; "
    "first new step within 10 s",
    full=200,
    test=2,
)
def killed_trainers(work: Work) -> Outcome:
    """Each kill counts once; it is fine if its restart was, and the end of its run."""
    outcome, rng = Outcome(), random.Random(work.seed)
    expected = runs.undisturbed(work.scratch / "undisturbed", runs.arguments(UPDATES))
    durations = _durations(work.scratch)
    chains: list[Chain] = []
    for number in work.each():
        phase = PHASES[number % len(PHASES)]
        if not chains or chains[-1].is_over or not _kill_once(chains[-1], phase, durations, rng):
            if chains and not chains[-1].is_over:  # it ended before the kill
                _finish(chains[-1], expected, outcome)
            chains.append(Chain(work.scratch / f"chain-{len(chains)}", CHAINS[len(chains) % len(CHAINS)], beside=len(chains) % 3 == 2))
            while not _kill_once(chains[-1], phase, durations, rng):
                shutil.rmtree(chains[-1].directory)
        if len(chains[-1].kills) == chains[-1].length or number + 1 == work.count:
            _finish(chains[-1], expected, outcome)
    _summarise(chains, outcome)
    return outcome


def _durations(scratch: Path) -> dict[str, list[float]]:
    """How long each phase takes, and how often it comes, in a run that is not killed."""
    ended = runs.run(runs.command(runs.arguments(UPDATES), hooks=["time", str(scratch / "times")]), scratch / "timed")
    if ended.code:
        raise RuntimeError(f"the timed run ended with code {ended.code}: {ended.error[-500:]}")
    return dict(json.loads((scratch / "times").read_text()))


def _kill_once(chain: Chain, phase: str, durations: dict[str, list[float]], rng: random.Random) -> bool:
    """Start, or start again, with the timer set, and look at what the kill left. False if the run ended before its kill."""
    taken = sorted(durations[phase])
    left = 1 - (chain.expected_step or 0) / UPDATES  # of the run
    number = 1 + int(rng.random() * len(taken) * left)
    if rng.random() < AT_THE_END:
        number = max(1, round(len(taken) * left) - rng.randrange(2))
    microseconds = int(1e6 * rng.random() * taken[len(taken) // 2])
    note = chain.directory / "note"
    hooks = ["kill", phase, str(number), str(microseconds), str(note), *(["beside"] if chain.beside else [])]
    ended = runs.run(runs.command(runs.arguments(UPDATES), hooks=hooks), chain.directory)
    _check_resumed(chain, ended.out)
    if ended.code == 0:
        return False
    chain.kills.append(phase)
    if ended.code != -9 or note.read_bytes().decode().strip() != phase:
        chain.problems.append(f"a start ended with code {ended.code}: {ended.error[-300:]}")
    _look(chain)
    return True


def _look(chain: Chain) -> None:
    """What the kill left: a checkpoint that verifies, at most one interval behind the rows of metrics."""
    try:
        checkpoint = runs.newest(chain.run)
    except (CorruptFileError, OSError, UserWarning) as error:
        chain.problems.append(f"after a kill in {chain.kills[-1]}: {error}")
        return
    chain.expected_step = 0 if checkpoint is None else checkpoint.step
    lost = runs.last_iteration(chain.run / "metrics.jsonl") - chain.expected_step
    chain.lost = max(chain.lost, lost)
    if lost > 1 + chain.beside:
        chain.problems.append(f"after a kill in {chain.kills[-1]} {lost} intervals were lost")


def _check_resumed(chain: Chain, out: str) -> None:
    """What a start said: that it went on from the newest checkpoint, where there was one."""
    step = chain.expected_step
    if not step:
        return
    wanted = ("has reached its target", "steps are done") if step == UPDATES else (f"resuming at {step * runs.BATCH:,} steps of",)
    if not any(text in out for text in wanted):
        chain.problems.append(f"it did not go on from iteration {step}: {out[:200]!r}")


def _finish(chain: Chain, expected: dict[str, str], outcome: Outcome) -> None:
    """The same command once more, to the end; every kill of the chain is judged by it."""
    chain.is_over = True
    out = _restart(chain)
    _check_resumed(chain, out)
    different = runs.differences(runs.fingerprint(chain.run), expected)
    if different:
        chain.problems.append(f"other bits in {different}")
    if chain.first_row is not None and chain.first_row > FIRST_STEP_SECONDS:
        chain.problems.append(f"the first new step came {chain.first_row:.1f} s after the restart")
    left = runs.leftovers(chain.run)
    if left:
        chain.problems.append(f"left behind: {', '.join(left[:3])}")
    for kill in chain.kills:
        outcome.check(not chain.problems, f"killed in {' then '.join(chain.kills)} ({kill}): {'; '.join(chain.problems)}")
    if not chain.problems:
        shutil.rmtree(chain.directory)


def _restart(chain: Chain) -> str:
    """Run to the end; when the first new row of timing was there is put down (those of metrics repeat the lost ones exactly)."""
    timing = chain.run / "timing.jsonl"
    before = set(timing.read_bytes().splitlines()) if timing.exists() else set()
    began = time.monotonic()
    with (chain.directory / "out").open("w+") as out, (chain.directory / "error").open("w+") as error:
        process = subprocess.Popen(
            runs.command(runs.arguments(UPDATES)),
            cwd=chain.directory,
            env=runs.environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=error,
        )
        try:
            while process.poll() is None and time.monotonic() < began + runs.LIMIT:
                if chain.first_row is None and timing.exists() and set(timing.read_bytes().splitlines(keepends=False)) - before:
                    chain.first_row = time.monotonic() - began
                time.sleep(0.005)
        finally:
            if process.poll() is None:
                process.kill()
                chain.problems.append("the restart hung")
            process.wait(timeout=10)
        error.seek(0)
        if process.returncode:
            chain.problems.append(f"the restart ended with code {process.returncode}: {error.read()[-300:]}")
        out.seek(0)
        return out.read()


def _summarise(chains: list[Chain], outcome: Outcome) -> None:
    first = [chain.first_row for chain in chains if chain.first_row is not None]
    kills = [kill for chain in chains for kill in chain.kills]
    outcome.figures["kills in save, learn, collect"] = ", ".join(str(kills.count(phase)) for phase in ("save", "learn", "collect"))
    outcome.figures["runs"] = f"{len(chains)}, with up to {max(CHAINS)} kills each"
    outcome.figures["most work lost"] = f"{max([chain.lost for chain in chains if not chain.beside])} interval"
    if first:
        outcome.figures["longest wait from the restart to its first new step"] = f"{max(first):.2f} s"
    beside = sum(len(chain.kills) for chain in chains if chain.beside)
    outcome.figures["kills of runs that save in a thread"] = str(beside)
    outcome.notes.append(
        "a third of the runs is made to save in a thread, though saves as frequent as here are not; 2 intervals may be lost then"
    )
    outcome.notes.append("the kill is a SIGKILL from a timer of the kernel, set at a random time inside the phase")
