"""Variants of a setting compared seed by seed: a grid of runs, each a separate process, and its summary as Markdown.

A script says which function trains a run and with which cases; `compare` runs what is missing, several at once, and appends one JSON line
for each finished run to a file in benchmarks/results/variants/. An interrupted comparison continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

import jobs
from curves import SHOWN, draw, figures, smoothed
from figures import table
from seeds import half_interval

RESULTS = Path(__file__).parent / "results" / "variants"
CURVES = Path(__file__).parents[1] / "docs" / "curves"


@dataclass(frozen=True)
class Case:
    """A variant on a task: the function that trains it, `module:function`, and what that is given besides seed and scale."""

    task: str
    variant: str
    base: str
    """The variant that this one is compared with, seed by seed; its own name if with none."""
    call: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seeds: int | None = None
    """How many seeds at most, where a run is slow."""


Run = dict[str, Any]
"""A line of the file: task, variant, seed, scale, steps, seconds, the figures of `learning.figures`, and the smoothed curve."""


def measure(case: Case, seed: int, scale: float) -> Run:
    """One run with one thread. The function returns steps, seconds, the curve as (env steps, return) of each episode, and scores."""
    found = jobs.run(case.call, {**case.arguments, "seed": seed, "scale": scale})
    line = [None if value != value else round(float(value), 3) for value in smoothed(found["curve"], found["steps"])]
    named = {"task": case.task, "variant": case.variant, "seed": seed, "scale": scale}
    return {**named, "steps": found["steps"], "seconds": round(found["seconds"], 1), **figures(found), "curve": line}


def read_runs(path: Path) -> list[Run]:
    """The finished runs; a last line that was cut off is ignored."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def run_missing(path: Path, cases: Sequence[Case], seeds: int, scale: float, workers: int) -> None:
    """Run what the file does not hold yet, seed by seed, so that an interrupted comparison is still a comparison."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():  # remove what a killed writer left of its last line
        whole = path.read_bytes()
        path.write_bytes(whole[: whole.rfind(b"\n") + 1])
    done = {(run["task"], run["variant"], run["seed"], run["scale"]) for run in read_runs(path)}
    with ThreadPoolExecutor(workers) as pool:
        wanted = [
            pool.submit(measure, case, seed, scale)
            for seed in range(seeds)
            for case in cases
            if (case.task, case.variant, seed, scale) not in done and (case.seeds is None or seed < case.seeds)
        ]
        try:
            for future in as_completed(wanted):
                run = future.result()
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(run) + "\n")
                print(f"{run['task']}, {run['variant']}, seed {run['seed']}: area {run[SHOWN[0]]:.2f}, {run['seconds']:.0f} s", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, wait only for the runs that have begun


def with_interval(samples: Sequence[float]) -> str:
    """`12.3 ± 4.5`: the mean and half its 95 % interval (Student's t)."""
    if not samples:
        return "–"
    return rounded(fmean(samples), 4) + (f" ± {rounded(half_interval(samples), 2)}" if len(samples) > 1 else "")


def rounded(number: float, digits: int) -> str:
    """A number with so many significant digits, without an exponent: 300, not 3e+02."""
    return f"{float(f'{number:.{digits}g}'):g}"


Report = Callable[[Sequence[Case], Sequence[Run]], list[str]]


def paired_report(cases: Sequence[Case], runs: Sequence[Run]) -> list[str]:
    """Markdown: the figures of every case, and their differences from those of the same seeds of its base."""
    found: dict[tuple[str, str], dict[int, Run]] = {}
    for run in runs:
        found.setdefault((run["task"], run["variant"]), {})[run["seed"]] = run
    lines: list[str] = []
    for task in dict.fromkeys(run["task"] for run in runs):
        rows = []
        for case in cases:
            own, base = found.get((case.task, case.variant), {}), found.get((case.task, case.base), {})
            if case.task != task or not own:
                continue
            cells = [with_interval([run[name] for run in own.values()]) for name in SHOWN]
            paired = [[own[seed][name] - base[seed][name] for seed in own if seed in base] for name in SHOWN[:3]]
            rows.append(
                [case.variant, str(len(own)), *cells, *("" if case.base == case.variant else with_interval(part) for part in paired)]
            )
        steps = max(run["steps"] for run in runs if run["task"] == task)
        heads = ["variant", "seeds", *SHOWN, *(f"{name}, difference" for name in SHOWN[:3])]
        lines += [f"### {task}, {steps:,} env steps", "", *table(heads, rows)]
    compared = "; ".join(dict.fromkeys(f"{case.variant} from {case.base}" for case in cases if case.variant != case.base))
    return [*lines, f"Mean over seeds ± half of its 95 % interval. Differences, seed by seed: {compared}."]


def curve_images(name: str, cases: Sequence[Case], runs: Sequence[Run]) -> list[str]:
    """Markdown: a picture of each task's learning curves, which is written to docs/curves/."""
    CURVES.mkdir(parents=True, exist_ok=True)
    lines = ["Return of training episodes: mean over seeds, and the range from the worst to the best seed.", ""]
    for task in dict.fromkeys(run["task"] for run in runs):
        variants = dict.fromkeys(case.variant for case in cases if case.task == task)
        found = {one: [run["curve"] for run in runs if (run["task"], run["variant"]) == (task, one)] for one in variants}
        total = max(run["steps"] for run in runs if run["task"] == task)
        file = f"{name}-{re.sub('[^a-z0-9]+', '-', task.lower())}.svg"
        curves = {one: np.array(own, float) for one, own in found.items() if own}  # a point without an episode is null, here NaN
        (CURVES / file).write_text(draw(f"{task}: return of training episodes", curves, total), encoding="utf-8")
        lines += [f"![{task}: return of training episodes](curves/{file})", ""]
    return lines


def kept_runs(name: str) -> list[Run]:
    """The finished runs of a comparison in the repository, of whole trainings."""
    return [run for run in read_runs(RESULTS / f"{name}.jsonl") if run["scale"] == 1.0]


def compare(name: str, doc: str | None, cases: Sequence[Case], *, seeds: int, report: Report = paired_report) -> None:
    """The command line of a comparison: run what is missing, print the summary."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks, variants = (list(dict.fromkeys(getattr(case, part) for case in cases)) for part in ("task", "variant"))
    parser.add_argument("--tasks", nargs="+", default=tasks, choices=tasks)
    parser.add_argument("--variants", nargs="+", default=variants, choices=variants)
    parser.add_argument("--seeds", type=int, default=seeds, help="how many, from 0 on")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the steps, for trying things out")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.jsonl", help="the file of finished runs")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args()
    chosen = [case for case in cases if case.task in options.tasks and case.variant in options.variants]
    if not options.report:
        run_missing(options.out, chosen, options.seeds, options.scale, options.jobs)
    wanted = {(case.task, case.variant) for case in chosen}
    runs = [run for run in read_runs(options.out) if (run["task"], run["variant"]) in wanted]
    print("\n".join(report(chosen, [run for run in runs if run["scale"] == options.scale and run["seed"] < options.seeds])))
