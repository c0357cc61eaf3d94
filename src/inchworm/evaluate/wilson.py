"""How wide a 95 % interval for a win rate is, by Wilson's score. Serves the evaluation's statistics."""

from __future__ import annotations

import math

_Z = 1.959963984540054
"""The normal distribution's 97.5 % point."""


def wilson_interval95(rate: float, count: int) -> tuple[float, float]:
    """Where the true rate lies with 95 % confidence, if `count` independent games had the mean score `rate` (Wilson 1927).

    Unlike rate ± 2 standard errors it stays within 0 and 1 and says something after 20 wins of 20. A draw that scores 0.5 enters as half
    a win: scores between 0 and 1 spread at most as much as wins and losses with the same mean, so with draws it is rather too wide.
    """
    if count < 1:
        raise ValueError(f"a rate needs 1 game or more, not {count}")
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"a rate is from 0 to 1, not {rate}")
    share = _Z * _Z / count
    middle = (rate + share / 2) / (1 + share)
    half = _Z / (1 + share) * math.sqrt(rate * (1 - rate) / count + share / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)
