"""Statistics of a comparison without SciPy: Student's t for any degrees of freedom, Welch's test, and 95 % intervals of a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance

from inchworm.evaluate.stats import t_quantile_975


def t_cdf(t: float, degrees: float) -> float:
    """P(T <= t) for Student's t, by the regularised incomplete beta function: P(|T| > t) = I_x(df/2, 1/2), x = df / (df + t²)."""
    tail = 0.5 * incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))
    return tail if t < 0 else 1.0 - tail


def incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b) by its continued fraction (Abramowitz and Stegun 26.5.8), on the side where that converges fast."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a
    return 1.0 - front * _fraction(b, a, 1 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction by Lentz's method."""
    tiny = 1e-300
    c, d = 1.0, 1.0 / max(abs(1 - (a + b) * x / (a + 1)), tiny) * math.copysign(1, 1 - (a + b) * x / (a + 1))
    result = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / (1.0 + term * d or tiny)
            c = 1.0 + term / c or tiny
            result *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return result


def p_below(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Welch's one-sided p value for "ours is below theirs": small means that ours is worse beyond chance. Equal constants give 1."""
    spread = variance(ours) / len(ours) + variance(theirs) / len(theirs)
    difference = fmean(ours) - fmean(theirs)
    if spread == 0.0:
        return 0.0 if difference < 0 else 1.0
    parts = [(variance(side) / len(side)) ** 2 / (len(side) - 1) for side in (ours, theirs)]
    return t_cdf(difference / math.sqrt(spread), spread**2 / sum(parts))


def half_interval(samples: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean; NaN for one sample."""
    if len(samples) < 2:
        return math.nan
    return t_quantile_975(len(samples) - 1) * math.sqrt(variance(samples) / len(samples))
