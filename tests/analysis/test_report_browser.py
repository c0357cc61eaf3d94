"""The report in a real browser: curves are there, hovering reads values, nothing is fetched, nothing foreign runs; and the live page."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from doubles.browser import Browser, find_browser
from doubles.painted import HEIGHT, WIDTH, Painted
from doubles.run_files import HOSTILE, write_pairs, write_run
from inchworm.analysis.compare import ComparisonConfig, comparison_page, measure_pairs
from inchworm.analysis.report import make_server, write_report
from inchworm.analysis.runs import read_run
from inchworm.analysis.search_space import Choice, Range
from inchworm.analysis.sweep_results import Sweep, SweepConfig, TrialResult, sweep_page
from inchworm.collect.opponents import RandomActor
from inchworm.config.sections import EnvConfig, TrainingConfig
from inchworm.evaluate.video import record_video

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on PATH: the page was not tried in a browser")
    with Browser(program, tmp_path_factory.mktemp("browser")) as found:
        yield found


def hover(browser: Browser, selector: str, part: float) -> str:
    """Move the pointer to a part of a chart's width; return what the page says."""
    place = f"document.querySelector({json.dumps(selector)})"
    browser.value(f"{place}.scrollIntoView({{block: 'center'}})")
    left, top, width, height = browser.value(f"(r => [r.x, r.y, r.width, r.height])({place}.getBoundingClientRect())")
    began = time.monotonic()
    while browser.value("document.querySelector('#tip').hidden") or time.monotonic() < began + 0.5:  # a late scroll event hides it
        browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=left + part * width, y=top + height / 2)
        assert time.monotonic() < began + 120
        time.sleep(0.05)
    return str(browser.value("document.querySelector('#tip').innerText"))


def test_it_opens_offline_and_hovering_reads_values(browser: Browser, tmp_path: Path) -> None:
    page = write_report([read_run(write_run(tmp_path / "run"))])
    browser.open(page)
    assert browser.value("document.title") == "run: CartPole-v1"
    assert browser.value("document.querySelectorAll('svg.chart polyline').length") >= 10
    assert browser.value("document.querySelector('.wide svg.chart').getBoundingClientRect().width") > 900
    text = hover(browser, ".wide svg.chart", 0.995)
    assert text.splitlines() == ["10,240 steps", "training 200", "evaluation 200 [190, 210]"]
    assert "training 20" not in hover(browser, ".wide svg.chart", 0.5)
    browser.value("document.querySelector('figure svg.chart').focus()")
    browser.press("ArrowRight")
    assert browser.value("document.querySelector('#tip').innerText").startswith("512 steps")
    assert browser.requests() == [page.as_uri()]
    assert browser.complaints() == []


def test_videos_in_the_page_play(browser: Browser, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    for name in ("step-000000000100.mp4", "step-000000000200.gif"):
        stats = record_video(RandomActor(Painted().action_space), "doubles.painted:Painted", path / "replays" / name, seeds=[3])
    page = write_report([read_run(path)])
    browser.open(page)
    browser.wait("document.querySelector('video').readyState >= 2 && document.querySelector('figure img').complete")
    shown = browser.value("(v => [v.videoWidth, v.videoHeight, Math.round(10 * v.duration)])(document.querySelector('video'))")
    assert shown == [WIDTH + 1, HEIGHT + 1, stats.lengths[0] + 1]  # at 10 images per second
    assert browser.value("document.querySelector('figure img').naturalWidth") == WIDTH
    assert [one for one in browser.requests() if not one.startswith("data:")] == [page.as_uri()]
    assert browser.complaints() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1400])
def test_it_fits_narrow_and_wide_in_light_and_dark(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    runs = [read_run(write_run(tmp_path / f"seed-{seed}", seed=seed)) for seed in range(3)]
    browser.open(write_report(runs, tmp_path / "page.html"), width=width, scheme=scheme)
    assert browser.value("document.documentElement.scrollWidth") <= width, "no sideways scrolling"
    shown = ".narrow" if width < 700 else ".wide"
    assert browser.value(f"document.querySelector('{shown} svg.chart').getBoundingClientRect().width") > 300
    paper, ink = browser.value("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
    light = [sum(map(int, colour[4:-1].split(","))) for colour in (paper, ink)]
    assert (light[0] > light[1]) == (scheme == "light")
    stroke = "getComputedStyle(document.querySelector('.line.c0')).stroke"
    assert browser.value(stroke) == ("rgb(0, 114, 178)" if scheme == "light" else "rgb(86, 180, 233)")
    assert browser.complaints() == []


def test_hostile_names_run_nothing(browser: Browser, tmp_path: Path) -> None:
    path = write_run(tmp_path / HOSTILE.replace("/", "|"), **{HOSTILE: 1.0})
    page = write_report([read_run(path), read_run(write_run(tmp_path / "plain"))], tmp_path / "page.html")
    browser.open(page)
    hover(browser, ".wide svg.chart", 0.5)
    assert browser.value("window.pwned") is None
    assert browser.value("document.scripts.length") == 1
    assert browser.requests() == [page.as_uri()]
    assert browser.complaints() == []


def test_the_page_of_a_sweep_reads_trials_and_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    """Scores of 10, 30 and 20: the best after the last trial is 30. Texts of a sweep come from its files, so they may be hostile."""
    config = SweepConfig(base=TrainingConfig(), space={"ppo.gamma": "0.9..1.0"}, trials=4)
    space = {"ppo.gamma": Range(0.9, 1.0), "run.notes": Choice((HOSTILE, "plain"))}
    values = [{"ppo.gamma": 0.9 + 0.02 * number, "run.notes": HOSTILE} for number in range(4)]
    trials = [TrialResult(number, "complete", values[number], score) for number, score in enumerate((10.0, 30.0, 20.0))]
    trials.append(TrialResult(3, "failed", values[3], rungs={1: 5.0}, error=HOSTILE))
    found = Sweep(tmp_path / HOSTILE.replace("/", "|"), config, space, tuple(trials), {HOSTILE: 0.75, "ppo.gamma": 0.25})
    page = tmp_path / "page.html"
    page.write_text(sweep_page(found), encoding="utf-8")
    browser.open(page)
    assert hover(browser, ".wide svg.chart", 0.995).splitlines() == ["trial 2", "best so far 30", "each trial 20"]
    assert browser.value("document.querySelectorAll('figure svg.chart circle').length") == 6
    assert "ppo.gamma: 0.99 → 0.92" in browser.value("document.body.innerText")
    assert browser.value("window.pwned") is None
    assert browser.value("document.scripts.length") == 1
    assert browser.requests() == [page.as_uri()]
    assert browser.complaints() == []


def test_a_comparison_opens_offline_and_hostile_names_run_nothing(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / HOSTILE.replace("/", "|")
    base = TrainingConfig(env=EnvConfig(id="CartPole-v1", kwargs={"name": "plain"}))
    changed = base.replace(env=base.env.replace(kwargs={"name": HOSTILE}))
    scores = {"base": [100.0, 110.0, 120.0, 130.0], "changed": [150.0, 170.0, 169.0, 181.0]}
    write_pairs(path, scores)
    page = path / "report.html"
    page.write_text(comparison_page(measure_pairs(path, ComparisonConfig(base=base, changed=changed, seeds=4))), encoding="utf-8")
    browser.open(page)
    assert HOSTILE.split("{")[0] in browser.value("document.querySelector('header p').innerText")
    assert "final score is higher" in browser.value("document.querySelector('section p').innerText")
    text = hover(browser, "section:nth-of-type(3) .wide svg.chart", 0.01).splitlines()
    # Differences are 50, 60, 49 and 51: their means after 3 and 4 pairs are 53 and 52.5.
    assert text[0] == "3 pairs"
    assert text[1].startswith("changed less base 53 [")
    assert browser.value("document.querySelectorAll('svg.chart').length") > 10
    assert browser.value("window.pwned") is None
    assert browser.value("document.scripts.length") == 1
    assert browser.requests() == [page.as_uri()]
    assert browser.complaints() == []


def test_watch_serves_the_page_and_refreshes_it_without_reloading(browser: Browser, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", rows=10)
    rows = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(rows[:5]))
    with make_server([path]) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        host, port = server.server_address[:2]
        assert host == "127.0.0.1"
        address = f"http://127.0.0.1:{port}/"
        browser.events.clear()
        browser.look(1200, 900)
        browser.ask("Page.navigate", url=address)
        browser.wait("document.readyState === 'complete' && document.querySelector('.cards') !== null")
        assert "2,560" in browser.value("document.querySelector('.cards').innerText")
        browser.value("window.same = true; document.querySelector('#more').open = true")
        (path / "metrics.jsonl").write_text("".join(rows))
        browser.wait("document.querySelector('.cards').innerText.includes('5,120')")
        assert browser.value("window.same") is True, "the page was not loaded again"
        assert browser.value("document.querySelector('#more').open") is True
        assert {url.removeprefix(address) for url in browser.requests()} <= {"", "page", "favicon.ico"}
        for headers, wanted, code in (({"Host": "evil.example"}, address, 403), ({}, f"{address}../config.yaml", 404)):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(urllib.request.Request(wanted, headers=headers), timeout=60)
            assert caught.value.code == code
        server.shutdown()
        thread.join()
    browser.wait("document.querySelector('#live').textContent.includes('has ended')")
