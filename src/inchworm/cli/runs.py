"""Runs as commands name them, and their policies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inchworm.cli.arguments import UsageError
from inchworm.run import Run, open_run

if TYPE_CHECKING:
    from inchworm.protocols import Policy


def named_run(positional: Sequence[str], prog: str, *, env: str | None = None) -> Run:
    """The run that the first argument names."""
    if not positional or not positional[0]:
        raise UsageError(f"no run is given; type: {prog} RUN, the run's directory or its name in runs/")
    return open_run(positional[0], env=env)


def as_typed(run: Run) -> str:
    """The run as it is typed after a command: with the environment, where that is code that no file may name."""
    env = f" --env {run.config.env.id}" if ":" in run.config.env.id else ""
    return f"{run.name if run.path.parent.name == 'runs' else run.path}{env}"


def load_run_policy(run: Run, *, best: bool = False) -> tuple[Policy, Path]:
    """The run's latest policy, or its best, and where it is."""
    from inchworm.evaluate.players import run_policy

    return run_policy(run, best=best)


def check_one_policy(run: Run) -> None:
    """Refuse to train a run of several policies from here: its config names one, and who plays which lane is said in Python."""
    from inchworm.evaluate.players import parts_of

    parts = parts_of(run)
    if parts:
        raise UsageError(
            f"the run {run.path} trains several policies ({', '.join(parts)}), which a command cannot name; go on in Python: "
            f'PPOTrainer(PolicyMap(…), …, run_dir="{run.path}"), then load_checkpoint() and train()'
        )
