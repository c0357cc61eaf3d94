"""`inchworm train ENV`: a new run, or one that goes on under its given name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from inchworm.cli.arguments import asks_for_help, config_from, parse_over, spelled_out, split
from inchworm.cli.names import check_can_be_trained_in, check_one_policy, named_run
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import ConfigError, MissingExtraError, SpaceError
from inchworm.run.directory import Run, create_run
from inchworm.tracking.console import Terminal, make_terminal


def open_terminal(run: Run, *, quiet: bool) -> Terminal:
    """The run's terminal, with what is about to happen said on it."""
    terminal = make_terminal(quiet=quiet)
    config = run.config
    terminal.print(
        f"training {config.env.id} for {config.run.total_timesteps:,} steps, seed {config.run.seed}, run {run.path}", markup=False
    )
    return terminal


PROG_TRAIN, PROG_RESUME = "inchworm train", "inchworm resume"


@dataclass(frozen=True)
class TrainOptions:
    """Train a policy on an environment. Flags change the environment's preset, or the config of --config.

    --backend, --seed, --total-timesteps, --num-envs, --num-workers and --compile may be typed without their section.
    A switch such as --policy.central-critic may be followed by true or false. Two more flags take YAML: --env.kwargs '{gravity: 5}'
    and --env.wrappers '[{name: ClipReward, kwargs: {min_reward: -1}}]'.
    """

    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")] = ""
    """A Gymnasium id, or package.module:make_env for a factory of yours."""
    config: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """Start from this YAML file, as `inchworm config ENV` prints it, instead of from a preset."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Say nothing but errors and warnings."""
    profile: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """End with a table of where the time went."""
    settings: Annotated[TrainingConfig, tyro.conf.arg(name="")] = field(default_factory=TrainingConfig)


def run_train(arguments: Sequence[str]) -> int:
    """Train, and say what came of it."""
    arguments = spelled_out(arguments)
    options = parse_over(TrainOptions, arguments, PROG_TRAIN, config_from(TrainOptions, arguments, PROG_TRAIN))
    check_can_be_trained_in(options.settings)
    with create_run(options.settings) as new:
        terminal = open_terminal(new, quiet=options.quiet)
        from inchworm.cli.training import train_run  # all that trains: only once the first line is there
        from inchworm.train.profile import Profile

        try:
            return train_run(new, terminal, profile=Profile() if options.profile else None)
        except (ConfigError, SpaceError, MissingExtraError):  # what the command line asked for cannot be: it leaves nothing behind
            new.discard()
            raise


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


def run_resume(arguments: Sequence[str]) -> int:
    """Resume, and say what came of it."""
    if asks_for_help(arguments):
        parse_over(ResumeOptions, arguments, PROG_RESUME, TrainingConfig())
    positional, values = split(ResumeOptions, arguments)
    with named_run(positional, PROG_RESUME, env=values.get("--env")) as known:
        options = parse_over(ResumeOptions, arguments, PROG_RESUME, known.config)
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
