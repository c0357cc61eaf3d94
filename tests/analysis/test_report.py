"""The page as text: what is on it, that nothing of a run becomes markup, its size; and figures for papers."""

import builtins
import dataclasses
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import inchworm
from doubles.run_files import HOSTILE, write_run
from doubles.runs import small_config
from inchworm.analysis.charts import Line, bar_html, chart_svg, duration, save_plot, short_number, ticks
from inchworm.analysis.report import report_page, score_text, write_report
from inchworm.analysis.runs import read_run
from inchworm.core.errors import ConfigError, MissingExtraError


class Parsed(HTMLParser):
    """Every element with its attributes, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def test_the_page_has_every_part(tmp_path: Path) -> None:
    path = write_run(tmp_path / "mine")
    (path / "game.gif").write_bytes(b"GIF89a")
    page = Parsed(inchworm.report(path).read_text(encoding="utf-8"))
    assert (path / "report.html").exists()
    for text in ("mine", "finished", "CartPole-v1", "learning curve", "approx_kl", "where the time went", "configuration", "environment",
                 "Nothing wrong was found", "evaluations", "videos and replays", "game.gif", "ppo.learning_rate"):  # fmt: skip
        assert text in page.text, text
    charts = [json.loads(str(attributes["data-chart"])) for _, attributes in page.elements if "data-chart" in attributes]
    curve = charts[0]["lines"]
    assert [line["name"] for line in curve] == ["training", "evaluation"]
    assert (curve[0]["y"][-1], curve[1]["y"][-1], curve[1]["low"][-1], curve[1]["high"][-1]) == (200.0, 200.0, 190.0, 210.0)


def test_the_newest_videos_are_in_the_page_and_the_rest_is_named(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "replays").mkdir()
    sizes = {"step-000000000100.mp4": 600_000, "step-000000000200.mp4": 600_000, "step-000000000300.gif": 300_000}
    for name, size in sizes.items():
        (path / "replays" / name).write_bytes(bytes(size))
    (path / "replays" / "step-000000000300.json").write_text("{}")
    written = inchworm.report(path)
    assert written.stat().st_size < 3_000_000
    page = Parsed(written.read_text(encoding="utf-8"))
    sources = [str(attributes["src"])[:20] for tag, attributes in page.elements if tag in ("video", "img")]
    assert sources == ["data:image/gif;base6", "data:video/mp4;base6"], "300,000 and 600,000 of the 1,000,000 bytes there are"
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert links == ["./replays/step-000000000300.json", "./replays/step-000000000100.mp4"]
    assert f"replays/step-000000000300.json; inchworm replay {path}/replays/step-000000000300.json shows it" in page.text
    assert "replays/step-000000000100.mp4 (0.6 MB, not in this page)" in page.text
    live = Parsed(report_page([read_run(path)], live=True))
    assert (live.count("a"), "step-000000000100.mp4 (0.6 MB" in live.text) == (0, True), "the server has the page alone"


def test_ratings_are_a_curve_with_the_fixed_players_and_a_table(tmp_path: Path) -> None:
    path = write_run(tmp_path / "rated")
    history = [
        {"iteration": i, "env_steps": 1000 * i, "rating": 20.0 + i, "rating_sigma": 2.0, "win_rates": {"a<b": 0.5 + 0.1 * i}}
        for i in range(4)
    ]
    (path / "ratings.json").write_text(json.dumps({"anchors": {"a<b": [22.0, 1.0]}, "history": history}))
    page = Parsed(report_page([read_run(path)]))
    charts = [json.loads(str(attributes["data-chart"])) for _, attributes in page.elements if "data-chart" in attributes]
    policy, fixed = next(chart["lines"] for chart in charts if chart["lines"][0]["name"] == "the policy")
    assert (policy["x"], policy["y"], policy["low"], policy["high"]) == (
        [0, 1000, 2000, 3000],
        [20, 21, 22, 23],
        [16, 17, 18, 19],
        [24, 25, 26, 27],
    )
    assert (fixed["name"], fixed["y"]) == ("a<b", [22.0, 22.0])
    assert "80%" in page.text
    (path / "ratings.json").write_text('{"anchors": {"x": 3}}')
    assert "win rate vs" not in report_page([read_run(path)]), "a damaged file is left out"


def test_findings_are_on_the_page(tmp_path: Path) -> None:
    page = report_page([read_run(write_run(tmp_path / "sick", learning_rate=0.0))])
    assert "The learning rate is zero, so nothing is learned" in page
    assert "What to try:" in page


def test_several_runs_are_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [read_run(write_run(tmp_path / f"seed-{seed}", seed=seed)) for seed in range(4)]
    monkeypatch.chdir(tmp_path)
    path = write_report(runs)
    assert path == Path("report.html")
    page = Parsed(path.read_text(encoding="utf-8"))
    assert "interquartile mean" in page.text
    assert "seed-3" in page.text
    assert "run.seed" in page.text, "what differs"


def test_groups_have_a_row_and_a_colour_each(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name, seed=seed) for name, seed in (("one", 0), ("two", 1), ("again", 0))]
    text = report_page([read_run(path) for path in paths])
    page = Parsed(text)
    assert re.search(r"CartPole-v1220\d(\.\d)?\[20", page.text), "two seeds with an interval"
    assert "again1200one seed" in page.text
    assert text.count('c1"></i>again</li></ul>') == 3, "the last key of the learning curve, of the diagnostics and of the speed"


def test_the_score_has_two_digits_of_its_interval(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))

    def score(mean: float, half: float) -> str:
        row = {
            "env_steps": 1,
            "evaluation/mean_return": mean,
            "evaluation/interval95_low": mean - half,
            "evaluation/interval95_high": mean + half,
        }
        return score_text(dataclasses.replace(run, rows=[row]))[0]

    assert [score(310.49, 21.48), score(-4.2271, 0.01443), score(5_904.4, 1_190.3), score(200, 0)] == [
        "310 ± 21", "-4.227 ± 0.014", "5904 ± 1190", "200",
    ]  # fmt: skip


def test_a_compiled_loop_has_no_parts(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", rows=4)
    rows = [json.loads(line) for line in (path / "timing.jsonl").read_text().splitlines()]
    kept = [{name: row[name] for name in ("iteration", "env_steps", "seconds")} | {"between_seconds": 0.5} for row in rows]
    (path / "timing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert read_run(path).seconds == {"compiled loop": 2.0, "rest": 2.0}


def test_why_a_run_ended_is_in_words(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", outcome=None)
    reasons = {"total_timesteps": "reached run.total_timesteps", "converged": "converged", "callback": "stopped by a callback"}
    for reason, text in reasons.items():
        (path / "outcome.json").write_text(json.dumps({"outcome": "finished", "reason": reason}))
        assert f"seed 0 · {text}<" in report_page([read_run(path)])
    (path / "outcome.json").write_text(json.dumps({"outcome": "interrupted", "reason": "interrupted"}))
    assert "seed 0<" in report_page([read_run(path)]), "the badge says it"


def test_hostile_names_and_values_stay_text(tmp_path: Path) -> None:
    """B5: no element, handler or URL comes from an input."""
    name = HOSTILE.replace("/", "|").replace("\u2028", "")
    plain = write_run(tmp_path / "plain", metric=1.0)
    path = write_run(tmp_path / name, env="CartPole-v1", **{HOSTILE: 1.0, f"episode/{HOSTILE}": 2.0})
    config = (path / "config.yaml").read_text().replace("id: CartPole-v1", f"id: {json.dumps(HOSTILE[:-1])}")
    (path / "config.yaml").write_text(config)
    (path / "versions.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    (path / "outcome.json").write_text(json.dumps({"outcome": "failed", "reason": HOSTILE}))
    (path / f"{name}.mp4").write_bytes(b"video")
    ratings = {"anchors": {HOSTILE: [25.0, 1.0]}, "history": [{"iteration": 1, "env_steps": 512, "rating": 20.0, "rating_sigma": 1.0,
               "win_rates": {HOSTILE: 0.5}}]}  # fmt: skip
    (path / "ratings.json").write_text(json.dumps(ratings))
    runs = [read_run(path), read_run(plain)]
    for shown in ([runs[0]], runs):
        page = Parsed(report_page(shown, links_from=path))
        assert (page.count("script"), page.count("style"), page.count("img"), page.count("iframe")) == (1, 1, 0, 0)
        assert not [key for _, attributes in page.elements for key in attributes if key.startswith("on")]
        links = [value for _, attributes in page.elements for key, value in attributes.items() if key in ("src", "href", "xlink:href")]
        assert all(str(link).startswith(("data:video/mp4;base64,", "./")) for link in links)
    assert HOSTILE[:30] in Parsed(report_page([runs[0]])).text, "it is shown as it is"


def test_text_that_is_no_utf_8_is_escaped(tmp_path: Path) -> None:
    """A directory's name may be any bytes, and JSON has half surrogates; a page and a figure are UTF-8."""
    runs = [read_run(write_run(tmp_path / f"{name}\x1b[31m\x07", **{"half \ud800": 1.0})) for name in ("one", "two")]
    for shown in (runs[:1], runs):
        page = write_report(shown, tmp_path / "page.html").read_text(encoding="utf-8")
        assert "one\\x07" in page
        assert "half \\ud800" in page
    lines = [Line("half \ud800", np.array([0.0, 9.0]), np.array([1.0, 2.0]))]
    for name in ("curve.svg", "curve.png"):
        assert save_plot(lines, tmp_path / name).stat().st_size > 1_000


def test_the_policy_of_the_page_allows_its_own_parts_only(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    page = report_page([run])
    assert not re.findall(r"https?://", page), "nothing is fetched"
    policy = next(str(attributes["content"]) for _, attributes in Parsed(page).elements if attributes.get("http-equiv"))
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "connect-src" not in policy
    assert "connect-src 'self'" in report_page([run], live=True)


def test_a_million_steps_are_less_than_three_megabytes(tmp_path: Path) -> None:
    more = {f"episode/number_{index}": float(index) for index in range(40)}
    path = write_report([read_run(write_run(tmp_path / "long", rows=4_000, steps=250, **more))])
    assert path.stat().st_size < 3_000_000
    several = [read_run(write_run(tmp_path / f"seed-{seed}", rows=2_000, seed=seed)) for seed in range(5)]
    assert write_report(several, tmp_path / "all.html").stat().st_size < 3_000_000


def test_a_run_without_episodes_or_timing_has_a_page(tmp_path: Path) -> None:
    path = tmp_path / "bare"
    write_run(path, rows=1)
    (path / "metrics.jsonl").write_text('{"iteration": 1, "env_steps": 64, "loss": 0.5}\n')
    (path / "timing.jsonl").unlink()
    page = Parsed(report_page([read_run(path)]))
    assert "No episode has ended yet." in page.text
    assert "Too few updates to judge: 5 are needed." in page.text


def test_numbers_of_axes() -> None:
    assert [short_number(value) for value in (0, 0.02, 1.5, 2_000, 20_000, 1_500_000, -2e9, 1e-5)] == [
        "0", "0.02", "1.5", "2000", "20k", "1.5M", "-2G", "1e-05",
    ]  # fmt: skip
    assert [short_number(value, 20_000) for value in (0, 5_000, 20_000)] == ["0", "5k", "20k"]
    assert ticks(0, 10, 5) == [(0, "0"), (2, "2"), (4, "4"), (6, "6"), (8, "8"), (10, "10")]
    assert [text for _, text in ticks(0.52, 0.69, 3)] == ["0.55", "0.6", "0.65"], "one number alone tells no scale"
    assert [text for _, text in ticks(0, 20_480, 4)] == ["0", "5k", "10k", "15k", "20k"]
    assert [text for _, text in ticks(0.69312, 0.69316, 3)] == ["0.69312", "0.69314", "0.69316"], "no two have the same text"
    assert ticks(3.0, 3.0) == [(3.0, "3")]
    drawn = chart_svg([Line("constant", np.arange(2.0), np.array([0.3, 0.1 + 0.2]))], "label")
    assert ">0.3</text>" in drawn, "what differs by rounding only is a constant"
    assert ">0.28</text>" in drawn
    assert [duration(value) for value in (0.5, 59, 61, 3_660, 7_500, 266_400)] == [
        "0.5 s", "59 s", "1 min", "1 h 1 min", "2 h 5 min", "3 d 2 h",
    ]  # fmt: skip
    assert "learn 75%" in bar_html({"env": 1.0, "learn": 3.0})


def test_a_chart_maps_numbers_to_places() -> None:
    line = Line("one", np.array([0.0, 50.0, 100.0]), np.array([0.0, 1.0, 2.0]))
    svg = ET.fromstring(chart_svg([line], "label", width=172.0, height=146.0))
    points = svg.find("polyline")
    assert points is not None
    places = [tuple(map(float, point.split(","))) for point in points.attrib["points"].split()]
    assert [x for x, _ in places] == [58.0, 108.0, 158.0]  # the area is 100 wide
    assert [y for _, y in places] == pytest.approx([12 + 100 * (2.12 - value) / 2.24 for value in (0, 1, 2)], abs=0.05)


def test_plots_are_svg_by_our_own_code(tmp_path: Path) -> None:
    lines = [Line("a <b>\x1b\ud800", np.array([0.0, 9.0]), np.array([1.0, 2.0]), np.array([0.0, 1.0]), np.array([2.0, 3.0]))]
    svg = ET.fromstring(save_plot(lines, tmp_path / "curve.svg", y_label="return\x00").read_text())
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    texts = [element.text for element in svg.iter() if element.tag.endswith("text")]
    assert {"a <b>\\x1b\\ud800", "env steps", "return\\x00"} <= set(texts), "what XML cannot hold is escaped"
    with pytest.raises(ConfigError, match=r"must end in \.svg, \.png or \.pdf"):
        save_plot(lines, tmp_path / "curve.jpg")


def test_png_needs_matplotlib_and_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **options)

    line = Line("one", np.array([0.0, 9.0]), np.array([1.0, 2.0]))
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r'pip install "inchworm\[report\]"'):
        save_plot([line], tmp_path / "curve.png")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert save_plot([line], tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_training_in_python_ends_with_a_report(tmp_path: Path) -> None:
    config = small_config(iterations=6, backend="numpy", report=True)
    page = tmp_path / "run" / "report.html"
    with inchworm.PPOTrainer(config.policy, config.env, config, run_dir=tmp_path / "run", trackers=["csv"]) as trainer:
        trainer.train()
        assert not page.exists(), "it is written once, when the trainer is closed"
    assert '<span class="badge finished">finished</span>' in page.read_text()
    files = json.loads((tmp_path / "run" / "tracking" / "csv.json").read_text())["files"]
    assert {"config.yaml", "policy.safetensors", "report.html", "curve.svg"} <= files.keys(), "trackers receive them"
    assert ET.fromstring((tmp_path / "run" / "curve.svg").read_text()).tag.endswith("svg")
    before = page.stat().st_mtime_ns
    with inchworm.PPOTrainer(config.policy, config.env, config, run_dir=tmp_path / "run"):
        pass
    assert page.stat().st_mtime_ns == before, "nothing was trained"
    quiet = config.replace(run=config.run.replace(report=False))
    with inchworm.PPOTrainer(quiet.policy, quiet.env, quiet, run_dir=tmp_path / "quiet") as trainer:
        trainer.train()
    assert not {"report.html", "curve.svg"} & {path.name for path in (tmp_path / "quiet").iterdir()}
