"""`inchworm resume RUN`: goes on from the run's newest checkpoint, to its target or to a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from inchworm.cli.arguments import asks_for_help, parse_over, split
from inchworm.cli.opening import open_terminal
from inchworm.cli.runs import check_one_policy, named_run
from inchworm.config import TrainingConfig

PROG = "inchworm resume"


@dataclass(frozen=True)
class ResumeOptions:
    """Go on with a run. Flags may change what does not touch its past, such as --run.keep-checkpoints; anything else is refused."""

    run_name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = ""
    """The run's directory, or its name in runs/."""
    total_timesteps: int | None = None
    """The new target, counted from the run's beginning."""
    env: Annotated[str | None, tyro.conf.arg(metavar="MODULE:FACTORY")] = None
    """The environment, where it is code to import: repeat what the run was trained with."""
    profile: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """End with a table of where the time went."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Say nothing but errors and warnings."""
    settings: Annotated[TrainingConfig, tyro.conf.arg(name="")] = field(default_factory=TrainingConfig)


def run(arguments: Sequence[str]) -> int:
    """Resume, and say what came of it."""
    if asks_for_help(arguments):
        parse_over(ResumeOptions, arguments, PROG, TrainingConfig())
    positional, values = split(ResumeOptions, arguments)
    with named_run(positional, PROG, env=values.get("--env")) as known:
        options = parse_over(ResumeOptions, arguments, PROG, known.config)
        config = options.settings
        if options.total_timesteps is not None:
            config = config.replace(run=config.run.replace(total_timesteps=options.total_timesteps))
        check_one_policy(known)
        known.lock()
        known.change_config(config)
        known.check_versions()
        terminal = open_terminal(known, quiet=options.quiet)
        from inchworm.cli.training import train_run
        from inchworm.train.profile import Profile

        return train_run(known, terminal, profile=Profile() if options.profile else None)
