"""How fast is it? inchworm and Stable-Baselines3 train the same works side by side, in one run, in turns.

    python benchmarks/compare.py                                    # W1 to W5, 3 repeats each
    python benchmarks/compare.py --works W1 W3 --repeats 5
    python benchmarks/compare.py --steps-scale 0.05                 # a quick look; nothing is written to the docs

Each run is a process of its own with one thread. Sides take turns, so that whatever else the machine does falls on both;
a figure is the median over repeats with the range, and what counts is the ratio. `return` is the mean of the last 100 training
episodes: speed without it would be no comparison.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from machine import machine_facts
from side import SIDES, run_side
from works import SPEED

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "compare.json"
PAGE = ROOT / "docs" / "performance.md"


def main() -> None:
    """Measure, print, write."""
    options = _options()
    console = Console()
    runs = measure(console, options.works, options.repeats, options.steps_scale)
    rows = [summary(work, runs[work]) for work in options.works]
    console.print(table(rows))
    if options.steps_scale == 1.0:
        RESULTS.write_text(json.dumps({"machine": machine_facts(), "works": rows}, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(rows), encoding="utf-8")
        console.print(f"written: {RESULTS.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", default=list(SPEED), choices=list(SPEED))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps-scale", type=float, default=1.0, help="part of the steps, for a quick look")
    return parser.parse_args()


def measure(console: Console, works: list[str], repeats: int, scale: float) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """All runs, in turns: work by work within a repeat, and the sides in changing order within a work."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {work: {side: [] for side in SIDES} for work in works}
    with tempfile.TemporaryDirectory(prefix="inchworm-compare-") as directory:
        for repeat in range(repeats):
            for work in works:
                for side in SIDES if repeat % 2 == 0 else SIDES[::-1]:
                    out = Path(directory) / f"{side}_{work}_{repeat}.json"
                    result = run_side(side=side, group="speed", work=work, seed=repeat, scale=scale, evaluate=False, out=out)
                    runs[work][side].append(result)
                    console.print(f"{work} {side} repeat {repeat}: {result['steps'] / result['seconds']:,.0f} steps/s")
    return runs


def summary(work: str, sides: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The figures of one work; the ratio is taken within each repeat, then its median."""
    speeds = {side: [run["steps"] / run["seconds"] for run in runs] for side, runs in sides.items()}
    ratios = [ours / theirs for ours, theirs in zip(speeds[SIDES[0]], speeds[SIDES[1]])]
    return {
        "work": work,
        "env_id": SPEED[work].env_id,
        "steps": sides[SIDES[0]][0]["steps"],
        "steps_per_second": speeds,
        "learning_fraction": {side: _learning_fraction(runs) for side, runs in sides.items()},
        "return": {side: _return(runs) for side, runs in sides.items()},
        "ratios": ratios,
    }


def _learning_fraction(runs: list[dict[str, Any]]) -> float | None:
    known = [run["learn_seconds"] / run["seconds"] for run in runs if run.get("learn_seconds") is not None]
    return median(known) if known else None


def _return(runs: list[dict[str, Any]]) -> float | None:
    last = [fmean(value for _, value in run["curve"][-100:]) for run in runs if run["curve"]]
    return fmean(last) if last else None


def table(rows: list[dict[str, Any]]) -> Table:
    """For the terminal."""
    shown = Table("work", "environment", title="env steps per second: median (range)")
    for name in (*SIDES, "ratio", "learning", "return"):
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(row["work"], row["env_id"], *cells(row))
    return shown


def cells(row: dict[str, Any]) -> list[str]:
    """Speeds, ratio, learning fractions and returns as text."""
    speeds = [_median_range(row["steps_per_second"][side], ",.0f") for side in SIDES]
    fractions = ["?" if value is None else f"{value:.0%}" for value in (row["learning_fraction"][side] for side in SIDES)]
    returns = ["none" if value is None else f"{value:.0f}" for value in (row["return"][side] for side in SIDES)]
    return [*speeds, _median_range(row["ratios"], ".2f"), " / ".join(fractions), " / ".join(returns)]


def _median_range(values: list[float], form: str) -> str:
    spread = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{median(values):{form}}{spread}"


def page(rows: list[dict[str, Any]]) -> str:
    """docs/performance.md."""
    repeats = len(rows[0]["ratios"])
    lines = [
        "# Performance",
        "",
        "Made by `make bench` (`benchmarks/compare.py`): inchworm and Stable-Baselines3 train the same works (`benchmarks/works.py`)",
        f"in one run, in turns, each in a process of its own with one thread; {repeats} repeats. Speeds are env steps per second of",
        "training, median and range; the ratio is taken within each repeat. *learning* is the share of the time that learning took,",
        "*return* the mean of the last 100 training episodes, both inchworm / Stable-Baselines3.",
        "",
        "| work | environment | env steps | inchworm | stable-baselines3 | ratio | learning | return |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {row['work']} | {row['env_id']} | {row['steps']:,} | {' | '.join(cells(row))} |" for row in rows]
    lines += ["", "## Machine", "", *(f"- {fact}" for fact in machine_facts()), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
