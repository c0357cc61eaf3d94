"""The terminal goes on when nobody can read it any more."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.progress import Progress

from inchworm.tracking.console import make_terminal

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_silences_the_terminal_and_raises_nothing() -> None:
    with FULL.open("w") as file:
        terminal = make_terminal(file=file)
        terminal.print("x" * 100_000)
        terminal.print("y")
        assert terminal.quiet


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_progress_bar_on_a_full_disk_raises_nothing() -> None:
    with FULL.open("w") as file, Progress(console=make_terminal(file=file)) as progress:
        task = progress.add_task("steps", total=2)
        progress.advance(task)
