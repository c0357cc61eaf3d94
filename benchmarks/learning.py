"""Does it learn as well as its peer? Five seeds a side on each work, Welch's test, and the page docs/results.md with the curves.

    python benchmarks/learning.py                                   # everything that is not there yet, then the page
    python benchmarks/learning.py --works pendulum cartpole --seeds 2 --again
    python benchmarks/learning.py --report                          # the page alone, from the results that are there

Each run is a separate process; its result is kept in benchmarks/results/learning/ and not made again. With `--scale` below 1
(for trying things out) results and page go to a directory of their own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from curves import draw
from machine import machine_facts
from side import PRESET, PRESET_STEPS, SIDES, run_side
from welch import half_interval, p_below
from works import LEARNING

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "learning"
LEVEL = 0.01
TARGET = 475.0

Results = dict[str, dict[str, list[dict[str, Any]]]]
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
        for seed in range(options.seeds):  # seed by seed, so that an interrupted comparison is still a comparison
            for work in options.works:
                for side in sides_of(work, options.sides):
                    run_if_missing(console, results_dir, side, work, seed, options)
    results = read_results(results_dir, options.works, options.sides, options.seeds)
    console.print(table(results))
    write_page(results, docs)
    console.print(f"page: {docs / 'results.md'}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [PRESET, *LEARNING]
    parser.add_argument("--works", nargs="+", default=known, choices=known)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0 on")
    parser.add_argument("--again", action="store_true", help="run what is there already, too")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the steps, for trying things out")
    return parser.parse_args()


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


def scores(runs: list[dict[str, Any]]) -> list[float]:
    """One figure a seed: the mean return of its greedy evaluation."""
    return [float(run["score"]) for run in runs]


def figure(runs: list[dict[str, Any]] | None) -> str:
    """`-168.2 ± 12.1`, the mean over seeds and half its 95 % interval."""
    if not runs:
        return "not run"
    half = half_interval(scores(runs))
    return f"{fmean(scores(runs)):.1f}" + (f" ± {half:.1f}" if half == half else "")


def verdict(work: str, sides: dict[str, list[dict[str, Any]]]) -> tuple[str, str]:
    """The p value and what it says; for the preset, the worst seed and whether it reaches the target."""
    ours = scores(sides.get("inchworm", []))
    if work == PRESET:
        worst = min(ours, default=float("nan"))
        reached = sum(score >= TARGET for score in ours)
        return "", f"{reached} of {len(ours)} seeds at {TARGET:.0f} or more, worst {worst:.1f}"
    theirs = scores(sides.get(SIDES[1], []))
    if min(len(ours), len(theirs)) < 2:
        return "", "too few seeds"
    p = p_below(ours, theirs)
    return f"{p:.3f}", "not below" if p >= LEVEL else "below"


def table(results: Results) -> Table:
    """The same as the page's, for the terminal."""
    shown = Table("work", "steps", *SIDES, "p (below)", "verdict", title="greedy return: mean over seeds ± 95 % interval")
    for work, sides in results.items():
        shown.add_row(work, _steps(sides), *(figure(sides.get(side)) for side in SIDES), *verdict(work, sides))
    return shown


def _steps(sides: dict[str, list[dict[str, Any]]]) -> str:
    return f"{max(run['steps'] for runs in sides.values() for run in runs):,}"


def write_page(results: Results, docs: Path) -> None:
    """docs/results.md and one SVG for each work."""
    (docs / "curves").mkdir(parents=True, exist_ok=True)
    lines = [
        "# Results",
        "",
        "Made by `make learning` (`benchmarks/learning.py`), which anyone can run; the raw results, episode by episode, are in",
        "`benchmarks/results/learning/`. Both sides have the hyper-parameters of `benchmarks/works.py` (Stable-Baselines3's value loss has",
        "no ½, so its `vf_coef` is half of ours), the same networks, the same number of steps and their own seeds. A seed's score is the",
        "mean return of the last policy, acting greedily on separate environments (100 episodes; HalfCheetah-v5: 20).",
        "",
        "| work | environment | env steps | seeds | inchworm | stable-baselines3 | p | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for work, sides in results.items():
        if work != PRESET:
            count = "/".join(str(len(sides.get(side, []))) for side in SIDES)
            cells = [work, LEARNING[work].env_id, _steps(sides), count, *(figure(sides.get(side)) for side in SIDES), *verdict(work, sides)]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Mean over seeds ± half of its 95 % interval (Student's t). p is Welch's one-sided test of “inchworm is below”; the verdict is",
        f"“below” where p < {LEVEL}.",
        "",
    ]
    if PRESET in results:
        lines += _preset_section(results[PRESET])
    lines += ["## Learning curves", "", "Return of training episodes: mean over seeds, and the range from the worst to the best seed.", ""]
    for work, sides in results.items():
        total = max(run["steps"] for runs in sides.values() for run in runs)
        title = f"{'CartPole-v1 (preset)' if work == PRESET else LEARNING[work].env_id}: return of training episodes"
        curves = {side: [run["curve"] for run in sides[side]] for side in SIDES if side in sides}
        (docs / "curves" / f"{work}.svg").write_text(draw(title, curves, total), encoding="utf-8")
        lines += [f"![{title}](curves/{work}.svg)", ""]
    lines += ["## Machine", "", *(f"- {fact}" for fact in machine_facts()), ""]
    (docs / "results.md").write_text("\n".join(lines), encoding="utf-8")


def _preset_section(sides: dict[str, list[dict[str, Any]]]) -> list[str]:
    runs = sides["inchworm"]
    rows = [f"| {run['seed']} | {run['steps']:,} | {run['score']:.1f} | {min(run['returns']):.0f} | {run['seconds']:.0f} |" for run in runs]
    return [
        "## CartPole-v1, default preset",
        "",
        f"What `make train` runs, within {PRESET_STEPS:,} steps; greedy, 100 episodes. {verdict(PRESET, sides)[1]}.",
        "",
        "| seed | env steps | mean return | worst episode | seconds |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]


if __name__ == "__main__":
    main()
