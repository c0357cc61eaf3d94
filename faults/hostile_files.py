"""B1: crafted files, opened by every loader and command."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from faults.hostile_cases import Case, Sandbox, all_cases
from faults.hostile_tools import Opener, make_genuine, opener
from faults.programme import Outcome, Work, procedure

MEGABYTE = 1_000_000
MOST_SECONDS, MOST_MEMORY = 2.0, 100 * MEGABYTE


@procedure(
    "B1",
    title="Crafted files, checksums made right, opened by every loader and command",
    must="0 executions, 0 signals, 0 writes elsewhere; at most 2 s of CPU and the file's size + 100 MB; one clear error of ours",
    full=1_200,
    test=30,
)
def crafted_files(work: Work) -> Outcome:
    """Each case in a process of its own under an audit hook, with a canary that any executed code would touch."""
    outcome, counts = Outcome(), Counter[str]()
    genuine = make_genuine(work.scratch / "genuine")
    cases = _spread(all_cases(genuine), work.count)
    slowest, largest = 0.0, 0.0
    with opener() as child:
        for number in work.each(len(cases)):
            found = _one(cases[number], genuine, work.scratch / "case", child)
            outcome.check(not found["wrong"], f"{cases[number].name}: {found['wrong']}")
            slowest, largest = max(slowest, found.get("seconds", 0.0)), max(largest, found.get("memory", 0) / MEGABYTE)
            counts[cases[number].loader] += 1
    outcome.figures = {"slowest": f"{slowest:.2f} s", "most memory above the start": f"{largest:.0f} MB"}
    outcome.notes.append("files by who opens them: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return outcome


def _spread(cases: list[Case], count: int) -> list[Case]:
    """So many of the cases, evenly spread over all."""
    if count >= len(cases):
        return cases
    return [cases[number * len(cases) // count] for number in range(count)]


def _one(case: Case, genuine: Path, directory: Path, child: Opener) -> dict[str, Any]:
    """Make a case, have it opened, and look at what is left; `wrong` says what must not have happened, or nothing."""
    shutil.rmtree(directory, ignore_errors=True)
    box = Sandbox(directory / "inside", directory / "outside" / "victim", directory / "canary", genuine)
    box.inside.mkdir(parents=True)
    box.victim.parent.mkdir()
    box.victim.write_text("mine\n")
    made = case.make(box)
    job = {"sandbox": str(box.inside), "loader": case.loader, **({"arguments": made} if case.loader == "command" else {"path": made})}
    size = sum(path.stat().st_size for path in box.inside.rglob("*") if path.is_file() and not path.is_symlink())
    found = child.open(job)
    return {**found, "wrong": _wrong(case, box, found, size)}


def _wrong(case: Case, box: Sandbox, found: dict[str, Any], size: int) -> str:
    if found["hung"] or found["signal"]:
        return "it hung and was ended" if found["hung"] else f"it died of signal {found['signal']}"
    if found["hits"] or box.canary.exists():
        return f"it did what no loader may do: {found['hits'] or 'the canary was touched'}"
    if box.victim.read_text() != "mine\n" or [path.name for path in box.victim.parent.iterdir()] != ["victim"]:
        return "it wrote to somebody else's file"
    if found["seconds"] > MOST_SECONDS or found["memory"] > size + MOST_MEMORY:
        return f"it took {found['seconds']:.2f} s and {found['memory'] / MEGABYTE:.0f} MB for {size / MEGABYTE:.1f} MB"
    if case.loader == "command":
        return _wrong_answer(case, found)
    if not found["error"]:
        return "" if case.may_load else "it was taken for a good file"
    return "" if found["family"] else f"not an error of ours: {found['error']}"


def _wrong_answer(case: Case, found: dict[str, Any]) -> str:
    """A command says one clear line and ends with 1 or 2; or with 0 where nothing is wrong."""
    said = [line for line in found["text"].splitlines() if not line.startswith("warning: ")]
    if found["error"]:
        return f"not caught: {found['error']}"
    if found["code"] == 0:
        return "" if case.may_load and not said else f"it went on, and said {said[:3]}"
    fine = found["code"] in (1, 2) and len(said) == 1 and said[0].startswith("inchworm: ")
    return "" if fine else f"code {found['code']}, {len(said)} lines: {' / '.join(said)[:300]}"
