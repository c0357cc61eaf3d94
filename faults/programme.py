"""What a procedure of the fault programme is, and the list of all of them.

A procedure is one function with an ID. It causes a fault `work.count` times in `work.scratch` and counts how often the result was right.
The first line of its docstring is its title, and the line that starts with "Must:" says when it passes (continuation lines are indented):

    @procedure("A7", full=20, test=2)
    def two_trainers(work: Work) -> Outcome:
        \"\"\"Two trainers on one run.

        Must: the second refuses within 1 s.
        \"\"\"
        outcome = Outcome()
        for number in work.each():
            outcome.check(refused(...) and not work.late(seconds, 1.0), f"attempt {number}: it took 3.2 s")
        return outcome

`make faults` runs it with its usual or full count, the test suite with its `test` count. The same procedure with a peer is another
function, `@peer("A7", "Stable-Baselines3")`. To extend the programme, write a function in a module of `MODULES`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODULES = (
    *("durability_kills", "durability_points", "durability_full_disk", "durability_files"),  # A
    *("hostile_files", "hostile_names"),  # B
    *("processes_kills", "processes_errors", "processes_signals"),  # C
    *("bad_data_steps", "bad_data_learning"),  # D
    *("right_updates", "right_loss", "right_laws", "bugs"),  # E
    *("resume", "resume_changes"),  # F
    *("everyday_configs", "everyday_runs", "collectors"),  # G
    "peers",
)
"""The modules that contain procedures, by section."""


def child_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a child process: this package and the doubles of the tests are importable, and BLAS uses one thread."""
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **variables}


def benchmark(name: str) -> Any:
    """Import a script of benchmarks/ as a module. The scripts import each other by plain names."""
    directory = str(ROOT / "benchmarks")
    if directory not in sys.path:
        sys.path.append(directory)
    return importlib.import_module(name)


@dataclass
class Outcome:
    """How many cases passed, what was measured, and why cases failed."""

    passed: int = 0
    total: int = 0
    figures: dict[str, str] = field(default_factory=dict)
    """Name -> value with its unit, such as "longest wait" -> "0.31 s"."""
    failures: list[str] = field(default_factory=list)
    """The first 20 failures."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know to judge the figures."""

    def check(self, passed: bool, failure: str) -> bool:
        """Count one case; `failure` describes what was wrong if it did not pass."""
        self.total += 1
        self.passed += bool(passed)
        if not passed and len(self.failures) < 20:
            self.failures.append(failure)
        return bool(passed)

    @property
    def is_fine(self) -> bool:
        """Whether there were cases and all of them passed."""
        return self.total > 0 and self.passed == self.total


@dataclass
class Work:
    """What a procedure is given: a count, a scratch directory and a seed. In the suite the work is `reduced`."""

    count: int
    scratch: Path
    seed: int = 0
    reduced: bool = True
    tick: Callable[[int, int], None] = lambda done, total: None

    def each(self, total: int | None = None) -> Iterator[int]:
        """Yield 0 … count - 1 (or total - 1) and report the progress."""
        total = self.count if total is None else total
        for number in range(total):
            self.tick(number, total)
            yield number
        self.tick(total, total)

    def late(self, seconds: float, limit: float) -> bool:
        """Whether a time limit was exceeded. Only `python -m faults` checks limits: the suite also runs on busy machines."""
        return not self.reduced and seconds > limit


Run = Callable[[Work], Outcome]


@dataclass(frozen=True)
class Procedure:
    """One entry of the programme."""

    id: str
    title: str
    must: str
    """When it passes."""
    full: int
    """The count that the programme asks for."""
    usual: int
    """The count of `make faults`."""
    test: int
    """The count in the test suite; 0 where other tests of the suite cover the same."""
    run: Run
    alone: bool = False
    """Whether nothing else may run at the same time, because short times are measured."""
    needs: str = ""
    """What the machine must have, such as strace; without it the procedure is reported as not run."""
    possible: Callable[[], bool] = lambda: True
    """Whether this machine has it."""


PROCEDURES: dict[str, Procedure] = {}
PEERS: dict[tuple[str, str], Run] = {}


def procedure(id: str, *, full: int, test: int, usual: int | None = None, **options: Any) -> Callable[[Run], Run]:
    """Add a function to the programme, with title and `must` from its docstring; `options` are the other fields of `Procedure`."""

    def enter(run: Run) -> Run:
        if id in PROCEDURES:
            raise ValueError(f"there are two procedures {id}")
        found = re.match(r"(?s)(.*?)\.\n\n(?:.*\n)?Must: (.*?)\.(?:\n(?! )|$)", inspect.cleandoc(run.__doc__ or ""))
        if found is None:
            raise ValueError(f"the docstring of procedure {id} has no title or no line that starts with Must:")
        title, must = (" ".join(part.split()) for part in found.groups())
        PROCEDURES[id] = Procedure(id, title, must, full, full if usual is None else usual, test, run, **options)
        return run

    return enter


def peer(id: str, name: str) -> Callable[[Run], Run]:
    """Add the same procedure with a peer, as similar as the peer allows."""

    def enter(run: Run) -> Run:
        PEERS[id, name] = run
        return run

    return enter


def load_all() -> dict[str, Procedure]:
    """Import all modules of the programme; every procedure by its ID, A2 before A10."""
    for name in MODULES:
        importlib.import_module(f"faults.{name}")
    return dict(sorted(PROCEDURES.items(), key=lambda entry: (entry[0][0], int(re.sub(r"\D", "", entry[0])), entry[0])))


def as_data(outcome: Outcome, *, count: int, seconds: float) -> dict[str, Any]:
    """An outcome as it is stored."""
    return {**dataclasses.asdict(outcome), "count": count, "seconds": round(seconds, 1)}
