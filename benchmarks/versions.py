"""Compare the speed of two checkouts of inchworm on W1 to W5, in one run, interleaved.

    python benchmarks/versions.py OTHER_CHECKOUT                    # this checkout against another one, 5 repeats each
    python benchmarks/versions.py OTHER_CHECKOUT --works W1 W3 --sides inchworm-numpy --repeats 9

Every run is a separate process with one thread. The two checkouts alternate, and which of them goes first alternates too, so that
load on the machine affects both alike. A figure is the median over repeats of the ratio within a repeat; above 1 this checkout is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from side import SPEED_SIDES
from works import SPEED

HERE = Path(__file__).resolve().parents[1]
PROGRAM = "import json, sys; from inchworm_side import train; print(json.dumps(train(**json.loads(sys.argv[1]))))"
SIDES = [side for side in SPEED_SIDES if side.startswith("inchworm")]


def main() -> None:
    """Measure and print one row per work and side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the root of the other checkout")
    parser.add_argument("--works", nargs="+", default=list(SPEED), choices=list(SPEED))
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps-scale", type=float, default=1.0, help="fraction of each work's steps")
    options = parser.parse_args()
    table = Table("work", "side", "total", "collect", "learn", title="this checkout / the other: medians (range)")
    for work in options.works:
        for side in options.sides:
            pairs = [run_pair(options.other.resolve(), work, side, repeat, options.steps_scale) for repeat in range(options.repeats)]
            table.add_row(work, side, *(ratio_text(pairs, part) for part in ("seconds", "collect_seconds", "learn_seconds")))
    Console(width=120).print(table)


def run_pair(other: Path, work: str, side: str, repeat: int, scale: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train once with each checkout, the other one first in even repeats; return (this checkout's figures, the other's)."""
    roots = [other, HERE] if repeat % 2 == 0 else [HERE, other]
    found = {root: run_once(root, work, side, repeat, scale) for root in roots}
    return found[HERE], found[other]


def run_once(root: Path, work: str, side: str, seed: int, scale: float) -> dict[str, Any]:
    """Train one work with the checkout at `root`, after two warm-up iterations."""
    arguments = {"group": "speed", "name": work, "seed": seed, "scale": scale, "threads": 1, "warmup": 2, **SPEED_SIDES[side][1]}
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root / 'benchmarks'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(arguments)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{root} failed on {work} ({side}):\n{done.stderr}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures | {"collect_seconds": figures["seconds"] - figures["learn_seconds"]}


def ratio_text(pairs: list[tuple[dict[str, Any], dict[str, Any]]], part: str) -> str:
    """Median and range of how many times as fast this checkout is in one part of the run."""
    ratios = sorted(theirs[part] / ours[part] for ours, theirs in pairs)
    return f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


if __name__ == "__main__":
    main()
