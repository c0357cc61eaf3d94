"""The parts of an update that every backend shares."""

from __future__ import annotations

import math

import numpy as np
import pytest

from inchworm.backends.learner import BadNumberGuard, explained_variance, schedule_factor, summary
from inchworm.core.errors import BadNumberError


def test_means_are_over_the_steps_that_were_taken():
    table = {
        "approx_kl": np.array([0.1, np.nan, 0.0, 0.3]),
        "bad": np.array([0.0, 1.0, 0.0, 0.0]),
        "empty": np.array([0.0, 0.0, 1.0, 0.0]),
    }
    found = summary([table])  # steps 0 and 3: (0.1 + 0.3) / 2
    assert found == {"approx_kl": pytest.approx(0.2), "skipped_steps": 2.0}
    assert summary([table, {name: column[:1] for name, column in table.items()}])["approx_kl"] == pytest.approx(0.5 / 3)
    none = {"approx_kl": np.array([np.nan]), "bad": np.array([1.0]), "empty": np.array([0.0])}
    assert summary([none]) == {"approx_kl": 0.0, "skipped_steps": 1.0}


def test_explained_variance_by_hand():
    # returns 1, 2, 3, 4 (variance 5/3); values 1, 2, 3, 3: errors 0, 0, 0, 1 (variance 1/4): 1 - 0.25 / (5/3) = 0.85
    values, returns = np.array([[1.0, 2, 3, 3, 99]]), np.array([[1.0, 2, 3, 4, -99]])
    valid = np.array([[True, True, True, True, False]])
    assert explained_variance(returns, values, valid) == pytest.approx(0.85, abs=1e-12)
    assert explained_variance(returns, returns, valid) == 1.0
    assert explained_variance(np.ones((1, 5)), values, valid) == 0.0  # returns that do not vary
    assert explained_variance(returns, values, np.array([[True, False, False, False, False]])) == 0.0


def test_weights_out_of_range_stop_the_run() -> None:
    guard = BadNumberGuard(None)
    guard.check_weights({"w": np.ones(3, np.float32), "count": np.array(2**62)})
    with pytest.raises(BadNumberError, match="the weight w is not finite after this update"):
        guard.check_weights({"v": np.ones(1), "w": np.array([1.0, np.inf], np.float32)})


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_constant_stays(progress: float) -> None:
    assert schedule_factor("constant", progress) == 1.0


@pytest.mark.parametrize(("progress", "factor"), [(0.0, 1.0), (0.25, 0.75), (0.5, 0.5), (1.0, 0.0)])
def test_linear_goes_to_zero_in_a_straight_line(progress: float, factor: float) -> None:
    assert schedule_factor("linear", progress) == factor


@pytest.mark.parametrize(("progress", "factor"), [(0.0, 1.0), (1 / 3, 0.75), (0.5, 0.5), (2 / 3, 0.25), (1.0, 0.0)])
def test_cosine_goes_to_zero_in_half_a_wave(progress: float, factor: float) -> None:
    # ½ (1 + cos(π/3)) = ½ (1 + ½) = 0.75
    assert schedule_factor("cosine", progress) == pytest.approx(factor, abs=1e-15)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_progress_outside_the_run_is_its_nearer_end(kind: str) -> None:
    assert schedule_factor(kind, -0.5) == schedule_factor(kind, 0.0) == 1.0  # type: ignore[arg-type]
    assert schedule_factor(kind, 7.0) == schedule_factor(kind, 1.0)  # type: ignore[arg-type]
    assert not math.isnan(schedule_factor(kind, math.inf))  # type: ignore[arg-type]
