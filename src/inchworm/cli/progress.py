"""How far a command is, on stderr, so that what it prints can be piped: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from inchworm.tracking.terminal import Terminal, make_terminal

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(what: str, total: int, *, quiet: bool = False, terminal: Terminal | None = None) -> Iterator[Callable[[int], None]]:
    """A function to be told how many of `total` are done, while the work lasts."""
    terminal = terminal or make_terminal(stderr=True, quiet=quiet)
    if not terminal.is_terminal or terminal.is_dumb_terminal:
        yield _lines(what, total, terminal)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=terminal, transient=True, disable=quiet) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def _lines(what: str, total: int, terminal: Terminal) -> Callable[[int], None]:
    last = time.monotonic()

    def tell(done: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            terminal.print(f"{what} {done:,}/{total:,}", markup=False)

    return tell
