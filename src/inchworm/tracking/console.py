"""Progress of a run: a live view in a terminal, plain lines elsewhere; and several trackers as one.

Drawing happens inside `log`, at most a few times per second, so that it does not slow the run.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from inchworm.core.errors import printable
from inchworm.core.protocols import Tracker


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
    """The terminal of this process, or one that writes to `file`. Respects NO_COLOR and TERM=dumb."""
    return Terminal(file=file, stderr=stderr, quiet=quiet, highlight=False, emoji=False, soft_wrap=True)


_EVALUATION, _WON, _CAPPED = "evaluation/mean_return", "evaluation/win_rate", "evaluation/capped_episodes"
_DIFFERENCE = "evaluation/difference"
_TEAM = "episode/team_return"
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
    """Shows progress, time left, steps per second, returns, evaluation scores and losses."""

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
        self._samples = deque([(clock(), 0)], maxlen=50)
        live = self._terminal.is_terminal and not self._terminal.is_dumb_terminal and not self._terminal.quiet
        self._live = Live(console=self._terminal, auto_refresh=False) if live else None
        self._interval = seconds_between_draws if live else seconds_between_lines
        self._last_shown: float | None = None
        self._unseen = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Store a row and show it, unless one was shown just before; evaluations are always shown."""
        self.step = step
        self.metrics |= metrics
        self._samples.append((self._clock(), step))
        if _EVALUATION in metrics:
            self.metrics[_CAPPED] = metrics.get(_CAPPED, 0.0)  # reported only where there are any
            score = metrics[_EVALUATION]
            self.best_evaluation = score if self.best_evaluation is None else max(score, self.best_evaluation)
        self._unseen = True
        if self._last_shown is None or _EVALUATION in metrics or self._clock() - self._last_shown >= self._interval:
            self._show()

    def log_params(self, params: Mapping[str, Any]) -> None:
        """The config is not shown."""

    def start(self, step: int = 0, best_evaluation: float | None = None) -> None:
        """Start the clock and the live view, at `step` of a resumed run. Without this call, the first row does it."""
        self.step, self.best_evaluation = step, best_evaluation
        self._samples.clear()
        self._samples.append((self._clock(), step))
        if self._live is not None:
            self._show()
            self._last_shown = None

    def log_artifact(self, path: Path) -> None:
        """Files are not shown."""

    def close(self) -> None:
        """Show the last state and leave the terminal as it was."""
        if self._unseen:
            self._show()
        if self._live is not None:
            self._live.stop()

    @property
    def steps_per_second(self) -> float | None:
        """Speed over the last rows; None before it can be measured."""
        (first_time, first_step), (last_time, last_step) = self._samples[0], self._samples[-1]
        return (last_step - first_step) / (last_time - first_time) if last_time > first_time else None

    @property
    def seconds_left(self) -> float | None:
        """Time left at the current speed; None if unknown."""
        speed = self.steps_per_second
        return max(0.0, self.total - self.step) / speed if self.total is not None and speed else None

    def _show(self) -> None:
        self._last_shown = self._clock()
        self._unseen = False
        if self._live is None:
            self._terminal.print(self.line())
            return
        self._live.start()
        self._live.update(self.view(), refresh=True)

    def line(self) -> str:
        """The state in one line of text."""
        parts = [self._progress(), *self._pace(), *(f"{name} {value}" for name, value in self._scores().items())]
        parts += [f"{name} {value}" for name, value in self._losses().items() if name in ("loss", "entropy", "kl")]
        return "  ".join(part for part in parts if part)

    def view(self) -> RenderableType:
        """The state as the live view: a bar, then returns and scores, then losses."""
        cells: list[RenderableType] = [Text(printable(self.title), style="bold")] if self.title else []
        if self.total is not None:
            cells.append(ProgressBar(total=self.total, completed=min(self.step, self.total)))
        cells += [Text(self._progress()), *(Text(part, style="cyan") for part in self._pace())]
        head = Table.grid(padding=(0, 2))
        for cell in cells:  # on a narrow terminal the bar shrinks and words stay whole
            head.add_column(max_width=30) if isinstance(cell, ProgressBar) else head.add_column(no_wrap=True)
        head.add_row(*cells)
        losses = list(self._losses().items())
        return Group(head, _row(self._scores().items(), "bold green"), _row(losses[:4], ""), _row(losses[4:], ""))

    def _progress(self) -> str:
        if self.total is None:
            return f"{self.step:,} steps"
        return f"{self.step:,}/{self.total:,} steps {min(1.0, self.step / self.total):.0%}"

    def _pace(self) -> list[str]:
        speed, left = self.steps_per_second, self.seconds_left
        parts = [] if speed is None else [f"{speed:,.0f} steps/s"]
        if left is not None:
            minutes, seconds = divmod(round(left), 60)
            hours, minutes = divmod(minutes, 60)
            parts.append(f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left")
        return parts

    def _scores(self) -> dict[str, str]:
        """Scores with their labels; where there are wins, the win rate of the evaluations stands first."""
        metrics, scores = self.metrics, dict[str, str]()
        against = f" against {self.baseline}" if self.baseline else ""
        team = " per team" if _TEAM in metrics else ""
        if _WON in metrics:
            scores[f"win rate{against}"] = f"{metrics[_WON]:.2f}{self._interval_of('evaluation/win_interval95')}"
        if "mean_return" in metrics:
            scores["return per agent" if team else "return"] = f"{metrics['mean_return']:.1f}"
        if team:
            scores["per team"] = f"{metrics[_TEAM]:.1f}"
        if "episode/win" in metrics:
            scores["win rate in training"] = f"{metrics['episode/win']:.2f}"
        if "rating" in metrics:
            scores["rating"] = f"{metrics['rating']:.1f}±{2 * metrics.get('rating_sigma', 0.0):.1f}"
        if _EVALUATION in metrics:
            capped = f" ({metrics[_CAPPED]:.0f} capped)" if metrics.get(_CAPPED) else ""
            scores[f"evaluation{team}"] = f"{metrics[_EVALUATION]:.1f}{capped}"
        if _DIFFERENCE in metrics:
            scores[f"difference to {self.baseline or 'the baseline'}"] = (
                f"{metrics[_DIFFERENCE]:+.1f}{self._interval_of('evaluation/difference_interval95', '.1f')}"
            )
        if self.best_evaluation is not None:
            scores[f"best{team}"] = f"{self.best_evaluation:.1f}"
        return scores

    def _interval_of(self, name: str, form: str = ".2f") -> str:
        """Return ` [0.77, 0.88]`; empty if the interval is not known."""
        low, high = self.metrics.get(f"{name}_low"), self.metrics.get(f"{name}_high")
        return "" if low is None or high is None else f" [{low:{form}}, {high:{form}}]"

    def _losses(self) -> dict[str, str]:
        return {label: f"{self.metrics[name]:.3g}" for name, label in _SHOWN.items() if name in self.metrics}


def _row(values: Iterable[tuple[str, str]], style: str) -> Text:
    """Names and values in one line, truncated rather than wrapped on a narrow terminal."""
    parts = [part for name, value in values for part in ((f"{name} ", "dim"), (f"{value:<8}", style), "  ")]
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


class StatsLogger:
    """Passes everything to each tracker in turn. Exceptions propagate."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        """Trackers are called in this order."""
        self.trackers = tuple(trackers)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one row at `step` env steps to all."""
        for tracker in self.trackers:
            tracker.log(metrics, step)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log the run's config to all."""
        for tracker in self.trackers:
            tracker.log_params(params)

    def log_artifact(self, path: Path) -> None:
        """Log a file of the run to all."""
        for tracker in self.trackers:
            tracker.log_artifact(path)

    def close(self) -> None:
        """Close all, even if one fails; its exception is raised afterwards."""
        with ExitStack() as stack:
            for tracker in reversed(self.trackers):
                stack.callback(tracker.close)
