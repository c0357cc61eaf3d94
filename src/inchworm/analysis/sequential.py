"""A paired test that may stop after any pair: whether the mean of differences is 0, with an interval that holds whenever one stops.

Looking at a t-test after every pair and stopping at the first p below 5 % would find a difference where there is none in far more than 5 %
of all cases. Here an error-spending function divides the 5 % over the looks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

FIRST_LOOK = 3
"""Pairs before the first look: with fewer, no t-statistic is convincing."""
POWER = 2.0
"""After n of N pairs, the share (n/N)^POWER of the error has been spent."""
PATHS = 200_000
"""Simulated sequences of differences that the bounds are computed from."""
LEAST_PATHS = 20
"""Fewer sequences beyond a bound would not determine it: their error is spent later."""


@lru_cache(maxsize=16)
def bounds(most: int, level: float) -> tuple[float, ...]:
    """The bound of |t| after each number of pairs, from 0 to `most`; infinite where no claim is made.

    Normal differences of mean 0 and any variance exceed the bounds at any of the looks with probability `level`. The error is spent as in
    Lan & DeMets 1983, "Discrete sequential boundaries for clinical trials", with the power family of Kim & DeMets 1987, "Design and
    analysis of group sequential tests based on the type I error spending rate function". Their integrals assume a known variance; with few
    pairs that is far off, so the bounds are quantiles of simulated t-statistics, always the same.
    """
    rng, found = np.random.default_rng(0), [math.inf] * (most + 1)
    total, squares = np.zeros(PATHS), np.zeros(PATHS)
    going, crossed = np.ones(PATHS, np.bool_), 0
    for count in range(1, most + 1):
        drawn = rng.standard_normal(PATHS)
        total += drawn
        squares += drawn * drawn
        if count < FIRST_LOOK:
            continue
        allowed = int(level * (count / most) ** POWER * PATHS) - crossed
        if allowed < LEAST_PATHS:
            continue
        statistics = np.abs(total) / np.sqrt((squares - total * total / count) / (count - 1) * count)
        statistics[~going] = 0.0
        found[count] = float(-np.partition(-statistics, allowed - 1)[allowed - 1])
        going &= statistics < found[count]
        crossed += allowed
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known of the mean difference after some pairs."""

    pairs: int
    """Pairs that were looked at, up to the first look that showed a difference."""
    mean: float
    """NaN without pairs."""
    low: float
    high: float
    """The interval of the mean, at the confidence 1 - level at all looks together; infinite as long as no claim would be made."""
    differs: bool
    """Whether a difference is shown."""


def look(differences: np.ndarray, most: int, level: float) -> Answer:
    """Look at differences [n] in order, of up to `most` that are planned, and stop at the first look that shows a mean other than 0.

    The interval is the repeated confidence interval of Jennison & Turnbull 1989, "Interim analyses: the repeated confidence interval
    approach": the means that the bound would not reject. Differences without any spread, as of scores that are won or lost, have no
    t-statistic: they are shown when so many of one sign are as unlikely as what may have been spent by then, 2^(1 - n).
    """
    limits, answer = bounds(most, level), Answer(0, math.nan, -math.inf, math.inf, differs=False)
    for count in range(1, min(len(differences), most) + 1):
        seen = differences[:count]
        mean, half = float(seen.mean()), math.inf
        spread = float(seen.std(ddof=1)) if count > 1 else 0.0
        if spread > 0 or 2.0 ** (1 - count) <= level * (count / most) ** POWER:
            half = limits[count] * spread / math.sqrt(count) if spread > 0 else 0.0
        answer = Answer(count, mean, mean - half, mean + half, differs=abs(mean) > half)
        if answer.differs:
            break
    return answer
