import json
import math

import numpy as np
import pytest

from inchworm.evaluate.stats import EvalStats


def make(returns: list[float], **fields: object) -> EvalStats:
    n = len(returns)
    return EvalStats(returns=returns, **{"lengths": [10] * n, "seeds": range(n), **fields})  # type: ignore[arg-type]


def test_summaries_of_four_episodes() -> None:
    # mean 2.5; squares 2.25 + 0.25 + 0.25 + 2.25 = 5, / 3 = 1.6667, root 1.29099; t(3) = 3.18245; half = 3.18245 * 1.29099 / 2 = 2.05426
    stats = make([1.0, 2.0, 3.0, 4.0], lengths=[2, 4, 6, 8])
    assert (stats.mean_return, stats.median_return, stats.min_return, stats.max_return) == (2.5, 2.5, 1.0, 4.0)
    assert stats.std_return == pytest.approx(1.290994, abs=1e-6)
    assert stats.interval95 == pytest.approx((2.5 - 2.05426, 2.5 + 2.05426), abs=1e-5)
    assert (stats.mean_episode_length, stats.episodes) == (5.0, 4)


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


def test_rates_are_none_where_the_environment_says_nothing() -> None:
    stats = make([1.0, 2.0])
    assert (stats.success_rate, stats.win_rate, stats.mean_hp_margin) == (None, None, None)


def test_plain_data_has_finite_floats_or_none() -> None:
    stats = make([1.0, 2.0], infos={"speed": [math.inf, 3.0]})
    data = stats.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["infos"] == {"speed": [None, 3.0]}
    assert data["returns"] == [1.0, 2.0]
    assert data["deterministic"] is True


def test_metrics_are_finite_floats_with_info_means() -> None:
    metrics = make([1.0, 3.0], infos={"speed": [2.0, 4.0], "lost": [math.nan, math.nan]}).metrics()
    assert metrics["mean_return"] == 2.0
    assert metrics["info/speed"] == 3.0
    assert metrics["episodes"] == 2.0
    assert metrics.keys().isdisjoint({"success_rate", "win_rate", "info/lost"})
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())


def test_arrays_are_copies_and_locked() -> None:
    returns = np.array([1.0, 2.0])
    stats = make(returns)  # type: ignore[arg-type]
    returns[0] = 9.0
    assert stats.mean_return == 1.5
    with pytest.raises(ValueError, match="read-only"):
        stats.returns[0] = 9.0


def test_str_is_one_line_with_the_interval() -> None:
    text = str(make([1.0, 2.0, 3.0, 4.0], deterministic=False))
    assert text.startswith("mean return 2.5 ± 2.054 (95 %, 4 sampled episodes), from 1 to 4")
    assert "\n" not in text


@pytest.mark.parametrize("fields", [{"lengths": [1]}, {"seeds": [1, 2, 3]}, {"infos": {"x": [1.0]}}])
def test_columns_of_different_length_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="as many entries"):
        make([1.0, 2.0], **fields)


def test_no_episode_is_refused() -> None:
    with pytest.raises(ValueError, match="1 episode or more"):
        make([])


def test_a_win_rate_has_its_interval_and_a_draw_is_half_a_win() -> None:
    # 7 wins, 2 draws, 1 loss: (7 + 1) / 10 = 0.8, so [0.490163, 0.943317] as 8 of 10 would have
    stats = make([0.0] * 10, infos={"win": [1.0] * 7 + [0.5] * 2 + [0.0]})
    assert stats.win_rate == 0.8
    assert stats.win_interval95 == pytest.approx((0.490163, 0.943317), abs=2e-6)
    assert stats.win_text == "win rate 0.80 [0.49, 0.94]"
    assert str(stats).endswith("mean length 10, win rate 0.80 [0.49, 0.94]")
    metrics = stats.metrics()
    assert (metrics["win_interval95_low"], metrics["win_interval95_high"]) == stats.win_interval95
    assert stats.to_dict()["win_interval95"] == list(stats.win_interval95 or ())


def test_episodes_that_say_nothing_of_winning_are_not_counted() -> None:
    # 1 of 2, though 4 were played: middle 0.5, half = 1.959964 / 2.920729 * sqrt(0.125 + 1.920729 / 8) = 0.405468
    stats = make([0.0] * 4, infos={"win": [1.0, math.nan, 0.0, math.nan]})
    assert stats.win_interval95 == pytest.approx((0.5 - 0.405468, 0.5 + 0.405468), abs=1e-5)


def test_no_win_rate_no_interval_and_success_says_its_own() -> None:
    silent = make([1.0, 2.0])
    assert silent.win_interval95 is None
    assert silent.win_text == ""
    assert silent.to_dict()["win_interval95"] is None
    success = make([1.0, 2.0], infos={"is_success": [1.0, 0.0]})
    assert success.win_interval95 is not None
    assert "win_interval95_low" not in success.metrics()
    assert "win rate" not in str(success)
    points = make([1.0, 2.0], infos={"win": [3.0, 0.0]})  # somebody's points: no share of anything
    assert points.win_interval95 is None
    assert points.win_text == "win rate 1.50"


def test_each_agents_return_is_kept_beside_the_teams() -> None:
    stats = make([3.0, 7.0], agent_returns=[[1.0, 2.0], [3.0, 4.0]])
    assert stats.to_dict()["agent_returns"] == [[1.0, 2.0], [3.0, 4.0]]
    assert stats.mean_return == 5.0
    alone = make([3.0, 7.0])
    assert alone.agent_returns.tolist() == [[3.0], [7.0]]
    with pytest.raises(ValueError, match="as many entries"):
        make([3.0, 7.0], agent_returns=[[1.0, 2.0]])
