"""C3, C4 and C8: environments that raise or hang inside a worker, and a machine at its limits."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import runs
from faults.processes_worlds import TEXTS, the_error
from faults.programme import Outcome, Work, procedure
from faults.runs import fresh, is_gone, shared_names, workers_of
from inchworm.config.sections import EnvConfig
from inchworm.core.errors import WorkerError
from inchworm.env.source import make_vector_env

CASES = list(itertools.product(("constructor", "reset", "step", "close"), TEXTS))
TIMEOUT = 2.0
STEPS = 40


def _vector_env(place: str, deed: str, kind: str, mark: Path, *, again: bool = False, **options: Any) -> Any:
    """Two workers with two copies each of an environment that does something wrong."""
    kwargs = {"place": place, "deed": deed, "kind": kind, "mark": str(mark), "again": again}
    options = {"num_envs": 4, "num_workers": 2, "max_episode_steps": 25, **options}
    return make_vector_env(EnvConfig(id="faults.processes_worlds:Wrong", kwargs=kwargs, **options))


def _play(env: Any, steps: int = STEPS) -> str:
    """A hash of every number of some steps with fixed actions."""
    import numpy as np

    rng, step, digest = np.random.default_rng(0), env.reset(), hashlib.sha256()
    for _ in range(steps):
        for array in (step.observations, step.rewards, step.terminated, step.truncated):
            digest.update(np.ascontiguousarray(array).tobytes())
        step = env.step(rng.integers(2, size=env.num_lanes))
    return digest.hexdigest()


def _read_mark(mark: Path) -> tuple[int, int, float]:
    """Process, number of the environment in it, and time of the misdeed; zeros if there was none."""
    parts = mark.read_text().split() if mark.exists() else []
    return (int(parts[0]), int(parts[1]), float(parts[2])) if len(parts) == 3 else (0, 0, 0.0)


@procedure("C3", full=24, test=3)
def exceptions(work: Work) -> Outcome:
    """Exceptions in a worker's constructor, reset, step, close: plain, with %, unpicklable, 10 MB, non-ASCII, KeyboardInterrupt.

    Must: type, text, traceback and lane in the parent within 1 s, close within 5 s, 24 of 24.
    Each kind of error in each place; the last cases of a reduced count are those of the step and of closing.
    """
    outcome, waits, closes = Outcome(), list[float](), list[float]()
    for number in work.each():
        place, kind = CASES[(7 * number + 13) % len(CASES)]  # 7 and 24 have no common factor: all of them, in a mixed order
        problem = _raise_once(place, kind, fresh(work.scratch / f"{number}") / "mark", work, waits, closes)
        outcome.check(not problem, f"{kind} in {place}: {problem}")
    outcome.figures = {"longest way of an error": runs.longest(waits), "longest close": runs.longest(closes)}
    outcome.notes.append("an error in close is a warning with lane, type and text; texts are cut after 10,000 characters")
    return outcome


def _raise_once(place: str, kind: str, mark: Path, work: Work, waits: list[float], closes: list[float]) -> str:
    """What was wrong with how an error was reported; empty if nothing."""
    text, env, lanes, pids = "", None, (1, 3), []
    with warnings.catch_warnings(record=True, action="always") as warned:
        try:
            env = _vector_env(place, "raise", kind, mark)
            pids = workers_of(os.getpid())
            _play(env, 10)
        except Exception as error:
            waits.append(time.monotonic() - _read_mark(mark)[2])
            text = f"{type(error).__name__}: {error}"
        pid, copy, _ = _read_mark(mark)
        if place not in ("constructor", "close") and pid in pids:
            lanes = (2 * pids.index(pid) + copy,)
        began = time.monotonic()
        if env is not None:
            env.close()
        closes.append(time.monotonic() - began)
    if place == "close":
        text = "\n".join(str(entry.message) for entry in warned)
    wanted = {
        "its type": type(the_error(kind)).__name__ in text,
        "its text": TEXTS[kind][:1000] in text,
        "the lane": any(f"lane {lane}" in text for lane in lanes),
        "the traceback": place == "close" or ("processes_worlds.py" in text and "in _maybe" in text),
    }
    missing = [name for name, there in wanted.items() if not there]
    if missing:
        return f"{', '.join(missing)} missing in {text[:600]!r}"
    if len(text) > 100_000:
        return f"the message has {len(text)} characters"
    if work.late(closes[-1], 5.0) or (place != "close" and work.late(waits[-1], 1.0)):  # an error in close is reported after closing
        return f"it took {waits[-1:]} s to arrive, and closing {closes[-1]:.2f} s"
    return "" if not workers_of(os.getpid()) else "a worker is left"


MANNERS = ("sleep", "loop", "in C")
HANGS = [
    *(("once", place, manner) for place in ("step", "reset") for manner in MANNERS),
    *(("always", place, manner) for place in ("step", "reset", "close") for manner in MANNERS),
    ("twice", "step", "sleep"),
]


@procedure("C4", full=len(HANGS), test=1)
def hangs(work: Work) -> Outcome:
    """Endless step, reset and close (asleep, in a loop and in C code that ignore SIGTERM), time-out 2 s.

    Must: acted on within time-out + 1 s, the hung process gone; rebuilt with the same numbers, or an error after the bound; default 60 s.
    Each manner in each place: hung once, always (with no restart allowed) and twice (with one allowed).
    """
    outcome = Outcome()
    times: dict[str, list[float]] = {"noticed": [], "rebuilt": [], "error": [], "close": []}
    quiet = fresh(work.scratch / "quiet") / "mark"
    quiet.touch()
    with _vector_env("none", "hang", "sleep", quiet, num_workers=0) as env:
        expected = _play(env)
    for number in work.each():
        how, place, manner = HANGS[(3 * number) % len(HANGS)]
        mark = fresh(work.scratch / f"{number}") / "mark"
        problem = _hang(how, place, manner, mark, work, times, expected)
        outcome.check(not problem, f"{manner} in {place}, {how}: {problem}")
    default = EnvConfig().worker_timeout
    outcome.check(default == 60.0, f"the default time-out is {default} s")
    outcome.figures = {
        "longest until a hung process was gone": runs.longest(times["noticed"]),
        "longest step with a rebuild": runs.longest(times["rebuilt"]),
        "longest until the error": runs.longest(times["error"]),
        "longest close of an environment that never closes": runs.longest(times["close"]),
    }
    return outcome


class _Watch:
    """Measures in a thread how long the process that made the mark lives after its misdeed, without asking the library."""

    def __init__(self, mark: Path) -> None:
        self.seconds, self._mark, self._stop = 99.0, mark, False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop:
            pid, _, moment = _read_mark(self._mark)
            if pid and is_gone(pid):
                self.seconds = time.monotonic() - moment
                return
            time.sleep(0.005)

    def stop(self) -> float:
        """Seconds from the misdeed to the end of the process; 99 if it is alive."""
        self._thread.join(0.05)
        self._stop = True
        self._thread.join()
        return self.seconds


def _hang(how: str, place: str, manner: str, mark: Path, work: Work, times: dict[str, list[float]], expected: str) -> str:
    """What was wrong with how a hang was handled; empty if nothing."""
    allowed = {"once": 10, "twice": 1, "always": 10 if place == "close" else 0}[how]
    env = _vector_env(place, "hang", manner, mark, worker_timeout=TIMEOUT, worker_restarts=allowed, again=how != "once")
    watch, text, found, pids = _Watch(mark), "", "", workers_of(os.getpid())
    with warnings.catch_warnings(record=True, action="always") as warned:
        began = time.monotonic()
        try:
            found = _play(env)
        except WorkerError as error:
            text = str(error)
        took = time.monotonic() - began
        pids += workers_of(os.getpid())
        began = time.monotonic()
        env.close()
        closing = time.monotonic() - began
    gone = watch.stop()
    if left := [pid for pid in {*pids} if not is_gone(pid)]:
        return f"workers are left: {left}"
    if place == "close":
        times["close"].append(closing)
        if found != expected:
            return "the numbers differ from those of an undisturbed run"
        return f"close took {closing:.2f} s" if work.late(closing, 5.0) else ""
    times["noticed"].append(gone)
    times["rebuilt" if how == "once" else "error"].append(took)
    limit = TIMEOUT + 6.0 if how == "once" else TIMEOUT + 1.0 + allowed * (TIMEOUT + 5.0)
    if work.late(gone, TIMEOUT + 1.0) or work.late(took, limit):
        return f"the hung process was gone after {gone:.2f} s, playing took {took:.2f} s"
    if how == "once":
        restarts = [entry for entry in warned if "WorkerRestart" in entry.category.__name__]
        if found != expected:
            return "the numbers differ from those of an undisturbed run"
        return "" if len(restarts) == 1 else f"{len(restarts)} warnings of a restart"
    return "" if "lane" in text else f"no clear error: {text!r}"


@dataclass(frozen=True)
class Limit:
    """One limit of the machine: what precedes the trainer's command."""

    name: str
    prefix: tuple[str, ...]
    big: bool = False
    """Whether the environment has observations of 256 kB."""
    must_work: bool = False
    """Whether even a clear error is a failure, because nothing is missing that the trainer needs."""


# The limit on processes counts per user and does not bind root, so the trainer gets an unused user id, which may read root's files.
AS_USER = (
    "setpriv",
    f"--reuid={54_000 + os.getpid() % 1000}",
    "--clear-groups",
    "--inh-caps=+dac_override",
    "--ambient-caps=+dac_override",
)
SMALL_SHARED = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh")
LIMITS = (
    Limit("10 descriptors", ("prlimit", "--nofile=10:10")),
    Limit("64 descriptors", ("prlimit", "--nofile=64:64"), must_work=True),
    Limit("/dev/shm of 1 MB", SMALL_SHARED, must_work=True),
    Limit("/dev/shm of 1 MB, rows of 4 MB", SMALL_SHARED, big=True, must_work=True),
    *(Limit(f"{number} descriptors", ("prlimit", f"--nofile={number}:{number}")) for number in (32, 20, 14)),
    *(Limit(f"{number} processes", (*AS_USER, "prlimit", f"--nproc={number}:{number}"), must_work=number == 8) for number in (1, 2, 4, 8)),
)


@functools.cache
def _may_limit() -> bool:
    """Whether this machine lets us mount, limit and change the user."""
    if any(shutil.which(name) is None for name in ("unshare", "prlimit", "setpriv")):
        return False
    trials = ([*SMALL_SHARED, "true"], [*AS_USER, "true"])
    return all(subprocess.run(trial, capture_output=True, timeout=10, check=False).returncode == 0 for trial in trials)


@procedure("C8", full=len(LIMITS), test=1, needs="unshare, prlimit and setpriv, with the right to use them", possible=_may_limit)
def limits(work: Work) -> Outcome:
    """/dev/shm of 1 MB, few file descriptors, few processes.

    Must: it works with the same bits, or one clear line; no signal, no hang, no worker left.
    A small run with 4 workers under each limit.
    """
    big = runs.train_command("--policy.hidden-sizes", "4", updates=2, steps=16)
    commands = {False: runs.train_command(updates=3), True: [part.replace(runs.WORLD, "faults.processes_worlds:Big") for part in big]}
    kinds = {limit.big for limit in LIMITS[: work.count]}
    expected = {kind: runs.undisturbed(work.scratch / f"undisturbed{kind}", commands[kind]) for kind in kinds}
    outcome, times, works = Outcome(), list[float](), list[str]()
    for number in work.each():
        limit, directory = LIMITS[number % len(LIMITS)], fresh(work.scratch / f"{number}")
        for part in (directory.parent, directory):
            part.chmod(0o777)
        names, began = shared_names(), time.monotonic()
        with runs.started([*limit.prefix, *commands[limit.big]], directory, HOME=str(directory)) as child:
            code = child.code_within(runs.LIMIT)
            left = runs.descendants(child.pid)
        times.append(time.monotonic() - began)
        error, problem = child.errors(), ""
        if code is None:
            problem = f"it hung; {error[-300:]}"
        elif left or shared_names() - names:
            problem = f"it left processes {left} or names {sorted(shared_names() - names)[:3]}"
        elif code == 0:
            problem = runs.differences(runs.fingerprint(directory / runs.RUN), expected[limit.big])
            works.append(limit.name)
        elif code < 0 or code > 128 or limit.must_work:
            problem = f"it ended with code {code}: {error[-500:]}"
        elif "Traceback" in error or re.search(r"^inchworm: .{20,}", error, re.MULTILINE) is None:
            problem = f"no clear line: {error[-700:]}"
        outcome.check(not problem, f"{limit.name}: {problem}")
    outcome.figures = {"longest run": runs.longest(times, 1), "works under": "; ".join(works)}
    outcome.notes.append("rows of 4 MB: observations of 256 kB on 8 lanes; the limit on processes is set for an unused user id")
    return outcome
