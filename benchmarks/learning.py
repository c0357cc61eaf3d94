"""Does it learn as well as its peer? 15 seeds a side on each work (10 where it is slow), and the page docs/results.md with the curves.

    python benchmarks/learning.py                                   # everything that is not there yet, then the page
    python benchmarks/learning.py --works pendulum cartpole --seeds 2 --again
    python benchmarks/learning.py --report                          # the page alone, from the results that are there

What is compared is the area under the training curve and the mean return of the last eighth of training: both are means over hundreds of
episodes. The score of the last policy is shown too; in the middle of learning it may have two modes, such as hovering and landing.

Each run is a separate process, `--jobs` at once; its result is kept in benchmarks/results/learning/ and not made again. With `--scale`
below 1 (for trying things out) results and page go to a directory of their own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import jax_learning
import off_policy
import presets
import value_scaling
from curves import COMPARED, SHOWN, draw, figures, smoothed
from inchworm.evaluate.stats import bootstrap_interval95, interquartile_mean
from machine import machine_facts
from seeds import holm, p_differs
from side import PRESET, PRESET_STEPS, SIDES, run_side
from works import LEARNING

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "learning"
LEVEL = 0.05
TARGET = 475.0

Runs = list[dict[str, Any]]
Results = dict[str, dict[str, Runs]]
"""work -> side -> runs, by seed"""


def main() -> None:
    """Run what is missing, then report."""
    options = _options()
    console = Console()
    results_dir, docs = RESULTS, ROOT / "docs"
    if options.scale != 1.0:
        results_dir = Path(tempfile.mkdtemp(prefix="inchworm-learning-"))
        docs = results_dir
    if not options.report:
        with ThreadPoolExecutor(options.jobs) as pool:
            wanted = [  # seed by seed, so that an interrupted comparison is still a comparison
                (side, work, seed)
                for seed in range(options.seeds)
                for work in options.works
                for side in sides_of(work, options.sides)
                if seed < seeds_of(work)
            ]
            for _ in pool.map(lambda run: run_if_missing(console, results_dir, *run, options), wanted):
                pass
    results = read_results(results_dir, options.works, options.sides, options.seeds)
    console.print(table(results))
    write_page(results, docs)
    console.print(f"page: {docs / 'results.md'}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [PRESET, *LEARNING]
    parser.add_argument("--works", nargs="+", default=known, choices=known)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--seeds", type=int, default=15, help="how many at most, from 0 on")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--again", action="store_true", help="run what is there already, too")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the steps, for trying things out")
    return parser.parse_args()


def seeds_of(work: str) -> int:
    """How many seeds a work is compared with."""
    return 5 if work == PRESET else LEARNING[work].seeds


def sides_of(work: str, sides: list[str]) -> list[str]:
    """The preset has no peer: only its score is asked for."""
    return [side for side in sides if work != PRESET or side == "inchworm"]


def run_if_missing(console: Console, directory: Path, side: str, work: str, seed: int, options: argparse.Namespace) -> None:
    """One run, unless its result is there."""
    out = directory / f"{side}_{work}_{seed}.json"
    if out.exists() and not options.again:
        return
    result = run_side(side=side, group="learning", work=work, seed=seed, scale=options.scale, evaluate=True, out=out)
    console.print(f"{side} {work} seed {seed}: score {result['score']:.1f} after {result['steps']:,} steps, {result['seconds']:.0f} s")


def read_results(directory: Path, works: list[str], sides: list[str], seeds: int) -> Results:
    """What has been measured so far."""
    results: Results = {}
    for work in works:
        for side in sides_of(work, sides):
            paths = [directory / f"{side}_{work}_{seed}.json" for seed in range(seeds)]
            runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
            if runs:
                results.setdefault(work, {})[side] = runs
    return results


def samples(runs: Runs, name: str) -> list[float]:
    """One figure of every run that has it."""
    return [own[name] for own in map(figures, runs) if name in own]


def figure(runs: Runs | None, name: str) -> str:
    """`-168.2 [-180.0, -155.1]`: the interquartile mean over seeds and its 95 % bootstrap interval."""
    found = samples(runs or [], name)
    if not found:
        return "not run"
    low, high = bootstrap_interval95(found)
    return f"{interquartile_mean(found):.1f} [{low:.1f}, {high:.1f}]"


def corrected_p(results: Results) -> dict[str, float]:
    """The corrected p value of each tested figure of each work, by `work: figure`."""
    p_values = {}
    for work, sides in results.items():
        for name in COMPARED:
            ours, theirs = (samples(sides.get(side, []), name) for side in SIDES)
            if work != PRESET and min(len(ours), len(theirs)) > 1:
                p_values[f"{work}: {name}"] = p_differs(ours, theirs)
    return holm(p_values)


def verdict(work: str, sides: dict[str, Runs], name: str, p_values: dict[str, float]) -> str:
    """What the test says about a figure of a work."""
    p = p_values.get(f"{work}: {name}")
    if p is None:
        return "not tested"
    ours, theirs = (samples(sides[side], name) for side in SIDES)
    return f"p = {p:.3f}: " + ("no difference shown" if p >= LEVEL else "higher" if np.mean(ours) > np.mean(theirs) else "lower")


def preset_verdict(sides: dict[str, Runs]) -> str:
    """The worst seed of the preset, and how many reach the target."""
    scores = [float(run["score"]) for run in sides.get("inchworm", [])]
    reached = sum(score >= TARGET for score in scores)
    return f"{reached} of {len(scores)} seeds at {TARGET:.0f} or more, worst {min(scores, default=float('nan')):.1f}"


def rows(results: Results) -> list[list[str]]:
    """The table of the comparison: a row for each figure of each work."""
    p_values = corrected_p(results)
    made = []
    for work, sides in results.items():
        if work != PRESET:
            for name in SHOWN:
                count = "/".join(str(len(samples(sides.get(side, []), name))) for side in SIDES)
                cells = (figure(sides.get(side), name) for side in SIDES)
                made.append([LEARNING[work].env_id, _steps(sides), count, name, *cells, verdict(work, sides, name, p_values)])
    return made


HEADINGS = ("environment", "env steps", "seeds", "figure", *SIDES, "difference")


def table(results: Results) -> Table:
    """The same as the page's, for the terminal."""
    shown = Table(*HEADINGS, title="interquartile mean over seeds [95 % interval]")
    for row in rows(results):
        shown.add_row(*row)
    return shown


def _steps(sides: dict[str, Runs]) -> str:
    return f"{max(run['steps'] for runs in sides.values() for run in runs):,}"


def write_page(results: Results, docs: Path) -> None:
    """docs/results.md and one SVG for each work."""
    (docs / "curves").mkdir(parents=True, exist_ok=True)
    lines = [
        "# Results",
        "",
        "Made by `make learning` (`benchmarks/learning.py`), which anyone can run; the raw results, episode by episode, are in",
        "`benchmarks/results/learning/`. Both sides have the hyper-parameters of `benchmarks/works.py` (Stable-Baselines3's value loss has",
        "no ½, so its `vf_coef` is half of ours), the same networks, the same number of steps and their own seeds.",
        "",
        "The area under the curve is the mean height of the training curve; the last eighth is the mean return of the training episodes",
        "that ended in the last eighth of the steps. The greedy and the sampled score are the mean return of the last policy on separate",
        "environments (100 episodes; HalfCheetah-v5: 20), with the most likely action or a drawn one.",
        "",
        f"| {' | '.join(HEADINGS)} |",
        f"|{'---|' * len(HEADINGS)}",
        *(f"| {' | '.join(row)} |" for row in rows(results)),
        "",
        "Interquartile mean over seeds and its 95 % bootstrap interval. p is Welch's two-sided test on the seeds, corrected for all tests",
        f"of this table (Holm); “higher” and “lower” say where inchworm stands if p < {LEVEL}.",
        "",
    ]
    if PRESET in results:
        lines += _preset_section(results[PRESET])
    lines += [*presets.section(), *value_scaling.section(), *jax_learning.section(), *off_policy.section()]
    lines += ["## Learning curves", "", "Return of training episodes: mean over seeds, and the range from the worst to the best seed.", ""]
    for work, sides in results.items():
        total = max(run["steps"] for runs in sides.values() for run in runs)
        title = f"{'CartPole-v1 (preset)' if work == PRESET else LEARNING[work].env_id}: return of training episodes"
        lines_of = {side: np.stack([smoothed(run["curve"], total) for run in sides[side]]) for side in SIDES if side in sides}
        (docs / "curves" / f"{work}.svg").write_text(draw(title, lines_of, total), encoding="utf-8")
        lines += [f"![{title}](curves/{work}.svg)", ""]
    lines += ["## Machine", "", *(f"- {fact}" for fact in machine_facts()), ""]
    (docs / "results.md").write_text("\n".join(lines), encoding="utf-8")


def _preset_section(sides: dict[str, Runs]) -> list[str]:
    runs = sides["inchworm"]
    rows = [f"| {run['seed']} | {run['steps']:,} | {run['score']:.1f} | {min(run['returns']):.0f} | {run['seconds']:.0f} |" for run in runs]
    return [
        "## CartPole-v1, default preset",
        "",
        f"What `make train` runs, within {PRESET_STEPS:,} steps; greedy, 100 episodes. {preset_verdict(sides)}.",
        "",
        "| seed | env steps | mean return | worst episode | seconds |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]


if __name__ == "__main__":
    main()
