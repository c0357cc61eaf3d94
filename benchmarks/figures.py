"""The arithmetic and the words of the performance page: medians, ratios within repeats, geometric means, targets met or missed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

Run = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A figure and the bound it is held against."""

    what: str
    value: float | None
    bound: float
    at_least: bool = True
    unit: str = "×"

    @property
    def verdict(self) -> str:
        """met, missed, or not measured."""
        if self.value is None or math.isnan(self.value):
            return "not measured"
        return "met" if (self.value >= self.bound if self.at_least else self.value <= self.bound) else "**missed**"

    def row(self) -> str:
        """A line of a Markdown table."""
        bound = f"{'at least' if self.at_least else 'at most'} {_number(self.bound)} {self.unit}"
        measured = "–" if self.value is None or math.isnan(self.value) else f"{_number(self.value, 4)} {self.unit}"
        return f"| {self.what} | {measured} | {bound} | {self.verdict} |"


@dataclass(frozen=True)
class Section:
    """A part of the page: its text and the targets that it measured."""

    title: str
    lines: list[str]
    targets: list[Target] = field(default_factory=list)


def speed(run: Run) -> float:
    """Env steps per second of training."""
    return float(run["steps"] / run["seconds"])


def ratios(ours: Sequence[Run], theirs: Sequence[Run]) -> list[float]:
    """How many times as fast, repeat by repeat: what slows the machine for a while slows both."""
    return [speed(a) / speed(b) for a, b in zip(ours, theirs, strict=True)]


def geometric_mean(values: Iterable[float]) -> float:
    """The mean of ratios: twice as fast and half as fast make 1."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan


def compile_seconds(run: Run) -> float | None:
    """What the warm-up took beyond the time of as many steps afterwards."""
    if not run.get("warmup_steps"):
        return None
    return max(0.0, float(run["warmup_seconds"] - run["warmup_steps"] * run["seconds"] / run["steps"]))


def median_range(values: Sequence[float], form: str) -> str:
    """`5.0 (4.0 to 6.0)`; a dash where there is nothing."""
    if not values:
        return "–"
    spread = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{median(values):{form}}{spread}"


def known_median(values: Iterable[float | None]) -> float | None:
    """The median of those that are known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, with an empty line after it."""
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *(f"| {' | '.join(row)} |" for row in rows), ""]


def or_dash(value: float | None, form: str) -> str:
    """A figure, or a dash where it is not known."""
    return "–" if value is None else f"{value:{form}}"


def _number(value: float, digits: int = 3) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
