"""E6 and E6m: bugs that other libraries shipped, and small automatic changes, are caught by the tests of the suite."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from faults import bugs_mutants
from faults.bugs_mutants import Mutant
from faults.programme import ROOT, Outcome, Work, procedure

FILE = Path(__file__).with_name("bugs_data.toml")


@dataclass(frozen=True)
class Edit:
    """In `file` (under src/inchworm) the text `old`, which occurs once, becomes `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Form:
    """One way to have a bug: all its edits at once, and the tests (under tests) that notice."""

    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Bug:
    """One historic bug."""

    number: int
    title: str
    origin: str
    forms: tuple[Form, ...]
    here: str = ""


BUGS = tuple(
    Bug(forms=tuple(Form(tuple(Edit(**edit) for edit in form["edit"]), tuple(form["tests"])) for form in data.pop("form")), **data)
    for data in tomllib.loads(FILE.read_text(encoding="utf-8"))["bug"]
)
LONG_AGO = 946_684_800  # 2000-01-01: a file written into the copy later never has the time that its bytecode was made for
UNBROKEN_SECONDS = 300.0  # for tests whose usual time is not known yet
NOT_A_BUG = ("SyntaxError", "IndentationError", "ImportError", "ModuleNotFoundError", "NameError", "UnboundLocalError")
"""Errors of a bug that does not fit the source: no test has judged it."""


@dataclass(frozen=True)
class Verdict:
    """The result of running some tests."""

    passed: bool
    failed: str
    """The first test that failed."""
    kind: str
    """Its error."""
    in_time: bool
    seconds: float

    @property
    def judged(self) -> bool:
        """Whether a test failed by its own judgement, not because the code could not be imported."""
        return bool(self.failed) and not self.failed.endswith("(at collection)") and not self.kind.startswith(NOT_A_BUG)

    def __str__(self) -> str:
        if not self.in_time:
            return f"did not end within {self.seconds:.0f} s"
        return "all tests pass" if self.passed else f"{self.failed}: {self.kind[:150]}"


class PackageCopy:
    """A copy of src, tests, faults and pyproject.toml with a process that tests it; the original is only read."""

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
        self._server.terminate()
        self._server.wait(timeout=30)
        for pipe in (self._server.stdin, self._server.stdout):
            if pipe is not None:
                pipe.close()

    def text(self, file: str) -> str:
        """A source file, by its path under src/inchworm."""
        return self._path(file).read_text(encoding="utf-8")

    def unbroken(self, tests: Sequence[str]) -> Verdict:
        """The result of the tests on the unchanged copy, run once."""
        key = tuple(tests)
        if key not in self._unbroken:
            self._unbroken[key] = self._run(tests, UNBROKEN_SECONDS, keep_bytecode=True)
        return self._unbroken[key]

    def verdict(self, files: Mapping[str, str], tests: Sequence[str]) -> Verdict:
        """The result of the tests with these files replaced; three times their usual time is too long."""
        limit = 20.0 + 3.0 * self.unbroken(tests).seconds
        before = {file: self.text(file) for file in files}
        try:
            for file, text in files.items():
                self._path(file).write_text(text, encoding="utf-8")
            return self._run(tests, limit, keep_bytecode=False)
        finally:
            for file, text in before.items():
                self._path(file).write_text(text, encoding="utf-8")
                os.utime(self._path(file), (LONG_AGO, LONG_AGO))

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
        found = json.loads(line)
        if found["package"] and not Path(found["package"]).is_relative_to(self.directory):
            raise RuntimeError(f"the tests imported the package at {found['package']}, not the copy")
        if found["in_time"] and not found["failed"] and (found["code"] != 0 or not found["package"]):
            log = self._log.read_text(errors="replace")[-2000:]
            return Verdict(False, "", f"no test was run (code {found['code']}): {log}", True, found["seconds"])
        return Verdict(found["code"] == 0, found["failed"], found["kind"], found["in_time"], found["seconds"])

    def _path(self, file: str) -> Path:
        return self.directory / "src" / "inchworm" / file


ENOUGH = 0.95


def spread(number: int, count: int) -> list[int]:
    """`count` of the places 0 … number - 1, evenly from the first to the last."""
    count = min(count, number)
    return [0] if count == 1 else [round(place * (number - 1) / (count - 1)) for place in range(count)]


def edited(form: Form, read: Mapping[str, str]) -> dict[str, str]:
    """The files that a form changes, with the change; raises where a text does not occur exactly once."""
    files: dict[str, str] = {}
    for edit in form.edits:
        text = files.get(edit.file, read[edit.file])
        if text.count(edit.old) != 1:
            raise ValueError(
                f"{edit.file} has this text {text.count(edit.old)} times instead of once; bring bugs_data.toml up to date: {edit.old!r}"
            )
        files[edit.file] = text.replace(edit.old, edit.new)
    return files


def sources(forms: Sequence[Form], root: Path) -> dict[str, str]:
    """The files that these forms change, as they are under `root`."""
    return {edit.file: (root / edit.file).read_text(encoding="utf-8") for form in forms for edit in form.edits}


def _problem(bug: Bug, form: Form, copy: PackageCopy) -> str:
    """Why this form of a bug does not count as caught; empty if it does."""
    name = f"{bug.number} {bug.title} ({form.edits[0].file})"
    try:
        files = edited(form, sources([form], copy.directory / "src" / "inchworm"))
    except (ValueError, OSError) as error:
        return f"{name}: {error}"
    before = copy.unbroken(form.tests)
    if not before.passed:
        return f"{name}: its tests fail without it, too: {before}"
    found = copy.verdict(files, form.tests)
    if found.passed:
        return f"{name}: not noticed by {', '.join(form.tests)}"
    return "" if found.judged or not found.in_time else f"{name}: written down wrongly, no test has judged it: {found}"


@procedure("E6", full=len(BUGS), test=1)
def historic_bugs(work: Work) -> Outcome:
    """Bugs that others shipped, put back one by one.

    Must: each is noticed by a test of the fast suite.
    Each in a copy of the package; its tests pass before and fail after, by what a test says.
    """
    outcome = Outcome()
    chosen = [BUGS[place] for place in spread(len(BUGS), work.count)]
    forms = 0
    with PackageCopy(work.scratch) as copy:
        for number in work.each(len(chosen)):
            bug = chosen[number]
            forms += len(bug.forms)
            problems = [problem for form in bug.forms if (problem := _problem(bug, form, copy))]
            outcome.check(not problems, "; ".join(problems))
    outcome.figures["bugs"] = str(len(chosen))
    outcome.figures["forms of them (backends, places)"] = str(forms)
    outcome.notes += [f"{bug.number} ({bug.title}, {bug.origin}) as: {bug.here}" for bug in chosen if bug.here]
    return outcome


@procedure(
    "E6m",
    full=200,
    usual=40,
    test=0,
    needs="mutmut (pip install -e '.[dev]')",
    possible=lambda: importlib.util.find_spec("mutmut") is not None,
)
def automatic_mutants(work: Work) -> Outcome:
    """Small changes made by a machine, one at a time.

    Must: at least 95 % are noticed by the tests of their module; every survivor has a reason.
    Each in a copy of the package. A time-out counts as noticed: the suite has one too.
    """
    with PackageCopy(work.scratch) as copy:
        mutants = bugs_mutants.chosen(work.count, copy.directory / "src" / "inchworm", seed=work.seed)
        found: dict[Mutant, Verdict] = {}
        sick: dict[str, Verdict] = {}
        for number in work.each(len(mutants)):
            mutant = mutants[number]
            tests = bugs_mutants.TESTS[mutant.module]
            if not copy.unbroken(tests).passed:
                sick[mutant.module] = copy.unbroken(tests)
                continue
            found[mutant] = copy.verdict({mutant.module: mutant.applied(copy.text(mutant.module))}, tests)
    outcome = judged(list(found), [mutant for mutant, verdict in found.items() if verdict.passed], bugs_mutants.reasons())
    for module, verdict in sick.items():
        outcome.check(False, f"the tests of {module} fail without a mutant, too: {verdict}")
    outcome.figures["time of one"] = f"{sum(verdict.seconds for verdict in found.values()) / max(1, len(found)):.1f} s"
    return outcome


def judged(mutants: Sequence[Mutant], survivors: Sequence[Mutant], reasons: Mapping[str, Mapping[str, str]]) -> Outcome:
    """A mutant is well if it was noticed or has a reason why not; and 95 % must be noticed, whatever the reasons are."""
    outcome = Outcome()
    for mutant in mutants:
        reason = reasons.get(mutant.module, {}).get(mutant.key, "")
        survived = mutant in survivors
        outcome.check(not survived or bool(reason), f"survived without a reason: {mutant.module}: {mutant.key}")
        if survived and reason:
            outcome.notes.append(f"survivor in {mutant.module}: `{mutant.key}` — {reason}")
    caught = len(mutants) - len(survivors)
    outcome.check(caught >= ENOUGH * len(mutants), f"only {caught} of {len(mutants)} were noticed, less than 95 %")
    modules = len({mutant.module for mutant in mutants})
    outcome.figures["noticed"] = f"{caught} of {len(mutants)} ({100 * caught / max(1, len(mutants)):.1f} %), in {modules} modules"
    outcome.notes.append("excluded: docstrings, annotations, texts of errors and warnings, decorators, imports, assertions, __all__")
    return outcome
