"""`inchworm train ENV`, `inchworm resume RUN` and `inchworm ship RUN`.

What trains is imported only after the first line is printed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from rich.table import Column, Table

from inchworm.cli.arguments import ENV, File, Metavar, RunName, apply_changes, parse_with_config, resolve_config
from inchworm.cli.main import EVALUATION_FAILED, FAILED, OK, leaving, raise_if_received
from inchworm.cli.names import check_can_be_trained_in, check_one_policy, named_run
from inchworm.config.reading import ConfigBase, config_class
from inchworm.core.errors import USAGE_ERRORS, ConfigError
from inchworm.env.registry import heuristic_of
from inchworm.run.directory import RATINGS_PAGE, Run, create_run
from inchworm.tracking.console import ConsoleTracker, Terminal, make_terminal

if TYPE_CHECKING:
    from inchworm.run.saver import Saver
    from inchworm.train.loop import TrainingState

PROG_TRAIN, PROG_RESUME, PROG_SHIP = "inchworm train", "inchworm resume", "inchworm ship"


@config_class("--")
class TrainOptions(ConfigBase):
    """Train a policy on an environment. Flags change the environment's preset, or the config of --config.

    A switch may be followed by true or false, and null clears an optional value. Flags that take YAML are typed as
    --env.kwargs '{gravity: 5}' or --env.wrappers '[{name: ClipReward, kwargs: {min_reward: -1}}]'.
    """

    env: Annotated[str, ENV] = ""
    """A Gymnasium id, or package.module:make_env for your own factory."""
    config: File = None
    """Start from this YAML file, as `inchworm config ENV` prints it, instead of from a preset."""
    quiet: bool = False
    """Print nothing but errors and warnings."""
    profile: bool = False
    """Print a table of where the time went at the end."""
    overwrite: bool = False
    """Start over in the directory of --run.name: delete the run that is there."""


def run_train(arguments: Sequence[str]) -> int:
    """Train a new run, or continue the one that --run.name names."""
    options, changes = parse_with_config(TrainOptions, arguments, PROG_TRAIN)
    config = resolve_config(options.env, options.config, changes, PROG_TRAIN)
    check_can_be_trained_in(config)
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


def run_resume(arguments: Sequence[str]) -> int:
    """Continue a run."""
    options, changes = parse_with_config(ResumeOptions, arguments, PROG_RESUME)
    with named_run(options.run_name, PROG_RESUME, env=options.env) as run:
        config = apply_changes(run.config, changes)
        check_one_policy(run)
        run.lock()
        run.change_config(config)
        run.check_versions()
        return train_run(run, open_terminal(run, quiet=options.quiet), profiled=options.profile)


@config_class("--")
class ShipOptions(ConfigBase):
    """Deliver the metrics and files of a run to trackers: those of its config, or those that flags turn on. Nothing is delivered twice."""

    run_name: RunName = ""
    """The run's directory, or its name in runs/."""
    env: Annotated[str | None, Metavar("MODULE:FACTORY")] = None
    """The environment, if it is code to import: repeat what the run was trained with."""


def run_ship(arguments: Sequence[str]) -> int:
    """Deliver what trackers have not received yet."""
    from inchworm.tracking.shipping import ship
    from inchworm.tracking.sinks import check_installed

    options, changes = parse_with_config(ShipOptions, arguments, PROG_SHIP)
    with named_run(options.run_name, PROG_SHIP, env=options.env) as run:
        config = apply_changes(run.config, changes)
        tracking = config.tracking
        if not tracking.sinks:
            raise ConfigError(f"no tracker is on in the config of {run.path}; turn one on: {PROG_SHIP} {run.typed} --tracking.tensorboard")
        check_installed(tracking)
        left = ship(run.path, config, lambda text: make_terminal(stderr=True).print(f"warning: {text}", markup=False))
        make_terminal().print(left or f"{run.path} is delivered to {', '.join(tracking.sinks)}", markup=False)
        return FAILED if left else OK


def open_terminal(run: Run, *, quiet: bool) -> Terminal:
    """Return the run's terminal after printing the first line on it."""
    terminal = make_terminal(quiet=quiet)
    config = run.config
    terminal.print(
        f"training {config.env.id} for {config.run.total_timesteps:,} steps, seed {config.run.seed}, run {run.path}", markup=False
    )
    return terminal


def train_run(run: Run, terminal: Terminal, *, profiled: bool) -> int:
    """Train until the run's target, from its newest checkpoint if there is one. The run must be locked."""
    from inchworm.evaluate.evaluator import evaluation_opponent
    from inchworm.run.checkpoint import TrainingCheckpointer
    from inchworm.train.convergence import describe_convergence, has_converged
    from inchworm.train.loop import is_done
    from inchworm.train.profile import Profile, table_text
    from inchworm.train.resolve import resolve_choices
    from inchworm.train.trainer import PPOTrainer, make_console

    profile = Profile() if profiled else None
    console = make_console(run.config, terminal)
    with contextlib.ExitStack() as stack, _interruptions(run, console, terminal, stack) as savers:
        config, reasons = resolve_choices(run.config.policy, run.config.env, run.config)
        if config != run.config:
            run.save_config(config)  # what was chosen by measuring is chosen once
        for reason in reasons:
            terminal.print(reason, markup=False)
        has_checkpoint = TrainingCheckpointer(run.checkpoints).latest() is not None
        trainer = stack.enter_context(PPOTrainer(config.policy, config.env, config, run_dir=run))
        savers.append(trainer.saver)
        state = trainer.state
        if has_checkpoint:
            trainer.load_checkpoint()
            done = is_done(state, config.run) or has_converged(state, config.convergence)
            if done and (state.scored == state.iteration or not config.evaluation.final_episodes):
                reached = f"has reached its target ({state.env_steps:,} steps in {state.iteration:,} iterations)"
                if has_converged(state, config.convergence):
                    reached = f"has {describe_convergence(state, config.convergence)}"
                terminal.print(f"the run {run.path} {reached}; to continue:\n  {_longer(run, state)}", markup=False)
                return OK
            steps = f"{state.env_steps:,} steps"
            where = (
                f"all {steps} are done; running the last evaluation" if done else f"resuming at {steps} of {config.run.total_timesteps:,}"
            )
            terminal.print(where, markup=False)
        elif trainer.warm_start is not None:
            terminal.print(trainer.warm_start, markup=False)
        terminal.print(trainer.size, markup=False)
        raise_if_received()
        state.keep_history = False  # metrics.jsonl has it
        trainer.train(profile=profile, progress=console)
        if text := describe_convergence(state, config.convergence):
            terminal.print(text, markup=False)
        terminal.print(_summary(run, state, evaluation_opponent(config)), markup=False)
        if profile is not None:
            table = Table("section", *(Column(name, justify="right") for name in ("seconds", "share", "calls", "µs a call")))
            table.title = "where the time went"
            for row in table_text(profile.rows()):
                table.add_row(*row)
            terminal.print(table)
        for failure in state.failures:
            make_terminal(stderr=True).print(f"an evaluation failed: {failure}", markup=False)
        return EVALUATION_FAILED if state.failures else OK


@contextlib.contextmanager
def _interruptions(run: Run, console: ConsoleTracker, terminal: Terminal, stack: contextlib.ExitStack) -> Iterator[list[Saver]]:
    """Print what is saved when a signal ends the block, whose saver is in the list as soon as there is one."""
    savers: list[Saver] = []
    try:
        yield savers
    except KeyboardInterrupt:
        console.close()
        saved = savers[0].saved if savers else None
        if saved is not None:
            text = f"{saved.env_steps:,} steps ({saved.iteration:,} iterations) are saved. To continue:"
        else:
            text = "nothing was saved by this command. To start it again:"
        terminal.print(f"interrupted; {text}\n  inchworm resume {run.typed}", markup=False)
        stack.enter_context(leaving())
        raise


def _longer(run: Run, state: TrainingState) -> str:
    """Return the command that continues a run beyond the limits that it has reached."""
    from inchworm.train.loop import reached_limits

    names = {"total_timesteps": "--total-timesteps", "max_iterations": "--run.max-iterations", "max_episodes": "--run.max-episodes"}
    flags = [f"{names[limit]} {2 * done}" for limit, done in reached_limits(state, run.config.run).items()]
    if "converged" in state.convergence:
        flags.append("--convergence.target null")
    flags = flags or [f"--total-timesteps {2 * run.config.run.total_timesteps}"]
    return f"inchworm resume {run.typed} {' '.join(flags)}"


def _summary(run: Run, state: TrainingState, opponent: str | None) -> str:
    """Return the score, the run's files, and what to type next."""
    from inchworm.run.policies import policy_file_names

    name = run.typed
    names = (*policy_file_names(run), *policy_file_names(run, best=True), RATINGS_PAGE)
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
    """Return the result of the last evaluation: against an opponent the win rate first, then the mean return, both with intervals."""
    if not state.evaluations:
        return "no evaluation was requested"
    last = state.evaluations[-1]
    if "failed" in last:
        return "unknown, the last evaluation failed"
    count = f"{last['episodes']} episode{'s' if last['episodes'] > 1 else ''}"
    low, high = last["interval95"]
    spread = "" if low is None or high is None else f" ± {(high - low) / 2:.4g}"
    label = "mean return" if last["agents"] == 1 else f"mean team return, {last['mean_agent_return']:.5g} per agent,"
    score = f"{last['mean_return']:.5g}{spread} {label} over {count}{' (95 % interval)' if spread else ''}"
    if opponent is not None and last["win_rate"] is not None:
        interval = "" if last["win_interval95"] is None else " [{:.2f}, {:.2f}]".format(*last["win_interval95"])
        score = f"win rate {last['win_rate']:.2f}{interval} against {opponent}; {score}"
    if last["baseline"] is not None:
        low, high = last["difference_interval95"]
        interval = "" if low is None or high is None else f" [{low:.5g}, {high:.5g}]"
        score += f"; difference to {last['baseline']} on the same seeds {last['difference']:+.5g}{interval}"
    if last["capped_episodes"]:
        score += f"; {last['capped_episodes']} of the episodes did not end and were cut off (evaluation.max_episode_steps)"
    return score
