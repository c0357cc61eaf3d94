"""C1, C2, C5 and C6: workers and trainers that are killed or die, and vector environments created and closed many times."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults import runs
from faults.processes_worlds import BEAT, BEATS, MARK, MISDEED, STEP_SECONDS
from faults.programme import Outcome, Work, child_environment, procedure
from faults.runs import RUN, Child, fresh, is_gone, shared_names, wait_for, workers_of
from inchworm.config.sections import EnvConfig
from inchworm.core.errors import InchwormError
from inchworm.env.source import make_vector_env

WORKERS = 4
KILLS_PER_RUN = 9
"""Ten restarts in ten minutes are allowed; one is reserved for a kill that hits a worker that is being replaced."""
AHEAD = 4
"""Steps of its two copies that a worker may still take after another one died: to the end of this step, and of the next."""
COMMAND = runs.train_command("--run.checkpoint-interval", "5", workers=WORKERS, updates=20, steps=64)
"""20 updates on 8 lanes in 4 workers, episodes of many lengths, a checkpoint every 5 updates."""


@dataclass
class Kills:
    """What was measured at all kills of C1."""

    noticed: list[float] = field(default_factory=list)
    replaced: list[float] = field(default_factory=list)
    count: int = 0
    in_a_step: int = 0


def read_beats(beats: Path, pids: list[int]) -> dict[int, tuple[int, int]]:
    """Worker -> steps begun so far, and whether it is inside one; only workers that have begun to count."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError, struct.error):
            found[pid] = BEAT.unpack((beats / str(pid)).read_bytes())
    return found


@procedure("C1", full=100, test=1)
def workers_killed(work: Work) -> Outcome:
    """kill -9 of a random env worker at random moments (4 workers, mid-step included).

    Must: noticed within 1 s, replaced within 5 s; no zombie, no name in /dev/shm; final weights bit-identical.
    Runs of 20 updates with up to nine kills each, until `count` workers have been killed.
    """
    outcome, rng, kills, number = Outcome(), random.Random(work.seed), Kills(), 0
    expected = runs.undisturbed(work.scratch / "undisturbed", COMMAND)
    ticks = work.each()
    next(ticks)
    while kills.count < work.count and number < work.count + 5:
        _kill_in_one_run(fresh(work.scratch / f"{number}"), work, rng, expected, kills, outcome, ticks)
        number += 1
    outcome.check(kills.count >= work.count, f"only {kills.count} of {work.count} workers could be killed")
    outcome.figures = {
        "kills": str(kills.count),
        "runs": str(number),
        "in the middle of a step": str(kills.in_a_step),
        "longest until noticed": runs.longest(kills.noticed),
        "longest until replaced": runs.longest(kills.replaced),
    }
    outcome.notes.append(
        "noticed: the trainer has waited for the dead process; replaced: all four workers step again. A kill between the last rollout "
        "and the end of the run is judged by its bits alone"
    )
    return outcome


def _kill_in_one_run(
    directory: Path, work: Work, rng: random.Random, expected: dict[str, str], kills: Kills, outcome: Outcome, ticks: Iterator[int]
) -> None:
    """One run with some kills: a case for each of them, and one for the bits of the run."""
    names, beats = shared_names(), fresh(directory / "beats")
    with runs.started(COMMAND, directory, **{BEATS: str(beats), STEP_SECONDS: "0.001"}) as child:
        rows = directory / RUN / "timing.jsonl"  # from its first row on, the run has opened all its files
        wait_for(lambda: (rows.exists() and rows.stat().st_size) or not child.running(), runs.LIMIT)
        before = runs.count_descriptors(child.pid) if child.running() else 0
        for _ in range(min(KILLS_PER_RUN, work.count - kills.count)):
            time.sleep(rng.uniform(0.0, 0.15))
            problem = _kill_worker(child, beats, work, rng, kills)
            if problem is None:
                break
            kills.count += 1
            outcome.check(not problem, f"kill {kills.count}: {problem}")
            next(ticks, None)
            if child.running() and not problem:  # a file that is being written at this moment does not count
                limit = 60.0 if work.reduced else 1.0
                flat = wait_for(lambda: not child.running() or runs.count_descriptors(child.pid) == before, limit)
                outcome.check(flat is not None, f"kill {kills.count}: more descriptors than the {before} before the kills")
        code = child.code_within(runs.LIMIT)
    different = runs.differences(runs.fingerprint(directory / RUN), expected)
    outcome.check(code == 0 and not different, f"the run ended with {code}; these differ: {different}; {child.errors()[-300:]}")
    outcome.check(not shared_names() - names, f"left in /dev/shm: {sorted(shared_names() - names)[:3]}")


def _kill_worker(child: Child, beats: Path, work: Work, rng: random.Random, kills: Kills) -> str | None:
    """Kill a worker and wait until all workers step again; what was wrong, or None if the run had ended."""
    pids = workers_of(child.pid)
    if not child.running() or not pids:
        return None
    victim = rng.choice(pids)
    with contextlib.suppress(ProcessLookupError):
        if rng.random() < 0.33:  # stopped, it does not read the next message
            os.kill(victim, signal.SIGSTOP)
            time.sleep(rng.uniform(0.0, 0.03))
        before = read_beats(beats, pids)
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        kills.in_a_step += read_beats(beats, [victim]).get(victim, (0, 0))[1]

    def all_step_again() -> bool:
        now = read_beats(beats, workers_of(child.pid))
        return len(now) == WORKERS and all(count > before.get(pid, (-1, 0))[0] + AHEAD for pid, (count, _) in now.items())

    noticed = wait_for(lambda: not runs.state_of(victim) or not child.running(), 60)
    replaced = wait_for(lambda: all_step_again() or not child.running(), 60)
    took = time.monotonic() - began
    if not child.running():  # it was killed after the last step that the run needed
        return "" if child.code_within(0) == 0 else f"the run ended with {child.code_within(0)}: {child.errors()[-400:]}"
    if noticed is None or replaced is None:
        return f"noticed after {noticed} s, replaced after {replaced} s"
    kills.noticed.append(noticed)
    kills.replaced.append(took)
    if wait_for(lambda: not runs.zombies(child.pid), 1.0 if not work.reduced else 60.0) is None:
        return f"zombies: {runs.zombies(child.pid)}"
    late = work.late(noticed, 1.0) or work.late(took, 5.0)
    return f"noticed after {noticed:.2f} s, replaced after {took:.2f} s" if late else ""


DEATHS = ("segv", "exit", "systemexit", "memory", "always-exit:0", "always-segv")
"""Once in a run at a random step (the run continues), or at every start and at every step (the run must give up)."""


@procedure("C2", full=24, usual=12, test=0)
def workers_die(work: Work) -> Outcome:
    """A worker that dies by itself: SIGSEGV, os._exit(3), SystemExit, out of memory (RLIMIT_AS); one that dies at every start.

    Must: once: replaced, final weights bit-identical; always: a clear error after 10 restarts, exit code 1, no traceback.
    Each way of dying in turn.
    """
    outcome, rng = Outcome(), random.Random(work.seed)
    expected = runs.undisturbed(work.scratch / "undisturbed", COMMAND)
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in work.each():
        death = DEATHS[number % len(DEATHS)]
        always = death.startswith("always")
        how = death if death.endswith(":0") else f"{death}:{rng.randint(*(1, 50) if always else (200, 1500))}"
        directory = fresh(work.scratch / f"{number}")
        began = time.monotonic()
        ended = runs.run(COMMAND, directory, **{MISDEED: how, MARK: str(directory / "mark")})
        times[always].append(time.monotonic() - began)
        problem = ""
        if always:
            last = [line for line in ended.error.splitlines() if line.startswith("inchworm: ")]
            if ended.code != 1 or "Traceback" in ended.error or not last or "env worker" not in last[-1] or "10" not in last[-1]:
                problem = f"exit code {ended.code}, no clear error: {ended.error[-400:]}"
        elif not (directory / "mark").exists():
            problem = "no worker died"
        else:
            different = runs.differences(runs.fingerprint(directory / RUN), expected)
            if ended.code != 0 or different or "replaced" not in ended.error:
                problem = f"the run ended with {ended.code}; these differ: {different}; {ended.error[-400:]}"
        outcome.check(not problem, f"{how}: {problem}")
    outcome.figures = {"longest run with a death": runs.longest(times[False], 1), "longest until it gave up": runs.longest(times[True], 1)}
    outcome.notes.append("a worker that always dies is tried in a run that has used no restarts before")
    return outcome


STATES = ("idle", "stepping", "hung")
HANGS_AT = 150
"""The step in which a worker hangs; checking a resume takes up to 64 steps."""


@procedure("C5", full=50, usual=24, test=1)
def trainer_killed(work: Work) -> Outcome:
    """kill -9 of the trainer with 4 workers idle, stepping or hung.

    Must: all workers gone within 2 s, no names in /dev/shm, the next start works.
    Kill the trainer at a random moment of its training, then run the same command again.
    """
    outcome, rng, waits = Outcome(), random.Random(work.seed), list[float]()
    for number in work.each():
        state = STATES[number % 3]
        problem = _kill_trainer(state, fresh(work.scratch / f"{number}"), work, rng, waits)
        outcome.check(not problem, f"kill {number}, workers {state}: {problem}")
    outcome.figures = {"longest life of a worker after its trainer": runs.longest(waits)}
    outcome.notes.append("idle: the trainer is stopped, so that its workers wait; hung: in C code that ignores SIGTERM and never returns")
    return outcome


def _kill_trainer(state: str, directory: Path, work: Work, rng: random.Random, waits: list[float]) -> str:
    command = runs.train_command("--run.checkpoint-interval", "3", updates=10)
    names, beats = shared_names(), fresh(directory / "beats")
    variables = {BEATS: str(beats), STEP_SECONDS: "0.002", MISDEED: f"always-hang:{HANGS_AT}" if state == "hung" else ""}
    with runs.started(command, directory, **variables) as child:

        def steps() -> list[int]:
            return [count for count, _ in read_beats(beats, workers_of(child.pid)).values()]

        if wait_for(lambda: len(workers_of(child.pid)) == WORKERS == len(steps()), runs.LIMIT) is None:
            return f"there are not four workers: {child.errors()[-300:]}"
        if state == "hung" and wait_for(lambda: min(steps()) >= HANGS_AT, runs.LIMIT) is None:
            return "the workers did not reach the step in which they hang"
        time.sleep(rng.uniform(0.0, 1.0))
        if state == "idle":  # the workers finish their step and wait
            os.kill(child.pid, signal.SIGSTOP)
            wait_for(lambda: all(runs.state_of(pid) == "S" for pid in workers_of(child.pid)), 1.0)
            time.sleep(0.02)
        pids = workers_of(child.pid)
        os.kill(child.pid, signal.SIGKILL)
        gone = wait_for(lambda: all(is_gone(pid) for pid in pids), 60)
        for pid in pids if gone is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    waits.append(99.0 if gone is None else gone)
    if gone is None or work.late(gone, 2.0):
        return f"workers lived for {gone} s"
    if shared_names() - names:
        return f"left in /dev/shm: {sorted(shared_names() - names)[:3]}"
    ended = runs.run(command, directory)
    saved = (directory / RUN / "policy.safetensors").exists()
    return "" if ended.code == 0 and saved else f"the next start ended with {ended.code}: {ended.error[-300:]}"


IN_PROCESS = 1000
WAYS = ("close", "twice", "after an error", "after a kill", "by __del__", "in the middle of a step")


@procedure("C6", full=1000, usual=60, test=2)
def create_and_close(work: Work) -> Outcome:
    """Create, step and close 1000 times: closed once, twice, after an error, after a kill, by __del__, at exit.

    Must: descriptors, threads, processes and shared memory flat, every close within 5 s.
    `count` cycles with two workers, each ended in another way, and up to 1000 cycles in this process.
    """
    outcome, closes, me = Outcome(), list[float](), os.getpid()

    def resources() -> dict[str, Any]:
        gc.collect()
        flat = {"descriptors": runs.count_descriptors(me), "threads": threading.active_count()}
        return {**flat, "children": len(runs.children(me)), "shared": sorted(shared_names())}

    in_process = min(IN_PROCESS, 50 * work.count)
    with warnings.catch_warnings(action="ignore"):
        for workers in (0, 2):  # the first cycles import, and start what stays
            _cycle(workers, "close", closes)
        before = resources()
        for number in range(in_process):
            _cycle(0, WAYS[number % len(WAYS)], closes)
        now = resources()
        outcome.check(now == before, f"after {in_process} cycles in this process {now}, before {before}")
        for number in work.each():
            way = WAYS[number % len(WAYS)]
            _cycle(2, way, closes)
            now = resources()
            outcome.check(now == before, f"cycle {number} ({way}): {now}, before {before}")
    outcome.check(not work.late(max(closes), 5.0), f"a close took {max(closes):.2f} s")
    # A script that ends while its vector environment is open must leave nothing behind.
    names, script = shared_names(), [sys.executable, "-c", SCRIPT]
    done = subprocess.run(script, cwd=work.scratch, env=child_environment(), capture_output=True, text=True, timeout=runs.LIMIT)
    pids = [int(part) for part in done.stdout.split()]
    gone = wait_for(lambda: all(is_gone(pid) for pid in pids), 60.0)
    left = [pid for pid in pids if not is_gone(pid)] if gone is None or work.late(gone, 2.0) else sorted(shared_names() - names)
    fine = done.returncode == 0 and "Traceback" not in done.stderr and len(pids) == 2 and gone is not None and not work.late(gone, 2.0)
    outcome.check(
        fine and not left, f"a script without close: code {done.returncode}, workers gone after {gone} s, left {left}, {done.stderr}"
    )
    outcome.figures = {
        "longest close": runs.longest(closes),
        "cycles with workers": str(work.count),
        "cycles in one process": str(in_process),
    }
    return outcome


def _cycle(workers: int, way: str, closes: list[float]) -> None:
    """Create a vector environment, step it, and end it in this way."""
    env = make_vector_env(EnvConfig(id=runs.WORLD, num_envs=4, num_workers=workers, native=False))
    env.reset()
    for _ in range(3):
        env.step([0, 1, 0, 1])
    began = time.monotonic()
    if way == "after an error":
        with contextlib.suppress(InchwormError, AssertionError):
            env.step([0, 1, 0, 7])  # there is no action 7
    elif way == "after a kill":
        for pid in workers_of(os.getpid()):
            os.kill(pid, signal.SIGKILL)
    elif way == "in the middle of a step":
        env.send([0, 1, 0, 1])
    for _ in range({"twice": 2, "by __del__": 0}.get(way, 1)):
        env.close()
    del env
    closes.append(time.monotonic() - began)


SCRIPT = f"""
import os
from faults.runs import workers_of
from inchworm.config.sections import EnvConfig
from inchworm.env.source import make_vector_env
kept = [make_vector_env(EnvConfig(id={runs.WORLD!r}, num_envs=4, num_workers=2))]
kept.append(kept)  # a cycle: only the end of the interpreter frees it
kept[0].reset()
print(*workers_of(os.getpid()))
"""
