"""The ratings of a run as a self-contained HTML page: one SVG and one table."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from inchworm.selfplay.ratings import RatingBook

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 860.0, 420.0, 60.0, 180.0, 30.0, 45.0
_POLICY, _FIXED = "#3b76c4", "#c4663b"
_GAP = 15.0
"""Smallest distance between the names next to the curve."""
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #8884; }
"""


class _Scale:
    """Coordinates of env steps and ratings."""

    def __init__(self, book: RatingBook) -> None:
        bounds = [bound for entry in book.history for bound in entry.rating.interval95]
        levels = [*bounds, *(rating.mu for rating in book.anchors.values())]
        self.low, self.high = min(levels) - 1.0, max(levels) + 1.0
        self.last = max(1, *(entry.env_steps for entry in book.history))

    def x(self, env_steps: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * env_steps / self.last

    def y(self, level: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (self.high - level) / (self.high - self.low)


def ratings_page(book: RatingBook) -> str:
    """Return the page: rating ± 2 sigma over env steps, the fixed players as lines, and a table of the numbers."""
    names = list(book.anchors)
    titles = ("iteration", "env steps", "rating", "± 2 sigma", *(f"win rate vs {_shorten(name)}" for name in names))
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    rows = []
    for entry in book.history:
        rates = [f"{entry.win_rates[name]:.0%}" if name in entry.win_rates else "" for name in names]
        cells = [f"{entry.iteration:,}", f"{entry.env_steps:,}", f"{entry.rating.mu:.1f}", f"{2 * entry.rating.sigma:.1f}", *rates]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>Ratings</title><style>{_STYLE}</style></head>\n<body>'
        f"<h1>Ratings</h1>\n<p>The policy's rating with ± 2 sigma over env steps. The fixed players (dashed) are the scale: they were "
        f"rated by games among themselves at the start and never change.</p>\n{ratings_svg(book)}\n"
        f"<table><tr>{head}</tr>\n{''.join(rows)}</table>\n</body></html>\n"
    )


def ratings_svg(book: RatingBook) -> str:
    """Return the curve."""
    scale = _Scale(book)
    upper = [(scale.x(entry.env_steps), scale.y(entry.rating.interval95[1])) for entry in book.history]
    lower = [(scale.x(entry.env_steps), scale.y(entry.rating.interval95[0])) for entry in reversed(book.history)]
    middle = [(scale.x(entry.env_steps), scale.y(entry.rating.mu)) for entry in book.history]
    axes = [f'<text x="{_LEFT - 8:.0f}" y="14" text-anchor="end">rating</text>']
    for level in _ticks(scale.low, scale.high):
        axes.append(f'<text x="{_LEFT - 8:.0f}" y="{scale.y(level) + 4:.1f}" text-anchor="end">{level:g}</text>')
        axes.append(_line(scale.y(level), 'stroke="#888" stroke-opacity="0.3"'))
    below = f'y="{_HEIGHT - _BOTTOM + 18:.0f}" text-anchor="middle"'
    axes += [f'<text x="{scale.x(steps):.1f}" {below}>{steps:,.0f}</text>' for steps in _ticks(0.0, scale.last)]
    axes.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{_HEIGHT - 6:.0f}" text-anchor="middle">env steps</text>')
    return "".join(
        [
            f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-label="rating over env steps">',
            *axes,
            *[_line(scale.y(rating.mu), f'stroke="{_FIXED}" stroke-dasharray="6 4"') for rating in book.anchors.values()],
            f'<polygon points="{_points(upper + lower)}" fill="{_POLICY}" opacity="0.2"/>',
            f'<polyline points="{_points(middle)}" fill="none" stroke="{_POLICY}" stroke-width="2"/>',
            *[f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_POLICY}"/>' for x, y in middle],
            _names(scale, book),
            "</svg>",
        ]
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return three to nine round numbers from `low` to `high`: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _names(scale: _Scale, book: RatingBook) -> str:
    """Write the players' names next to the curve, from the strongest down, without overlap."""
    players = [(rating.mu, name, "") for name, rating in book.anchors.items()]
    players.append((book.history[-1].rating.mu, "the policy", f' style="fill: {_POLICY}; font-weight: bold"'))
    parts, above = [], -math.inf
    for level, name, style in sorted(players, key=lambda player: -player[0]):
        above = max(scale.y(level) + 4, above + _GAP)
        parts.append(f'<text x="{_WIDTH - _RIGHT + 8:.0f}" y="{above:.1f}"{style}>{html.escape(_shorten(name))} {level:.1f}</text>')
    return "".join(parts)


def _shorten(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:17]}…"


def _line(y: float, style: str) -> str:
    """Draw a horizontal line across the plot."""
    return f'<line x1="{_LEFT:.1f}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT:.1f}" y2="{y:.1f}" {style}/>'


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
