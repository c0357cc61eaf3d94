"""`inchworm check-env ENV`: what in an environment would break training, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from inchworm.cli.arguments import UsageError, parse, take_yaml_flags
from inchworm.cli.main import FAILED, OK
from inchworm.cli.worlds import made
from inchworm.config import EnvConfig, TrainingConfig
from inchworm.env.checker import check_env
from inchworm.tracking.terminal import make_terminal

PROG = "inchworm check-env"


@dataclass(frozen=True)
class CheckOptions:
    """Look for what would break training: spaces that lie, bad numbers, lost observations, randomness that no seed governs.

    Two more flags take YAML: --env.kwargs '{gravity: 5}' and --env.wrappers '[{name: ClipReward, kwargs: {min_reward: -1}}]'.
    """

    env_id: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")] = ""
    """A Gymnasium id, or package.module:make_env for a factory of yours."""
    max_episode_steps: int | None = None
    """As env.max_episode_steps of a run."""
    frame_stack: int = 1
    """As env.frame_stack of a run."""
    atari: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """As env.atari of a run."""


def run(arguments: Sequence[str]) -> int:
    """Check, and say what was found; problems make the exit code 1."""
    rest, config = take_yaml_flags(arguments, TrainingConfig())
    options = parse(CheckOptions, rest, PROG)
    if not options.env_id:
        raise UsageError(f"no environment is given; type: {PROG} CartPole-v1")
    env = config.env.replace(
        id=options.env_id, max_episode_steps=options.max_episode_steps, frame_stack=options.frame_stack, atari=options.atari
    )
    return _report(env)


def _report(config: EnvConfig) -> int:
    terminal = make_terminal()
    env = made(config)
    try:
        report = check_env(env)
    finally:
        env.close()
    for problem in report.problems:
        terminal.print(f"problem: {problem}", markup=False)
    for note in report.notes:
        terminal.print(f"note: {note}", markup=False)
    count = len(report.problems)
    found = "nothing that would break training" if report.ok else f"{count} problem{'s' if count > 1 else ''}"
    terminal.print(f"{config.id}: {found}", markup=False)
    return OK if report.ok else FAILED
