"""`inchworm collect RUN`, `inchworm inspect FILE…` and `inchworm learn RUN FILE…`: the two halves of training, with files in between."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from inchworm.backends.corrections import describe_distance, importance_metrics, log_ratios_of
from inchworm.backends.learner import check_rollout
from inchworm.backends.registry import log_probs
from inchworm.cli.arguments import Metavar, RunName, UsageError, check_policy_of_config, named_run, parse
from inchworm.cli.main import OK
from inchworm.collect.collector import RolloutCollector
from inchworm.config.reading import FROM_LIST, ConfigBase, config_class
from inchworm.config.sections import PPOConfig, TrainingConfig
from inchworm.core.errors import BadNumberError, ConfigError, CorruptFileError, InchwormError, RolloutError, SpaceError, printable
from inchworm.core.protocols import Policy
from inchworm.core.seeding import derive_seed
from inchworm.core.types import UpdateStats
from inchworm.env.source import make_vector_env
from inchworm.policy.file import fingerprint
from inchworm.rollout.buffer import check_fits, format_bytes, rollout_bytes
from inchworm.rollout.fields import named_leaves
from inchworm.rollout.files import numbered_paths, rollout_paths, shards_in
from inchworm.rollout.rollout import Rollout
from inchworm.run.directory import Run
from inchworm.run.policies import load_policy, load_run_policy, run_of
from inchworm.selfplay.callback import bind_pool, with_opponents
from inchworm.tracking.console import Terminal, make_terminal
from inchworm.train.offline import load_for, train_from_saved_rollouts
from inchworm.train.trainer import PPOTrainer

PROG_COLLECT, PROG_LEARN, PROG_INSPECT = "inchworm collect", "inchworm learn", "inchworm inspect"
SHOWN = ("loss", "policy_loss", "value_loss", "approx_kl")
"""What is shown of an update."""


@config_class("--")
class CollectOptions(ConfigBase):
    """Collect rollouts with a run's policy, to inspect them or for `inchworm learn`. No learning framework is imported."""

    run_name: RunName = ""
    """The run's directory, or its name in runs/."""
    out: Annotated[str, Metavar("FILE")] = ""
    """The file to write; with --rollouts, the directory."""
    rollouts: int | None = None
    """Write this many rollouts, one after another, as files of a directory."""
    steps: int | None = None
    """Steps of every lane; the run's ppo.rollout_steps by default."""
    num_envs: int | None = None
    """Copies of the environment; the run's env.num_envs by default."""
    seed: int | None = None
    """Seed of episodes and actions; derived from the run's seed and the policy's version by default."""
    best: bool = False
    """Act with the policy of the best evaluation instead of the latest."""
    keep_infos: Annotated[tuple[str, ...], FROM_LIST] = ()
    """Names of numbers in the environment's info that every step keeps; the run's collect.keep_infos by default."""
    env: Annotated[str | None, Metavar("MODULE:FACTORY")] = None
    """The environment, if it is code to import: repeat what the run was trained with."""
    quiet: bool = False
    """Print nothing but errors and warnings."""


def run_collect(arguments: Sequence[str]) -> int:
    """Collect a rollout and save it."""
    options = parse(CollectOptions, arguments, PROG_COLLECT)
    if not options.out:
        raise UsageError("no file is given for the rollout; add --out rollout.safetensors")
    out = Path(options.out)
    try:
        paths = [out] if options.rollouts is None else numbered_paths(out, options.rollouts)
    except RolloutError as error:
        raise UsageError(f"--out, --rollouts: {error}") from None
    if options.rollouts is None and out.is_dir():  # said before collecting, which may take long
        raise UsageError(f"--out {out} is a directory; name a file in it, or add --rollouts and choose a new directory")
    if options.rollouts is None and out.exists():
        try:
            Rollout.load(out, mapped=True)  # only an earlier rollout is replaced, not a policy or whatever else has this name
        except CorruptFileError as error:
            raise UsageError(f"--out {out} exists and is not a rollout; choose another name, or remove it") from error
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
    reads: dict[str, Any] = {"global_state": config.policy.central_critic}
    reads["keep_infos"] = options.keep_infos or config.collect.keep_infos
    with contextlib.closing(make_vector_env(world, seed=seed, **reads)) as made:
        env = with_opponents(made, config)  # as in training; in self-play, the opponent is the policy itself
        bind_pool(env, policy)
        lanes = f"{env.num_lanes} lanes" + ("" if copies == env.num_lanes else f" ({copies} copies)")
        terminal.print(f"collecting {steps:,} steps of {lanes} of {world.id}")
        length = config.ppo.sequence_length_for(steps, memory=True)
        check_fits(
            rollout_bytes(env.observation_space, env.action_space, max(0, steps), env.num_lanes, env.global_state_space, copies),
            what=f"a rollout of {env.num_lanes} lanes x {steps} steps",
            use="use fewer --steps or --num-envs, and more --rollouts",
        )
        collector = RolloutCollector(env, policy, seed=seed, sequence_length=length)
        returns: list[float] = []
        for path in paths:
            rollout = collector.collect(steps)
            try:
                rollout.save(path)
            except OSError as error:
                raise UsageError(f"cannot write --out {options.out}: {error}") from error
            returns += [episode.episode_return for episode in rollout.episodes]
    mean = f", mean return {np.mean(returns):.4g}" if returns else ""
    several = "" if options.rollouts is None else f"{len(paths)} rollouts, "
    terminal.print(
        f"rollout: {out} ({several}{collector.env_steps:,} steps, finished episodes: {len(returns)}{mean})\n"
        f"next:    inchworm learn {run.typed} {shlex.quote(str(out))}"
    )
    return OK


@config_class("--")
class LearnOptions(ConfigBase):
    """Learn from rollout files, starting at the run's newest checkpoint; the result becomes the run's latest policy and checkpoint."""

    run_name: RunName = ""
    """The run's directory, or its name in runs/."""
    files: Annotated[tuple[str, ...], FROM_LIST, Metavar("FILE", positional=True)] = ()
    """Rollouts written by `inchworm collect` or `Rollout.save`, or directories of them; one update each, in this order."""
    epochs: int | None = None
    """Passes over each rollout; the run's ppo.update_epochs by default."""
    learning_rate: float | None = None
    """Step size; the run's ppo.learning_rate by default. Schedules depend on a run's steps and do not apply here. One of several policies
    that has its own ppo settings keeps them."""
    max_staleness: int | None = None
    """Refuse rollouts of weights more than this many updates old, or of another history; the run's ppo.max_staleness by default."""
    min_effective_sample_size: float | None = None
    """Take no steps on a rollout of which a smaller share of rows is effective; the run's ppo.min_effective_sample_size by default."""
    max_behavior_kl: float | None = None
    """Take no steps on a rollout that is further than this KL from the policy; the run's ppo.max_behavior_kl by default."""
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
    given = {
        "update_epochs": options.epochs,
        "learning_rate": options.learning_rate,
        "max_staleness": options.max_staleness,
        "min_effective_sample_size": options.min_effective_sample_size,
        "max_behavior_kl": options.max_behavior_kl,
    }
    ppo = run.config.ppo.replace(
        **{name: value for name, value in given.items() if value is not None},
        learning_rate_schedule="constant",
        clip_schedule="constant",
        ent_schedule="constant",
    )
    policy: Policy | None = None
    with contextlib.suppress(CorruptFileError, ConfigError):  # a damaged or missing file is written again, from the checkpoint
        policy, _ = load_run_policy(run)
    for path in _found(options.files):  # all of them before the run is opened, so that a wrong one leaves it as it is
        load_for(policy, path)
    with run:
        run.lock()
        _learn(run, run.config.replace(ppo=ppo), options.files, make_terminal(quiet=options.quiet))
    return OK


def _found(files: Sequence[str]) -> list[Path]:
    """The rollouts that files and directories stand for."""
    try:
        return rollout_paths(files)
    except RolloutError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"cannot read the rollout {error.filename}: {error}") from error


def _learn(run: Run, config: TrainingConfig, files: Sequence[str], terminal: Terminal) -> None:
    """Update the policy once with each rollout, and save a checkpoint."""
    with PPOTrainer(config.policy, config.env, config, run_dir=run) as trainer:
        trainer.load_checkpoint()

        def show(file: Path, stats: UpdateStats) -> None:
            for tracker in trainer.trackers:
                tracker.log({"iteration": float(trainer.state.iteration), **stats}, trainer.state.env_steps)
            shown = "  ".join(f"{name} {stats[name]:.4g}" for name in SHOWN if name in stats)
            terminal.print(f"{file}: {shown}")

        train_from_saved_rollouts(trainer, files, on_update=show)
        path = trainer.save_checkpoint()
        terminal.print(f"saved {path} and {', '.join(str(run.path / file) for file in run.policy_files())}")


@config_class("--")
class InspectOptions(ConfigBase):
    """Say what is in rollout files, and how far they are from a policy."""

    files: Annotated[tuple[str, ...], FROM_LIST, Metavar("FILE", positional=True)] = ()
    """Rollouts, or directories of them."""
    policy: Annotated[str | None, Metavar("RUN")] = None
    """A run, checkpoint or policy file: also say how old the rollouts are for it, and how far its action probabilities have moved."""


def run_inspect(arguments: Sequence[str]) -> int:
    """Describe each rollout."""
    options = parse(InspectOptions, arguments, PROG_INSPECT)
    if not options.files:
        raise UsageError("no rollout is given; type inchworm inspect rollout.safetensors")
    paths = _found(options.files)
    policy: Any = None
    if options.policy is not None:
        try:
            policy = load_policy(options.policy)
        except FileNotFoundError as error:
            raise UsageError(f"--policy {options.policy}: {error}") from error
    run = None if options.policy is None else run_of(options.policy)
    ppo = PPOConfig() if run is None else run.config.ppo
    for place, path in enumerate(paths):
        rollout = Rollout.load(path, mapped=True)
        files = shards_in(path) if path.is_dir() else [path]
        shards = f"{len(files)} shards, " if path.is_dir() else ""
        size = format_bytes(sum(file.stat().st_size for file in files))
        lines = {"rollout": f"{path} ({shards}{size}, checksum verified)", **describe_rollout(rollout)}
        if policy is not None:
            try:
                lines |= describe_staleness(rollout, policy, ppo)
            except (BadNumberError, RolloutError, SpaceError) as error:
                raise type(error)(f"{path} does not fit the policy {options.policy}: {error}") from error
        text = "\n".join(f"{name + ':':<15}{printable(value)}" for name, value in lines.items())
        sys.stdout.write(("\n" if place else "") + text + "\n")
    return OK


def describe_rollout(rollout: Rollout) -> dict[str, str]:
    """What is in a rollout, in words by heading."""
    total = rollout.num_steps * rollout.num_lanes
    lines = {"size": f"{rollout.num_steps:,} steps x {rollout.num_lanes:,} lanes, {rollout.num_valid:,} of {total:,} rows valid"}
    for field in ("observations", "actions", "policy_state", "global_state", "extras"):
        leaves = named_leaves(rollout[field], field)
        if leaves:
            lines[field] = ", ".join(f"{name.partition('.')[2]} {leaf.dtype}{list(leaf.shape[2:])}".strip() for name, leaf in leaves)
    versions = sorted(set(rollout.policy_version.tolist()))
    prints = sorted({f"{number:016x}" if number else "unknown" for number in rollout.weights_fingerprint.tolist()})
    lines["policy"] = f"version {' to '.join(map(str, dict.fromkeys(versions[:1] + versions[-1:])))}, weights {', '.join(prints[:3])}" + (
        f" and {len(prints) - 3} more" if len(prints) > 3 else ""
    )
    returns, lengths = (np.array([getattr(episode, name) for episode in rollout.episodes]) for name in ("episode_return", "length"))
    lines["episodes"] = f"{len(returns):,} finished"
    if len(returns):
        lines["episodes"] += f", mean length {lengths.mean():.4g}"
        lines["returns"] = f"mean {returns.mean():.4g}, from {returns.min():.4g} to {returns.max():.4g}"
    ended = rollout.valid & rollout.dones
    lines["ends"] = f"{int((ended & rollout.terminated).sum()):,} terminated, {int((ended & rollout.truncated).sum()):,} truncated"
    if rollout.num_valid:
        rewards = rollout.rewards[rollout.valid]
        lines["rewards"] = f"mean {rewards.mean(dtype=np.float64):.4g}, from {rewards.min():.4g} to {rewards.max():.4g}"
    try:
        rollout.validate()
    except InchwormError as error:
        lines["problem"] = str(error)
    return lines


def describe_staleness(rollout: Rollout, policy: Any, ppo: PPOConfig) -> dict[str, str]:
    """How far a policy is from the one that collected a rollout, in words by heading."""
    check_rollout(getattr(policy, "spec", None), rollout)
    versions, known = rollout.policy_version, rollout.weights_fingerprint != 0
    if (rollout.weights_fingerprint == np.uint64(fingerprint(policy.get_weights()))).all():
        age = "0: collected with these weights"
    elif known.any():
        updates = int(policy.policy_version) - int(versions[known].min(initial=2**31 - 1))
        age = f"{updates} update{'' if updates == 1 else 's'}, if both are of one run"
    else:
        age = "unknown"
    if not rollout.num_valid:
        return {"staleness": age}
    log_ratios = log_ratios_of(log_probs(policy, rollout, ppo), rollout)
    metrics = importance_metrics(log_ratios[rollout.valid])
    ratios = np.exp(np.clip(log_ratios[rollout.valid].astype(np.float64), -80, 80))
    shown = ", ".join(f"{share:.0%} {value:.3g}" for share, value in zip((0.05, 0.5, 0.95), np.quantile(ratios, (0.05, 0.5, 0.95))))
    reason = describe_distance(metrics, ppo)
    return {
        "staleness": age,
        "ratios": f"quantiles {shown}; largest distance from 1: {metrics['ratio_error']:.3g}",
        "sample size": f"{metrics['effective_sample_size']:.1%} of the rows are effective",
        "behavior KL": f"{metrics['behavior_kl']:.4g}",
        **({} if reason is None else {"guard": f"inchworm learn would take no steps: {reason}"}),
    }
