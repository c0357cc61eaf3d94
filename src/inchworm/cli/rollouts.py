"""`inchworm collect RUN --out FILE`: the first motion alone. Gathers a rollout with a run's policy and writes it to a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import tyro

from inchworm.cli.arguments import UsageError, parse, split
from inchworm.cli.names import as_typed, check_one_policy, load_run_policy, named_run
from inchworm.collect.collector import RolloutCollector
from inchworm.config.sections import PPOConfig
from inchworm.core.errors import RolloutError, SpaceError
from inchworm.core.protocols import Policy, VectorEnv, lanes_per_copy
from inchworm.core.seeding import derive_seed
from inchworm.core.types import UpdateStats
from inchworm.env.source import make_vector_env
from inchworm.rollout.rollout import Rollout
from inchworm.run.directory import Run
from inchworm.selfplay.callback import bind_pool, with_opponents
from inchworm.tracking.console import make_terminal

if TYPE_CHECKING:
    from inchworm.train.trainer import PPOTrainer


PROG_COLLECT = "inchworm collect"


@dataclass(frozen=True)
class CollectOptions:
    """Gather a rollout with a run's policy, for looking at it or for `inchworm learn`. No learning framework is involved."""

    run_name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = ""
    """The run's directory, or its name in runs/."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """Where the rollout goes."""
    steps: int | None = None
    """Steps of every lane; the run's ppo.rollout_steps by default."""
    num_envs: int | None = None
    """Copies of the environment; the run's env.num_envs by default."""
    seed: int | None = None
    """Of episodes and actions; derived from the run's seed and the policy's version by default."""
    best: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Act with the best policy by evaluation instead of the latest."""
    env: Annotated[str | None, tyro.conf.arg(metavar="MODULE:FACTORY")] = None
    """The environment, where it is code to import: repeat what the run was trained with."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Say nothing but errors and warnings."""


def run_collect(arguments: Sequence[str]) -> int:
    """Collect, save, and say what is in the file."""
    options = parse(CollectOptions, arguments, PROG_COLLECT)
    if not options.out:
        raise UsageError("no file is given for the rollout; add --out rollout.safetensors")
    known = named_run(split(CollectOptions, arguments)[0], PROG_COLLECT, env=options.env)
    policy, _ = load_run_policy(known, best=options.best)
    terminal = make_terminal(quiet=options.quiet)
    steps = known.config.ppo.rollout_steps if options.steps is None else options.steps
    seed = derive_seed(known.config.run.seed, "collect", policy.policy_version) if options.seed is None else options.seed
    env = _env(known, policy, options.num_envs, seed)
    try:
        terminal.print(f"collecting {steps:,} steps of {_lanes(env)} of {known.config.env.id}", markup=False)
        length = known.config.ppo.sequence_length_for(steps, memory=True)
        rollout = RolloutCollector(env, policy, seed=seed, sequence_length=length).collect(steps)
    finally:
        env.close()
    try:
        path = rollout.save(Path(options.out))
    except OSError as error:
        raise UsageError(f"cannot write --out {options.out}: {error}") from error
    terminal.print(f"rollout: {path} ({_summary(rollout)})\nnext:    inchworm learn {as_typed(known)} {path}", markup=False)
    return 0


def _env(known: Run, policy: Policy, num_envs: int | None, seed: int) -> VectorEnv:
    """As in the run's training: with its opponents (of self-play, the policy as it is) and, for a central critic, its global state."""
    run, world = known.config, known.config.env
    copies = world.num_envs if num_envs is None else num_envs
    workers = world.num_workers if world.num_workers == "auto" else min(world.num_workers, copies)
    env = make_vector_env(world.replace(num_envs=copies, num_workers=workers), seed=seed, global_state=run.policy.central_critic)
    try:
        unrated = run.replace(run=run.run.replace(seed=seed), opponent=run.opponent.replace(rating_interval=0))
        with_others = with_opponents(env, unrated)
        bind_pool(with_others, policy)
        return with_others
    except BaseException:  # there are no opponents for it, or Ctrl-C was pressed
        env.close()
        raise


def _lanes(env: VectorEnv) -> str:
    copies = env.num_lanes // lanes_per_copy(env)
    return f"{env.num_lanes} lanes" + ("" if copies == env.num_lanes else f" ({copies} copies)")


def _summary(rollout: Rollout) -> str:
    returns = [episode.episode_return for episode in rollout.episodes]
    told = f", mean return {np.mean(returns):.4g}" if returns else ""
    return f"{rollout.num_valid:,} steps, finished episodes: {len(returns)}{told}"


PROG_LEARN = "inchworm learn"


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


def run_learn(arguments: Sequence[str]) -> int:
    """Learn from each file, then save."""
    options = parse(LearnOptions, arguments, PROG_LEARN)
    positional, _ = split(LearnOptions, arguments)
    known = named_run(positional, PROG_LEARN, env=options.env)
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
