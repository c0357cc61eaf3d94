"""Serves step 9 of 9: how a coefficient moves over a run. Pure functions of progress, so that a resume needs no state for them."""

from __future__ import annotations

import math

from inchworm.config import Schedule


def schedule_factor(kind: Schedule, progress: float) -> float:
    """What a coefficient is multiplied with at `progress` from 0 (the run's start) to 1 (its planned end)."""
    progress = min(max(progress, 0.0), 1.0)
    if kind == "linear":
        return 1.0 - progress
    if kind == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0
