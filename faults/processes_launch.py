"""The command line, with the phase that it is in written where another process can read it: `python -m faults.processes_launch train …`.

Nothing else is changed: the methods that a run spends its time in are wrapped, each sets one byte and calls the original.
"""

from __future__ import annotations

import functools
import mmap
import os
import sys
from pathlib import Path
from typing import Any

PHASES = ("start-up", "collect", "learn", "save", "evaluation")
VARIABLE = "FAULTS_PHASE"


def _mark(owner: Any, name: str, phase: bytes, page: mmap.mmap) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def marked(*arguments: Any, **keywords: Any) -> Any:
        before, page[0] = page[0], phase[0]
        try:
            return original(*arguments, **keywords)
        finally:
            page[0] = before

    setattr(owner, name, marked)


def read_phase(path: Path) -> str:
    """The phase that a run is in; "" between phases."""
    data = path.read_bytes() if path.exists() else b""
    return PHASES[data[0] - 1] if data and data[0] else ""


def main() -> int:
    """As `inchworm`."""
    from inchworm.backends.learner import BaseLearner
    from inchworm.cli.main import main as command_line
    from inchworm.collect.collector import RolloutCollector
    from inchworm.evaluate.evaluator import PolicyEvaluator
    from inchworm.run.checkpoint import TrainingCheckpointer

    path = Path(os.environ[VARIABLE])
    path.write_bytes(bytes(1))
    with path.open("r+b") as file:
        page = mmap.mmap(file.fileno(), 1)
    for owner, name, phase in (
        (RolloutCollector, "collect", "collect"),
        (BaseLearner, "update", "learn"),
        (TrainingCheckpointer, "save", "save"),
        (PolicyEvaluator, "evaluate", "evaluation"),
    ):
        _mark(owner, name, bytes([PHASES.index(phase) + 1]), page)
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
