"""Progress of a run, or of several seeds: a live view in a terminal or a notebook, plain lines elsewhere.

A thread draws the live view a few times per second from what `log` has stored and from counters that the run keeps anyway, so that it
moves within an iteration and does not slow the run.
"""

from __future__ import annotations

import importlib
import io
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.control import Control
from rich.jupyter import JUPYTER_HTML_FORMAT, JupyterRenderable
from rich.live import Live
from rich.live_render import LiveRender
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from inchworm.core.errors import printable
from inchworm.core.types import Activity, SeedEvent


class Terminal(Console):
    """A rich console that turns quiet when its reader is gone (`| head`) or its disk is full, so that the run continues."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Remove escape sequences and escape control characters: names and messages from files must not control the terminal."""
        return super().render_str(printable(text), **options)

    def _check_buffer(self) -> None:
        """Write the buffer; rich handles a closed pipe, but not a file on a full disk."""
        try:
            super()._check_buffer()
        except OSError:
            self._buffer.clear()
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Stop writing, and redirect the stream so that the interpreter can flush it at exit."""
        self.quiet = True
        detach(self.file)


def detach(stream: object) -> None:
    """Redirect a stream whose reader is gone to the null device, so that flushing it does not raise again."""
    try:
        target = stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):  # captured or in-memory streams have no descriptor
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, target)
    os.close(nothing)


def make_terminal(*, quiet: bool = False, file: TextIO | None = None, stderr: bool = False) -> Terminal:
    """The terminal of this process, or one that writes to `file`. Text is printed as it is; NO_COLOR and TERM=dumb are respected."""
    return Terminal(file=file, stderr=stderr, quiet=quiet, highlight=False, emoji=False, markup=False, soft_wrap=True)


class Curve:
    """Values as a line of block characters, `▁▃▅▇`. A long series is averaged, so that it always shows the whole run."""

    _POINTS, _BLOCKS = 24, "▁▂▃▄▅▆▇█"

    def __init__(self) -> None:
        self._points: list[float] = []
        self._newest = 0.0, 0  # sum and number of the values that are less than one point
        self._per_point = 1

    def add(self, value: float) -> None:
        """Add the next value."""
        total, count = self._newest[0] + value, self._newest[1] + 1
        self._newest = total, count  # at once: another thread may be drawing
        if count == self._per_point:
            self._points, self._newest = [*self._points, total / count], (0.0, 0)
        if len(self._points) == self._POINTS:
            self._points = [fmean(pair) for pair in zip(self._points[::2], self._points[1::2])]
            self._per_point *= 2

    def __str__(self) -> str:
        """The line; empty below two points."""
        total, count = self._newest
        points = [*self._points, *([total / count] if count else [])]
        low, high = min(points, default=0.0), max(points, default=0.0)
        if len(points) < 2 or not math.isfinite(high - low):
            return ""
        top = len(self._BLOCKS) - 1
        return "".join(self._BLOCKS[round(top * (point - low) / (high - low)) if high > low else top // 2] for point in points)


class TerminalScreen(Live):
    """A live view in a terminal that leaves no stale lines when the terminal is made narrower."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(console=terminal, auto_refresh=False)
        self._live_render = _WrappedRender(terminal)

    def draw(self, view: RenderableType) -> None:
        """Draw a view over the last one."""
        self.start()
        self.update(view, refresh=True)


class _WrappedRender(LiveRender):
    """Moves the cursor up by the rows that the last view takes now: a narrower terminal has wrapped its lines."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__("")
        self._terminal = terminal
        self._widths: list[int] = []  # of the lines that were drawn

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        segments = list(super().__rich_console__(console, options))
        self._widths = [Segment.get_line_length(line) for line in Segment.split_lines(segments)]  # type: ignore[arg-type]
        yield from segments

    def position_cursor(self) -> Control:
        columns = max(1, self._terminal.width)
        if self._shape is not None:
            self._shape = columns, sum(max(1, math.ceil(width / columns)) for width in self._widths)
        return super().position_cursor()


class NotebookScreen:
    """A live view in the output of a notebook's cell. (That of rich needs ipywidgets.)"""

    _WIDTH = 120

    def __init__(self) -> None:
        """Raises ImportError without IPython."""
        self._display = importlib.import_module("IPython.display").display
        self._handle: Any = None

    def draw(self, view: RenderableType) -> None:
        """Replace the last view."""
        recorder = Console(
            file=io.StringIO(), record=True, width=self._WIDTH, force_terminal=True, force_jupyter=False, color_system="truecolor"
        )
        recorder.print(view)
        html = recorder.export_html(inline_styles=True, code_format=JUPYTER_HTML_FORMAT, clear=False)
        shown = JupyterRenderable(html, recorder.export_text())
        if self._handle is None:
            self._handle = self._display(shown, display_id=True)
        else:
            self._handle.update(shown)

    def stop(self) -> None:
        """The last view stays."""


_EVALUATION, _WON, _CAPPED = "evaluation/mean_return", "evaluation/win_rate", "evaluation/capped_episodes"
_DIFFERENCE = "evaluation/difference"
_TEAM = "episode/team_return"
_CONVERGED, _CHECKS = "convergence/converged", "convergence/checks"
_SHOWN = {  # metric -> label
    "loss": "loss",
    "policy_loss": "policy loss",
    "value_loss": "value loss",
    "entropy": "entropy",
    "approx_kl": "kl",
    "clip_fraction": "clip fraction",
    "explained_variance": "explained variance",
    "learning_rate": "learning rate",
}


class ConsoleTracker:
    """Shows progress, elapsed time and time left, steps per second, returns, evaluation scores and losses."""

    def __init__(
        self,
        total_timesteps: int | None = None,
        *,
        title: str = "",
        baseline: str = "",
        quiet: bool = False,
        terminal: Terminal | None = None,
        seconds_between_draws: float = 0.25,
        seconds_between_lines: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`baseline` names the opponent or baseline of the evaluations; `quiet` shows nothing; tests replace the clock."""
        self.total = total_timesteps
        self.title = title
        self.baseline = baseline
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.best_evaluation: float | None = None
        self._terminal = terminal or make_terminal(quiet=quiet)
        self._clock = clock
        self._began = clock()
        self._samples = deque([(self._began, 0)], maxlen=50)
        self._curves = {"mean_return": Curve(), _EVALUATION: Curve()}
        self._watch: Callable[[], Activity] | None = None
        self._seconds_between_draws, self._seconds_between_lines = seconds_between_draws, seconds_between_lines
        self._screen: TerminalScreen | NotebookScreen | None = None
        self._drawing: threading.Thread | None = None
        self._stop_drawing = threading.Event()
        self._last_line: float | None = None
        self._unseen = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Store a row. Without a live view it is printed, unless one was printed just before; evaluations are always printed."""
        self.step = step
        self.metrics |= metrics
        self._samples.append((self._clock(), step))
        if _EVALUATION in metrics:
            self.metrics[_CAPPED] = metrics.get(_CAPPED, 0.0)  # reported only where there are any
            score = metrics[_EVALUATION]
            self.best_evaluation = score if self.best_evaluation is None else max(score, self.best_evaluation)
        for name, curve in self._curves.items():
            if name in metrics:
                curve.add(metrics.get(_WON, metrics[name]) if name == _EVALUATION else metrics[name])
        self._unseen = True
        if self._drawing is None:
            self._open()
        now, last = self._clock(), self._last_line
        if self._screen is None and (last is None or _EVALUATION in metrics or now - last >= self._seconds_between_lines):
            self._last_line, self._unseen = now, False
            self._terminal.print(self.line())

    def log_params(self, params: Mapping[str, Any]) -> None:
        """The config is not shown."""

    def start(self, step: int = 0, best_evaluation: float | None = None, watch: Callable[[], Activity] | None = None) -> None:
        """Start the clock and the live view, at `step` of a resumed run. Without this call, the first row does it.

        The view asks `watch` what the training is doing, from another thread.
        """
        self.step, self.best_evaluation, self._watch = step, best_evaluation, watch
        self._began = self._clock()
        self._samples.clear()
        self._samples.append((self._began, step))
        self._last_line = None
        self._open()

    def _open(self) -> None:
        """Begin to draw, where there is a terminal or a notebook to draw in."""
        terminal = self._terminal
        if terminal.quiet or self._screen is not None:
            return
        if terminal.is_jupyter:
            with suppress(ImportError):
                self._screen = NotebookScreen()
        elif terminal.is_terminal and not terminal.is_dumb_terminal:
            self._screen = TerminalScreen(terminal)
        if self._screen is not None:
            self.draw()
            self._stop_drawing.clear()
            self._drawing = threading.Thread(target=self._draw_regularly, name="inchworm progress", daemon=True)
            self._drawing.start()

    def _draw_regularly(self) -> None:
        while not self._stop_drawing.wait(self._seconds_between_draws):
            self.draw()

    def draw(self) -> None:
        """Draw the live view now, where there is one."""
        if self._screen is not None:
            self._screen.draw(self.view())

    def log_artifact(self, path: Path) -> None:
        """Files are not shown."""

    def close(self) -> None:
        """Show the last state and leave the terminal as it was."""
        if self._drawing is not None:
            self._stop_drawing.set()
            self._drawing.join()
            self._drawing = None
        self._watch = None
        if self._screen is not None:
            self.draw()
            self._screen.stop()
            self._screen = None
        elif self._unseen:
            self._terminal.print(self.line())
        self._unseen = False

    @property
    def steps_per_second(self) -> float | None:
        """Speed over the last rows; None before it can be measured."""
        (first_time, first_step), (last_time, last_step) = self._samples[0], self._samples[-1]
        return (last_step - first_step) / (last_time - first_time) if last_time > first_time else None

    def line(self) -> str:
        """The state in one line of text."""
        parts = [
            self._progress(self.step),
            self._speed(),
            self._times(self.step),
            *(f"{name} {value}" for name, value in self._scores().items()),
        ]
        parts += [f"{name} {value}" for name, value in self._losses().items() if name in ("loss", "entropy", "kl")]
        return "  ".join(part for part in parts if part)

    def view(self) -> RenderableType:
        """The state as the live view: a bar, what is being done, then returns and scores, then losses."""
        activity = self._watch() if self._watch is not None else None
        step = max(self.step, activity.env_steps) if activity is not None else self.step
        head: list[RenderableType] = [Text(printable(self.title), style="bold")] if self.title else []
        if self.total is not None:
            head.append(ProgressBar(total=self.total, completed=min(step, self.total)))
        head += [Text(self._progress(step)), Text(self._speed(), style="cyan")]
        doing: list[RenderableType] = []
        if activity is not None and activity.iteration:
            doing += [Text(f"iteration {activity.iteration:,}"), Text(activity.phase)]
            if activity.share is not None:
                doing += [ProgressBar(total=1.0, completed=activity.share), Text(f"{activity.share:.0%}")]
        doing.append(Text(self._times(step), style="cyan"))
        losses = list(self._losses().items())
        rows = [_row(self._scores(curves=True).items(), "bold green"), _row(losses[:4], ""), _row(losses[4:], "")]
        return Group(grid(head), grid(doing), *rows)

    def _progress(self, step: int) -> str:
        if self.total is None:
            return f"{step:,} steps"
        return f"{step:,}/{self.total:,} steps {min(1.0, step / self.total):.0%}"

    def _speed(self) -> str:
        speed = self.steps_per_second
        return "" if speed is None else f"{speed:,.0f} steps/s"

    def _times(self, step: int) -> str:
        """The elapsed time and, if it is known, the time left."""
        speed, elapsed = self.steps_per_second, f"{format_time(self._clock() - self._began)} elapsed"
        return elapsed if self.total is None or not speed else f"{elapsed}, {format_time(max(0.0, self.total - step) / speed)} left"

    def _scores(self, *, curves: bool = False) -> dict[str, str]:
        """Scores with their labels, and with `curves` what they were before; the win rate of evaluations stands first if there is one."""
        metrics, scores = self.metrics, dict[str, str]()
        shown = curves and not self._terminal.options.ascii_only
        returns, evaluations = (f" {curve}".rstrip() if shown else "" for curve in self._curves.values())
        against = f" against {self.baseline}" if self.baseline else ""
        team = " per team" if _TEAM in metrics else ""
        if _WON in metrics:
            scores[f"win rate{against}"] = f"{metrics[_WON]:.2f}{self._interval_of('evaluation/win_interval95')}{evaluations}"
        if "mean_return" in metrics:
            scores["return per agent" if team else "return"] = f"{metrics['mean_return']:.1f}{returns}"
        if team:
            scores["per team"] = f"{metrics[_TEAM]:.1f}"
        if "episode/win" in metrics:
            scores["win rate in training"] = f"{metrics['episode/win']:.2f}"
        if "rating" in metrics:
            scores["rating"] = f"{metrics['rating']:.1f}±{2 * metrics.get('rating_sigma', 0.0):.1f}"
        if _EVALUATION in metrics:
            capped = f" ({metrics[_CAPPED]:.0f} capped)" if metrics.get(_CAPPED) else ""
            scores[f"evaluation{team}"] = f"{metrics[_EVALUATION]:.1f}{capped}{'' if _WON in metrics else evaluations}"
        if _DIFFERENCE in metrics:
            scores[f"difference to {self.baseline or 'the baseline'}"] = (
                f"{metrics[_DIFFERENCE]:+.1f}{self._interval_of('evaluation/difference_interval95', '.1f')}"
            )
        if self.best_evaluation is not None:
            scores[f"best{team}"] = f"{self.best_evaluation:.1f}"
        if metrics.get(_CONVERGED):
            scores["converged"] = "yes"
        elif metrics.get(_CHECKS):
            scores["checks at the target"] = f"{metrics[_CHECKS]:.0f}"
        return scores

    def _interval_of(self, name: str, form: str = ".2f") -> str:
        """Return ` [0.77, 0.88]`; empty if the interval is not known."""
        low, high = self.metrics.get(f"{name}_low"), self.metrics.get(f"{name}_high")
        return "" if low is None or high is None else f" [{low:{form}}, {high:{form}}]"

    def _losses(self) -> dict[str, str]:
        return {label: f"{self.metrics[name]:.3g}" for name, label in _SHOWN.items() if name in self.metrics}


def grid(cells: Sequence[RenderableType]) -> Table:
    """Cells in one line. On a narrow terminal bars shrink and words stay whole."""
    table = Table.grid(padding=(0, 2))
    for cell in cells:
        table.add_column(max_width=30) if isinstance(cell, ProgressBar) else table.add_column(no_wrap=True)
    table.add_row(*cells)
    return table


def format_time(seconds: float) -> str:
    """`1:05`, or `2:01:05` with hours."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _row(values: Iterable[tuple[str, str]], style: str) -> Text:
    """Names and values in one line, truncated rather than wrapped on a narrow terminal."""
    parts = [part for name, value in values for part in ((f"{name} ", "dim"), (f"{value:<8}", style), "  ")]
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


# Progress of several seeds: a live view in a terminal, plain lines elsewhere.

_LABELS = {"mean_return": "return", "evaluation/win_rate": "win rate", "evaluation/mean_return": "evaluation"}

SECONDS_BETWEEN_LINES = 10.0
"""Where there is no terminal to draw on."""


class SeedsView:
    """Shows how far all seeds are, each running one with its latest scores, and the scores of those that are done."""

    def __init__(
        self,
        seeds: Sequence[int],
        total_timesteps: int,
        *,
        title: str = "",
        terminal: Terminal | None = None,
        seconds_between_draws: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total_timesteps` are those of one seed; tests replace the clock."""
        self.seeds, self.total, self.title = tuple(seeds), total_timesteps, title
        self.done: dict[int, float | None] = {}
        self.failed: dict[int, str] = {}
        self.running: dict[int, SeedEvent] = {}
        self._terminal = terminal or make_terminal()
        self._clock, self._began = clock, clock()
        self._between_draws = seconds_between_draws
        self._steps_at_start: dict[int, int] = {}
        self._last_steps: dict[int, int] = {}
        self._screen: TerminalScreen | None = None
        self._shown_at = 0.0

    def start(self, done: Mapping[int, float | None]) -> None:
        """Begin, with the scores of the seeds that are done already."""
        self.done |= done
        self._began = self._shown_at = self._clock()
        if self.done:
            self._terminal.print(f"{len(self.done)} of {len(self.seeds)} seeds are done already")
        if self._terminal.is_terminal and not self._terminal.is_dumb_terminal and not self._terminal.quiet:
            self._screen = TerminalScreen(self._terminal)
            self._screen.draw(self.view())

    def update(self, event: SeedEvent, score: float | None = None) -> None:
        """Take in what a seed reports; `score` is that of one that is done."""
        seed = event.seed
        if event.env_steps is not None:
            self._steps_at_start.setdefault(seed, event.env_steps)
            self._last_steps[seed] = event.env_steps
        if event.kind == "progress":
            self.running[seed] = event
        else:
            self.running.pop(seed, None)
            if event.kind == "done":
                self.done[seed] = score
                text = f"seed {seed}: done" + ("" if score is None else f", score {score:.5g}")
            else:
                self.failed[seed] = event.text
                text = f"seed {seed}: failed: {event.text}"
            if self._screen is None:
                self._terminal.print(f"{text} ({len(self.done)} of {len(self.seeds)} seeds done)")
        now = self._clock()
        if now - self._shown_at >= (SECONDS_BETWEEN_LINES if self._screen is None else self._between_draws):
            self._shown_at = now
            self._terminal.print(self.line()) if self._screen is None else self._screen.draw(self.view())

    def close(self) -> None:
        """Show the last state and leave the terminal as it was."""
        if self._screen is not None:
            self._screen.draw(self.view())
            self._screen.stop()
            self._screen = None

    def line(self) -> str:
        """The state in one line of text."""
        running = ", ".join(f"{seed} at {self._share(event):.0%}" for seed, event in sorted(self.running.items()))
        parts = [self._counts(), f"running: {running}" if running else "", self._times()]
        return "  ".join(part for part in parts if part)

    def view(self) -> RenderableType:
        """The state as the live view: one line for all seeds, one for each that runs, one with the scores of those that are done."""
        head: list[RenderableType] = [Text(printable(self.title), style="bold")] if self.title else []
        over = len({*self.done, *self.failed})
        share = (over + sum(map(self._share, self.running.values()))) / len(self.seeds)
        head += [ProgressBar(total=1.0, completed=share), Text(self._counts()), Text(self._times(), style="cyan")]
        rows: list[RenderableType] = [grid(head)]
        for seed, event in sorted(self.running.items()):
            steps = f"{event.env_steps or 0:,}/{self.total:,} steps"
            scores = [f"{label} {event.metrics[name]:.5g}" for name, label in _LABELS.items() if name in event.metrics]
            bar = ProgressBar(total=1.0, completed=self._share(event))
            rows.append(grid([Text(f"seed {seed}"), bar, Text(steps), Text("  ".join(scores), style="bold green")]))
        if self.done:
            scores = [f"{seed}: {'no score' if score is None else format(score, '.5g')}" for seed, score in sorted(self.done.items())]
            rows.append(Text(f"done  {'  '.join(scores)}", no_wrap=True, overflow="ellipsis"))
        rows += [
            Text(printable(f"seed {seed} failed: {text}"), style="red", no_wrap=True, overflow="ellipsis")
            for seed, text in self.failed.items()
        ]
        return Group(*rows)

    def _share(self, event: SeedEvent) -> float:
        return min(1.0, (event.env_steps or 0) / self.total)

    def _counts(self) -> str:
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"{len(self.done)}/{len(self.seeds)} seeds done{failed}"

    def _times(self) -> str:
        """The elapsed time and, once something has been trained, the time left."""
        elapsed = self._clock() - self._began
        trained = sum(self._last_steps[seed] - first for seed, first in self._steps_at_start.items())
        waiting = set(self.seeds) - {*self.done, *self.failed}
        left = sum(max(0, self.total - self._last_steps.get(seed, 0)) for seed in waiting)
        known = f", {format_time(left * elapsed / trained)} left" if trained > 0 and waiting else ""
        return f"{format_time(elapsed)} elapsed{known}"
