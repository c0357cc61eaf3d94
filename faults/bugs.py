"""E6 and E6m: bugs that others shipped, and small changes made by a machine, are noticed by the tests of the suite."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from faults import bugs_mutants
from faults.bugs_copy import PackageCopy, Verdict
from faults.bugs_data import BUGS, Bug, Form
from faults.bugs_mutants import Mutant
from faults.programme import Outcome, Work, procedure

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


@procedure(
    "E6",
    title="Bugs that others shipped, put back one by one",
    must="each is noticed by a test of the fast suite",
    full=len(BUGS),
    test=2,
)
def historic_bugs(work: Work) -> Outcome:
    """Each in a copy of the package; its tests pass before and fail after, by what a test says."""
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


def _has_mutmut() -> bool:
    return importlib.util.find_spec("mutmut") is not None


@procedure(
    "E6m",
    title="Small changes made by a machine, one at a time",
    must="at least 95 % are noticed by the tests of their module; every survivor has a reason",
    full=200,
    usual=40,
    test=0,
    needs="mutmut (pip install -e '.[dev]')",
    possible=_has_mutmut,
)
def automatic_mutants(work: Work) -> Outcome:
    """Each in a copy of the package. A time-out counts as noticed: the suite has one too."""
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
    outcome.notes.append(
        "left out: docstrings, type annotations, texts of errors and warnings, decorators, imports, assert statements, __all__"
    )
    return outcome
