import math

import pytest

from inchworm.backends.learner import schedule_factor


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
