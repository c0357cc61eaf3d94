"""Measured results, one file for each procedure, and docs/reliability.md, which is made from them."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

from faults.programme import ROOT, Procedure
from inchworm.core.tensor_file import write_atomically
from inchworm.run.directory import versions

RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "reliability.md"
OURS = "inchworm"
HEAD = """# Reliability

What a run survives, measured. `make faults` runs the programme of `faults/`, stores the results in `faults/results/` and writes this page.
`make faults IDS="A1 C7"` runs a part of it and keeps the other results; `make faults FACTOR=1` uses the full counts. Most procedures also
run in the test suite (`make test`), with a small count and without time limits. What is promised, and what is not, is in
[SECURITY.md](../SECURITY.md) and [runs.md](runs.md).
"""

Found = dict[str, Any]


def keep(id: str, peer: str, found: Found, directory: Path = RESULTS) -> None:
    """Store the result of a procedure, or of a peer, next to those of the others."""
    path = directory / f"{id}.json"
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    now = versions()
    machine = f"{os.cpu_count()} cores, {now['cpu']}, Python {platform.python_version()}, NumPy {now['numpy']}, torch {now['torch']}"
    data[peer or OURS] = {**found, "machine": machine}
    text = json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False)
    write_atomically(path, text.replace(f"{ROOT}/", "") + "\n")  # results must not contain where the project lies


def read_all(directory: Path = RESULTS) -> dict[str, dict[str, Found]]:
    """ID -> inchworm or peer -> result."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("*.json"))}


def cell(text: str) -> str:
    """Text for a cell of a table, without markup."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;").split())


def page_text(procedures: dict[str, Procedure], kept: dict[str, dict[str, Found]]) -> str:
    """The page: a table of all procedures, the peers, figures, failures and machines."""
    ours = {id: kept[id][OURS] for id in procedures if OURS in kept.get(id, {})}
    lines = [HEAD, "## The programme", "", "| | fault | must | measured | count | |", "|---|---|---|---|---|---|"]
    for id, entry in procedures.items():
        row = f"| {id} | {cell(entry.title)} | {cell(entry.must)} |"
        found = ours.get(id)
        if found is None:
            lines.append(f"{row} not measured yet | | |")
        elif "not_run" in found:
            lines.append(f"{row} not run: {cell(found['not_run'])} | | |")
        else:
            count = f"{found['count']:,}" + ("" if found["count"] >= entry.full else f" (reduced; full: {entry.full:,})")
            lines.append(f"{row} {_score(found)} | {count} | {'✓' if found['passed'] == found['total'] > 0 else '**short**'} |")
    rows = []
    for id, entry in procedures.items():
        for name, found in kept.get(id, {}).items():
            if name != OURS:
                figures = [f"{figure}: {value}" for figure, value in found["figures"].items()]
                seen = cell("; ".join([*figures, *found["notes"], *found["failures"][:1]]))
                score = _score(kept[id].get(OURS, {}))
                rows.append(f"| {id} {cell(entry.title)} | {score} | {cell(name)}: {_score(found)} | {seen} |")
    head = ["", "## The same procedures on a peer", "", "| | inchworm | peer | what was seen with the peer |", "|---|---|---|---|"]
    lines += [*(head if rows else []), *rows, "", "## Figures", ""]
    for id, found in ours.items():
        parts = [f"{name} {value}" for name, value in found.get("figures", {}).items()] + list(found.get("notes", ()))
        if parts:
            lines.append(f"- **{id}** ({found['seconds']:,.0f} s): {'; '.join(parts)}.")
    failures = [f"- **{id}**: {cell(failure[:500])}" for id, found in ours.items() for failure in found.get("failures", ())[:5]]
    lines += ["", "## What fell short", "", *(failures or ["Nothing."]), "", "## Machine", ""]
    machines: dict[str, list[str]] = {}
    for id, found in ours.items():
        machines.setdefault(f"{found.get('measured', '')}, {found['machine']}", []).append(id)
    lines += [f"- {', '.join(ids)}: {machine}" for machine, ids in machines.items()]
    return "\n".join(lines) + "\n"


def _score(found: Found) -> str:
    return f"{found['passed']:,} of {found['total']:,}" if "passed" in found else "not measured"
