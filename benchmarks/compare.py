"""How fast is it? inchworm, its peers and the C limit train the same works side by side, in one run, in turns.

    python benchmarks/compare.py                                    # W1 to W5, every side that can run here, 3 repeats each
    python benchmarks/compare.py --works W1 W3 --repeats 5 --sides inchworm-numpy stable-baselines3
    python benchmarks/compare.py --steps-scale 0.05                 # a quick look; nothing is kept

Each run is a separate process. Short runs with 1 and with 2 threads come first, and each side then keeps what suited it on
that work. Before the clock starts, every side trains for two iterations: what is compiled on the way is reported apart. Sides take
turns, so that whatever else the machine does falls on all; a figure is the median over repeats with its range, and what
counts is the ratio. The page is made by `page.py` from what is kept.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

import results
from compare_section import section
from figures import Run, speed
from side import LIMIT, SPEED_SIDES, missing, smallest, train_speed
from works import SPEED

SWEEP_SCALE = 0.1


def main() -> None:
    """Measure, print, keep."""
    options = _options()
    console = Console()
    sides = available(console, options.sides)
    with tempfile.TemporaryDirectory(prefix="inchworm-compare-") as directory:
        caches = cache_settings(Path(directory))
        data = measure(console, options.works, sides, options.repeats, options.steps_scale, options.threads, caches)
    found = section(data)
    console.print(Markdown("\n".join(found.lines)))
    for target in found.targets:
        console.print(target.row().replace("*", ""))
    if options.steps_scale == 1.0 and set(options.works) == set(SPEED):
        results.save("compare", data)
        console.print("kept in benchmarks/results/speed/compare.json; docs/performance.md is renewed")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", default=list(SPEED), choices=list(SPEED))
    parser.add_argument("--sides", nargs="+", default=list(SPEED_SIDES), choices=list(SPEED_SIDES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread settings to choose from")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="part of the steps, for a quick look")
    return parser.parse_args()


def available(console: Console, sides: list[str]) -> list[str]:
    """The sides that can run here; the others are named with what they lack."""
    lacking = {side: reason for side in sides if (reason := missing(side)) is not None}
    for side, reason in lacking.items():
        console.print(f"without {side}: {reason}")
    return [side for side in sides if side not in lacking]


def cache_settings(directory: Path) -> dict[str, str]:
    """Empty caches of compiled code, so that the first compile is a first one; later runs find what earlier ones left."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "torch"),
        "XDG_CACHE_HOME": str(directory / "cache"),
        "JAX_COMPILATION_CACHE_DIR": str(directory / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def measure(
    console: Console, works: list[str], sides: list[str], repeats: int, scale: float, threads: list[int], caches: dict[str, str]
) -> dict[str, Any]:
    """All runs: per work and side the thread settings tried, the one chosen, and the repeats with it."""
    sweeps = {work: {side: sweep(work, side, threads, scale, caches) for side in sides} for work in works}
    chosen = {work: {side: fastest(tried) for side, tried in sweeps[work].items()} for work in works}
    for work in works:
        console.print(f"{work} threads: {', '.join(f'{side} {count}' for side, count in chosen[work].items())}")
    runs: dict[str, dict[str, list[Run]]] = {work: {side: [] for side in sides} for work in works}
    for repeat in range(repeats):
        for work in works:
            turn = (repeat * 2) % len(sides)
            for side in sides[turn:] + sides[:turn]:
                run = train_speed(side, work, seed=repeat, scale=scale, threads=chosen[work][side], environment=caches)
                runs[work][side].append(run)
                console.print(f"{work} {side} repeat {repeat}: {speed(run):,.0f} steps/s")
    parts = {work: {"threads": chosen[work], "sweep": sweeps[work], "runs": runs[work]} for work in works}
    return {"sides": sides, "works": parts}


def sweep(work: str, side: str, threads: list[int], scale: float, caches: dict[str, str]) -> dict[str, Run]:
    """A short run with each thread setting; the C program has one thread."""
    counts = [1] if side == LIMIT else [count for count in threads if count <= len(os.sched_getaffinity(0))] or [1]
    short = max(smallest(work), SWEEP_SCALE * scale)
    return {str(count): train_speed(side, work, seed=0, scale=short, threads=count, environment=caches) for count in counts}


def fastest(tried: dict[str, Run]) -> int:
    """The thread setting with the highest speed; the smaller one of equals."""
    return int(max(tried, key=lambda count: (speed(tried[count]), -int(count))))


if __name__ == "__main__":
    main()
