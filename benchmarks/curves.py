"""Learning curves: the figures of a run, and curves as plain SVG, the mean over seeds with the range from the worst to the best seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

COLOURS = ("#1b7f3b", "#9a5b00", "#2f6fb5", "#b0307a", "#7a6ad8", "#808080")
WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 34, 40
POINTS = 60

Curve = Sequence[tuple[int, float]]

COMPARED = ("area under the curve", "last eighth")
SHOWN = (*COMPARED, "greedy score", "sampled score")
"""The figures of a run. The first two are tested."""


def smoothed(curve: Curve, total: int) -> np.ndarray:
    """[POINTS] mean return of the episodes that ended in the last tenth of the run before each point; NaN where none did."""
    steps = np.array([point[0] for point in curve], float)
    returns = np.array([point[1] for point in curve], float)
    ends = np.linspace(0, total, POINTS + 1)[1:]
    windows = [returns[(steps > end - total / 10) & (steps <= end)] for end in ends]
    return np.array([window.mean() if len(window) else math.nan for window in windows])


def figures(run: dict[str, Any]) -> dict[str, float]:
    """The figures of a run, by name; what an older result lacks is missing."""
    curve, total = run["curve"], run["steps"]
    line = smoothed(curve, total)
    known = np.flatnonzero(np.isfinite(line))
    filled = line[known[np.maximum(0, np.searchsorted(known, np.arange(len(line)), "right") - 1)]]  # the last value known, else the first
    late = [episode_return for step, episode_return in curve if step > total * 7 / 8]
    found = {"area under the curve": float(filled.mean()), "last eighth": float(np.mean(late)), "greedy score": float(run["score"])}
    return found | ({"sampled score": float(run["sampled_score"])} if "sampled_score" in run else {})


def draw(title: str, lines: Mapping[str, np.ndarray], total: int) -> str:
    """An SVG document of smoothed curves [seeds, POINTS] by name; its colours are readable on light and on dark pages."""
    values = np.concatenate([line[np.isfinite(line)] for line in lines.values()])
    ticks = nice_ticks(float(values.min()), float(values.max()))
    low, high = min(ticks[0], float(values.min())), max(ticks[-1], float(values.max()))
    x = np.linspace(LEFT, WIDTH - RIGHT, POINTS + 1)[1:]

    def y(value: float | np.ndarray) -> np.ndarray:
        return np.asarray(HEIGHT - BOTTOM - (value - low) / (high - low or 1.0) * (HEIGHT - TOP - BOTTOM))

    parts = [_frame(title, ticks, y, total)]
    for index, (side, line) in enumerate(lines.items()):
        known = np.isfinite(line).any(axis=0)
        shown = line[:, known]
        worst, best, mean = np.nanmin(shown, 0), np.nanmax(shown, 0), np.nanmean(shown, 0)
        colour = COLOURS[index % len(COLOURS)]
        band = _points(np.concatenate([x[known], x[known][::-1]]), np.concatenate([y(best), y(worst)[::-1]]))
        parts.append(f'<polygon points="{band}" fill="{colour}" fill-opacity="0.18"/>')
        parts.append(f'<polyline points="{_points(x[known], y(mean))}" fill="none" stroke="{colour}" stroke-width="2"/>')
        label = f"{side} ({len(line)} seed{'s' if len(line) > 1 else ''})"
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - BOTTOM - 10 - 16 * index}" text-anchor="end" fill="{colour}">{label}</text>')
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style}>\n' + "\n".join(parts) + "\n</svg>\n"


def nice_ticks(low: float, high: float) -> list[float]:
    """Some round numbers from below the lowest value to above the highest."""
    span = max(high - low, 1e-9)
    size = 10.0 ** math.floor(math.log10(span / 4))
    step = next(size * factor for factor in (1, 2, 5, 10) if span / (size * factor) <= 5)
    first = math.floor(low / step)
    return [step * index for index in range(first, math.ceil(high / step) + 1)]


def _frame(title: str, ticks: Sequence[float], y: object, total: int) -> str:
    grey = 'stroke="#888" stroke-opacity="0.35"'
    parts = [f'<text x="{LEFT}" y="18" font-size="14" fill="#808080">{escape(title)}</text>']
    for tick in ticks:
        height = float(y(tick))  # type: ignore[operator]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}" {grey}/>')
        parts.append(f'<text x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end" fill="#808080">{tick:g}</text>')
    for tick in (tick for tick in nice_ticks(0, total) if tick <= total):
        place = LEFT + tick / total * (WIDTH - LEFT - RIGHT)
        parts.append(f'<text x="{place:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#808080">{tick:,.0f}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle" fill="#808080">env steps</text>')
    return "\n".join(parts)


def _points(x: np.ndarray, y: np.ndarray) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y))
