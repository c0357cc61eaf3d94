"""`inchworm train ENV`: a new run, or one that goes on under its given name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from inchworm.cli.arguments import config_from, parse_over, spelled_out
from inchworm.cli.opening import open_terminal
from inchworm.cli.worlds import check_can_be_trained_in
from inchworm.config import TrainingConfig
from inchworm.errors import ConfigError, MissingExtraError, SpaceError
from inchworm.run import create_run

PROG = "inchworm train"


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


def run(arguments: Sequence[str]) -> int:
    """Train, and say what came of it."""
    arguments = spelled_out(arguments)
    options = parse_over(TrainOptions, arguments, PROG, config_from(TrainOptions, arguments, PROG))
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
