"""Student's t quantiles against published tables, and against the distribution's own definition."""

import itertools
import math

import numpy as np
import pytest

from inchworm.evaluate.stats import t_quantile_975

# The 97.5 % column of the usual tables, to all the digits they print.
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 10: 2.228, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000}


@pytest.mark.parametrize("degrees", TABLE)
def test_equals_the_printed_table(degrees: int) -> None:
    assert t_quantile_975(degrees) == pytest.approx(TABLE[degrees], abs=5.1e-4)


def test_one_and_two_degrees_have_closed_forms() -> None:
    # df 1 is Cauchy: tan(pi * (0.975 - 0.5)); df 2: 2 * (p - 0.5) * sqrt(2 / (4 p (1 - p))) with p = 0.975
    assert t_quantile_975(1) == pytest.approx(math.tan(math.pi * 0.475), rel=1e-12)
    assert t_quantile_975(2) == pytest.approx(2 * 0.475 * math.sqrt(2 / (4 * 0.975 * 0.025)), rel=1e-12)


@pytest.mark.parametrize("degrees", [3, 8, 37, 100, 101, 250])
def test_97_5_percent_of_the_density_lies_below(degrees: int) -> None:
    t = np.linspace(0.0, t_quantile_975(degrees), 20_001)
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    density = np.exp(log_scale - (degrees + 1) / 2 * np.log1p(t * t / degrees))
    assert 0.5 + np.trapezoid(density, t) == pytest.approx(0.975, abs=1e-8)


def test_the_series_for_many_degrees_meets_the_exact_sums_and_the_normal_limit() -> None:
    values = [t_quantile_975(degrees) for degrees in range(95, 106)]
    assert all(a > b for a, b in itertools.pairwise(values))
    assert values[5] - values[6] == pytest.approx((values[4] - values[5] + values[6] - values[7]) / 2, rel=1e-3)
    assert t_quantile_975(10**9) == pytest.approx(1.959964, abs=1e-6)


def test_no_degree_of_freedom_is_refused() -> None:
    with pytest.raises(ValueError, match="1 degree of freedom"):
        t_quantile_975(0)
