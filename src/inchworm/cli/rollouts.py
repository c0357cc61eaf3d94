"""`inchworm collect RUN` and `inchworm learn RUN FILE…`: the two halves of training, with rollout files in between."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np

from inchworm.cli.arguments import Metavar, RunName, UsageError, check_policy_of_config, named_run, parse
from inchworm.cli.main import OK
from inchworm.collect.collector import RolloutCollector
from inchworm.config.reading import FROM_LIST, ConfigBase, config_class
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import RolloutError, SpaceError
from inchworm.core.seeding import derive_seed
from inchworm.env.source import make_vector_env
from inchworm.rollout.rollout import Rollout
from inchworm.run.directory import Run
from inchworm.run.policies import load_run_policy
from inchworm.selfplay.callback import bind_pool, with_opponents
from inchworm.tracking.console import Terminal, make_terminal

PROG_COLLECT, PROG_LEARN = "inchworm collect", "inchworm learn"


@config_class("--")
class CollectOptions(ConfigBase):
    """Collect a rollout with a run's policy, to inspect it or for `inchworm learn`. No learning framework is imported."""

    run_name: RunName = ""
    """The run's directory, or its name in runs/."""
    out: Annotated[str, Metavar("FILE")] = ""
    """The file to write."""
    steps: int | None = None
    """Steps of every lane; the run's ppo.rollout_steps by default."""
    num_envs: int | None = None
    """Copies of the environment; the run's env.num_envs by default."""
    seed: int | None = None
    """Seed of episodes and actions; derived from the run's seed and the policy's version by default."""
    best: bool = False
    """Act with the policy of the best evaluation instead of the latest."""
    env: Annotated[str | None, Metavar("MODULE:FACTORY")] = None
    """The environment, if it is code to import: repeat what the run was trained with."""
    quiet: bool = False
    """Print nothing but errors and warnings."""


def run_collect(arguments: Sequence[str]) -> int:
    """Collect a rollout and save it."""
    options = parse(CollectOptions, arguments, PROG_COLLECT)
    if not options.out:
        raise UsageError("no file is given for the rollout; add --out rollout.safetensors")
    run = named_run(options.run_name, PROG_COLLECT, env=options.env)
    policy, _ = load_run_policy(run, best=options.best)
    terminal = make_terminal(quiet=options.quiet)
    steps = run.config.ppo.rollout_steps if options.steps is None else options.steps
    seed = derive_seed(run.config.run.seed, "collect", policy.policy_version) if options.seed is None else options.seed
    world = run.config.env
    copies = world.num_envs if options.num_envs is None else options.num_envs
    workers = world.num_workers if world.num_workers == "auto" else min(world.num_workers, copies)
    world = world.replace(num_envs=copies, num_workers=workers)
    opponent = run.config.opponent.replace(rating_interval=0)
    config = run.config.replace(env=world, run=run.config.run.replace(seed=seed), opponent=opponent)
    with contextlib.closing(make_vector_env(world, seed=seed, global_state=config.policy.central_critic)) as made:
        env = with_opponents(made, config)  # as in training; in self-play, the opponent is the policy itself
        bind_pool(env, policy)
        lanes = f"{env.num_lanes} lanes" + ("" if copies == env.num_lanes else f" ({copies} copies)")
        terminal.print(f"collecting {steps:,} steps of {lanes} of {world.id}")
        length = config.ppo.sequence_length_for(steps, memory=True)
        rollout = RolloutCollector(env, policy, seed=seed, sequence_length=length).collect(steps)
    try:
        path = rollout.save(Path(options.out))
    except OSError as error:
        raise UsageError(f"cannot write --out {options.out}: {error}") from error
    returns = [episode.episode_return for episode in rollout.episodes]
    mean = f", mean return {np.mean(returns):.4g}" if returns else ""
    terminal.print(
        f"rollout: {path} ({rollout.num_valid:,} steps, finished episodes: {len(returns)}{mean})\n"
        f"next:    inchworm learn {run.typed} {shlex.quote(str(path))}"
    )
    return OK


@config_class("--")
class LearnOptions(ConfigBase):
    """Learn from rollout files, starting at the run's newest checkpoint; the result becomes the run's latest policy and checkpoint."""

    run_name: RunName = ""
    """The run's directory, or its name in runs/."""
    files: Annotated[tuple[str, ...], FROM_LIST, Metavar("FILE", positional=True)] = ()
    """Rollouts written by `inchworm collect` or `Rollout.save`; one update each, in this order."""
    epochs: int | None = None
    """Passes over each rollout; the run's ppo.update_epochs by default."""
    learning_rate: float | None = None
    """Step size; the run's ppo.learning_rate by default. Schedules depend on a run's steps and do not apply here. One of several policies
    that has its own ppo settings keeps them."""
    env: Annotated[str | None, Metavar("MODULE:FACTORY")] = None
    """The environment, if it is code to import: repeat what the run was trained with."""
    quiet: bool = False
    """Print nothing but errors and warnings."""


def run_learn(arguments: Sequence[str]) -> int:
    """Learn from each file, then save."""
    options = parse(LearnOptions, arguments, PROG_LEARN)
    run = named_run(options.run_name, PROG_LEARN, env=options.env)
    if not options.files:
        raise UsageError(f"no rollout is given; inchworm collect {run.typed} --out FILE makes one")
    check_policy_of_config(run)
    ppo = run.config.ppo
    ppo = ppo.replace(
        update_epochs=ppo.update_epochs if options.epochs is None else options.epochs,
        learning_rate=ppo.learning_rate if options.learning_rate is None else options.learning_rate,
        learning_rate_schedule="constant",
        clip_schedule="constant",
        ent_schedule="constant",
    )
    rollouts: dict[str, Rollout] = {}
    for file in options.files:  # all of them first: a wrong name must not leave half the work done
        try:
            rollouts[file] = Rollout.load(file)
        except OSError as error:
            raise UsageError(f"cannot read the rollout {file}: {error}") from error
    with run:
        run.lock()
        _learn(run, run.config.replace(ppo=ppo), rollouts, make_terminal(quiet=options.quiet))
    return OK


def _learn(run: Run, config: TrainingConfig, rollouts: dict[str, Rollout], terminal: Terminal) -> None:
    """Update the policy once with each rollout, and save a checkpoint."""
    from inchworm.train.trainer import PPOTrainer  # so that `inchworm collect` imports no trainer

    with PPOTrainer(config.policy, config.env, config, run_dir=run) as trainer:
        trainer.load_checkpoint()
        for file, rollout in rollouts.items():
            try:
                stats = trainer.learn(rollout)
            except (RolloutError, SpaceError) as error:
                raise type(error)(f"{file} does not fit the run {run.path}: {error}") from error
            for tracker in trainer.trackers:
                tracker.log({"iteration": float(trainer.state.iteration), **stats}, trainer.state.env_steps)
            shown = "  ".join(f"{name} {stats[name]:.4g}" for name in ("loss", "policy_loss", "value_loss", "approx_kl") if name in stats)
            terminal.print(f"{file}: {shown}")
        path = trainer.save_checkpoint()
        terminal.print(f"saved {path} and {', '.join(str(run.path / file) for file in run.policy_files())}")
