"""Series, groups of seeds and their statistics."""

import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from doubles.run_files import HOSTILE, write_run
from inchworm.analysis.charts import (
    Line,
    chart_svg,
    evaluation_line,
    group_lines,
    group_runs,
    metric_line,
    return_lines,
    return_metric,
    scatter_svg,
    seeds_line,
    shorten,
)
from inchworm.analysis.runs import read_run
from inchworm.core.errors import printable


def test_a_long_line_is_shortened_and_keeps_its_extremes() -> None:
    x = np.arange(10_000.0)
    y = np.sin(x / 50)
    y[1_234], y[7_777] = 9.0, -9.0
    short = shorten(Line("long", x, y), 400)
    assert 200 < len(short.x) <= 402
    assert (short.y.max(), short.y.min()) == (9.0, -9.0)
    assert (short.x[0], short.x[-1]) == (0, 9_999)
    assert (np.diff(short.x) > 0).all()
    assert shorten(short, 500) is short


def test_runs_that_differ_only_in_the_seed_are_one_group(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / f"{env}-{seed}", env=env, seed=seed)) for env in ("CartPole-v1", "Acrobot-v1") for seed in (0, 1)]
    groups = group_runs(runs)
    assert [[run.name for run in group.runs] for group in groups] == [["CartPole-v1-0", "CartPole-v1-1"], ["Acrobot-v1-0", "Acrobot-v1-1"]]
    assert [group.label for group in groups] == ["CartPole-v1", "Acrobot-v1"]
    line = seeds_line(groups[0], "mean_return")
    assert line is not None
    assert line.y[0] == pytest.approx(20 + 180 / 20 + 2.5)  # the mean of seeds 0 and 1, which differ by 5
    assert line.low is not None
    assert line.high is not None
    assert (line.low[0], line.high[0]) == (pytest.approx(29.0), pytest.approx(34.0))
    assert seeds_line(group_runs(runs[:1])[0], "mean_return") is None, "one seed has no interval"
    drawn = [(one.name, one.colour, one.style) for one in group_lines(groups, "mean_return")]
    assert drawn[:3] == [("CartPole-v1-0", 0, "faint"), ("CartPole-v1-1", 0, "faint"), ("CartPole-v1 (2 seeds)", 0, "line")]
    assert group_lines(groups, "nothing") == []


def test_a_seed_that_occurs_again_is_no_new_sample(tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "bundle.yaml").touch()
    names = {"one": 0, "two": 1, "many/seed-0": 0, "many/seed-1": 1, "many/seed-2": 2, "alone": 0}
    runs = [read_run(write_run(tmp_path / name, seed=seed)) for name, seed in names.items()]
    groups = [(group.label, [run.name for run in group.runs]) for group in group_runs(runs)]
    assert groups == [
        ("CartPole-v1", ["one", "two"]),
        ("CartPole-v1 (many)", ["many/seed-0", "many/seed-1", "many/seed-2"]),  # the third would fit into the first, too
        ("alone", ["alone"]),
    ]


def test_several_runs_are_compared_by_evaluations_where_there_are_enough_else_by_the_teams_return(tmp_path: Path) -> None:
    team = {"episode/team_return": 7.0}
    short, other = (read_run(write_run(tmp_path / f"short-{seed}", rows=4, seed=seed, **team)) for seed in (0, 1))
    long, alone = read_run(write_run(tmp_path / "long", rows=16, **team)), read_run(write_run(tmp_path / "alone", rows=4))
    assert return_metric([short, other]) == "episode/team_return"
    assert return_metric([long, long]) == "evaluation/mean_return"
    assert return_metric([short, alone]) == "mean_return", "which both have"
    assert return_lines([short, other])[-1].y.tolist() == [7.0] * 4


def test_one_row_is_a_point_at_the_end_of_the_axis() -> None:
    svg = ElementTree.fromstring(chart_svg([Line("one", np.array([22_000.0]), np.array([1.0]))], "return", width=380.0))
    (dot,) = svg.findall("circle")
    assert float(dot.attrib["cx"]) == 366.0
    assert [text.text for text in svg.findall("text")][-3:] == ["0", "10k", "20k"]


def test_lines_of_a_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", rows=16))
    line = metric_line(run, "entropy", label="mine", colour=3)
    assert line is not None
    assert (line.name, line.colour, len(line.x)) == ("mine", 3, 16)
    assert metric_line(run, "nothing") is None
    rows = [{"env_steps": step, "entropy": value} for step, value in ((30, 3.0), (20, 1.0), (20, 2.0), (10, 1.0))]
    mixed = metric_line(dataclasses.replace(run, rows=rows), "entropy")
    assert mixed is not None
    assert (mixed.x.tolist(), mixed.y.tolist()) == ([10, 20, 30], [1, 2, 3]), "of one number of steps the last row, in any order"
    scores = evaluation_line(run)
    assert scores is not None
    assert scores.low is not None
    assert scores.high is not None
    assert (len(scores.x), scores.y[-1], scores.low[-1], scores.high[-1]) == (8, 200.0, 190.0, 210.0)


def test_points_have_no_line_and_places_are_linear() -> None:
    """The axis of a scatter begins 10 right of 58 and ends 10 left of 380 - 14: the middle is 212; higher values are further up."""
    svg = chart_svg([Line("each", np.array([0.0, 1.0]), np.array([2.0, 3.0]), style="points")], "score", over="trial")
    assert "polyline" not in svg
    assert svg.count("<circle") == 2
    assert "score over trial" in svg
    scatter = ElementTree.fromstring(scatter_svg([0.0, 0.5, 1.0], [1.0, 3.0, 2.0], [(0.5, "a")], ["x", "y", HOSTILE], HOSTILE, best=1))
    dots = scatter.findall("circle")
    assert [float(dot.attrib["cx"]) for dot in dots] == [68.0, 212.0, 356.0]
    heights = [float(dot.attrib["cy"]) for dot in dots]
    assert heights[1] < heights[2] < heights[0]
    assert [dot.attrib["r"] for dot in dots] == ["3", "5", "3"]
    assert scatter.attrib["aria-label"] == printable(HOSTILE)
    assert [dot.findtext("title") for dot in dots] == ["x", "y", printable(HOSTILE)]
    assert scatter.findall("script") == []
