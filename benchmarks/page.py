"""Pages of the documentation, made from what the scripts have kept in results/speed/. Each can be run again alone.

python benchmarks/page.py
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results
from figures import Section

DOCS = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True)
class Page:
    """One page: its path, its opening text, and the scripts that it is made from."""

    path: Path
    opening: tuple[str, ...]
    modules: dict[str, str]
    """Kept file -> the module whose `section` turns it into text, in the order of the page."""
    comparisons: tuple[str, ...] = ()
    """Modules that compare variants and make a section of the runs they keep themselves; they follow the others."""


PAGES = (
    Page(
        DOCS / "performance.md",
        (
            "# Performance",
            "",
            "Made by `make bench`: the scripts in `benchmarks/` measure, keep their figures in `benchmarks/results/speed/`, and",
            "`benchmarks/page.py` writes this page. What falls short is shown as it is.",
        ),
        {
            "compare": "compare_section",
            "profiles": "profiles",
            "solve": "solve",
            "jax_native": "jax_native",
            "jax_solve": "jax_solve",
            "step_costs": "step_costs",
            "images": "images",
            "scaling": "scaling",
            "steady": "steady",
            "tracking_cost": "tracking_cost",
            "sweep": "sweep",
            "loop_cost": "loop_cost",
            "report_page": "report_page",
        },
    ),
    Page(
        DOCS / "memory_and_teams.md",
        (
            "# Memory and teams, measured",
            "",
            "Made by `make teams`: policies with and without memory, sb3-contrib, the combat world's speed, and what",
            "teams learn. The scripts in `benchmarks/` keep their figures in `benchmarks/results/speed/`; `benchmarks/page.py` writes this",
            "page. What falls short is shown as it is.",
        ),
        {name: name for name in ("corridor", "recurrent", "skirmish", "combat", "spread", "connect_four")},
        ("forget_bias",),
    ),
    Page(
        DOCS / "doctor.md",
        (
            "# The doctor, measured",
            "",
            "Made by `make doctor`: `benchmarks/doctor.py` makes runs sick on purpose and asks the [doctor](reports.md#the-doctor).",
            "[Troubleshooting](troubleshooting.md#the-doctors-rules) has what each rule looks at. What falls short is shown as it is.",
        ),
        {"doctor": "doctor"},
    ),
    Page(
        DOCS / "extensions.md",
        (
            "# Curiosity and exports, measured",
            "",
            "Made by `make extensions`: a task that needs exploration, with and without a custom loss that explores, and how exactly",
            "exported policies agree with the policies. The scripts in `benchmarks/` keep their figures in `benchmarks/results/speed/`;",
            "`benchmarks/page.py` writes this page. What falls short is shown as it is.",
        ),
        {name: name for name in ("curiosity", "exports")},
    ),
    Page(
        DOCS / "collectors_measured.md",
        (
            "# Collectors, measured",
            "",
            "Made by `make collectors`: [collecting in processes and on Ray](distributed.md) against collecting in turns, a",
            "calculation of how many collectors one learner feeds, and [simulators on a device](devices.md) against NumPy and rsl_rl. What",
            "falls short is shown as it is.",
        ),
        {name: name for name in ("async_collection", "ray_scaling", "device_env")},
    ),
    Page(
        DOCS / "curricula_measured.md",
        (
            "# Curricula and tasks, measured",
            "",
            "Made by `make tasks`: a maze with and without a curriculum, adaptation to tasks that were not trained, laws found from data.",
            "The scripts in `benchmarks/` hold the budgets and targets, and keep their figures in `benchmarks/results/speed/`;",
            "`benchmarks/page.py` writes this page. What falls short is shown as it is.",
        ),
        {name: name for name in ("maze", "meta", "symbolic")},
    ),
)


def text(page: Page, kept: dict[str, dict[str, Any]]) -> str:
    """The page: every target first, then each section, then the machine."""
    sections: dict[str, Section] = {
        name: importlib.import_module(page.modules[name]).section(kept[name]["data"]) for name in page.modules if name in kept
    }
    sections |= {name: importlib.import_module(name).section() for name in page.comparisons}
    lines = [
        *page.opening,
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
    for name, found in kept.items():
        groups.setdefault((f"measured on {found['measured']}", *found["machine"]), []).append(name)
    if len(groups) == 1:
        return [f"- {fact}" for fact in next(iter(groups))]
    return [f"- {', '.join(names)}: {'; '.join(facts)}" for facts, names in groups.items()]


def write_pages(pages: Sequence[Page] = PAGES) -> None:
    """Renew the pages from what there is; one of which nothing is measured yet is left alone."""
    for page in pages:
        kept = {name: found for name in page.modules if (found := results.load(name)) is not None}
        if kept:
            page.path.write_text(text(page, kept), encoding="utf-8")


if __name__ == "__main__":
    write_pages()
