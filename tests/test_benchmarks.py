"""The benchmarks' own arithmetic: statistics against tables, curves against hand-made ones. Their runs are not tests."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.mark.parametrize(
    ("t", "degrees", "probability"),
    [
        (0.0, 3.0, 0.5),
        (1.0, 1.0, 0.75),  # Cauchy: 1/2 + atan(1) / pi
        (-1.0, 1.0, 0.25),
        (2.0, 2.0, 0.5 + 2.0 / (2 * math.sqrt(6.0))),  # closed form for 2 degrees: 1/2 + t / (2 sqrt(2 + t²))
        (2.764, 10.0, 0.99),  # the usual table's 1 % point
        (-2.764, 10.0, 0.01),
        (1.812, 10.0, 0.95),
        (2.326, 1e6, 0.99),  # the normal distribution's
    ],
)
def test_student_t(module: Any, t: float, degrees: float, probability: float) -> None:
    assert module("welch").t_cdf(t, degrees) == pytest.approx(probability, abs=1e-4)


def test_welch_by_hand(module: Any) -> None:
    """Means 2 and 4, variances 1 and 4, n = 3 each: t = -2 / sqrt(5/3) = -1.549, df = (5/3)² / ((1/3)²/2 + (4/3)²/2) = 50/17."""
    ours, theirs = [1.0, 2.0, 3.0], [2.0, 4.0, 6.0]
    welch = module("welch")
    assert welch.p_below(ours, theirs) == pytest.approx(welch.t_cdf(-2 / math.sqrt(5 / 3), 50 / 17), abs=1e-12)
    assert welch.p_below(ours, theirs) + welch.p_below(theirs, ours) == pytest.approx(1.0)
    assert welch.p_below([5.0, 5.0], [5.0, 5.0]) == 1.0
    assert welch.p_below([4.0, 4.0], [5.0, 5.0]) == 0.0


def test_interval_by_hand(module: Any) -> None:
    """n = 5, variance 2.5: 2.776 * sqrt(2.5 / 5)."""
    assert module("welch").half_interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.776 * math.sqrt(0.5), abs=1e-3)


def test_curves_are_well_formed_and_smoothed_over_a_tenth(module: Any) -> None:
    curves = module("curves")
    curve = [(100 * index, float(index)) for index in range(1, 11)]  # one episode every 100 of 1000 steps
    line = curves.smoothed(curve, 1000)
    assert line[-1] == 10.0  # the last tenth, (900, 1000], holds the episode of return 10 alone
    assert math.isnan(line[0])  # nothing had ended by then
    svg = ElementTree.fromstring(curves.draw("a <b> & c", {"inchworm": [curve, curve]}, 1000))
    assert svg.tag.endswith("svg")


@pytest.mark.parametrize(("low", "high"), [(0.0, 500.0), (-1600.0, -120.0), (9.3, 9.4), (-5.0, 5.0)])
def test_ticks_cover_the_values(module: Any, low: float, high: float) -> None:
    ticks = module("curves").nice_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 2 <= len(ticks) <= 8


def test_verdicts(module: Any) -> None:
    learning = module("learning")
    good, bad = [{"score": 500.0 + i} for i in range(5)], [{"score": 100.0 + i} for i in range(5)]
    assert learning.verdict("pendulum", {"inchworm": good, "stable-baselines3": bad})[1] == "not below"
    assert learning.verdict("pendulum", {"inchworm": bad, "stable-baselines3": good})[1] == "below"
    assert learning.verdict("cartpole", {"inchworm": good})[1] == "5 of 5 seeds at 475 or more, worst 500.0"
    assert learning.verdict("cartpole", {"inchworm": [*good[:4], {"score": 474.9}]})[1].startswith("4 of 5")
