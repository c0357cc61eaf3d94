"""What every learner shares, apart from any backend."""

from __future__ import annotations

import numpy as np
import pytest

from inchworm.backends.learner import summary


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
