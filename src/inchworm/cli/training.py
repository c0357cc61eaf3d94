"""Training from the command line. Imports everything that trains, so it is loaded only after the first line is printed."""

from __future__ import annotations

import contextlib

from rich.table import Column, Table

from inchworm.cli.main import EVALUATION_FAILED, OK, leaving, raise_if_received
from inchworm.cli.names import as_typed
from inchworm.collect.actors import has_heuristic
from inchworm.config.sections import TrainingConfig
from inchworm.run.checkpoint import TrainingCheckpointer
from inchworm.run.directory import BEST_POLICY, POLICY, Run
from inchworm.selfplay.callback import REPORT, evaluation_opponent
from inchworm.tracking.console import ConsoleTracker, Terminal, make_terminal
from inchworm.train.loop import TrainingState, is_done
from inchworm.train.profile import Profile, table_text
from inchworm.train.resolve import settle
from inchworm.train.trainer import PPOTrainer


def train_run(run: Run, terminal: Terminal, *, profile: Profile | None = None) -> int:
    """Train until the run's target, going on from its newest checkpoint if it has one. The run must be locked."""
    config = _settle(run, terminal)
    has_checkpoint = TrainingCheckpointer(run.checkpoints).latest() is not None
    console = ConsoleTracker(config.run.total_timesteps, title=config.env.id, terminal=terminal)
    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(PPOTrainer(config.policy, config.env, config, trackers=[console], run_dir=run))
        if has_checkpoint:
            trainer.load_checkpoint()
            if is_done(trainer.state, config.run) and not _lacks_score(trainer.state, config):
                _say_done(terminal, run, trainer.state)
                return OK
            terminal.print(_how_far(trainer.state, config), markup=False)
        terminal.print(trainer.size, markup=False)
        raise_if_received()
        console.start(trainer.state.env_steps, trainer.state.best_score)
        try:
            trainer.state.keep_history = False  # metrics.jsonl has it
            trainer.train(profile=profile)
        except KeyboardInterrupt:
            console.close()
            _say_interrupted(terminal, run, trainer.state)
            stack.enter_context(leaving())
            raise
        console.close()
        _say_end(terminal, run, trainer.state)
        if profile is not None:
            terminal.print(_profile_table(profile))
        for failure in trainer.state.failures:
            make_terminal(stderr=True).print(f"an evaluation failed: {failure}", markup=False)
        return EVALUATION_FAILED if trainer.state.failures else OK


def _settle(run: Run, terminal: Terminal) -> TrainingConfig:
    """Choose what the config leaves to us, once: the run's own config then says what was chosen."""
    config, reasons = settle(run.config)
    if config != run.config:
        run.save_config(config)
    for reason in reasons:
        terminal.print(reason, markup=False)
    return config


def _lacks_score(state: TrainingState, config: TrainingConfig) -> bool:
    """Whether a run that has reached its target was stopped before its last evaluation."""
    return bool(config.evaluation.final_episodes) and state.scored != state.iteration


def _how_far(state: TrainingState, config: TrainingConfig) -> str:
    if is_done(state, config.run):
        return f"all {state.env_steps:,} steps are taken; the last evaluation is left"
    return f"going on from {state.env_steps:,} of {config.run.total_timesteps:,} steps"


def _profile_table(profile: Profile) -> Table:
    numbers = [Column(name, justify="right") for name in ("seconds", "share", "calls", "µs a call")]
    table = Table("section", *numbers, title="where the time went")
    for row in table_text(profile.rows()):
        table.add_row(*row)
    return table


def _say_done(terminal: Terminal, run: Run, state: TrainingState) -> None:
    terminal.print(
        f"the run {run.path} has reached its target ({state.env_steps:,} steps in {state.iteration:,} iterations); to go on:\n"
        f"  inchworm resume {as_typed(run)} --total-timesteps {2 * state.env_steps}",
        markup=False,
    )


def _say_interrupted(terminal: Terminal, run: Run, state: TrainingState) -> None:
    terminal.print(
        f"interrupted at {state.env_steps:,} steps; the last complete iteration is saved. To go on:\n  inchworm resume {as_typed(run)}",
        markup=False,
    )


def _say_end(terminal: Terminal, run: Run, state: TrainingState) -> None:
    files = ", ".join(name for name in (POLICY, BEST_POLICY, REPORT) if (run.path / name).exists())
    lines = [
        f"score: {_score(state, run.config)}",
        f"run:   {run.path} ({files}, metrics.jsonl, checkpoints)",
        "next:  " + f"inchworm evaluate {as_typed(run)} --episodes 100",
        "       " + f"inchworm resume {as_typed(run)} --total-timesteps {2 * run.config.run.total_timesteps}",
    ]
    if has_heuristic(run.config.env.id):
        lines.append(
            f"       inchworm evaluate {as_typed(run)} --opponent heuristic --save-replay game.json, then inchworm replay game.json"
        )
    terminal.print("\n".join(lines), markup=False)


def _score(state: TrainingState, config: TrainingConfig) -> str:
    if not state.evaluations:
        return "no evaluation was asked for"
    last = state.evaluations[-1]
    if "failed" in last:
        return "unknown, the last evaluation failed"
    low, high = last["interval95"]
    count = f"{last['episodes']} episode{'s' if last['episodes'] > 1 else ''}"
    opponent = evaluation_opponent(config)
    wins = "" if opponent is None or last["win_rate"] is None else f"; win rate {last['win_rate']:.2f} against {opponent}"
    if low is None or high is None:
        return f"{last['mean_return']:.5g} mean return over {count}{wins}"
    return f"{last['mean_return']:.5g} ± {(high - low) / 2:.4g} mean return over {count} (95 % interval){wins}"
