"""The parts of an update that every backend shares."""

from __future__ import annotations

import math

import numpy as np
import pytest

from inchworm.backends.learner import explained_variance, schedule_factor, summary


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


@pytest.mark.parametrize(
    ("kind", "progress", "factor"),
    [("constant", 0.3, 1.0), ("linear", 0.25, 0.75), ("cosine", 1 / 3, 0.75), ("cosine", 1.0, 0.0)]  # ½ (1 + cos(π/3)) = 0.75
    + [(kind, -0.5, 1.0) for kind in ("constant", "linear", "cosine")]  # progress outside of the run is its nearer end
    + [(kind, math.inf, 0.0) for kind in ("linear", "cosine")],
)
def test_schedules_by_hand(kind, progress, factor):
    assert schedule_factor(kind, progress) == pytest.approx(factor, abs=1e-15)
