"""Win rates and the draw by them, with the arithmetic written out."""

import numpy as np
import pytest

from inchworm.selfplay.pool import Score, draw_index, pfsp_weights


def test_a_win_rate_begins_at_one_half_and_is_smoothed():
    score = Score()
    assert score.win_rate == 0.5
    score.add(1.0)
    assert score.win_rate == pytest.approx(2 / 3)  # (1 + 1) / (1 + 2)
    score.add(0.5)
    # the first counts 0.99 now: (0.99 + 0.5 + 1) / (0.99 + 1 + 2)
    assert score.win_rate == pytest.approx(2.49 / 3.99)


def test_old_games_are_forgotten():
    score = Score()
    for _ in range(2000):
        score.add(0.0)
    for _ in range(100):
        score.add(1.0)
    # 100 games of weight (1 - 0.99^100) / 0.01 = 63.4 of 100
    assert score.games == pytest.approx(100, abs=1e-3)
    assert score.wins == pytest.approx((1 - 0.99**100) / 0.01)


def test_weights_are_what_is_still_lost_to_the_power():
    # (0.5, 0.25, 0) squared is (0.25, 0.0625, 0), whose sum is 0.3125
    assert pfsp_weights([0.5, 0.75, 1.0], 2.0) == pytest.approx([0.8, 0.2, 0.0])
    assert pfsp_weights([0.5, 0.75, 1.0], 1.0) == pytest.approx([2 / 3, 1 / 3, 0.0])
    assert pfsp_weights([0.5, 0.9], 0.0) == pytest.approx([0.5, 0.5])
    assert pfsp_weights([1.0, 1.0, 1.0, 1.0], 2.0) == pytest.approx([0.25] * 4)


def test_the_draw_has_these_probabilities():
    rng, drawn = np.random.default_rng(0), np.zeros(3)
    for _ in range(4000):
        drawn[draw_index(np.array([0.7, 0.0, 0.3]), rng)] += 1
    # 2800 expected, standard deviation sqrt(4000 * 0.7 * 0.3) = 29
    assert drawn[1] == 0
    assert abs(drawn[0] - 2800) < 5 * 29
    assert draw_index(np.array([0.5, 0.5 - 1e-12]), _Top()) == 1  # rounding never leads past the end


class _Top:
    def random(self):
        return 1.0 - 1e-16
