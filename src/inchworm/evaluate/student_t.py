"""How wide a 95 % interval for a mean is, from Student's t distribution. Serves the evaluation's statistics."""

from __future__ import annotations

import math
from functools import lru_cache

_Z = 1.959963984540054
"""The normal distribution's 97.5 % point, t's limit for many samples."""

_EXACT_UP_TO = 100
"""Degrees of freedom from which on the series in 1/df is exact to nine digits."""


@lru_cache(maxsize=256)
def t_quantile_975(degrees: int) -> float:
    """The point below which 97.5 % of Student's t with `degrees` degrees of freedom lies: half the width of a 95 % interval."""
    if degrees < 1:
        raise ValueError(f"Student's t needs 1 degree of freedom or more, not {degrees}")
    if degrees > _EXACT_UP_TO:
        return _large_degrees(degrees)
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # bisection in the angle, whose range is finite; 60 halvings leave less than a float's spacing
        middle = (low + high) / 2
        low, high = (middle, high) if _central_probability(middle, degrees) < 0.95 else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _central_probability(angle: float, degrees: int) -> float:
    """P(|t| < sqrt(degrees) tan(angle)), the finite sums of Abramowitz and Stegun 26.7.3 (odd) and 26.7.4 (even)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(2 + odd, degrees + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


def _large_degrees(degrees: int) -> float:
    """The expansion around the normal point, Abramowitz and Stegun 26.7.5."""
    z = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / degrees ** (power + 1) for power, term in enumerate(terms))
