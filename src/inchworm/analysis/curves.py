"""Series of metrics: long ones made short, and those of several seeds as an interquartile mean with a bootstrap interval."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inchworm.analysis.runs import RunRecord
from inchworm.run.directory import FREE_FIELDS, config_changes

MOST_POINTS = 400
"""Points of a curve on a page; a longer series keeps the lowest and the highest of each of half as many sections."""
RESAMPLES = 2_000
SEED_FIELDS = FREE_FIELDS | {"run.seed"}
"""Fields in which two runs of one group may differ."""


@dataclass(frozen=True)
class Line:
    """A curve over env steps: x and y [n], ascending in x, and a band from `low` to `high` where there is one."""

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    colour: int = 0
    style: str = "line"
    """`line`, `dots` (with a line), `faint` or `dashed`."""


@dataclass
class Group:
    """Runs that differ in nothing but the seed."""

    label: str
    runs: list[RunRecord] = field(default_factory=list)


def shorten(line: Line, most: int = MOST_POINTS) -> Line:
    """Return a line of at most `most` points that shows the same extremes."""
    count = len(line.x)
    if count <= most:
        return line
    edges = np.linspace(0, count, most // 2 + 1).astype(int)
    kept: set[int] = {0, count - 1}
    for begin, end in itertools.pairwise(edges.tolist()):
        kept |= {begin + int(line.y[begin:end].argmin()), begin + int(line.y[begin:end].argmax())}
    rows = np.array(sorted(kept))
    low, high = (None if band is None else band[rows] for band in (line.low, line.high))
    return Line(line.name, line.x[rows], line.y[rows], low, high, line.colour, line.style)


def metric_line(run: RunRecord, name: str, *, timing: bool = False, **options: Any) -> Line | None:
    """A metric of a run; None if it has none. Rows of one number of env steps are one point, the last."""
    x, y = run.series(name, timing=timing)
    if not len(x):
        return None
    last = np.append(x[1:] > x[:-1], True) & (x >= np.maximum.accumulate(x))
    return Line(options.pop("label", name), x[last], y[last], **options)


def evaluation_line(run: RunRecord, **options: Any) -> Line | None:
    """The mean return of the evaluations, with its 95 % interval."""
    rows = {row["env_steps"]: row for row in run.evaluations}
    if not rows:
        return None
    mean, ends = "evaluation/mean_return", ("evaluation/interval95_low", "evaluation/interval95_high")
    table = np.array([(step, row[mean], *(row.get(end, row[mean]) for end in ends)) for step, row in sorted(rows.items())])  # [n, 4]
    return Line(options.pop("label", "evaluation"), *table.T, **options)


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """Sort runs into groups whose configs differ only in the seed; a group is named by its environment and what differs from the first."""
    groups: list[Group] = []
    for run in runs:
        home = next((group for group in groups if not _differing(group.runs[0], run)), None)
        if home is None:
            changes = _differing(groups[0].runs[0], run) if groups else {}
            new = [f"{name}={text.rpartition(' → ')[2]}" for name, text in changes.items() if name != "env.id"]
            home = Group(", ".join([run.config.env.id, *new])[:120])
            groups.append(home)
        home.runs.append(run)
    return groups


def _differing(one: RunRecord, other: RunRecord) -> dict[str, str]:
    return {name: text for name, text in config_changes(one.config, other.config).items() if name not in SEED_FIELDS}


def interquartile_mean(samples: np.ndarray) -> np.ndarray:
    """The mean of the middle half along the first axis: as robust as a median, with less variance (Agarwal et al. 2021)."""
    cut = len(samples) // 4
    return np.asarray(np.sort(samples, axis=0)[cut : len(samples) - cut].mean(axis=0))


def bootstrap_interval(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 95 % percentile interval of the interquartile mean over resampled seeds [n, …]; always the same for the same samples."""
    drawn = np.random.default_rng(0).integers(len(samples), size=(RESAMPLES, len(samples)))
    means = np.stack([interquartile_mean(samples[rows]) for rows in drawn])
    low, high = np.quantile(means, (0.025, 0.975), axis=0)
    return low, high


def seeds_line(group: Group, name: str, **options: Any) -> Line | None:
    """The interquartile mean of a metric over the seeds of a group, with its bootstrap interval, where all of them have values."""
    lines = [line for run in group.runs if (line := metric_line(run, name)) is not None]
    if len(lines) < 2:
        return None
    begin, end = max(line.x[0] for line in lines), min(line.x[-1] for line in lines)
    steps = np.unique(np.concatenate([line.x for line in lines]))
    steps = steps[(steps >= begin) & (steps <= end)]
    if len(steps) > MOST_POINTS // 2:
        steps = np.linspace(begin, end, MOST_POINTS // 2)
    if not len(steps):
        return None
    table = np.stack([np.interp(steps, line.x, line.y) for line in lines])  # [seeds, n]
    return Line(options.pop("label", group.label), steps, interquartile_mean(table), *bootstrap_interval(table), **options)


def final_scores(group: Group) -> np.ndarray:
    """The last score of each run of a group."""
    return np.array([run.score for run in group.runs if run.score is not None], np.float64)
