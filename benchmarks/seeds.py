"""Statistics over seeds: intervals of means, Welch's test, and Holm's correction for several tests at once.

Interquartile means and their bootstrap intervals are in `inchworm.evaluate.stats`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats


def half_interval(samples: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean (Student's t); NaN for one sample."""
    if len(samples) < 2:
        return math.nan
    return float(stats.t.ppf(0.975, len(samples) - 1) * stats.sem(samples))


def p_differs(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Welch's two-sided p value of equal means; two equal constants give 1, two different ones 0."""
    if np.ptp(ours) == 0 and np.ptp(theirs) == 0:
        return float(ours[0] == theirs[0])
    return float(stats.ttest_ind(ours, theirs, equal_var=False).pvalue)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """The p values corrected for the number of tests (Holm 1979), by name: the k-th smallest of m times m - k + 1, never decreasing."""
    corrected: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, p_values[name] * (len(p_values) - rank)))
        corrected[name] = largest
    return corrected
