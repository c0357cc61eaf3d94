"""C1 and C2: env workers that are killed, or that die by themselves, while a run trains."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from faults.processes_tools import (
    LIMIT_SECONDS,
    RUN,
    Child,
    count_descriptors,
    differences,
    fingerprint,
    finished,
    fresh,
    seconds,
    shared_names,
    started,
    state_of,
    train_command,
    undisturbed,
    wait_for,
    workers_of,
    zombies,
)
from faults.processes_worlds import BEAT, BEATS, MARK, MISDEED, STEP_SECONDS
from faults.programme import Outcome, Work, procedure

WORKERS = 4
KILLS_PER_RUN = 9
"""Ten restarts in ten minutes are allowed; the last one is left, in case that a kill meets a worker that is being replaced."""
AHEAD = 4
"""Steps of its two copies that a worker may still take after another one died: to the end of this step, and of the next."""


@dataclass
class Seen:
    """What was measured at all kills."""

    noticed: list[float] = field(default_factory=list)
    replaced: list[float] = field(default_factory=list)
    kills: int = 0
    in_a_step: int = 0


def command() -> list[str]:
    """20 updates on 8 lanes in 4 workers, episodes of many lengths, a checkpoint every 5 updates."""
    return train_command("--run.checkpoint-interval", "5", workers=WORKERS, updates=20, steps=64)


@procedure(
    "C1",
    title="kill -9 of a random env worker at random moments (4 workers, mid-step included)",
    must="noticed within 1 s, replaced within 5 s; no zombie, no name in /dev/shm; final weights bit-identical",
    full=100,
    test=2,
)
def workers_killed(work: Work) -> Outcome:
    """Runs of 20 updates with up to nine kills each, until `count` workers have been killed."""
    outcome = Outcome()
    moment = random.Random(work.seed)
    wanted = undisturbed(command(), fresh(work.scratch / "undisturbed"))
    seen, runs = Seen(), 0
    ticks = work.each()
    next(ticks)
    while seen.kills < work.count and runs < work.count + 5:
        kills = min(KILLS_PER_RUN, work.count - seen.kills)
        _one_run(fresh(work.scratch / f"{runs}"), kills, moment, wanted, seen, outcome, ticks)
        runs += 1
    outcome.check(seen.kills >= work.count, f"only {seen.kills} of {work.count} workers could be killed")
    outcome.figures = {
        "kills": str(seen.kills),
        "runs": str(runs),
        "in the middle of a step": str(seen.in_a_step),
        "longest until noticed": seconds(seen.noticed),
        "longest until replaced": seconds(seen.replaced),
    }
    outcome.notes.append(
        "noticed: the dead process has been looked at by the trainer; replaced: all four workers step again. A kill that hits "
        "between collecting and the run's end has nobody to wait for and is only counted by its bits"
    )
    return outcome


def _one_run(
    directory: Path, kills: int, moment: random.Random, wanted: dict[str, str], seen: Seen, outcome: Outcome, ticks: object
) -> None:
    """One run with some kills; a case for each of them, and one for the run's bits."""
    names, beats = shared_names(), fresh(directory / "beats")
    with started(command(), directory, **{BEATS: str(beats), STEP_SECONDS: "0.001"}) as child:
        rows = directory / RUN / "metrics.jsonl"  # from its first row on, the run holds all files that it will
        wait_for(lambda: (rows.exists() and rows.stat().st_size) or not child.running(), LIMIT_SECONDS)
        before = count_descriptors(child.pid) if child.running() else 0
        for _ in range(kills):
            time.sleep(moment.uniform(0.0, 0.15))
            problem = _kill_one(child, beats, moment, seen)
            if problem == "over":
                break
            seen.kills += 1
            outcome.check(not problem, f"kill {seen.kills}: {problem}")
            next(ticks, None)  # type: ignore[call-overload]
            if child.running() and not problem:
                after = _flat(child, before)
                outcome.check(after == before, f"kill {seen.kills}: {after} descriptors, {before} before the kills")
        code = child.code_within(LIMIT_SECONDS)
        said = child.said()
    different = differences(fingerprint(directory / RUN), wanted)
    outcome.check(code == 0 and not different, f"the run ended with {code}; these differ: {different}; {said[-300:]}")
    outcome.check(not shared_names() - names, f"left in /dev/shm: {sorted(shared_names() - names)[:3]}")


def _flat(child: Child, before: int) -> int:
    """The trainer's descriptors, once a file that it may be writing this moment is closed."""
    counts = [before + 1]

    def same() -> bool:
        with contextlib.suppress(OSError):
            counts.append(count_descriptors(child.pid))
        return counts[-1] == before or not child.running()

    return before if wait_for(same, 1.0) is not None or not child.running() else counts[-1]


def _counts(beats: Path, pids: Sequence[int]) -> dict[int, int]:
    """Steps begun so far by each of some workers that have begun to count."""
    return {pid: count for pid in pids for count, _ in _beat_of(beats, pid)}


def _beat_of(beats: Path, pid: int) -> list[tuple[int, int]]:
    """A worker's count, and whether it is in the middle of a step; nothing if it has not begun to count."""
    with contextlib.suppress(OSError, struct.error):
        return [BEAT.unpack((beats / str(pid)).read_bytes())]
    return []


def _kill_one(child: Child, beats: Path, moment: random.Random, seen: Seen) -> str:
    """Kill a worker, wait until the trainer goes on: what was not well, or "over" if the run had ended."""
    pids = workers_of(child.pid)
    if not child.running() or not pids:
        return "over"
    victim = moment.choice(pids)
    with contextlib.suppress(ProcessLookupError):
        if moment.random() < 0.33:  # its next message is sent to one that does not read, and is never read
            os.kill(victim, signal.SIGSTOP)
            time.sleep(moment.uniform(0.0, 0.03))
        counts = _counts(beats, pids)
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        seen.in_a_step += any(inside for _, inside in _beat_of(beats, victim))
    noticed = wait_for(lambda: not state_of(victim) or not child.running(), 15)
    replaced = wait_for(lambda: _goes_on(child, beats, counts) or not child.running(), 30)
    took = time.monotonic() - began
    if not child.running():  # it was killed after the last step that the run needed
        return "" if child.code_within(0) == 0 else f"the run ended with {child.code_within(0)}: {child.said()[-400:]}"
    if noticed is None or replaced is None:
        return f"noticed after {noticed} s, replaced after {replaced} s"
    seen.noticed.append(noticed)
    seen.replaced.append(took)
    if zombies(child.pid) and wait_for(lambda: not zombies(child.pid), 1.0) is None:
        return f"zombies: {zombies(child.pid)}"
    return f"noticed after {noticed:.2f} s, replaced after {took:.2f} s" if noticed > 1.0 or took > 5.0 else ""


def _goes_on(child: Child, beats: Path, before: dict[int, int]) -> bool:
    """Whether all workers are there and have stepped beyond what they could without the one that was killed."""
    now = _counts(beats, workers_of(child.pid))
    return len(now) == WORKERS and all(count > before.get(pid, -1) + AHEAD for pid, count in now.items())


DEATHS = ("segv", "exit", "systemexit", "memory", "always-exit:0", "always-segv")
"""Once in a run at a random step (and the run goes on), or at every start and at every step (and the run must give up)."""


@procedure(
    "C2",
    title="A worker that dies by itself: SIGSEGV, os._exit(3), SystemExit, out of memory (RLIMIT_AS); one that dies at every start",
    must="once: replaced, final weights bit-identical; always: a clear error after 10 restarts, exit code 1, no traceback",
    full=24,
    usual=12,
    test=0,
)
def workers_die(work: Work) -> Outcome:
    """Each way of dying in turn."""
    outcome = Outcome()
    moment = random.Random(work.seed)
    wanted = undisturbed(command(), fresh(work.scratch / "undisturbed"))
    times: dict[str, list[float]] = {"once": [], "always": []}
    for number in work.each():
        death = DEATHS[number % len(DEATHS)]
        how = death if death.endswith(":0") else f"{death}:{moment.randint(*(1, 50) if death.startswith('always') else (200, 1500))}"
        directory = fresh(work.scratch / f"{number}")
        began = time.monotonic()
        code, said = finished(command(), directory, **{MISDEED: how, MARK: str(directory / "mark")})
        took = time.monotonic() - began
        times["always" if death.startswith("always") else "once"].append(took)
        problem = _gave_up(code, said) if death.startswith("always") else _went_on(code, said, directory, wanted)
        outcome.check(not problem, f"{how}: {problem}")
    outcome.figures = {
        "longest run with a death": seconds(times["once"], 1),
        "longest until it gave up": seconds(times["always"], 1),
    }
    outcome.notes.append("the error of a worker that always dies is awaited in a run that has used no restarts before")
    return outcome


def _went_on(code: int | None, said: str, directory: Path, wanted: dict[str, str]) -> str:
    if not (directory / "mark").exists():
        return "no worker died"
    different = differences(fingerprint(directory / RUN), wanted)
    if code != 0 or different:
        return f"the run ended with {code}; these differ: {different}; {said[-400:]}"
    return "" if "replaced" in said else f"no warning of a restart: {said[-300:]}"


def _gave_up(code: int | None, said: str) -> str:
    last = [line for line in said.splitlines() if line.startswith("inchworm: ")]
    if code != 1 or "Traceback" in said:
        return f"exit code {code}: {said[-400:]}"
    return "" if last and "env worker" in last[-1] and "10" in last[-1] else f"no clear error: {said[-400:]}"
