"""`inchworm compare ENV --change ppo.gae_lambda=0.9`: whether a change of settings makes a difference. `analysis/compare` does the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from rich.table import Column, Table

from inchworm.analysis.compare import Comparison, check_settings, compare_settings, find_comparison, read_comparison
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
from inchworm.tracking.console import Terminal, make_terminal
from inchworm.tracking.seeds_view import SeedsView

PROG = "inchworm compare"


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
    options, changes = parse_with_config(CompareOptions, arguments, PROG)
    path = find_comparison(options.env)
    seeds = options.seeds
    if path is not None:
        if options.change or changes or options.config or options.preset or options.overwrite:
            raise UsageError(f"{options.env} is a comparison, which continues as it began; leave out other flags than --jobs and --quiet")
        found = read_comparison(path)
        base, changed, seeds = found.base, found.changed, found.seeds
    else:
        if not options.change:
            raise UsageError(f"no change is given; type: {PROG} ENV --change ppo.gae_lambda=0.9")
        base = resolve_config(options.env, options.config, changes, PROG, options.preset)
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
        terminal.print(f"interrupted; every run that had begun is saved. To continue:\n  {PROG} {path}")
        raise
    return show(result, terminal)


def read_changes(texts: Sequence[str]) -> Changes:
    """The changes that `--change ppo.gae_lambda=0.9` asks for, read as the flag `--ppo.gae_lambda=0.9` is."""
    found: Changes = {}
    for text in texts:
        name, equals, _ = text.partition("=")
        if not equals or "." not in name or name.startswith("-"):
            raise UsageError(f"--change {text} must be SETTING=VALUE with the section, such as ppo.gae_lambda=0.9")
        try:
            _, changes = parse_with_config(CompareOptions, [f"--{text}"], PROG)
        except UsageError as error:
            raise UsageError(f"--change {text}: {error}") from None
        for section, fields in changes.items():
            found.setdefault(section, {}).update(fields)
    return found


def show(result: Comparison, terminal: Terminal) -> int:
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
        terminal.print(f"next:   {PROG} {result.path}")
        return FAILED
    return OK
