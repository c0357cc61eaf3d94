import pytest

from inchworm.evaluate.stats import wilson_interval95


def test_eight_wins_of_ten() -> None:
    # z² / n = 3.84146 / 10 = 0.384146; middle = (0.8 + 0.192073) / 1.384146 = 0.716740
    # half = 1.959964 / 1.384146 * sqrt(0.8 * 0.2 / 10 + 0.384146 / 40) = 1.416010 * sqrt(0.0256037) = 0.226577
    assert wilson_interval95(0.8, 10) == pytest.approx((0.490163, 0.943317), abs=2e-6)


def test_all_of_twenty_still_says_something() -> None:
    # with p = 1: middle + half = 1, middle - half = 1 / (1 + z² / n) = 1 / 1.192073 = 0.838875
    assert wilson_interval95(1.0, 20) == pytest.approx((0.838875, 1.0), abs=1e-6)
    # and the mirror image with none: z² / n / (1 + z² / n) = 0.192073 / 1.192073
    assert wilson_interval95(0.0, 20) == pytest.approx((0.0, 0.161125), abs=1e-6)
    assert wilson_interval95(1.0, 20)[1] <= 1.0
    assert wilson_interval95(0.0, 20)[0] >= 0.0


def test_many_games_are_the_usual_standard_error() -> None:
    # 0.5 ± 1.96 * sqrt(0.25 / 1e6) = 0.5 ± 0.00098
    assert wilson_interval95(0.5, 1_000_000) == pytest.approx((0.49902, 0.50098), abs=1e-7)


@pytest.mark.parametrize(("rate", "count"), [(0.5, 0), (1.5, 3), (-0.1, 3), (float("nan"), 3)])
def test_what_is_no_rate_is_refused(rate: float, count: int) -> None:
    with pytest.raises(ValueError, match="a rate"):
        wilson_interval95(rate, count)
