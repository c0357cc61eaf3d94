"""Exploration by curiosity: the corridor of doors of examples/curiosity.py, with random network distillation, a forward model, and without.

python benchmarks/curiosity.py                     (about five minutes on one core)
python benchmarks/curiosity.py "forward model"     (one side again; the others are kept)

Budget, seeds and targets are those below, and were fixed before the runs that are reported. All sides have the same settings of PPO; the
side without curiosity gets twice the env steps, with the entropy coefficient of the others and with one ten times as large.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import results
from figures import Section, Target

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples import curiosity

STEPS, SEEDS, LENGTH = 60_000, (11, 12, 13), 16
SOLVED, UNSOLVED = 0.9, 0.2
"""Success of 50 greedy episodes from which a seed counts as solved, and below which as not solved."""
SIDES = {
    "random network distillation": ("rnd", STEPS, curiosity.CONFIG.ent_coef),
    "forward model": ("forward", STEPS, curiosity.CONFIG.ent_coef),
    "plain PPO": ("off", 2 * STEPS, curiosity.CONFIG.ent_coef),
    "plain PPO, more entropy": ("off", 2 * STEPS, 10 * curiosity.CONFIG.ent_coef),
}
"""Name -> the kind, its env steps and its entropy coefficient."""


def measure(only: list[str]) -> dict[str, list[float]]:
    """The success of every seed, by side: of those named, or all."""
    found: dict[str, list[float]] = dict((results.load("curiosity") or {"data": {}})["data"])
    config = curiosity.CONFIG
    for name, (kind, steps, entropy) in SIDES.items():
        if only and name not in only:
            continue
        curiosity.CONFIG = config.replace(ent_coef=entropy)
        found[name] = []
        for seed in SEEDS:
            with contextlib.redirect_stdout(io.StringIO()):
                found[name].append(float(curiosity.main(steps, kind, seed, LENGTH)))
            print(f"{name}, seed {seed}: success {found[name][-1]:.2f}", flush=True)
    curiosity.CONFIG = config
    return found


def section(data: dict[str, Any]) -> Section:
    """The part of the page."""
    lines = [
        f"A corridor of {LENGTH} cells: in each, one of four doors leads on and three lead one cell back, and only the last cell gives a",
        "reward ([examples/curiosity.py](../examples/curiosity.py)). Success is the share of 50 greedy episodes that reach it, after",
        f"{STEPS:,} env steps with curiosity and {2 * STEPS:,} without, for the seeds {', '.join(map(str, SEEDS))}. Solved is a success of",
        f"{SOLVED} or more, not solved one below {UNSOLVED}. The forward model solved one of these seeds with features that it learned; it",
        "was then given fixed random ones and trained again with the same seeds, so its row is not of settings that were fixed before.",
        "",
        "| | env steps | ppo.ent_coef | success of each seed |",
        "|---|---|---|---|",
    ]
    targets = []
    for name, (kind, steps, entropy) in SIDES.items():
        scores = data[name]
        lines.append(f"| {name} | {steps:,} | {entropy:g} | {', '.join(f'{score:.2f}' for score in scores)} |")
        right = sum(score < UNSOLVED if kind == "off" else score >= SOLVED for score in scores)
        what = f"corridor of doors, {name}: seeds {'not ' if kind == 'off' else ''}solved"
        targets.append(Target(what, float(right), float(len(SEEDS)), unit=f"of {len(SEEDS)}"))
    return Section("Curiosity", [*lines, ""], targets)


if __name__ == "__main__":
    results.save("curiosity", measure(sys.argv[1:]))
