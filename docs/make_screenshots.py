"""Train small runs and write the screenshots of docs/reports.md to docs/images, in headless Chromium.

PYTHONPATH=tests python docs/make_screenshots.py
"""

from __future__ import annotations

import base64
import os
import sys
import tempfile
from pathlib import Path

from doubles.browser import Browser, find_browser
from inchworm.analysis.charts import return_lines, save_plot
from inchworm.analysis.report import write_report
from inchworm.analysis.runs import read_run
from inchworm.cli.main import main

IMAGES = Path(__file__).resolve().with_name("images")
STEPS = "60000"


def train() -> None:
    """Train CartPole with three seeds and two settings, and once without any chance to learn."""
    for seed in ("0", "1", "2"):
        for name, flags in (("preset", []), ("lambda-0.5", ["--ppo.gae-lambda", "0.5"])):
            flags = [*flags, "--evaluation.interval", "12", "--total-timesteps", STEPS, "--quiet", "--seed", seed]
            main(["train", "CartPole-v1", "--run.name", f"{name}-{seed}", *flags])
    sick = ["--ppo.learning-rate", "1e-9", "--total-timesteps", "20000", "--quiet"]
    main(["train", "CartPole-v1", "--run.name", "sick", *sick])


def shoot(browser: Browser, page: Path, image: str, *, width: int, height: int, scheme: str, hover: float | None = None) -> None:
    """Open a page and save what is seen of it."""
    browser.open(page, width=width, height=height, scheme=scheme)
    if hover is not None:
        chart = "document.querySelector('.wide svg.chart').getBoundingClientRect()"
        left, top, wide, high = browser.value(f"(r => [r.x, r.y, r.width, r.height])({chart})")
        browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=left + hover * wide, y=top + high / 2)
        browser.wait("!document.querySelector('#tip').hidden")
    (IMAGES / image).write_bytes(base64.b64decode(browser.ask("Page.captureScreenshot", format="png")["data"]))
    sys.stdout.write(f"{IMAGES / image}\n")


def run() -> None:
    """Make all images."""
    program = find_browser()
    if program is None:
        raise SystemExit("no chromium, chromium-browser or google-chrome on PATH")
    with tempfile.TemporaryDirectory() as directory, Browser(program, Path(directory)) as browser:
        os.chdir(directory)
        train()
        several = [read_run(f"{name}-{seed}") for name in ("preset", "lambda-0.5") for seed in (0, 1, 2)]
        single = Path("runs/preset-0/report.html").resolve()
        seeds = write_report(several, "seeds.html").resolve()
        shoot(browser, single, "report.png", width=1240, height=1000, scheme="light", hover=0.6)
        shoot(browser, seeds, "report_seeds.png", width=1240, height=900, scheme="dark", hover=0.4)
        shoot(browser, Path("runs/sick/report.html").resolve(), "report_doctor.png", width=1240, height=560, scheme="light")
        save_plot(return_lines(several), IMAGES / "curve.svg")


if __name__ == "__main__":
    run()
