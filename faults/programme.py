"""What a procedure of the fault programme is, and the list of all of them.

A procedure is one function with an ID. It does something bad `work.count` times in `work.scratch`, and says how often all was well:

    @procedure("A7", title="Two trainers on one run", must="the second refuses within 1 s", full=20, usual=20, test=2)
    def two_trainers(work: Work) -> Outcome:
        outcome = Outcome()
        for number in work.each():
            outcome.check(refused_in_time(...), f"attempt {number}: it took 3.2 s")
        return outcome

The same function serves `make faults` (usual or full count) and the fast suite (`test` count). A peer's run of the same procedure
is another function, `@peer("A7", "Stable-Baselines3")`. To add to the programme, write a function in a module of `MODULES`.
"""

from __future__ import annotations

import importlib
import os
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
    *("everyday_configs", "everyday_runs"),  # G
    "peers",
)
"""The modules that contain procedures, by section."""

KEPT_FAILURES = 20


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
    """How often all was well, figures that were measured on the way, and in words what was not well."""

    passed: int = 0
    total: int = 0
    figures: dict[str, str] = field(default_factory=dict)
    """Name -> value with its unit, such as "longest wait" -> "0.31 s"."""
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a reader must know to judge the figure: what was left out, and why."""

    def check(self, fine: bool, otherwise: str) -> bool:
        """Count one case; `otherwise` says what was wrong with it, for a person who has to find out why."""
        self.total += 1
        self.passed += bool(fine)
        if not fine and len(self.failures) < KEPT_FAILURES:
            self.failures.append(otherwise)
        return bool(fine)

    @property
    def is_fine(self) -> bool:
        """All that was tried was well, and something was tried."""
        return self.total > 0 and self.passed == self.total


class Work:
    """What a procedure is given: a count, a scratch directory and a seed. In the suite the work is `reduced`."""

    def __init__(
        self,
        count: int,
        scratch: Path,
        *,
        seed: int = 0,
        reduced: bool = True,
        tick: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.count, self.scratch, self.seed, self.reduced = count, scratch, seed, reduced
        self._tick = tick

    def each(self, total: int | None = None) -> Iterator[int]:
        """Yield 0 … count - 1 (or total - 1) and report the progress."""
        total = self.count if total is None else total
        for number in range(total):
            self._tick(number, total)
            yield number
        self._tick(total, total)

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
    """The pass figure in words."""
    full: int
    """The count that the programme asks for."""
    usual: int
    """The count of `make faults`."""
    test: int
    """The count in the fast suite; 0 leaves it out there, because another test of the suite shows the same."""
    run: Run
    alone: bool = False
    """Whether nothing else may run meanwhile, because it measures short times."""
    needs: str = ""
    """What the machine must have, such as strace; without it the procedure is reported as not run."""
    possible: Callable[[], bool] = lambda: True
    """Whether this machine has it."""


PROCEDURES: dict[str, Procedure] = {}
PEERS: dict[tuple[str, str], Run] = {}


def procedure(
    id: str,
    *,
    title: str,
    must: str,
    full: int,
    usual: int | None = None,
    test: int,
    alone: bool = False,
    needs: str = "",
    possible: Callable[[], bool] = lambda: True,
) -> Callable[[Run], Run]:
    """Put a function into the programme."""

    def enter(run: Run) -> Run:
        if id in PROCEDURES:
            raise ValueError(f"there are two procedures {id}")
        PROCEDURES[id] = Procedure(id, title, must, full, full if usual is None else usual, test, run, alone, needs, possible)
        return run

    return enter


def peer(id: str, name: str) -> Callable[[Run], Run]:
    """A peer's run of the procedure `id`, as alike as the peer allows."""

    def enter(run: Run) -> Run:
        PEERS[id, name] = run
        return run

    return enter


def load_all() -> dict[str, Procedure]:
    """Every procedure by its ID, in their order, after importing the modules that hold them."""
    for name in MODULES:
        importlib.import_module(f"faults.{name}")
    return dict(sorted(PROCEDURES.items(), key=lambda entry: _order(entry[0])))


def _order(id: str) -> tuple[str, int, str]:
    """A2 comes before A10."""
    number = "".join(letter for letter in id[1:] if letter.isdigit())
    return id[0], int(number or 0), id


def as_data(outcome: Outcome, *, count: int, seconds: float) -> dict[str, Any]:
    """An outcome as it is kept."""
    return {
        "passed": outcome.passed,
        "total": outcome.total,
        "figures": outcome.figures,
        "failures": outcome.failures,
        "notes": outcome.notes,
        "count": count,
        "seconds": round(seconds, 1),
    }
