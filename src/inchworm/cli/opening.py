"""The first line of a run, which must be there at once: nothing heavy is imported for it."""

from __future__ import annotations

from inchworm.run import Run
from inchworm.tracking.terminal import Terminal, make_terminal


def open_terminal(run: Run, *, quiet: bool) -> Terminal:
    """The run's terminal, with what is about to happen said on it."""
    terminal = make_terminal(quiet=quiet)
    config = run.config
    terminal.print(
        f"training {config.env.id} for {config.run.total_timesteps:,} steps, seed {config.run.seed}, run {run.path}", markup=False
    )
    return terminal
