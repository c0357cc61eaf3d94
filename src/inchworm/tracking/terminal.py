"""The terminal that the project writes to. Serves the console tracker and the command line."""

from __future__ import annotations

import os
from typing import TextIO

from rich.console import Console


class Terminal(Console):
    """A rich console that falls silent when its reader has gone (`| head`): a run does not end because nobody is watching."""

    def on_broken_pipe(self) -> None:
        """Write nothing any more, and give the interpreter a harmless place to flush to at its end."""
        self.quiet = True
        detach(self.file)


def detach(stream: object) -> None:
    """Point a stream whose reader has gone at nothing, so that flushing it raises no second time."""
    try:
        target = stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):  # captured or in-memory streams have no descriptor, and need none
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, target)
    os.close(nothing)


def make_terminal(*, quiet: bool = False, file: TextIO | None = None, stderr: bool = False) -> Terminal:
    """The terminal of this process, or one that writes to `file`. NO_COLOR and TERM=dumb are honoured."""
    return Terminal(file=file, stderr=stderr, quiet=quiet, highlight=False, soft_wrap=True)
