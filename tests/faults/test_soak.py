"""The soak's own arithmetic, and a soak of some seconds."""

from pathlib import Path

import pytest

from faults.everyday_runs import slope_of, soak_for
from faults.programme import Work


def test_a_slope_is_that_of_the_nearest_line() -> None:
    assert slope_of([0.0, 1.0, 2.0], [5.0, 7.0, 9.0]) == pytest.approx(2.0)
    assert slope_of([0.0, 1.0, 2.0], [0.0, 3.0, 0.0]) == pytest.approx(0.0)
    assert slope_of([1.0], [4.0]) == 0.0


@pytest.mark.slow
def test_a_soak_of_some_seconds(tmp_path: Path) -> None:
    outcome = soak_for(1.0, Work(1, tmp_path))
    assert outcome.is_fine, outcome.failures
    assert any("mean nothing yet" in note for note in outcome.notes)
