"""docs/performance.md, made from what the scripts have kept in results/speed/. Each can be run again alone; this puts them together.

python benchmarks/page.py
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import results
from figures import Section

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
MODULES = {
    "compare": "compare_section",
    "profiles": "profiles",
    "solve": "solve",
    "step_costs": "step_costs",
    "images": "images",
    "scaling": "scaling",
    "steady": "steady",
}
"""Kept file -> the module whose `section` turns it into text, in the order of the page."""


def text(kept: dict[str, dict[str, Any]]) -> str:
    """The page: every target first, then each section, then the machine."""
    sections: dict[str, Section] = {
        name: importlib.import_module(MODULES[name]).section(kept[name]["data"]) for name in MODULES if name in kept
    }
    lines = [
        "# Performance",
        "",
        "Made by `make bench`: the scripts in `benchmarks/` measure, keep their figures in `benchmarks/results/speed/`, and",
        "`benchmarks/page.py` writes this page. What falls short is shown as it is.",
        "",
        "## Targets",
        "",
        "| what | measured | target | |",
        "|---|---|---|---|",
        *(target.row() for found in sections.values() for target in found.targets),
        "",
    ]
    for found in sections.values():
        lines += [f"## {found.title}", "", *found.lines]
    return "\n".join([*lines, "## Machine", "", *_facts(kept)]) + "\n"


def _facts(kept: dict[str, dict[str, Any]]) -> list[str]:
    """The machine, once if all was measured on the same one on the same day."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in MODULES:
        if name in kept:
            groups.setdefault((f"measured on {kept[name]['measured']}", *kept[name]["machine"]), []).append(name)
    if len(groups) == 1:
        return [f"- {fact}" for fact in next(iter(groups))]
    return [f"- {', '.join(names)}: {'; '.join(facts)}" for facts, names in groups.items()]


def write_page(path: Path = PAGE) -> None:
    """Renew the page from what there is."""
    kept = {name: found for name in MODULES if (found := results.load(name)) is not None}
    if not kept:
        raise SystemExit("nothing has been measured yet; type: make bench")
    path.write_text(text(kept), encoding="utf-8")


if __name__ == "__main__":
    write_page()
