"""How large the report of a long run is, and how soon a browser shows it: from the start of headless Chromium to the drawn page.

python benchmarks/report_page.py [--steps 1000000] [--repeats 5]          (a minute)
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import results
from doubles.browser import Browser, find_browser
from figures import Section, Target, median_range
from inchworm.analysis.report import report
from inchworm.cli.main import main as inchworm

DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
CURVES = "document.querySelectorAll('svg.chart polyline').length"


def measure(steps: int, repeats: int) -> dict[str, Any]:
    """Train CartPole for so many steps, with an evaluation every 50 iterations, write its report and open it in fresh browsers."""
    program = find_browser()
    if program is None:
        raise SystemExit("no chromium, chromium-browser or google-chrome on PATH")
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        flags = ["--run.name=long", f"--total-timesteps={steps}", "--run.backend=numpy", "--convergence.stop=false", "--quiet"]
        if inchworm(["train", "CartPole-v1", *flags]) != 0:
            raise SystemExit("the training failed")
        began = time.perf_counter()
        page = report("long").resolve()
        written = time.perf_counter() - began
        seconds, curves = [], 0
        for number in range(repeats):
            home = Path(directory) / f"browser-{number}"
            home.mkdir()
            began = time.perf_counter()
            with Browser(program, home) as browser:
                browser.open(page)
                browser.value(DRAWN)
                seconds.append(time.perf_counter() - began)
                curves = browser.value(CURVES)
        return {"steps": steps, "bytes": page.stat().st_size, "writing": written, "seconds": seconds, "curves": curves}


def section(found: dict[str, Any]) -> Section:
    """The part of the performance page."""
    megabytes, opening = found["bytes"] / 1e6, median(found["seconds"])
    return Section(
        "The report",
        [
            f"The [report](reports.md) of a CartPole run of {found['steps']:,} env steps is a file of {megabytes:.2f} MB with",
            f"{found['curves']} curves, written in {found['writing']:.2f} s. From the start of headless Chromium with an empty profile",
            f"until the page is drawn it takes {median_range(found['seconds'], '.2f')} s.",
            "",
        ],
        [
            Target(f"report of {found['steps']:,} env steps: its size", megabytes, 3.0, at_least=False, unit="MB"),
            Target("the same: time to open it in a browser that starts", opening, 2.0, at_least=False, unit="s"),
        ],
    )


def main() -> None:
    """Measure and renew the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    data = measure(given.steps, given.repeats)
    sys.stdout.write("\n".join([*section(data).lines, *(target.row() for target in section(data).targets)]) + "\n")
    results.save("report_page", data)


if __name__ == "__main__":
    main()
