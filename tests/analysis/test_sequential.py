"""The sequential test: its bounds, its interval, how often it errs and how often it finds what is there."""

import math

import numpy as np
import pytest
from scipy.stats import t

from inchworm.analysis.compare import FIRST_LOOK, bounds, look


def test_one_look_is_the_t_test() -> None:
    """With as many pairs as the first look, all error is spent there: the bound is Student's quantile."""
    found = bounds(FIRST_LOOK, 0.05)
    assert found[:3] == (math.inf,) * 3
    assert found[3] == pytest.approx(t.ppf(0.975, 2), rel=0.03)


def test_early_bounds_are_far_and_the_last_is_near_the_t_test() -> None:
    found = bounds(8, 0.05)[3:]
    assert list(found) == sorted(found, reverse=True)
    assert t.ppf(0.975, 7) < found[-1] < 1.25 * t.ppf(0.975, 7)
    assert len(bounds(50, 0.025)) == 51
    assert not math.isfinite(bounds(50, 0.025)[3]), "too little may be spent by then"


def test_the_interval_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3)."""
    answer = look(np.array([1.0, 2.0, 3.0]), 8, 0.05)
    half = bounds(8, 0.05)[3] / math.sqrt(3)
    assert (answer.pairs, answer.mean, answer.low, answer.high) == (3, 2.0, pytest.approx(2 - half), pytest.approx(2 + half))
    assert not answer.differs
    assert look(np.array([1.0, 1.01, 0.99, 9.0]), 8, 0.05).pairs == 3, "answered before the fourth"


def test_nothing_is_claimed_of_equal_or_too_few_pairs() -> None:
    assert not look(np.zeros(8), 8, 0.05).differs
    assert math.isnan(look(np.zeros(0), 8, 0.05).mean)
    assert look(np.ones(2), 8, 0.05).high == math.inf
    assert not look(np.ones(5), 8, 0.05).differs
    assert look(np.ones(7), 8, 0.05).differs, "1/64 is below 5 % of (7/8)²"


@pytest.mark.parametrize("kind", ["normal", "heavy", "saturated", "won or lost"])
def test_under_no_difference_one_is_claimed_in_at_most_five_percent(kind: str) -> None:
    """2,000 comparisons of 8 pairs and two measures at 2.5 % each, as a comparison makes them: at most 100 claims."""
    rng = np.random.default_rng(1)
    claims = 0
    for _ in range(2_000):
        scores = 0.7 * rng.standard_normal((2, 1, 8)) + 0.7 * rng.standard_normal((2, 2, 8))  # [setting, measure, pair]
        if kind == "heavy":
            scores = scores**3
        if kind == "saturated":
            scores = np.minimum(scores, 0.3)
        if kind == "won or lost":
            scores = np.sign(scores)
        claims += any(look(measure, 8, 0.025).differs for measure in scores[1] - scores[0])
    assert claims <= 100


def test_a_large_difference_is_found_and_early() -> None:
    rng = np.random.default_rng(2)
    answers = [look(2.0 + rng.standard_normal(8), 8, 0.025) for _ in range(300)]
    assert np.mean([answer.differs for answer in answers]) > 0.95
    assert np.mean([answer.pairs for answer in answers]) < 6.5


def test_the_interval_of_the_stop_covers_the_truth() -> None:
    """Of 1,000 comparisons of a true difference of 1, at most 5 % + 3 standard errors, 50 + 21, end with an interval without it."""
    rng = np.random.default_rng(3)
    answers = [look(1.0 + rng.standard_normal(8), 8, 0.05) for _ in range(1_000)]
    assert sum(not answer.low <= 1.0 <= answer.high for answer in answers) <= 71
