"""Curves of runs, those of several seeds as one with an interval, and their charts as SVG; every text that enters is escaped.

A chart carries its numbers in `data-chart`, from which the page's script reads values under the pointer. Colours are classes `c0` to `c7`,
defined by the page's style, or by `PALETTE` in a file of its own.
"""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from inchworm.analysis.runs import RunRecord
from inchworm.core.errors import ConfigError, MissingExtraError, printable
from inchworm.core.tensor_file import write_atomically
from inchworm.evaluate.stats import bootstrap_interval95, interquartile_mean
from inchworm.run.directory import FREE_FIELDS, config_changes

MOST_POINTS = 400
"""Points of a curve on a page; a longer series keeps the lowest and the highest of each of half as many sections."""
RESAMPLES = 2_000
"""Bootstrap samples of the interval at each point."""
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
    """`line`, `dots` (with a line), `points` (without), `faint` or `dashed`."""


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
    return replace(line, x=line.x[rows], y=line.y[rows], low=low, high=high)


def metric_line(run: RunRecord, name: str, *, timing: bool = False, **options: Any) -> Line | None:
    """A metric of a run; None if it has none. Rows of one number of env steps are one point, the last."""
    x, y = run.series(name, timing=timing)
    if not len(x):
        return None
    points = dict(sorted(dict(zip(x.tolist(), y.tolist())).items()))
    return Line(options.pop("label", name), np.array([*points]), np.array([*points.values()]), **options)


def evaluation_line(run: RunRecord, **options: Any) -> Line | None:
    """The mean return of the evaluations, with its 95 % interval."""
    rows = {row["env_steps"]: row for row in run.evaluations}
    if not rows:
        return None
    mean, ends = "evaluation/mean_return", ("evaluation/interval95_low", "evaluation/interval95_high")
    table = np.array([(step, row[mean], *(row.get(end, row[mean]) for end in ends)) for step, row in sorted(rows.items())])  # [n, 4]
    return Line(options.pop("label", "evaluation"), *table.T, **options)


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """Sort runs into groups that differ only in the seed. Of a seed that occurs again the run is in another group: it is not a new sample.

    A group is named by its environment and what differs from the first; one that has no other name, and a single run, by its run.
    """
    groups: list[Group] = []
    for run in runs:
        alike = (group for group in groups if not _differing(group.runs[0], run))
        fitting = (group for group in alike if run.config.run.seed not in {one.config.run.seed for one in group.runs})
        home = max(fitting, key=lambda group: group.runs[-1].path.parent == run.path.parent, default=None)  # with the others of its bundle
        if home is None:
            changes = _differing(groups[0].runs[0], run) if groups else {}
            new = [f"{name}={text.rpartition(' → ')[2]}" for name, text in changes.items() if name != "env.id"]
            label = ", ".join([run.config.env.id, *new])[:120]
            home = Group(label if all(label != group.label for group in groups) else f"{label} ({run.name.partition('/')[0]})")
            groups.append(home)
        home.runs.append(run)
    return [group if len(group.runs) > 1 else Group(group.runs[0].name, group.runs) for group in groups]


def _differing(one: RunRecord, other: RunRecord) -> dict[str, str]:
    return {name: text for name, text in config_changes(one.config, other.config).items() if name not in SEED_FIELDS}


def seeds_line(group: Group, name: str, **options: Any) -> Line | None:
    """The interquartile mean of a metric over the seeds of a group, with its bootstrap interval, where all of them have values."""
    lines = [line for run in group.runs if (line := metric_line(run, name)) is not None]
    steps = shared_steps(lines)
    if len(lines) < 2 or not len(steps):
        return None
    table = np.stack([np.interp(steps, line.x, line.y) for line in lines])  # [seeds, n]
    low, high = np.apply_along_axis(bootstrap_interval95, 0, table)
    return Line(options.pop("label", group.label), steps, np.apply_along_axis(interquartile_mean, 0, table), low, high, **options)


def shared_steps(lines: Sequence[Line]) -> np.ndarray:
    """The env steps [n] at which all lines have values, at most half of `MOST_POINTS`; empty if there are none."""
    if not lines:
        return np.zeros(0)
    begin, end = max(line.x[0] for line in lines), min(line.x[-1] for line in lines)
    steps = np.unique(np.concatenate([line.x for line in lines]))
    steps = steps[(steps >= begin) & (steps <= end)]
    return steps if len(steps) <= MOST_POINTS // 2 else np.linspace(begin, end, MOST_POINTS // 2)


def group_lines(groups: Sequence[Group], name: str) -> list[Line]:
    """A metric of several runs: the interquartile mean of each group with its runs faintly, or only the runs where there is none."""
    lines: list[Line | None] = []
    for index, group in enumerate(groups):
        middle = seeds_line(group, name, colour=index, label=f"{group.label} ({len(group.runs)} seeds)")
        for number, run in enumerate(group.runs):
            colour = number if middle is None and len(groups) == 1 else index
            lines.append(metric_line(run, name, label=run.name, colour=colour, style="line" if middle is None else "faint"))
        lines.append(middle)
    return [line for line in lines if line is not None]


def return_metric(runs: Sequence[RunRecord]) -> str:
    """The metric of the learning curves: several runs are compared by their evaluations where there are enough."""
    if len(runs) > 1 and all(len(run.evaluations) >= 5 for run in runs):
        return "evaluation/mean_return"
    return "episode/team_return" if all("episode/team_return" in run.names for run in runs) else "mean_return"


def return_lines(runs: Sequence[RunRecord]) -> list[Line]:
    """The learning curves: of one run training and evaluation, of several those of their groups."""
    name = return_metric(runs)
    if len(runs) > 1:
        return group_lines(group_runs(runs), name)
    training = metric_line(runs[0], name, label="training", colour=0)
    return [line for line in (training, evaluation_line(runs[0], colour=1, style="dots")) if line is not None]


# Drawing


def e(value: object) -> str:
    """Escape text for HTML and XML, which cannot hold control characters and half surrogates. All text of a run passes through here."""
    return html.escape(printable(str(value)))


PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a5bb5", "#b8860b", "#56b4e9", "#737d88")
"""Colours that people with any colour vision can tell apart (Okabe and Ito), in the order of the classes."""
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 12.0, 34.0


def short_number(value: float, largest: float = 0.0, digits: int = 4) -> str:
    """A number for an axis: 1.5M, 200k, 0.02. The unit is that of the `largest` on the axis, so that 5k stands beside 10k."""
    if not value:
        return "0"
    size = max(abs(value), abs(largest))
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            return f"{value / (1e3 if name == 'k' else unit):.{digits}g}{name}"
    return f"{value:.{digits if size >= 1e-3 else digits - 2}g}"


def ticks(low: float, high: float, most: int = 6) -> list[tuple[float, str]]:
    """Round numbers from `low` to `high` with their texts: at least two, and about `most`; steps are 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    if not rough > 0 or not math.isfinite(rough):
        return [(low, short_number(low))]
    power, found = 10.0 ** math.floor(math.log10(rough)), list[float]()
    for factor in (0.5, 1.0, 2.0, 5.0, 10.0):
        step = factor * power
        numbers = [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
        found = numbers if len(numbers) > 1 or not found else found
        if len(found) <= most + 1:
            break
    largest = max(map(abs, found))
    written = ([short_number(each, largest, digits) for each in found] for digits in range(4, 18))
    texts = next((texts for texts in written if len({*texts}) == len(found)), [f"{each:g}" for each in found])
    return list(zip(found, texts))


def _bounds(lines: Sequence[Line]) -> tuple[float, float]:
    """The range of y with a margin. A few extreme points of a long curve do not decide it, unless they are most of its range."""
    values = np.concatenate([band for line in lines for band in (line.y, line.low, line.high) if band is not None])
    low, high = float(values.min()), float(values.max())
    if len(values) >= 40:
        inner_low, inner_high = (float(value) for value in np.quantile(values, (0.01, 0.99)))
        spread = inner_high - inner_low
        if spread > 0:
            low, high = max(low, inner_low - spread), min(high, inner_high + spread)
    differs = high - low > 1e-9 * max(abs(low), abs(high))  # else by rounding only, and it is drawn as a constant
    margin = 0.06 * (high - low) if differs else 0.1 * abs(high) or 1.0
    return low - margin, high + margin


def _frame(low: float, high: float, width: float, height: float) -> list[str]:
    """The horizontal axis, and a line with its number at each round level from `low` to `high`."""
    bottom = height - BOTTOM
    parts = [f'<line class="axis" x1="{LEFT:g}" x2="{width - RIGHT:g}" y1="{bottom:g}" y2="{bottom:g}"/>']
    for level, text in ticks(low, high, max(3, int(height // 55))):
        y = TOP + (bottom - TOP) * (high - level) / (high - low)
        parts.append(f'<line class="rule" x1="{LEFT:g}" x2="{width - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 7:g}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    return parts


def chart_svg(
    lines: Sequence[Line], label: str, *, width: float = 720.0, height: float = 300.0, zero: bool = False, over: str = "env steps"
) -> str:
    """Draw lines over env steps, or what `over` says. `label` is the name for screen readers; with `zero` the range of y includes 0."""
    lines = [shorten(line) for line in lines]
    low, high = _bounds(lines)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    first, last = min(float(line.x[0]) for line in lines), max(float(line.x[-1]) for line in lines)
    first = 0.0 if first < 0.2 * last or first == last else first
    last = last or 1.0

    def x(value: float) -> float:
        return LEFT + (width - LEFT - RIGHT) * (value - first) / (last - first)

    def y(value: float) -> float:
        return TOP + (height - TOP - BOTTOM) * (high - min(max(value, low), high)) / (high - low)

    def path(xs: np.ndarray, ys: np.ndarray) -> str:
        return " ".join(f"{x(one):.1f},{y(other):.1f}" for one, other in zip(xs.tolist(), ys.tolist()))

    bottom, parts = height - BOTTOM, _frame(low, high, width, height)
    for step, text in ticks(first, last, max(3, int(width // 110))):
        if step % 1:
            continue  # there is no half a step, and no half a trial
        anchor = "end" if x(step) > width - RIGHT - 20 else "middle"
        parts.append(f'<text x="{x(step):.1f}" y="{bottom + 17:g}" text-anchor="{anchor}">{text}</text>')
    for line in lines:
        colour = f"c{line.colour % len(PALETTE)}"
        if line.low is not None and line.high is not None:
            band = path(np.concatenate([line.x, line.x[::-1]]), np.concatenate([line.high, line.low[::-1]]))
            parts.append(f'<polygon class="band {colour}" points="{band}"/>')
            if len(line.x) == 1:  # an interval of one point has no area
                parts.append(f'<line class="line {colour}" x1="{x(line.x[0]):.1f}" x2="{x(line.x[0]):.1f}" '
                             f'y1="{y(line.low[0]):.1f}" y2="{y(line.high[0]):.1f}"/>')  # fmt: skip
        if line.style != "points":
            parts.append(f'<polyline class="line {e(line.style)} {colour}" points="{path(line.x, line.y)}"/>')
        if line.style in ("dots", "points") or len(line.x) == 1:
            parts += [f'<circle class="dot {colour}" cx="{x(one):.1f}" cy="{y(two):.1f}" r="3"/>' for one, two in zip(line.x, line.y)]
    parts.append(f'<line class="cross" x1="0" x2="0" y1="{TOP:g}" y2="{bottom:g}"/>')
    numbers = {"area": [LEFT, width - RIGHT], "range": [first, last], "over": over.removeprefix("env "), "lines": [*map(_numbers, lines)]}
    data = e(json.dumps(numbers))
    return (
        f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" role="img" tabindex="0" '
        f'aria-label="{e(f"{label} over {over}")}" '
        f'data-chart="{data}">{"".join(parts)}</svg>'
    )


def _numbers(line: Line) -> dict[str, object]:
    """The numbers of a line for the script that reads values, with five digits each."""

    def rounded(values: np.ndarray) -> list[float]:
        return [float(f"{value:.5g}") for value in values.tolist()]

    bands = {} if line.low is None or line.high is None else {"low": rounded(line.low), "high": rounded(line.high)}
    return {"name": line.name, "colour": line.colour % len(PALETTE), "x": [int(value) for value in line.x], "y": rounded(line.y), **bands}


def scatter_svg(
    places: Sequence[float], values: Sequence[float], ends: Sequence[tuple[float, str]], names: Sequence[str], label: str, *, best: int = -1
) -> str:
    """Draw values over places from 0 to 1, with texts at some places below. Each point has a name to read; `best` stands out."""
    width, height = 380.0, 190.0
    low, high = min(values), max(values)
    low, high = (low - 0.06 * (high - low), high + 0.06 * (high - low)) if high > low else (low - 1.0, high + 1.0)
    bottom, inner = height - BOTTOM, (LEFT + 10.0, width - RIGHT - 10.0)

    def x(place: float) -> float:
        return inner[0] + (inner[1] - inner[0]) * place

    def y(value: float) -> float:
        return TOP + (bottom - TOP) * (high - value) / (high - low)

    parts = _frame(low, high, width, height)
    parts += [f'<text x="{x(place):.1f}" y="{bottom + 17:g}" text-anchor="middle">{e(text)}</text>' for place, text in ends]
    for index, (place, value, name) in enumerate(zip(places, values, names)):
        looks = ("dot c1", 5) if index == best else ("dot c0", 3)
        parts.append(f'<circle class="{looks[0]}" cx="{x(place):.1f}" cy="{y(value):.1f}" r="{looks[1]}"><title>{e(name)}</title></circle>')
    return f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{e(label)}">{"".join(parts)}</svg>'


def legend(lines: Sequence[Line]) -> str:
    """The names of lines with their colours."""
    entries = "".join(f'<li><i class="key {e(line.style)} c{line.colour % len(PALETTE)}"></i>{e(line.name)}</li>' for line in lines)
    return f'<ul class="legend">{entries}</ul>'


def bar_html(parts: Mapping[str, float]) -> str:
    """A bar split by shares, with a list of them: `learn 62 % (12 s)`."""
    total = sum(parts.values()) or 1.0
    shares = [(name, seconds, seconds / total, index) for index, (name, seconds) in enumerate(parts.items())]
    # Widths are attributes of SVG, because a page whose policy forbids inline styles must show them.
    begin, pieces = 0.0, []
    for name, _, share, index in shares:
        title = f"<title>{e(name)} {share:.1%}</title>"
        pieces.append(f'<rect class="fill c{index}" x="{1000 * begin:.1f}" width="{1000 * share:.1f}" height="26">{title}</rect>')
        begin += share
    entries = "".join(
        f'<li><i class="key c{index}"></i>{e(name)} {share:.0%} <small>{duration(seconds)}</small></li>'
        for name, seconds, share, index in shares
    )
    return (
        f'<svg class="bar" viewBox="0 0 1000 26" preserveAspectRatio="none" role="img" aria-label="time by part">{"".join(pieces)}</svg>'
        f'<ul class="legend">{entries}</ul>'
    )


def duration(seconds: float) -> str:
    """A duration in one or two units: 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 2 * 24 * 60:
        return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


_FILE_STYLE = (
    "text{font:12px system-ui,Helvetica,Arial,sans-serif;fill:#333}.rule{stroke:#e4e6ea}.axis{stroke:#9aa3ad}"
    ".line{fill:none;stroke-width:1.8}"
    ".faint{stroke-width:1;opacity:.35}.dashed{stroke-dasharray:5 4}.band{opacity:.18;stroke:none}.cross{display:none}"
    + "".join(f".line.c{n}{{stroke:{colour}}}.band.c{n},.dot.c{n}{{fill:{colour}}}" for n, colour in enumerate(PALETTE))
)


_LOOKS: dict[str, dict[str, Any]] = {
    "faint": {"alpha": 0.3, "linewidth": 0.8},
    "dashed": {"linestyle": "--"},
    "dots": {"marker": "o", "markersize": 3},
}


def plot_svg(lines: Sequence[Line], y_label: str) -> str:
    """A chart as a file of its own, with labels of the axes and the names of the lines below it."""
    width, height = 720.0, 400.0
    named = [line for line in lines if line.style != "faint"]
    total = height + 28 + 18 * len(named)
    drawn = chart_svg(lines, y_label, width=width, height=height)
    parts = [drawn[drawn.index(">") + 1 : -len("</svg>")], f'<text x="6" y="-4" font-weight="bold">{e(y_label)}</text>']
    parts.append(f'<text x="{width - RIGHT:g}" y="{height - 1:g}" text-anchor="end">env steps</text>')
    for row, line in enumerate(named):
        level, colour = height + 10 + 18 * row, f"{line.style} c{line.colour % len(PALETTE)}"
        parts.append(f'<line class="line {colour}" x1="{LEFT:g}" x2="{LEFT + 26:g}" y1="{level:g}" y2="{level:g}"/>')
        parts.append(f'<text x="{LEFT + 34:g}" y="{level + 4:g}">{e(line.name)}</text>')
    size = f'width="{width:g}" height="{total:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width:g} {total:g}"><style>{_FILE_STYLE}</style>'
    return f'{head}<rect {size} fill="#fff"/><g transform="translate(0 18)">{"".join(parts)}</g></svg>\n'


def save_plot(lines: Sequence[Line], out: str | Path, *, y_label: str = "return") -> Path:
    """Write lines as a figure for papers: .svg by our own code, .png and .pdf by matplotlib."""
    path = Path(out)
    lines, y_label = [replace(line, name=printable(line.name)) for line in lines], printable(y_label)
    if path.suffix == ".svg":
        return write_atomically(path, plot_svg(lines, y_label))
    if path.suffix not in (".png", ".pdf"):
        raise ConfigError(f"--out {path} must end in .svg, .png or .pdf")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(f'{path.suffix} needs matplotlib: pip install "inchworm[report]", or --out {path.stem}.svg') from error
    figure = Figure(figsize=(6.4, 4.0), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    axes_ = figure.subplots()
    for line in lines:
        colour = PALETTE[line.colour % len(PALETTE)]
        look = _LOOKS.get(line.style, {})
        axes_.plot(line.x, line.y, color=colour, label=None if line.style == "faint" else line.name.replace("$", r"\$"), **look)
        if line.low is not None and line.high is not None:
            axes_.fill_between(line.x, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
    axes_.set(xlabel="env steps", ylabel=y_label.replace("$", r"\$"))
    axes_.grid(alpha=0.3)
    axes_.legend(frameon=False)
    figure.savefig(path)
    return path
