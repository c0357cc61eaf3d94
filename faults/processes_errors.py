"""C3 and C4: environments that raise or hang inside a worker."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from faults.processes_tools import fresh, is_gone, seconds, workers_of
from faults.processes_worlds import TEXTS, the_error
from faults.programme import Outcome, Work, procedure

CASES = list(itertools.product(("constructor", "reset", "step", "close"), TEXTS))
TIMEOUT = 2.0
STEPS = 40


def _vector_env(place: str, deed: str, kind: str, mark: Path, **options: Any) -> Any:
    """Two workers with two copies each of a world that does something wrong."""
    from inchworm.config.sections import EnvConfig
    from inchworm.env.source import make_vector_env

    kwargs = {"place": place, "deed": deed, "kind": kind, "mark": str(mark), "again": options.pop("again", False)}
    known = {"num_envs": 4, "num_workers": 2, "max_episode_steps": 25, **options}
    return make_vector_env(EnvConfig(id="faults.processes_worlds:Wrong", kwargs=kwargs, **known))


def _play(env: Any, steps: int = STEPS) -> str:
    """A hash of every number of some steps with fixed actions."""
    import numpy as np

    rng = np.random.default_rng(0)
    taken = [env.reset()]
    digest = hashlib.sha256()
    for _ in range(steps):
        step = taken.pop()
        for array in (step.observations, step.rewards, step.terminated, step.truncated):
            digest.update(np.ascontiguousarray(array).tobytes())
        taken.append(env.step(rng.integers(2, size=env.num_lanes)))
    return digest.hexdigest()


def _who(mark: Path) -> tuple[int, int, float]:
    """Process, number in the process, and moment of the misdeed; long ago and nobody if there was none."""
    if not mark.exists():
        return 0, 0, 0.0
    pid, number, moment = mark.read_text().split()
    return int(pid), int(number), float(moment)


@procedure(
    "C3",
    title="Exceptions in a worker's constructor, reset, step, close: plain, with %, unpicklable, 10 MB, non-ASCII, KeyboardInterrupt",
    must="type, text, traceback and lane in the parent within 1 s, close within 5 s, 24 of 24",
    full=24,
    test=3,
)
def exceptions(work: Work) -> Outcome:
    """Each kind of error in each place; the last cases of a reduced count are those of the step and of closing."""
    outcome = Outcome()
    waits: list[float] = []
    closes: list[float] = []
    for number in work.each():
        place, kind = CASES[(7 * number + 13) % len(CASES)]  # 7 and 24 have no common factor: all of them, in a mixed order
        problem = _one_error(place, kind, fresh(work.scratch / f"{number}") / "mark", waits, closes)
        outcome.check(not problem, f"{kind} in {place}: {problem}")
    outcome.figures = {"longest way of an error": seconds(waits), "longest close": seconds(closes)}
    outcome.notes.append(
        "an error in close is a warning that names lane, type and text, without a traceback: nothing is lost by it; "
        "texts are cut after 10,000 characters"
    )
    return outcome


def _one_error(place: str, kind: str, mark: Path, waits: list[float], closes: list[float]) -> str:
    """What was not well; empty if all was."""
    text, env, lanes, pids = "", None, (1, 3), []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            env = _vector_env(place, "raise", kind, mark)
            pids = workers_of(os.getpid())
            _play(env, 10)
        except Exception as error:
            waits.append(time.monotonic() - _who(mark)[2])
            text = f"{type(error).__name__}: {error}"
        if place not in ("constructor", "close") and _who(mark)[0] in pids:
            lanes = (2 * pids.index(_who(mark)[0]) + _who(mark)[1],)
        began = time.monotonic()
        if env is not None:
            env.close()
        closes.append(time.monotonic() - began)
    if place == "close":
        text = "\n".join(str(entry.message) for entry in warned)
    return _judge(text, place, kind, lanes, waits[-1] if waits else 99.0, closes[-1])


def _judge(text: str, place: str, kind: str, lanes: tuple[int, ...], wait: float, close: float) -> str:
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
    if (place != "close" and wait > 1.0) or close > 5.0:  # what went wrong while closing is told once closing is over
        return f"it took {wait:.2f} s to arrive, and closing {close:.2f} s"
    return "" if not workers_of(os.getpid()) else "a worker is left"


MANNERS = ("sleep", "loop", "in C")
HANGS = [
    *(("once", place, manner) for place in ("step", "reset") for manner in MANNERS),
    *(("always", place, manner) for place in ("step", "reset", "close") for manner in MANNERS),
    ("twice", "step", "sleep"),
]


@procedure(
    "C4",
    title="Endless step, reset and close (asleep, in a loop and in C code that ignore SIGTERM), time-out 2 s",
    must="acted on within time-out + 1 s, the hung process gone; rebuilt with the same numbers, or an error after the bound; default 60 s",
    full=len(HANGS),
    test=1,
)
def hangs(work: Work) -> Outcome:
    """Each manner in each place: hung once, always (with no restart allowed) and twice (with one allowed)."""
    from inchworm.config.sections import EnvConfig

    outcome = Outcome()
    figures: dict[str, list[float]] = {"noticed": [], "back": [], "error": [], "close": []}
    quiet = fresh(work.scratch / "quiet") / "mark"
    quiet.touch()
    with _vector_env("none", "hang", "sleep", quiet, num_workers=0) as env:
        wanted = _play(env)
    for number in work.each():
        how, place, manner = HANGS[(3 * number) % len(HANGS)]
        mark = fresh(work.scratch / f"{number}") / "mark"
        problem = (_hung_once if how == "once" else _hung_close if place == "close" else _hung_always)(
            place, manner, mark, figures, wanted=wanted, restarts=int(how == "twice")
        )
        outcome.check(not problem, f"{manner} in {place}, {how}: {problem}")
    default = EnvConfig().worker_timeout
    outcome.check(default == 60.0, f"the default time-out is {default} s")
    outcome.figures = {
        "longest until a hung process was gone": seconds(figures["noticed"]),
        "longest step with a rebuild": seconds(figures["back"]),
        "longest until the error": seconds(figures["error"]),
        "longest close of a world that never closes": seconds(figures["close"]),
    }
    return outcome


class _Watch:
    """Notes in a thread when the process that made the mark has gone, without asking the library."""

    def __init__(self, mark: Path) -> None:
        self.after: float | None = None
        self._mark, self._stop = mark, False
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop:
            if self._mark.exists() and len(self._mark.read_text().split()) == 3:
                pid, _, moment = _who(self._mark)
                if is_gone(pid):
                    self.after = time.monotonic() - moment
                    return
            time.sleep(0.005)

    def stop(self) -> float:
        """Seconds from the misdeed to the end of the process; a large number if it lives."""
        time.sleep(0.05)
        self._stop = True
        self._thread.join()
        return 99.0 if self.after is None else self.after


def _hung_once(place: str, manner: str, mark: Path, figures: dict[str, list[float]], *, wanted: str, restarts: int) -> str:
    del restarts
    watch = _Watch(mark)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with _vector_env(place, "hang", manner, mark, worker_timeout=TIMEOUT) as env:
            began = time.monotonic()
            found = _play(env)
            took = time.monotonic() - began
    gone = watch.stop()
    figures["noticed"].append(gone)
    figures["back"].append(took)
    told = [entry for entry in warned if "WorkerRestart" in entry.category.__name__]
    if found != wanted:
        return "the numbers differ from those of an undisturbed run"
    if gone > TIMEOUT + 1.0 or took > TIMEOUT + 1.0 + 5.0:
        return f"the hung process was gone after {gone:.2f} s, the step took {took:.2f} s"
    return "" if len(told) == 1 else f"{len(told)} warnings of a restart"


def _hung_always(place: str, manner: str, mark: Path, figures: dict[str, list[float]], *, wanted: str, restarts: int) -> str:
    del wanted
    from inchworm.core.errors import WorkerError

    watch = _Watch(mark)
    env = _vector_env(place, "hang", manner, mark, worker_timeout=TIMEOUT, worker_restarts=restarts, again=True)
    began, text, pids = time.monotonic(), "", workers_of(os.getpid())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _play(env)
        except WorkerError as error:
            text = str(error)
        took = time.monotonic() - began
        env.close()
    gone = watch.stop()
    figures["noticed"].append(gone)
    figures["error"].append(took)
    allowed = TIMEOUT + 1.0 + restarts * (TIMEOUT + 5.0)
    if not text or "lane" not in text:
        return f"no clear error: {text!r}"
    if took > allowed or gone > TIMEOUT + 1.0:
        return f"the error came after {took:.2f} s, the hung process was gone after {gone:.2f} s"
    left = [pid for pid in {*pids, *workers_of(os.getpid())} if not is_gone(pid)]
    return f"workers are left: {left}" if left else ""


def _hung_close(place: str, manner: str, mark: Path, figures: dict[str, list[float]], *, wanted: str, restarts: int) -> str:
    del restarts
    env = _vector_env(place, "hang", manner, mark, worker_timeout=TIMEOUT, again=True)
    found, pids = _play(env), workers_of(os.getpid())
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env.close()
    took = time.monotonic() - began
    figures["close"].append(took)
    left = [pid for pid in pids if not is_gone(pid)]
    if found != wanted:
        return "the numbers differ from those of an undisturbed run"
    return f"close took {took:.2f} s and left {left}" if took > 5.0 or left else ""
