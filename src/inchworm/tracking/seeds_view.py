"""Progress of several seeds: a live view in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from inchworm.core.errors import printable
from inchworm.core.types import SeedEvent
from inchworm.tracking.console import Terminal, TerminalScreen, format_time, grid, make_terminal

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
