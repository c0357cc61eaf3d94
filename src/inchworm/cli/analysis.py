"""`inchworm report`, `watch`, `plot`, `doctor`, `audit`, `diff` and `runs`: commands that look at runs. `analysis` does the work."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich.table import Column, Table

from inchworm.analysis.audit import audit
from inchworm.analysis.charts import duration, group_lines, group_runs, return_lines, save_plot
from inchworm.analysis.compare import find_comparison, write_comparison_page
from inchworm.analysis.diff import diff_runs
from inchworm.analysis.doctor import MIN_UPDATES, diagnose, findings_text
from inchworm.analysis.report import make_server, report, score_text
from inchworm.analysis.runs import RunRecord, list_runs, read_runs, remove_run
from inchworm.cli.arguments import File, Metavar, RunName, UsageError, parse
from inchworm.cli.evaluate import progress
from inchworm.cli.main import FAILED, OK
from inchworm.cli.show import open_page
from inchworm.config.reading import FROM_LIST, ConfigBase, config_class
from inchworm.core.errors import close_names
from inchworm.evaluate.stats import interquartile_mean
from inchworm.tracking.console import make_terminal

Runs = Annotated[tuple[str, ...], FROM_LIST, Metavar("RUN …", positional=True)]


@config_class("--")
class ReportOptions(ConfigBase):
    """Write a page about a run, or about several side by side: one HTML file that opens offline."""

    runs: Runs = ()
    """Runs, bundles of seeds or comparisons: directories, or names in runs/. A comparison alone has a page with its answer."""
    out: Annotated[str | None, Metavar("PAGE")] = None
    """The page to write; by default report.html in the directory of the run, bundle or comparison, or here for several runs."""
    open: bool = False
    """Open the page in the browser."""


def run_report(arguments: Sequence[str]) -> int:
    """Write the page and print its path."""
    options = parse(ReportOptions, arguments, "inchworm report")
    _check_named(options.runs, "inchworm report")
    if options.out is not None and (Path(options.out).is_dir() or Path(options.out).suffix not in (".html", ".htm")):
        raise UsageError(f"--out {options.out} must name a file that ends in .html")
    comparison = find_comparison(options.runs[0]) if len(options.runs) == 1 else None
    path = report(*options.runs, out=options.out) if comparison is None else write_comparison_page(comparison, options.out)
    if options.open:
        open_page(path.resolve().as_uri())
    make_terminal().print(str(path))
    return OK


@config_class("--")
class WatchOptions(ConfigBase):
    """Serve the report of a run as a live page on this machine, while training goes on. Ctrl-C ends it."""

    runs: Runs = ()
    """Runs, bundles of seeds or comparisons: directories, or names in runs/."""
    port: int = 0
    """Port on 127.0.0.1; 0 takes a free one."""
    open: bool = False
    """Open the page in the browser."""


def run_watch(arguments: Sequence[str]) -> int:
    """Serve the page until a signal arrives."""
    options = parse(WatchOptions, arguments, "inchworm watch")
    runs = _read(options.runs, "inchworm watch", rows=False)
    if not 0 <= options.port <= 65_535:
        raise UsageError(f"--port {options.port} must be from 0 to 65535")
    with make_server([run.path.resolve() for run in runs], options.port) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        make_terminal().print(f"{address} (Ctrl-C ends it)")
        if options.open:
            open_page(address)
        server.serve_forever()
    return OK


@config_class("--")
class PlotOptions(ConfigBase):
    """Draw the learning curves of runs for a paper; runs that differ only in the seed become one curve with an interval."""

    runs: Runs = ()
    """Runs, bundles of seeds or comparisons: directories, or names in runs/."""
    out: Annotated[str, Metavar("FILE")] = "curve.svg"
    """The file to write: .svg, or .png and .pdf with matplotlib."""
    metric: str | None = None
    """Another metric than the return, such as entropy."""


def run_plot(arguments: Sequence[str]) -> int:
    """Write the figure and print its path."""
    options = parse(PlotOptions, arguments, "inchworm plot")
    runs = _read(options.runs, "inchworm plot")
    metric = options.metric
    lines = return_lines(runs) if metric is None else group_lines(group_runs(runs), metric)
    if not lines:
        if metric is None:
            raise UsageError("no episode of these runs has ended, so there is no return to draw; --metric entropy draws another metric")
        known = sorted({name for run in runs for name in run.names})
        near = close_names(metric, known)
        raise UsageError(f"no run has the metric {metric}; {f'did you mean {near[0]}?' if near else 'known: ' + ', '.join(known[:40])}")
    path = save_plot(lines, options.out, y_label=metric or "return")
    make_terminal().print(str(path))
    return OK


@config_class("--")
class DoctorOptions(ConfigBase):
    """Say what is likely wrong with a run, by which numbers, and what to try; the most likely first."""

    runs: Runs = ()
    """Runs, bundles of seeds or comparisons: directories, or names in runs/."""


def run_doctor(arguments: Sequence[str]) -> int:
    """Print the findings of each run."""
    options = parse(DoctorOptions, arguments, "inchworm doctor")
    terminal = make_terminal()
    for run in _read(options.runs, "inchworm doctor"):
        found = diagnose(run)
        updates = len(run.column("loss"))
        if updates < MIN_UPDATES:
            text = f"too short to judge ({updates} updates, {MIN_UPDATES} are needed)"
        else:
            text = f"nothing wrong found in {updates:,} updates" if not found else f"{len(found)} finding{'s' if len(found) > 1 else ''}"
        terminal.print(f"{run.name}: {text}")
        if found:
            terminal.print(findings_text(found))
    return OK


@config_class("--")
class AuditOptions(ConfigBase):
    """Measure how wrong the critic of a run is, how good GAE's advantages are for several lambdas, and how much of the gradient is noise.

    States of fresh episodes are restored many times and continued with the current policy.
    """

    run_name: RunName = ""
    """The run: its directory, or its name in runs/."""
    states: int = 128
    """States to continue from, spread over the episodes."""
    branches: int = 16
    """Continuations of each state for V(s), and as many for Q(s, a)."""
    seed: int = 0
    """Seed of the episodes and of acting."""
    max_steps: int | None = None
    """Steps of a continuation, after which the critic's value stands in; by default until the discount is below 1 %."""
    env: Annotated[str | None, Metavar("ENV")] = None
    """The environment, if it is code to import (repeat what the run was trained with)."""
    json: File = None
    """Also write everything to this file, as JSON."""
    quiet: bool = False
    """Show no progress."""


def run_audit(arguments: Sequence[str]) -> int:
    """Audit the run and print the tables."""
    options = parse(AuditOptions, arguments, "inchworm audit")
    if not options.run_name:
        raise UsageError("no run is given; type: inchworm audit RUN, the run's directory or its name in runs/")
    if options.json is not None and not Path(options.json).absolute().parent.is_dir():
        raise UsageError(f"--json {options.json}: there is no directory {Path(options.json).parent}")
    with progress("continuations", 2 * options.states * options.branches, quiet=options.quiet) as show:
        found = audit(
            options.run_name,
            options.env,
            states=options.states,
            branches=options.branches,
            seed=options.seed,
            max_steps=options.max_steps,
            progress=show,
        )
    if options.json is not None:
        Path(options.json).write_text(json.dumps(found.to_dict(), indent=1) + "\n", encoding="utf-8")
    make_terminal().print(str(found))
    return OK


@config_class("--")
class DiffOptions(ConfigBase):
    """Say where two runs part: the first iteration and stage, and what differs in config, versions and machine.

    The exit code is 0 if they are identical, and 1 if they part.
    """

    first: Annotated[str, Metavar("RUN", positional=True)] = ""
    """A run: its directory, or its name in runs/."""
    second: Annotated[str, Metavar("OTHER", positional=True)] = ""
    """Another one."""


def run_diff(arguments: Sequence[str]) -> int:
    """Print where the runs part."""
    options = parse(DiffOptions, arguments, "inchworm diff")
    if not options.second:
        raise UsageError("two runs are compared; type: inchworm diff RUN OTHER, directories or names in runs/")
    found = diff_runs(options.first, options.second)
    make_terminal().print(str(found))
    return OK if found.identical else FAILED


@config_class("--")
class RunsOptions(ConfigBase):
    """List runs, bundles of seeds, comparisons and sweeps with state, score, steps and age; or delete or archive some of them.

    The score of a bundle is the interquartile mean over its seeds, and its steps are those of all of them.
    """

    names: Annotated[tuple[str, ...], FROM_LIST, Metavar("NAME …", positional=True)] = ()
    """Only these runs; needed for --delete and --archive."""
    directory: str = "runs"
    """The directory of the runs."""
    delete: bool = False
    """Delete the named runs, after a question."""
    archive: bool = False
    """Pack the named runs into archive/NAME.tar.gz in the directory, and delete them, after a question."""
    yes: bool = False
    """Do not ask."""


def run_runs(arguments: Sequence[str]) -> int:
    """Print the list, or remove runs."""
    options = parse(RunsOptions, arguments, "inchworm runs")
    terminal = make_terminal()
    if options.delete and options.archive:
        raise UsageError("--delete and --archive exclude each other; give one")
    if (options.delete or options.archive) and not options.names:
        raise UsageError(f"name the runs: inchworm runs NAME … --{'delete' if options.delete else 'archive'}")
    known = list_runs(options.directory)
    if missing := [name for name in options.names if name not in known]:
        raise UsageError(f"there is no run {', '.join(missing)} in {options.directory}; inchworm runs lists those that there are")
    if options.delete or options.archive:
        _confirm(f"{'delete' if options.delete else 'archive'} {', '.join(options.names)} in {options.directory}", asked=not options.yes)
        for name in options.names:
            path = remove_run(name, directory=options.directory, archive=options.archive)
            terminal.print(f"archived as {path}" if options.archive else f"deleted {path}")
        return OK
    listed = {name: run for name, run in known.items() if not options.names or name in options.names}
    if not listed:
        terminal.print(f"no runs in {options.directory}; inchworm train ENV makes one")
        return OK
    right = [Column(title, justify="right") for title in ("env steps", "age")]
    table = Table("name", "kind", "state", "score", *right, box=None, pad_edge=False)
    for name, entry in listed.items():
        scores = [run.score for run in entry.runs if run.score is not None]
        score = score_text(entry.runs[0])[0] if len(entry.runs) == 1 else f"{interquartile_mean(scores):.5g}" if scores else ""
        steps = f"{sum(run.env_steps for run in entry.runs):,}" if entry.runs else ""
        table.add_row(name, entry.kind, entry.state, score, steps, duration(max(0, round(time.time() - entry.changed))))
    terminal.print(table)
    for entry in listed.values():
        if entry.problem:
            terminal.print(entry.problem)
    return OK


def _confirm(what: str, *, asked: bool) -> None:
    """Ask on the terminal; without one, --yes is needed."""
    if not asked:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"to {what}, add --yes: there is no terminal to ask on")
    sys.stdout.write(f"{what}? [y/N] ")
    sys.stdout.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was changed")


def _read(names: Sequence[str], prog: str, *, rows: bool = True) -> list[RunRecord]:
    _check_named(names, prog)
    return read_runs(names, rows=rows)


def _check_named(names: Sequence[str], prog: str) -> None:
    if not names:
        raise UsageError(f"no run is given; type: {prog} RUN, the run's directory or its name in runs/")
