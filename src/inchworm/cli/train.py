"""`inchworm train ENV`, `inchworm resume RUN`, and `inchworm ship RUN`, which delivers what a training could not.

What trains is imported only after the first line is printed.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from rich.table import Column, Table

from inchworm.analysis.doctor import diagnose, findings_text
from inchworm.analysis.report import after_training, write_last_report
from inchworm.backends.registry import join_ranks, num_ranks, own_rank
from inchworm.cli.arguments import (
    Changes,
    Metavar,
    RunName,
    TrainOptions,
    UsageError,
    apply_changes,
    check_can_be_trained_in,
    check_policy_of_config,
    named_run,
    parse_with_config,
    resolve_config,
)
from inchworm.cli.main import EVALUATION_FAILED, FAILED, OK, leaving, raise_if_received
from inchworm.config.reading import ConfigBase, config_class
from inchworm.config.sections import Count, TrainingConfig
from inchworm.core.errors import USAGE_ERRORS
from inchworm.env.registry import heuristic_of
from inchworm.evaluate.evaluator import evaluation_opponent
from inchworm.evaluate.stats import EvalStats
from inchworm.run.bundle import Bundle, create_bundle, is_bundle, open_bundle, why_not_alone
from inchworm.run.directory import NOT_BIT_IDENTICAL, REPORT, NotExactWarning, Run, create_run, refuse_code
from inchworm.tracking.console import ConsoleTracker, Terminal, make_terminal
from inchworm.tracking.shipping import check_installed, ship
from inchworm.train.loop import TrainingState, describe_convergence, has_stopped, is_done, reached_limits

if TYPE_CHECKING:
    from inchworm.train.trainer import PPOTrainer

PROG_TRAIN, PROG_RESUME, PROG_SHIP = "inchworm train", "inchworm resume", "inchworm ship"


def run_train(arguments: Sequence[str]) -> int:
    """Train a new run, or continue the one that --run.name names."""
    options, changes = parse_with_config(TrainOptions, arguments, PROG_TRAIN)
    config = resolve_config(options.env, options.config, changes, PROG_TRAIN, options.preset)
    check_can_be_trained_in(config)
    if own_rank() and not options.seeds:
        return follow_run(config, options.env)
    if options.seeds is not None:
        if num_ranks() > 1:
            raise UsageError("--seeds trains each seed in a process of its own, not in several; start it without torchrun")
        return train_several(config, options)
    for name, meaning in {"jobs": "is the number of seeds that are trained at a time", "together": "is about several seeds"}.items():
        if getattr(options, name) is not None:
            raise UsageError(f"--{name} {meaning}; add --seeds N")
    with create_run(config, overwrite=options.overwrite) as run:
        try:
            return train_run(run, open_terminal(run, quiet=options.quiet), profiled=options.profile)
        except USAGE_ERRORS:  # wrong use leaves nothing behind
            run.discard()
            raise


@config_class("--")
class ResumeOptions(ConfigBase):
    """Continue a run. Flags may change settings that do not affect completed training, such as --run.keep-checkpoints; others are refused.

    --total-timesteps is the new target, counted from the start of the run.
    """

    run_name: RunName = ""
    """The run's directory, or its name in runs/."""
    env: Annotated[str | None, Metavar("MODULE:FACTORY")] = None
    """The environment, if it is code to import: repeat what the run was trained with."""
    profile: bool = False
    """Print a table of where the time went at the end."""
    quiet: bool = False
    """Print nothing but errors and warnings."""
    jobs: Count | None = None
    """Seeds that are trained at a time, if the run has several."""


def run_resume(arguments: Sequence[str]) -> int:
    """Continue a run."""
    options, changes = parse_with_config(ResumeOptions, arguments, PROG_RESUME)
    if own_rank():
        return follow_run(TrainingConfig(), options.env)
    if is_bundle(options.run_name):
        return resume_several(changes, options)
    if options.jobs is not None:
        raise UsageError(f"--jobs is the number of seeds that are trained at a time, and {options.run_name} is a single run; leave it out")
    with named_run(options.run_name, PROG_RESUME, env=options.env) as run:
        config = apply_changes(run.config, changes)
        check_policy_of_config(run)
        run.lock()
        run.change_config(config)
        run.check_versions()
        if reason := why_not_alone(run):
            warnings.warn(f"{reason}: {NOT_BIT_IDENTICAL}", NotExactWarning, stacklevel=2)
        return train_run(run, open_terminal(run, quiet=options.quiet), profiled=options.profile)


@config_class("--")
class ShipOptions(ConfigBase):
    """Deliver the metrics and files of a run to trackers: those of its config, changed by --tracking flags. Nothing is delivered twice."""

    run_name: RunName = ""
    """The run's directory, or its name in runs/."""
    env: Annotated[str | None, Metavar("MODULE:FACTORY")] = None
    """The environment, if it is code to import: repeat what the run was trained with."""


def run_ship(arguments: Sequence[str]) -> int:
    """Deliver what trackers have not received yet."""
    options, changes = parse_with_config(ShipOptions, arguments, PROG_SHIP)
    with named_run(options.run_name, PROG_SHIP, env=options.env) as run:
        others = [f"--{section}.{name.replace('_', '-')}" for section in changes if section != "tracking" for name in changes[section]]
        if others:
            raise UsageError(f"{others[0]} changes nothing here; {PROG_SHIP} takes flags that begin with --tracking")
        config = apply_changes(run.config, changes)
        if not config.tracking.sinks:
            raise UsageError(f"no tracker is on in the config of {run.path}; turn one on: {PROG_SHIP} {run.typed} --tracking.tensorboard")
        check_installed(config.tracking)
        left = ship(run.path, config, lambda text: warnings.warn(text, stacklevel=1))
        make_terminal().print(left or f"{run.path} is delivered to {', '.join(config.tracking.sinks)}")
        return FAILED if left else OK


def train_several(config: TrainingConfig, options: TrainOptions) -> int:
    """Train several seeds, new ones or those of the bundle that --run.name names."""
    from inchworm.train.seeds import check_together, choose_seeds

    assert options.seeds is not None
    if options.together:
        check_together(config.policy, config.env, config, jobs=options.jobs)
    if options.profile:
        raise UsageError("--profile is for a single run; leave out --seeds")
    with create_bundle(config, choose_seeds(config, options.seeds), overwrite=options.overwrite) as bundle:
        try:
            return train_seeds_of(bundle, make_terminal(quiet=options.quiet), jobs=options.jobs, together=options.together)
        except USAGE_ERRORS:  # wrong use leaves nothing behind
            bundle.discard()
            raise


def resume_several(changes: Changes, options: ResumeOptions) -> int:
    """Continue the unfinished seeds of a bundle."""
    if options.profile:
        raise UsageError(f"--profile is for a single run, and {options.run_name} has several seeds; leave it out")
    with open_bundle(options.run_name, env=options.env) as bundle:
        config = apply_changes(bundle.config, changes)
        bundle.lock()
        bundle.update(config)
        return train_seeds_of(bundle, make_terminal(quiet=options.quiet), jobs=options.jobs)


def train_seeds_of(bundle: Bundle, terminal: Terminal, *, jobs: int | None, together: bool | None = None) -> int:
    """Train the seeds of a bundle that are not finished, and print the summary. The bundle must be locked."""
    from inchworm.train.seeds import make_view, plan_seeds, train_bundle

    trainer, how = plan_seeds(bundle.config.policy, bundle.config.env, bundle, jobs=jobs, together=together)
    config, count = bundle.config, len(bundle.seeds)
    first, last = bundle.seeds[0], bundle.seeds[-1]
    seeds = f"{count} seeds ({first} to {last})" if last - first == count - 1 else f"the seeds {', '.join(map(str, bundle.seeds))}"
    terminal.print(f"training {config.env.id} for {config.run.total_timesteps:,} steps with {seeds}, run {bundle.path}")
    terminal.print(how)
    try:
        raise_if_received()
        summary = train_bundle(bundle, trainer, make_view(bundle, terminal))
    except KeyboardInterrupt:
        terminal.print(f"interrupted; every seed that had begun is saved. To continue:\n  inchworm resume {bundle.typed}")
        raise
    headings, rows = summary.table()
    table = Table(*(Column(heading, justify="left" if heading == "status" else "right") for heading in headings))
    for row in rows:
        table.add_row(*row)
    terminal.print(table)
    terminal.print(f"score: {summary.score_text()}")
    terminal.print(f"run:   {bundle.path} ({REPORT}, summary.md, summary.json, {bundle.run_path(first).name}, …)")
    errors = make_terminal(stderr=True)
    for score in summary.seeds:
        for failure in score.failures:
            errors.print(f"seed {score.seed}: an evaluation failed: {failure}")
        if score.status == "failed":
            log = f"; traceback: {bundle.log_path(score.seed)}" if bundle.log_path(score.seed).exists() else ""
            errors.print(f"inchworm: seed {score.seed} failed: {score.error}{log}")
    if summary.unfinished:
        terminal.print(f"next:  inchworm resume {bundle.typed}")
        return FAILED
    best = max(summary.seeds, key=lambda score: -math.inf if score.score is None else score.score)
    run = bundle.find_run(best.seed)
    assert run is not None
    terminal.print(f"next:  inchworm evaluate {run.typed} --episodes 100")
    terminal.print(f"       inchworm resume {bundle.typed} --total-timesteps {2 * config.run.total_timesteps}")
    return EVALUATION_FAILED if any(score.failures for score in summary.seeds) else OK


def open_terminal(run: Run, *, quiet: bool) -> Terminal:
    """Return the run's terminal after printing the first line on it."""
    terminal = make_terminal(quiet=quiet)
    config = run.config
    terminal.print(f"training {config.env.id} for {config.run.total_timesteps:,} steps, seed {config.run.seed}, run {run.path}")
    return terminal


def train_run(run: Run, terminal: Terminal, *, profiled: bool) -> int:
    """Train until the run's target, from its newest checkpoint if there is one. The run must be locked."""
    from inchworm.train.profile import Profile, table_text  # late, as in the other functions here: the first line waits for nothing heavy
    from inchworm.train.resolve import resolve_choices
    from inchworm.train.trainer import PPOTrainer, make_console

    profile = Profile() if profiled else None
    console = make_console(run.config, terminal)
    with contextlib.ExitStack() as stack, _interruptions(run, console, terminal, stack) as trainers:
        config, reasons = resolve_choices(run.config.policy, run.config.env, run.config)
        if config != run.config:
            run.save_config(config)  # what was chosen by measuring is chosen once
        for reason in reasons:
            terminal.print(reason)
        ranks = join_ranks(config.run)
        if ranks is not None:
            terminal.print(f"learning in {ranks.count} processes, each with its share of the {config.env.num_envs} copies")
            ranks.broadcast_tree(config.to_dict())
        trainer = stack.enter_context(PPOTrainer(config.policy, config.env, config, run_dir=run))
        trainers.append(trainer)
        state = trainer.state
        if ranks is not None:
            ranks.broadcast_tree(trainer.continues)
        if trainer.continues:
            trainer.load_checkpoint()
            done = is_done(state, config.run) or has_stopped(state, config.convergence)
            if done and (state.scored == state.iteration or not config.evaluation.final_episodes):
                reached = f"has reached its target ({state.env_steps:,} steps in {state.iteration:,} iterations)"
                if has_stopped(state, config.convergence):
                    reached = f"has {describe_convergence(state, config.convergence)}"
                run.restore_config()
                terminal.print(f"the run {run.path} {reached}; to continue:\n  {_longer(run, state)}")
                trainer.release_ranks()
                return OK
            steps = f"{state.env_steps:,} steps"
            where = (
                f"all {steps} are done; running the last evaluation" if done else f"resuming at {steps} of {config.run.total_timesteps:,}"
            )
            terminal.print(where)
        elif trainer.warm_start is not None:
            terminal.print(trainer.warm_start.text)
        terminal.print(trainer.size)
        raise_if_received()
        state.keep_history = False  # metrics.jsonl has it
        history = trainer.train(profile=profile, progress=console)
        if text := describe_convergence(state, config.convergence):
            terminal.print(text)
        findings = _look_back(run, history.stop_reason or "")
        terminal.print(_summary(run, state, evaluation_opponent(config)))
        if findings:
            terminal.print(findings)
        if profile is not None:
            table = Table("section", *(Column(name, justify="right") for name in ("seconds", "share", "calls", "µs a call")))
            table.title = "where the time went"
            for row in table_text(profile.rows()):
                table.add_row(*row)
            terminal.print(table)
        for failure in state.failures:
            make_terminal(stderr=True).print(f"an evaluation failed: {failure}")
        return EVALUATION_FAILED if state.failures else OK


def follow_run(config: TrainingConfig, env: str | None) -> int:
    """Learn together with rank 0, which has the run and its config; print nothing but errors."""
    from inchworm.train.trainer import PPOTrainer

    ranks = join_ranks(config.run.replace(backend="torch") if config.run.backend == "auto" else config.run)
    assert ranks is not None
    config = TrainingConfig.from_dict(ranks.broadcast_tree())
    refuse_code(config, "rank 0's config", env)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank 0 prints them
        with PPOTrainer(config.policy, config.env, config) as trainer:
            if ranks.broadcast_tree():
                trainer.load_checkpoint()
            trainer.train()
    return OK


def _look_back(run: Run, reason: str) -> str:
    """Write the report, and return what the doctor finds; a failure is a warning, because the training is done."""
    with after_training():
        wrong = [finding for finding in diagnose(write_last_report(run.path, reason)) if not finding.note]
        if wrong:
            return f"doctor: something looks wrong (inchworm doctor {run.typed})\n{findings_text(wrong[:3])}"
    return ""


@contextlib.contextmanager
def _interruptions(run: Run, console: ConsoleTracker, terminal: Terminal, stack: contextlib.ExitStack) -> Iterator[list[PPOTrainer]]:
    """Print what is saved when a signal ends the block, whose saver is in the list as soon as there is one."""
    trainers: list[PPOTrainer] = []
    try:
        yield trainers
    except KeyboardInterrupt:
        console.close()
        saved = trainers[0].saver.saved if trainers else None
        if saved is not None and saved.iteration:
            iterations = f"{saved.iteration:,} iteration{'s' if saved.iteration > 1 else ''}"
            text = f"{saved.env_steps:,} steps ({iterations}) are saved. To continue:"
        else:
            text = "nothing was saved by this command. To start it again:"
        terminal.print(f"interrupted; {text}\n  inchworm resume {run.typed}")
        stack.enter_context(leaving())
        raise


def _longer(run: Run, state: TrainingState) -> str:
    """Return the command that continues a run beyond the limits that it has reached."""
    names = {"total_timesteps": "--total-timesteps", "max_iterations": "--run.max-iterations", "max_episodes": "--run.max-episodes"}
    flags = [f"{names[limit]} {2 * done}" for limit, done in reached_limits(state, run.config.run).items()]
    if run.config.convergence.stop and "converged" in state.convergence:
        flags.append("--convergence.target null")
    flags = flags or [f"--total-timesteps {2 * run.config.run.total_timesteps}"]
    return f"inchworm resume {run.typed} {' '.join(flags)}"


def _summary(run: Run, state: TrainingState, opponent: str | None) -> str:
    """Return the score, the run's files, and what to type next."""
    name = run.typed
    names = (*run.policy_files(), *run.policy_files(best=True), REPORT)
    files = ", ".join(file for file in names if (run.path / file).exists())
    lines = [
        f"score: {_score(state, opponent)}",
        f"run:   {run.path} ({files}, metrics.jsonl, checkpoints)",
        f"next:  inchworm evaluate {name} --episodes 100",
        f"       {_longer(run, state)}",
    ]
    if heuristic_of(run.config.env.id) is not None:
        lines.append(f"       inchworm evaluate {name} --opponent heuristic --save-replay game.json, then inchworm replay game.json")
    return "\n".join(lines)


def _score(state: TrainingState, opponent: str | None) -> str:
    """Return the result of the last evaluation."""
    if not state.evaluations:
        return "no evaluation was requested"
    if "failed" in state.evaluations[-1]:
        return "unknown, the last evaluation failed"
    stats = EvalStats.from_dict(state.evaluations[-1])
    limit = " (evaluation.max_episode_steps)" if stats.capped_episodes else ""
    return f"{'' if opponent is None else f'against {opponent}: '}{stats}{limit}"
