"""`inchworm compare ENV --change ppo.gae_lambda=0.9` and `inchworm sweep ENV`: commands that train many runs. `analysis` does the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from rich.table import Column, Table

from inchworm.analysis import sweep as analysis
from inchworm.analysis.compare import Comparison, check_settings, compare_settings, find_comparison, read_comparison
from inchworm.analysis.search_space import check_field, default_space, read_space
from inchworm.analysis.sweep import BEST, find_sweep, read_sweep_config
from inchworm.analysis.sweep_results import OBJECTIVES, Sweep, SweepConfig, TrialResult, show_value, trial_rows
from inchworm.cli.arguments import (
    Changes,
    File,
    Metavar,
    Preset,
    UsageError,
    apply_changes,
    check_can_be_trained_in,
    parse_with_config,
    resolve_config,
)
from inchworm.cli.main import FAILED, OK
from inchworm.config.reading import FROM_LIST, ConfigBase, config_class
from inchworm.config.sections import Count, TrainingConfig
from inchworm.run.directory import make_run_directory
from inchworm.tracking.console import SeedsView, Terminal, make_terminal

PROG_COMPARE = "inchworm compare"


@config_class("--")
class CompareOptions(ConfigBase):
    """Compare two settings: pairs of runs with the same seeds, until a test shows a difference or all seeds are done.

    The other flags are those of inchworm train, and describe both settings. Give the directory of a comparison, or its name in runs/, to
    continue it.
    """

    env: Annotated[str, Metavar("ENV", positional=True)] = ""
    """A Gymnasium id, or package.module:make_env for your own factory; or a comparison that is to be continued."""
    change: Annotated[tuple[str, ...], FROM_LIST, Metavar("SETTING=VALUE …", repeated=True)] = ()
    """What differs in the second setting, such as ppo.gae_lambda=0.9; may be given several times."""
    seeds: Count = 8
    """The most pairs of runs, with the seeds from --run.seed on."""
    config: File = None
    """Start from this YAML file, as `inchworm config ENV` prints it, instead of from a preset."""
    preset: Preset = None
    """Start from a config of this size instead of from the environment's preset."""
    jobs: Count | None = None
    """Runs that are trained at a time, in a process each; by default as many as there are cores."""
    together: bool | None = None
    """Train all seeds of a setting at once in one compiled program, with --backend jax and a JAX-native environment."""
    overwrite: bool = False
    """Start over in the directory of --run.name: delete the comparison that is there."""
    quiet: bool = False
    """Print nothing but errors and warnings."""


def run_compare(arguments: Sequence[str]) -> int:
    """Compare, or continue a comparison, and print the answer."""
    options, changes = parse_with_config(CompareOptions, arguments, PROG_COMPARE)
    path = find_comparison(options.env)
    seeds = options.seeds
    if path is not None:
        if options.change or changes or options.config or options.preset or options.overwrite:
            raise UsageError(f"{options.env} is a comparison, which continues as it began; leave out other flags than --jobs and --quiet")
        found = read_comparison(path)
        base, changed, seeds = found.base, found.changed, found.seeds
    else:
        if not options.change:
            raise UsageError(f"no change is given; type: {PROG_COMPARE} ENV --change ppo.gae_lambda=0.9")
        base = resolve_config(options.env, options.config, changes, PROG_COMPARE, options.preset)
        changed = apply_changes(base, read_changes(options.change))
        check_settings(base, changed, seeds)
        for config in (base, changed):
            check_can_be_trained_in(config)
        path = make_run_directory(base)
    placed = {"name": path.name, "directory": str(path.parent)}
    base, changed = (config.replace(run=config.run.replace(**placed)) for config in (base, changed))
    terminal = make_terminal(quiet=options.quiet)

    def make_view(name: str, seeds: Sequence[int], config: TrainingConfig) -> SeedsView:
        terminal.print(f"{name}: seed{'' if len(seeds) == 1 else 's'} {seeds[0]}" + (f" to {seeds[-1]}" if len(seeds) > 1 else ""))
        return SeedsView(seeds, config.run.total_timesteps, title=f"{name}, {config.env.id}", terminal=terminal)

    terminal.print(f"comparing two settings of {base.env.id} with up to {seeds} seeds, {base.run.total_timesteps:,} steps each, run {path}")
    try:
        result = compare_settings(
            base, changed, seeds=seeds, jobs=options.jobs, together=options.together, overwrite=options.overwrite, make_view=make_view
        )
    except KeyboardInterrupt:
        terminal.print(f"interrupted; every run that had begun is saved. To continue:\n  {PROG_COMPARE} {path}")
        raise
    return show_comparison(result, terminal)


def read_changes(texts: Sequence[str]) -> Changes:
    """The changes that `--change ppo.gae_lambda=0.9` asks for, read as the flag `--ppo.gae_lambda=0.9` is."""
    found: Changes = {}
    for text in texts:
        name, equals, _ = text.partition("=")
        if not equals or "." not in name or name.startswith("-"):
            raise UsageError(f"--change {text} must be SETTING=VALUE with the section, such as ppo.gae_lambda=0.9")
        try:
            _, changes = parse_with_config(CompareOptions, [f"--{text}"], PROG_COMPARE)
        except UsageError as error:
            raise UsageError(f"--change {text}: {error}") from None
        for section, fields in changes.items():
            found.setdefault(section, {}).update(fields)
    return found


def show_comparison(result: Comparison, terminal: Terminal) -> int:
    """Print the table and the answer."""
    headings, rows = result.table()
    columns = [Column(headings[0], no_wrap=True), *(Column(heading, justify="right") for heading in headings[1:])]
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    terminal.print(table)
    terminal.print(f"answer: {result}")
    terminal.print(f"run:    {result.path} (report.html, comparison.json, base, changed)")
    errors = make_terminal(stderr=True)
    for score in result.failed:
        errors.print(f"inchworm: seed {score.seed} failed: {score.error}")
    if not result.finished:
        terminal.print(f"next:   {PROG_COMPARE} {result.path}")
        return FAILED
    return OK


# `inchworm sweep ENV`: search hyperparameters. `analysis/sweep` does the work.

PROG_SWEEP = "inchworm sweep"
MOST_ROWS = 10
"""Trials of the table at the end."""


@config_class("--")
class SweepOptions(ConfigBase):
    """Search hyperparameters with Optuna: trials of several seeds each, from the preset's settings on.

    The other flags are those of inchworm train; what they set is not searched. Give the directory of a sweep, or its name in runs/, to
    continue it.
    """

    env: Annotated[str, Metavar("ENV", positional=True)] = ""
    """A Gymnasium id, or package.module:make_env for your own factory; or a sweep that is to be continued."""
    space: Annotated[tuple[str, ...], FROM_LIST, Metavar("FIELD=VALUES …", repeated=True)] = ()
    """What is searched, besides the default space or instead of it there: ppo.gae_lambda=0.9,0.95 or ppo.learning_rate=1e-4..1e-2:log,
    or a YAML file, which replaces the default space."""
    only: Annotated[tuple[str, ...], FROM_LIST, Metavar("FIELD …", repeated=True)] = ()
    """Search only these fields of the space."""
    objective: Literal["score", "area", "steps"] | None = None
    """score of the final evaluation (the default), area under the curve of training, or env steps to convergence.target."""
    trials: Count | None = None
    """Trials in all (default: 20); a sweep that is continued may get more."""
    seeds: Count = 3
    """Runs of each trial."""
    rungs: Count = 4
    """Parts of a run; after each but the last one, a trial may be pruned."""
    pruner: Literal["median", "hyperband", "none"] = "median"
    """median prunes what is below the median of earlier trials at the same rung; hyperband keeps the better half at each."""
    sampler: Literal["tpe", "random"] = "tpe"
    """How values are suggested."""
    evaluations: Count = 40
    """Evaluations of a whole run with --objective steps: how finely the time to the target is measured."""
    config: File = None
    """Start from this YAML file, as `inchworm config ENV` prints it, instead of from a preset."""
    jobs: Count | None = None
    """Runs that are trained at a time, in a process each; by default as many as there are cores. With 1, equal sweeps have equal trials."""
    overwrite: bool = False
    """Start over in the directory of --run.name: delete the sweep that is there."""
    quiet: bool = False
    """Print nothing but errors and warnings."""


def run_sweep(arguments: Sequence[str]) -> int:
    """Search, or continue a sweep, and print the trials."""
    options, changes = parse_with_config(SweepOptions, arguments, PROG_SWEEP)
    path = find_sweep(options.env)
    if path is not None:
        fresh = SweepOptions(env=options.env, trials=options.trials, jobs=options.jobs, quiet=options.quiet)
        if changes or options != fresh:
            raise UsageError(
                f"{options.env} is a sweep, which continues as it began; leave out other flags than --trials, --jobs and --quiet"
            )
        config = read_sweep_config(path)
        config = config.replace(trials=options.trials or config.trials)
    else:
        config = new_sweep(options, changes)
        analysis.check_sweep(config)  # before there is a directory
        path = make_run_directory(config.base)
    base = config.base.replace(run=config.base.run.replace(name=path.name, directory=str(path.parent)))
    terminal = make_terminal(quiet=options.quiet)
    terminal.print(
        f"searching {len(config.space)} settings of {base.env.id}: {config.trials} trials of {config.seeds} seeds, up to "
        f"{base.run.total_timesteps:,} steps each, objective {OBJECTIVES[config.objective]}, sweep {path}"
    )

    def show_trial(trial: TrialResult) -> None:
        score = "" if trial.score is None else f", {OBJECTIVES[config.objective]} {trial.score:,.6g}"
        error = f": {trial.error}" if trial.error else ""
        values = " ".join(f"{name}={show_value(value)}" for name, value in trial.values.items())
        terminal.print(f"trial {trial.number} {trial.state}{score}{error} ({values})")

    try:
        found = analysis.run_sweep(config.replace(base=base), jobs=options.jobs, overwrite=options.overwrite, on_trial=show_trial)
    except KeyboardInterrupt:
        terminal.print(f"interrupted; every run that had begun is saved. To continue:\n  {PROG_SWEEP} {path}")
        raise
    return show_sweep(found, terminal)


def new_sweep(options: SweepOptions, changes: Changes) -> SweepConfig:
    """The sweep that a command line describes."""
    if not options.env and options.config is None:
        raise UsageError(f"no environment is given; type: {PROG_SWEEP} CartPole-v1, or the name of a sweep to continue it")
    base = resolve_config(options.env, options.config, changes, PROG_SWEEP)
    check_can_be_trained_in(base)
    settings = {name: getattr(options, name) for name in ("seeds", "rungs", "pruner", "sampler", "evaluations")}
    config = {"trials": options.trials or 20, "objective": options.objective or "score", **settings}
    return SweepConfig(base=base, space=choose_space(base, options, changes), **config)


def choose_space(base: TrainingConfig, options: SweepOptions, changes: Changes) -> dict[str, Any]:
    """The default space without what flags set, with what `--space` adds or a file in its place; then only the fields of `--only`."""
    given = read_space(options.space)
    fixed = {f"{section}.{name}" for section, fields in changes.items() for name in fields}
    if both := sorted(fixed & given.keys()):
        raise UsageError(f"{both[0]} is set by a flag and searched by --space; leave out one of them")
    from_file = any("=" not in word for word in options.space)
    sizes = {"ppo.minibatch_size", "ppo.num_minibatches"}
    replaced = fixed | (sizes if sizes & (fixed | given.keys()) else set())
    space: dict[str, Any] = {} if from_file else {name: entry for name, entry in default_space(base).items() if name not in replaced}
    space |= given
    for name in options.only:
        check_field(base, name)
        if name not in space:
            raise UsageError(f"--only {name} is not in the search space ({', '.join(space)}); add it with --space {name}=VALUES")
    return {name: space[name] for name in options.only} if options.only else space


def show_sweep(found: Sweep, terminal: Terminal) -> int:
    """Print the best trials and what to type next."""
    headings, rows = trial_rows(found)  # values are on the line of each trial, and in the report
    table = Table(*(Column(heading, justify="right", no_wrap=True) for heading in headings[:4]), box=None, pad_edge=False)
    for row in rows[:MOST_ROWS]:
        table.add_row(*row[:4])
    terminal.print(table)
    if len(rows) > MOST_ROWS:
        terminal.print(f"and {len(rows) - MOST_ROWS} more in report.html")
    terminal.print(f"answer: {found}")
    terminal.print(f"sweep:  {found.path} (report.html, sweep.json, best.yaml, study.db, trial-0 …)")
    if found.best is None:
        return FAILED
    terminal.print(f"next:   inchworm train --config {found.path / BEST}")
    return OK
