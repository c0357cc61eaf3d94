"""Results of an evaluation: summaries by hand, intervals against published tables and closed forms."""

import itertools
import json
import math
import re
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats

from inchworm.evaluate.stats import (
    RESAMPLES,
    EvalStats,
    MatchStats,
    bootstrap_interval95,
    interquartile_mean,
    t_quantile_975,
    wilson_interval95,
)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 8, 37, 100, 101, 250])
def test_t_97_5_percent_of_the_density_lies_below(degrees: int) -> None:
    t = np.linspace(0.0, t_quantile_975(degrees), 20_001)
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    density = np.exp(log_scale - (degrees + 1) / 2 * np.log1p(t * t / degrees))
    assert 0.5 + np.trapezoid(density, t) == pytest.approx(0.975, abs=1e-8)


def test_the_t_series_for_many_degrees_meets_the_exact_sums_and_the_normal_limit() -> None:
    values = [t_quantile_975(degrees) for degrees in range(95, 106)]
    assert all(a > b for a, b in itertools.pairwise(values))
    assert values[5] - values[6] == pytest.approx((values[4] - values[5] + values[6] - values[7]) / 2, rel=1e-3)
    assert t_quantile_975(10**9) == pytest.approx(1.959964, abs=1e-6)


@pytest.mark.parametrize(
    ("rate", "count", "expected"),
    [
        # z² / n = 3.84146 / 10 = 0.384146; middle = (0.8 + 0.192073) / 1.384146 = 0.716740
        # half = 1.959964 / 1.384146 * sqrt(0.8 * 0.2 / 10 + 0.384146 / 40) = 1.416010 * sqrt(0.0256037) = 0.226577
        (0.8, 10, (0.490163, 0.943317)),
        (1.0, 20, (0.838875, 1.0)),  # 1 / (1 + z² / n) = 1 / 1.192073
        (0.0, 20, (0.0, 0.161125)),  # the mirror image: 0.192073 / 1.192073
        (0.5, 1_000_000, (0.49902, 0.50098)),  # the usual standard error: 1.96 * sqrt(0.25 / 1e6) = 0.00098
    ],
)
def test_wilson_intervals(rate: float, count: int, expected: tuple[float, float]) -> None:
    low, high = wilson_interval95(rate, count)
    assert (low, high) == pytest.approx(expected, abs=2e-6)
    assert 0.0 <= low <= high <= 1.0


@pytest.mark.parametrize(("rate", "count"), [(0.5, 0), (1.5, 3), (-0.1, 3), (float("nan"), 3)])
def test_an_invalid_rate_and_no_degree_of_freedom_are_rejected(rate: float, count: int) -> None:
    with pytest.raises(ValueError, match="a rate"):
        wilson_interval95(rate, count)
    with pytest.raises(ValueError, match="1 degree of freedom"):
        t_quantile_975(0)


def make(returns: list[float], **fields: object) -> EvalStats:
    n = len(returns)
    return EvalStats(returns=returns, **{"lengths": [10] * n, "seeds": range(n), **fields})  # type: ignore[arg-type]


def test_summaries_of_four_episodes() -> None:
    # mean 2.5; squares 2.25 + 0.25 + 0.25 + 2.25 = 5, / 3 = 1.6667, root 1.29099; t(3) = 3.18245; half = 3.18245 * 1.29099 / 2 = 2.05426
    returns = np.array([1.0, 2.0, 3.0, 4.0])
    stats = make(returns, lengths=[2, 4, 6, 8])  # type: ignore[arg-type]
    returns[0] = 9.0  # the stats hold a copy
    assert (stats.mean_return, stats.median_return, stats.min_return, stats.max_return) == (2.5, 2.5, 1.0, 4.0)
    assert stats.std_return == pytest.approx(1.290994, abs=1e-6)
    assert stats.interval95 == pytest.approx((2.5 - 2.05426, 2.5 + 2.05426), abs=1e-5)
    assert (stats.mean_episode_length, stats.episodes) == (5.0, 4)
    with pytest.raises(ValueError, match="read-only"):
        stats.returns[0] = 9.0


def test_one_episode_has_no_spread() -> None:
    stats = make([7.0])
    assert math.isnan(stats.std_return)
    assert all(math.isnan(bound) for bound in stats.interval95)
    assert stats.to_dict()["interval95"] == [None, None]
    assert "std_return" not in stats.metrics()
    assert "±" not in str(stats)
    assert "1 greedy episode)" in str(stats)


def test_success_and_win_rates_come_from_infos_and_skip_episodes_without_them() -> None:
    stats = make([1.0, 2.0, 3.0], infos={"is_success": [1.0, 0.0, math.nan], "hp_margin": [3.0, 4.0, 5.0]})
    assert (stats.success_rate, stats.win_rate, stats.mean_hp_margin) == (0.5, 0.5, 4.0)
    assert "success 50.0%" in str(stats)
    assert make([1.0, 2.0], infos={"success": [1.0, 1.0]}).success_rate == 1.0
    won = make([1.0, 2.0], infos={"win": [1.0, 1.0], "is_success": [0.0, 0.0]})
    assert (won.win_rate, won.success_rate) == (1.0, 0.0)


def test_plain_data_has_finite_floats_or_none() -> None:
    stats = make([1.0, 2.0], infos={"speed": [math.inf, 3.0]})
    data = stats.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["infos"] == {"speed": [None, 3.0]}
    assert data["returns"] == [1.0, 2.0]
    assert data["deterministic"] is True
    assert EvalStats.from_dict({"iteration": 3, **data}).to_dict() == data


def test_metrics_are_finite_floats_with_info_means() -> None:
    metrics = make([1.0, 3.0], infos={"speed": [2.0, 4.0], "lost": [math.nan, math.nan]}).metrics()
    assert metrics["mean_return"] == 2.0
    assert metrics["info/speed"] == 3.0
    assert metrics["episodes"] == 2.0
    assert metrics.keys().isdisjoint({"success_rate", "win_rate", "info/lost"})
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())


def test_str_is_one_line_with_the_interval() -> None:
    text = str(make([1.0, 2.0, 3.0, 4.0], deterministic=False))
    assert text.startswith("mean return 2.5 ± 2.054 (95 %, 4 sampled episodes), from 1 to 4")
    assert "\n" not in text
    assert repr(make([1.0, 2.0, 3.0, 4.0], deterministic=False)) == f"EvalStats({text})"  # no arrays, whatever their length


@pytest.mark.parametrize("fields", [{"lengths": [1]}, {"seeds": [1, 2, 3]}, {"infos": {"x": [1.0]}}, {"agent_returns": [[1.0, 2.0]]}])
def test_columns_of_different_length_are_rejected(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="arrays of equal length"):
        make([1.0, 2.0], **fields)
    with pytest.raises(ValueError, match="1 episode or more"):
        make([])


def test_a_win_rate_has_its_interval_and_a_draw_is_half_a_win() -> None:
    # 7 wins, 2 draws, 1 loss: (7 + 1) / 10 = 0.8, so [0.490163, 0.943317] as 8 of 10 would have
    stats = make([0.0] * 10, infos={"win": [1.0] * 7 + [0.5] * 2 + [0.0]})
    assert stats.win_rate == 0.8
    assert stats.win_interval95 == pytest.approx((0.490163, 0.943317), abs=2e-6)
    assert stats.win_text == "win rate 0.80 [0.49, 0.94]"
    assert str(stats).startswith("win rate 0.80 [0.49, 0.94], mean return ")
    metrics = stats.metrics()
    assert (metrics["win_interval95_low"], metrics["win_interval95_high"]) == stats.win_interval95
    assert stats.to_dict()["win_interval95"] == list(stats.win_interval95 or ())


def test_episodes_that_say_nothing_of_winning_are_not_counted() -> None:
    # 1 of 2, though 4 were played: middle 0.5, half = 1.959964 / 2.920729 * sqrt(0.125 + 1.920729 / 8) = 0.405468
    stats = make([0.0] * 4, infos={"win": [1.0, math.nan, 0.0, math.nan]})
    assert stats.win_interval95 == pytest.approx((0.5 - 0.405468, 0.5 + 0.405468), abs=1e-5)


def test_no_win_rate_no_interval_and_success_says_its_own() -> None:
    silent = make([1.0, 2.0])
    assert (silent.success_rate, silent.win_rate, silent.win_interval95, silent.mean_hp_margin) == (None, None, None, None)
    assert silent.win_text == ""
    assert silent.to_dict()["win_interval95"] is None
    success = make([1.0, 2.0], infos={"is_success": [1.0, 0.0]})
    assert success.win_interval95 is not None
    assert "win_interval95_low" not in success.metrics()
    assert "win rate" not in str(success)
    points = make([1.0, 2.0], infos={"win": [3.0, 0.0]})  # points, not a rate
    assert points.win_interval95 is None
    assert points.win_text == "win rate 1.50"


def match(wins: list[float], **fields: Any) -> MatchStats:
    ones = np.ones(len(wins))
    return MatchStats(returns=ones, lengths=ones * 12, seeds=ones, infos={"win": wins, "hp_margin": ones * 0.25}, **fields)  # type: ignore[dict-item]


def test_a_match_is_one_line() -> None:
    # 8 of 10 by 7 wins and 2 draws: [0.49, 0.94], as above
    stats = match([1.0] * 7 + [0.5, 0.5, 0.0])
    assert str(stats) == (
        "win rate 0.80 [0.49, 0.94] (7 won, 2 drawn, 1 lost of 10 greedy episodes), health margin 0.250, mean return 1, mean length 12"
    )
    assert repr(stats) == f"MatchStats({stats})"
    silent = MatchStats(returns=[1.0, 2.0], lengths=[1, 1], seeds=[1, 1])  # type: ignore[arg-type]
    assert str(silent).startswith("mean return 1.5")
    assert (silent.wins, silent.draws, silent.losses, silent.win_rate_on(0)) == (0, 0, 0, None)


def test_a_match_is_plain_data() -> None:
    stats = match([1.0, 0.5, 0.0, 1.0], players=("a", "b"), replay={"frames": []})
    data = stats.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert (data["players"], data["wins"], data["draws"], data["losses"], data["sides"]) == (["a", "b"], 2, 1, 1, [0, 1, 0, 1])
    assert "replay" not in data


def test_the_return_of_a_team_is_called_that() -> None:
    agents = np.array([[1.0, 3.0], [2.0, 4.0]])
    stats = EvalStats(returns=agents.sum(1), agent_returns=agents, lengths=[5, 5], seeds=[1, 2])
    assert (stats.agents, stats.mean_return, stats.mean_agent_return) == (2, 5.0, 2.5)
    assert re.match(r"mean team return 5 ± \S+, per agent 2\.5 \(95 %, 2 greedy episodes\), from 4 to 6", str(stats))
    data = stats.to_dict()
    assert (data["return_of"], data["agents"], data["mean_agent_return"]) == ("team", 2, 2.5)
    assert data["agent_returns"] == agents.tolist()
    alone = EvalStats(returns=[4.0, 6.0], lengths=[5, 5], seeds=[1, 2])
    assert str(alone).startswith("mean return 5 ± ")
    assert alone.to_dict()["return_of"] == "agent"
    assert alone.agent_returns.tolist() == [[4.0], [6.0]]


def test_the_difference_to_a_baseline_is_paired() -> None:
    # Differences 1, 2, 3: mean 2, standard deviation 1, so the interval is 2 ± 4.3027 / sqrt(3), far narrower than that of the returns.
    stats = EvalStats(
        returns=[101.0, 202.0, 303.0], lengths=[1, 1, 1], seeds=[1, 2, 3], baseline="random", baseline_returns=[100.0, 200.0, 300.0]
    )
    assert stats.difference == 2.0
    half = 4.302652729911275 / math.sqrt(3)
    assert stats.difference_interval95 == pytest.approx((2.0 - half, 2.0 + half))
    assert "difference to random on the same seeds +2 [-0.48414, 4.4841]" in str(stats)
    assert stats.metrics()["difference"] == stats.to_dict()["difference"] == 2.0
    assert stats.metrics()["difference_interval95_low"] == stats.to_dict()["difference_interval95"][0] == pytest.approx(2.0 - half)
    with pytest.raises(ValueError, match="arrays of equal length"):
        EvalStats(returns=[1.0, 2.0], lengths=[1, 1], seeds=[1, 2], baseline="random", baseline_returns=[1.0])
    plain = EvalStats(returns=[1.0], lengths=[1], seeds=[1])
    assert plain.difference is plain.difference_interval95 is plain.to_dict()["difference"] is None


def test_the_interquartile_mean_drops_a_quarter_at_each_end() -> None:
    assert interquartile_mean([-1000.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 1000.0]) == 2.5  # of 1, 2, 3, 4
    assert interquartile_mean([5.0, 1.0, 9.0]) == 5.0  # a quarter of three is none
    with pytest.raises(ValueError, match="1 value or more"):
        interquartile_mean([])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 16, 33])
def test_interquartile_mean_and_its_interval_equal_those_of_scipy(count: int) -> None:
    values = np.random.default_rng(count).normal(100.0, 30.0, count)
    assert interquartile_mean(values) == pytest.approx(scipy_stats.trim_mean(values, 0.25), rel=1e-12)
    low, high = bootstrap_interval95(values)
    if count == 1:
        assert math.isnan(low)
        assert math.isnan(high)
        return
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, count))
    expected = np.quantile(scipy_stats.trim_mean(drawn, 0.25, axis=1), (0.025, 0.975))
    assert (low, high) == pytest.approx(tuple(expected), rel=1e-12)
    assert low <= interquartile_mean(values) <= high


def test_the_bootstrap_interval_is_that_of_scipy_up_to_its_noise_and_repeats() -> None:
    values = np.random.default_rng(5).normal(0.0, 1.0, 20)
    found = scipy_stats.bootstrap(
        (values,), lambda drawn, axis: scipy_stats.trim_mean(drawn, 0.25, axis=axis), method="percentile", n_resamples=20_000, rng=1
    ).confidence_interval
    assert bootstrap_interval95(values) == pytest.approx((found.low, found.high), abs=0.03)
    assert bootstrap_interval95(values) == bootstrap_interval95(list(values))
    assert bootstrap_interval95([3.0] * 5) == (3.0, 3.0)
    low, high = bootstrap_interval95([0.0] * 10 + [1.0] * 10)
    assert 0.0 <= low < 0.5 < high <= 1.0
