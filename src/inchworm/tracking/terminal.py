"""The terminal that the project writes to. Serves the console tracker and the command line."""

from __future__ import annotations

import os
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text


class Terminal(Console):
    """A rich console that falls silent when its reader has gone (`| head`) or its disk is full: a run does not end for lack of watchers."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Text as it is: what names and messages from elsewhere hold must not steer the terminal."""
        return super().render_str(printable(text), **options)

    def _check_buffer(self) -> None:
        """Where rich writes; it handles a reader that has gone, but not a file on a full disk."""
        try:
            super()._check_buffer()
        except OSError:
            self._buffer.clear()
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Write nothing any more, and give the interpreter a harmless place to flush to at its end."""
        self.quiet = True
        detach(self.file)


def printable(text: str) -> str:
    """Text without characters that a terminal obeys, such as the escape that begins a colour; they are shown as `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


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
    return Terminal(file=file, stderr=stderr, quiet=quiet, highlight=False, emoji=False, soft_wrap=True)
