"""`inchworm learn RUN FILE…`: the second motion alone. Draws a run's policy up to rollouts from files, whoever collected them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from inchworm.cli.arguments import UsageError, parse, split
from inchworm.cli.runs import check_one_policy, named_run
from inchworm.config import PPOConfig
from inchworm.errors import RolloutError, SpaceError
from inchworm.rollout.rollout import Rollout
from inchworm.run import Run
from inchworm.tracking.terminal import make_terminal
from inchworm.types import UpdateStats

if TYPE_CHECKING:
    from inchworm.train.trainer import PPOTrainer

PROG = "inchworm learn"


@dataclass(frozen=True)
class LearnOptions:
    """Learn from saved rollouts, from the run's newest checkpoint on; the new weights become the run's latest policy and checkpoint."""

    run_name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = ""
    """The run's directory, or its name in runs/."""
    files: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE")] = ()
    """Rollouts, as `inchworm collect` or `Rollout.save` wrote them; one update each, in this order."""
    epochs: int | None = None
    """Passes over each rollout; the run's ppo.update_epochs by default."""
    learning_rate: float | None = None
    """Step size; the run's ppo.learning_rate by default. Schedules count a run's steps and do not apply here."""
    env: Annotated[str | None, tyro.conf.arg(metavar="MODULE:FACTORY")] = None
    """The environment, where it is code to import: repeat what the run was trained with."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Say nothing but errors and warnings."""


def run(arguments: Sequence[str]) -> int:
    """Learn from each file, then save."""
    options = parse(LearnOptions, arguments, PROG)
    positional, _ = split(LearnOptions, arguments)
    known = named_run(positional, PROG, env=options.env)
    if not options.files:
        raise UsageError(f"no rollout is given; inchworm collect {known.path} --out FILE makes one")
    check_one_policy(known)
    _for_files(known.config.ppo, options)  # complains of settings that make no sense
    rollouts = {file: _load(file) for file in options.files}  # all of them first: a wrong name must not leave half the work done
    with known:
        known.lock()
        return _learn(known, rollouts, options)


def _learned(trainer: PPOTrainer, file: str, rollout: Rollout) -> UpdateStats:
    """One update; what does not fit is told with the file's name."""
    try:
        return trainer.learn(rollout)
    except (RolloutError, SpaceError) as error:
        raise type(error)(f"{file} does not fit the run {trainer.run_dir}: {error}") from error


def _load(file: str) -> Rollout:
    try:
        return Rollout.load(file)
    except OSError as error:
        raise UsageError(f"cannot read the rollout {file}: {error}") from error


def _for_files(ppo: PPOConfig, options: LearnOptions) -> PPOConfig:
    """The run's settings without its schedules: those end with the run's steps, which learning from files does not take."""
    return ppo.replace(
        update_epochs=ppo.update_epochs if options.epochs is None else options.epochs,
        learning_rate=ppo.learning_rate if options.learning_rate is None else options.learning_rate,
        learning_rate_schedule="constant",
        clip_schedule="constant",
        ent_schedule="constant",
    )


def _learn(known: Run, rollouts: dict[str, Rollout], options: LearnOptions) -> int:
    from inchworm.train.trainer import PPOTrainer

    terminal = make_terminal(quiet=options.quiet)
    config = known.config.replace(ppo=_for_files(known.config.ppo, options))
    with PPOTrainer(config.policy, config.env, config, run_dir=known) as trainer:
        trainer.load_checkpoint()
        for file, rollout in rollouts.items():
            stats = _learned(trainer, file, rollout)
            trainer.state.iteration += 1  # one more update than the checkpoint it came from
            for tracker in trainer.trackers:
                tracker.log({"iteration": float(trainer.state.iteration), **stats}, trainer.state.env_steps)
            shown = "  ".join(f"{name} {stats[name]:.4g}" for name in ("loss", "policy_loss", "value_loss", "approx_kl") if name in stats)
            terminal.print(f"{file}: {shown}", markup=False)
        path = trainer.save_checkpoint()
        terminal.print(f"saved {path} and {known.policy_path()}", markup=False)
    return 0
