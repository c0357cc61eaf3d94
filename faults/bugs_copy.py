"""Serves E6: a copy of the package and its tests, which may be broken on purpose, and what the tests then say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from faults.programme import ROOT

LONG_AGO = 946_684_800  # 2000-01-01: whatever is written into the copy later has another time than its bytecode says
SURELY = 300.0  # seconds for tests of which it is not known yet how long they take
NOT_A_BUG = ("SyntaxError", "IndentationError", "ImportError", "ModuleNotFoundError", "NameError", "UnboundLocalError")
"""What shows that a bug was written down wrongly: no test has judged it."""


@dataclass(frozen=True)
class Verdict:
    """What a run of some tests came to."""

    passed: bool
    failed: str
    """The first test that failed."""
    kind: str
    """What it said."""
    in_time: bool
    seconds: float

    @property
    def judged(self) -> bool:
        """A test has looked and said no, which is more than that the code could not be imported."""
        return bool(self.failed) and not self.failed.endswith("(while it was read)") and not self.kind.startswith(NOT_A_BUG)

    def __str__(self) -> str:
        if not self.in_time:
            return f"did not end within {self.seconds:.0f} s"
        return "all tests pass" if self.passed else f"{self.failed}: {self.kind[:150]}"


class PackageCopy:
    """A copy of src, tests, faults and pyproject.toml with a process that tests it. The tree it was copied from is only read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "copy"
        self._log = directory / "tests.log"
        self._unbroken: dict[tuple[str, ...], Verdict] = {}
        ignored = shutil.ignore_patterns("__pycache__", "results", ".hypothesis")
        for part in ("src", "tests", "faults"):
            shutil.copytree(ROOT / part, self.directory / part, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", self.directory)
        for path in self.directory.rglob("*.py"):
            os.utime(path, (LONG_AGO, LONG_AGO))
        environment = {**os.environ, "PYTHONPATH": str(self.directory / "src"), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment = {name: value for name, value in environment.items() if not name.startswith(("PYTEST_", "COV_"))}
        command = [sys.executable, "-P", str(self.directory / "faults" / "bugs_server.py")]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=self.directory, env=environment, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.terminate()  # it holds nothing that must be put away
        self._server.wait(timeout=30)
        for pipe in (self._server.stdin, self._server.stdout):
            if pipe is not None:
                pipe.close()

    def text(self, file: str) -> str:
        """A source file, by its path under src/inchworm."""
        return self._path(file).read_text(encoding="utf-8")

    @contextmanager
    def broken(self, files: Mapping[str, str]) -> Iterator[None]:
        """The copy with these files replaced for a while."""
        before = {file: self.text(file) for file in files}
        try:
            for file, text in files.items():
                self._path(file).write_text(text, encoding="utf-8")
            yield
        finally:
            for file, text in before.items():
                self._path(file).write_text(text, encoding="utf-8")
                os.utime(self._path(file), (LONG_AGO, LONG_AGO))

    def unbroken(self, tests: Sequence[str]) -> Verdict:
        """What the tests say of the copy as it is; asked once."""
        key = tuple(tests)
        if key not in self._unbroken:
            self._unbroken[key] = self._run(tests, SURELY, keep_bytecode=True)
        return self._unbroken[key]

    def verdict(self, files: Mapping[str, str], tests: Sequence[str]) -> Verdict:
        """What the tests say of the copy with these files replaced; three times their usual time is too long."""
        limit = 20.0 + 3.0 * self.unbroken(tests).seconds
        with self.broken(files):
            return self._run(tests, limit, keep_bytecode=False)

    def _run(self, tests: Sequence[str], limit: float, *, keep_bytecode: bool) -> Verdict:
        paths = [f"tests/{test}" for test in tests]
        job = {"tests": paths, "limit": limit, "log": str(self._log), "keep_bytecode": keep_bytecode}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that runs the tests has ended with code {self._server.wait(timeout=30)}")
        return self._read(json.loads(line))

    def _read(self, found: Mapping[str, Any]) -> Verdict:
        if found["package"] and not Path(found["package"]).is_relative_to(self.directory):
            raise RuntimeError(f"the tests took the package at {found['package']}, not the copy")
        if found["in_time"] and not found["failed"] and (found["code"] != 0 or not found["package"]):
            log = self._log.read_text(errors="replace")[-2000:]
            return Verdict(False, "", f"no test was run (code {found['code']}): {log}", True, found["seconds"])
        return Verdict(found["code"] == 0, found["failed"], found["kind"], found["in_time"], found["seconds"])

    def _path(self, file: str) -> Path:
        return self.directory / "src" / "inchworm" / file
