"""Measured results, one file for each procedure, and docs/reliability.md, which is made from them."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

from faults.programme import ROOT, Procedure, load_all
from inchworm.core.tensor_file import write_atomically
from inchworm.run.directory import versions

DIRECTORY = Path(__file__).parent / "results"
OURS = "inchworm"


def keep(id: str, peer: str, found: dict[str, Any], directory: Path = DIRECTORY) -> None:
    """Put a procedure's outcome beside what its peers did."""
    path = directory / f"{id}.json"
    data = read_one(path)
    data[peer or OURS] = {**found, "machine": machine()}
    text = json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False)
    write_atomically(path, text.replace(f"{ROOT}/", "") + "\n")  # where the project lies is nobody's business


def read_one(path: Path) -> dict[str, Any]:
    """Who -> outcome, of one procedure."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def read_all(directory: Path = DIRECTORY) -> dict[str, dict[str, Any]]:
    """ID -> who -> outcome."""
    return {path.stem: read_one(path) for path in sorted(directory.glob("*.json"))}


def machine() -> str:
    """Where it was measured."""
    found = versions()
    return f"{os.cpu_count()} cores, {found['cpu']}, Python {platform.python_version()}, NumPy {found['numpy']}, torch {found['torch']}"


PAGE = ROOT / "docs" / "reliability.md"

HEAD = """# Reliability

What a run survives, measured. `make faults` runs the programme of `faults/`, keeps what it measured in
`faults/results/`, and writes this page; `make faults IDS="A1 C7"` runs some of it again and leaves the rest as it is,
`make faults FACTOR=1` takes the full counts. Most procedures are in the fast suite (`make test`) too, with a small count.
What is promised, and what is not, is in [SECURITY.md](../SECURITY.md) and [runs.md](runs.md).
"""


def write_page() -> None:
    """Renew the page."""
    PAGE.write_text(page_text(load_all(), read_all()), encoding="utf-8")


def page_text(procedures: dict[str, Procedure], kept: dict[str, dict[str, Any]]) -> str:
    """The page."""
    ours = {id: who[OURS] for id, who in kept.items() if OURS in who and id in procedures}
    lines = [HEAD, "## The programme", "", "| | fault | must | measured | count | |", "|---|---|---|---|---|---|"]
    lines += [_row(entry, ours.get(id)) for id, entry in procedures.items()]
    lines += ["", *_peers(procedures, kept), *_details(procedures, ours), *_failures(procedures, ours), *_machines(ours)]
    return "\n".join(lines) + "\n"


def _row(entry: Procedure, found: dict[str, Any] | None) -> str:
    head = f"| {entry.id} | {cell(entry.title)} | {cell(entry.must)} |"
    if found is None:
        return f"{head} not measured yet | | |"
    if "not_run" in found:
        return f"{head} not run: {cell(found['not_run'])} | | |"
    fine = "✓" if found["passed"] == found["total"] > 0 else "**short**"
    return f"{head} {found['passed']:,} of {found['total']:,} | {_count(entry, found)} | {fine} |"


def _count(entry: Procedure, found: dict[str, Any]) -> str:
    """The count, and the one that was asked for where it is less."""
    count = found["count"]
    return f"{count:,}" if count >= entry.full else f"{count:,} (reduced; full: {entry.full:,})"


def _peers(procedures: dict[str, Procedure], kept: dict[str, dict[str, Any]]) -> list[str]:
    rows = []
    for id, entry in procedures.items():
        others = {name: found for name, found in kept.get(id, {}).items() if name != OURS}
        for name, found in others.items():
            mine = kept[id].get(OURS, {})
            rows.append(f"| {id} {cell(entry.title)} | {_score(mine)} | {cell(name)}: {_score(found)} | {cell(_said(found))} |")
    if not rows:
        return []
    head = ["## The same procedures on a peer", "", "| | inchworm | peer | what was seen with the peer |", "|---|---|---|---|"]
    return [*head, *rows, ""]


def _score(found: dict[str, Any]) -> str:
    return f"{found['passed']:,} of {found['total']:,}" if "passed" in found else "not measured"


def _said(found: dict[str, Any]) -> str:
    figures = [f"{name}: {value}" for name, value in found["figures"].items()]
    return "; ".join([*figures, *found["notes"], *found["failures"][:1]])


def _details(procedures: dict[str, Procedure], ours: dict[str, dict[str, Any]]) -> list[str]:
    """Figures and notes, one paragraph for each procedure that has some."""
    lines = ["## Figures", ""]
    for id in procedures:
        found = ours.get(id, {})
        parts = [f"{name} {value}" for name, value in found.get("figures", {}).items()] + list(found.get("notes", ()))
        if parts:
            lines.append(f"- **{id}** ({found['seconds']:,.0f} s): {'; '.join(parts)}.")
    return [*lines, ""]


def _failures(procedures: dict[str, Procedure], ours: dict[str, dict[str, Any]]) -> list[str]:
    """What was not well, in words."""
    lines = [f"- **{id}**: {cell(failure[:500])}" for id in procedures for failure in ours.get(id, {}).get("failures", ())[:5]]
    return ["## What fell short", "", *(lines or ["Nothing."]), ""]


def _machines(ours: dict[str, dict[str, Any]]) -> list[str]:
    """Where and when, grouped."""
    groups: dict[str, list[str]] = {}
    for id, found in ours.items():
        groups.setdefault(f"{found.get('measured', '')}, {found['machine']}", []).append(id)
    return ["## Machine", "", *(f"- {', '.join(ids)}: {fact}" for fact, ids in groups.items())]


def cell(text: str) -> str:
    """Text that keeps to its cell of a table, and is never markup."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;").split())
