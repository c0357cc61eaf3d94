"""C5 and C6: what is left when a trainer is killed, and after a thousand vector envs."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.processes_tools import (
    RUN,
    WORLD,
    Child,
    children,
    count_descriptors,
    finished,
    fresh,
    is_gone,
    seconds,
    shared_names,
    started,
    state_of,
    train_command,
    wait_for,
    workers_of,
)
from faults.processes_worlds import BEAT, BEATS, MISDEED, STEP_SECONDS
from faults.programme import Outcome, Work, child_environment, procedure

STATES = ("idle", "stepping", "hung")
HANGS_AT = 150  # after the rehearsal of a resume, which takes up to 64 steps
"""The step of a worker in which it hangs."""


@procedure(
    "C5",
    title="kill -9 of the trainer with 4 workers idle, stepping or hung",
    must="all workers gone within 2 s, no names in /dev/shm, the next start works",
    full=50,
    usual=24,
    test=1,
)
def trainer_killed(work: Work) -> Outcome:
    """Kill the trainer at a random moment of its training, then give the same command again."""
    outcome = Outcome()
    random_moment = random.Random(work.seed)
    waits: list[float] = []
    for number in work.each():
        state = STATES[number % 3]
        directory = fresh(work.scratch / f"{number}")
        problem = _kill_one(state, directory, random_moment, waits)
        outcome.check(not problem, f"kill {number}, workers {state}: {problem}")
    outcome.figures = {"longest life of a worker after its trainer": seconds(waits)}
    outcome.notes.append("idle: the trainer is stopped, so that its workers wait; hung: in C code that ignores SIGTERM and never returns")
    return outcome


def _kill_one(state: str, directory: Path, random_moment: random.Random, waits: list[float]) -> str:
    command = train_command("--run.checkpoint-interval", "3", updates=10)
    names, beats = shared_names(), fresh(directory / "beats")
    variables = {BEATS: str(beats), STEP_SECONDS: "0.002", MISDEED: f"always-hang:{HANGS_AT}" if state == "hung" else ""}
    with started(command, directory, **variables) as child:
        if wait_for(lambda: len(workers_of(child.pid)) == 4 == len(_steps(child, beats)), 60) is None:
            return f"no four workers: {child.said()[-300:]}"
        if state == "hung" and wait_for(lambda: min(_steps(child, beats)) >= HANGS_AT, 60) is None:
            return "the workers did not come to where they hang"
        time.sleep(random_moment.uniform(0.0, 1.0))
        if state == "idle":
            _make_idle(child)
        pids = workers_of(child.pid)
        os.kill(child.pid, signal.SIGKILL)
        gone = wait_for(lambda: all(is_gone(pid) for pid in pids), 10)
        for pid in pids if gone is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    waits.append(99.0 if gone is None else gone)
    if gone is None or gone > 2.0:
        return f"workers lived for {gone} s"
    if shared_names() - names:
        return f"left in /dev/shm: {sorted(shared_names() - names)[:3]}"
    code, said = finished(command, directory)
    return "" if code == 0 and (directory / RUN / "policy.safetensors").exists() else f"the next start ended with {code}: {said[-300:]}"


def _steps(child: Child, beats: Path) -> list[int]:
    """Steps so far of every worker that has taken one; the one in which a resume was rehearsed is gone by then."""
    files = [beats / str(pid) for pid in workers_of(child.pid)]
    return [BEAT.unpack(path.read_bytes())[0] for path in files if path.exists() and path.stat().st_size]


def _make_idle(child: Child) -> None:
    """Stop the trainer; its workers finish their step and wait."""
    os.kill(child.pid, signal.SIGSTOP)
    wait_for(lambda: all(state_of(pid) == "S" for pid in workers_of(child.pid)), 1.0)
    time.sleep(0.02)


IN_PROCESS = 1000


@procedure(
    "C6",
    title="Create, step and close 1000 times: closed once, twice, after an error, after a kill, by __del__, at exit",
    must="descriptors, threads, processes and shared memory flat, every close within 5 s",
    full=1000,
    usual=60,
    test=2,
)
def create_and_close(work: Work) -> Outcome:
    """`count` cycles with two workers, each ended in another way, and up to 1000 cycles in this process."""
    outcome = Outcome()
    closes: list[float] = []
    in_process = min(IN_PROCESS, 50 * work.count)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _cycle(0, "close", closes)  # the first one imports, and starts what stays
        _cycle(2, "close", closes)
        before = _holdings()
        for number in range(in_process):
            _cycle(0, WAYS[number % len(WAYS)], closes)
        gc.collect()
        outcome.check(_holdings() == before, f"after {in_process} cycles in this process {_holdings()}, before {before}")
        for number in work.each():
            way = WAYS[number % len(WAYS)]
            _cycle(2, way, closes)
            gc.collect()
            now = _holdings()
            outcome.check(now == before, f"cycle {number} ({way}): {now}, before {before}")
    outcome.check(max(closes) <= 5.0, f"a close took {max(closes):.2f} s")
    lives = _left_at_exit(work.scratch)
    outcome.check(not lives, f"a script that ends without closing left {lives}")
    outcome.figures = {"longest close": seconds(closes), "cycles with workers": str(work.count), "cycles in one process": str(in_process)}
    return outcome


def _holdings() -> dict[str, Any]:
    """All that a process might leak."""
    me = os.getpid()
    return {
        "descriptors": count_descriptors(me),
        "threads": threading.active_count(),
        "children": len(children(me)),
        "shared": sorted(shared_names()),
    }


def _cycle(workers: int, way: str, closes: list[float]) -> None:
    from inchworm.config.sections import EnvConfig
    from inchworm.env.source import make_vector_env

    env = make_vector_env(EnvConfig(id=WORLD, num_envs=4, num_workers=workers, native=False))
    env.reset()
    for _ in range(3):
        env.step([0, 1, 0, 1])
    began = time.monotonic()
    ENDS[way](env)
    del env
    closes.append(time.monotonic() - began)


def _twice(env: Any) -> None:
    env.close()
    env.close()


def _after_an_error(env: Any) -> None:
    from inchworm.core.errors import InchwormError

    with contextlib.suppress(InchwormError, AssertionError):
        env.step([0, 1, 0, 7])  # there is no action 7
    env.close()


def _after_a_kill(env: Any) -> None:
    for pid in workers_of(os.getpid()):
        os.kill(pid, signal.SIGKILL)
    env.close()


def _in_a_step(env: Any) -> None:
    env.send([0, 1, 0, 1])
    env.close()


ENDS: dict[str, Callable[[Any], None]] = {
    "close": lambda env: env.close(),
    "twice": _twice,
    "after an error": _after_an_error,
    "after a kill": _after_a_kill,
    "by __del__": lambda env: None,
    "in the middle of a step": _in_a_step,
}
WAYS = tuple(ENDS)

SCRIPT = f"""
import sys
from inchworm.config.sections import EnvConfig
from inchworm.env.source import make_vector_env
kept = [make_vector_env(EnvConfig(id={WORLD!r}, num_envs=4, num_workers=2))]
kept.append(kept)  # a circle: only the end of the interpreter frees it
kept[0].reset()
from faults.processes_tools import workers_of
import os
print(*workers_of(os.getpid()))
"""


def _left_at_exit(scratch: Path) -> str:
    """What a script leaves that ends while its vector env is open; empty if nothing."""
    names = shared_names()
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=scratch, env=child_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    took = time.monotonic() - began
    pids = [int(part) for part in done.stdout.split()]
    if wait_for(lambda: all(is_gone(pid) for pid in pids), 2.0) is None:
        return f"the workers {pids}"
    if done.returncode != 0 or "Traceback" in done.stderr or len(pids) != 2 or took > 30:
        return f"exit code {done.returncode} after {took:.1f} s: {done.stderr[-300:]}"
    return str(sorted(shared_names() - names)[:3]) if shared_names() - names else ""
