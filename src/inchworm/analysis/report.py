"""The report: one self-contained HTML page about one run, or about several side by side; written to a file, or served live on loopback.

The page of a file fetches nothing. Everything that comes from a run is escaped text or a number, and its Content-Security-Policy allows
only the style and the script of `report_assets`, by their hashes.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import shlex
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files as assets
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from inchworm.analysis.charts import (
    Group,
    Line,
    bar_html,
    chart_svg,
    duration,
    e,
    group_runs,
    legend,
    metric_line,
    return_lines,
    return_metric,
    save_plot,
    shorten,
)
from inchworm.analysis.doctor import MIN_UPDATES, because, diagnose
from inchworm.analysis.runs import RunRecord, read_run, read_runs
from inchworm.core.errors import ConfigError, InchwormError, error_text
from inchworm.core.tensor_file import write_atomically
from inchworm.env.registry import config_for, find_preset
from inchworm.evaluate.stats import bootstrap_interval95, interquartile_mean
from inchworm.run.bundle import find_bundle
from inchworm.run.directory import OUTCOME, REPORT, flatten_config
from inchworm.worlds.replay import inline_hash

CHARTS = {
    "policy_loss": "near 0",
    "value_loss": "½ mean squared error of the critic",
    "entropy": "falls slowly",
    "approx_kl": "0.001 to 0.03",
    "clip_fraction": "0.02 to 0.3",
    "explained_variance": "rises towards 1",
    "grad_norm": "before clipping",
    "learning_rate": "after the schedule",
    "mean_length": "steps per episode",
}
"""The metrics that every page shows, each with a hint; all others are behind a button."""
MOST_OTHERS = 48
"""Other metrics that are drawn."""
EMBEDDED_BYTES = 1_000_000
"""Videos and animations up to this size, together, are part of the page; others are linked."""
_HIDDEN = {"n_updates", "episodes", "warm_up", "mean_return", "loss", "rating", "rating_sigma", "iteration_episodes"}
_UNSHOWN = ("run.name", "run.directory", "run.seed", "run.report")
CURVE = "curve.svg"
"""The learning curve in the directory of a run; trackers receive it, like the report."""
HOST = "127.0.0.1"
"""Of the live page."""


def write_report(runs: Sequence[RunRecord], out: str | Path | None = None) -> Path:
    """Write the page of the runs to `out`, by default `report.html` in the directory of a single run, or here for several."""
    path = Path(out) if out is not None else runs[0].path / REPORT if len(runs) == 1 else Path(REPORT)
    return write_atomically(path, report_page(runs, links_from=path.parent))


def report(*runs: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of one run, or of several side by side, and return its path.

    Runs are directories, or names in `runs/`; a bundle of seeds stands for its runs. The page of one run or bundle is in its directory
    unless `out` says otherwise.
    """
    if out is None and len(runs) == 1 and (bundle := find_bundle(runs[0])) is not None:
        out = bundle / REPORT
    return write_report(read_runs(runs), out)


@contextmanager
def after_training() -> Iterator[None]:
    """Turn any failure of the block into a warning: the training is done, and only its report is missing."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"no report was written: {type(error).__name__}: {error_text(error)}", stacklevel=3)


def write_last_report(path: Path, reason: str) -> RunRecord:
    """Write the page and the learning curve of a run whose training has just ended, unless that is turned off or done; return the run."""
    run = dataclasses.replace(read_run(path, rows=False), state="finished", reason=reason)  # its lock is still held
    page, outcome = path / REPORT, path / OUTCOME
    is_new = page.exists() and outcome.exists() and page.stat().st_mtime_ns >= outcome.stat().st_mtime_ns
    if run.rows and run.config.run.report and not is_new:
        if lines := return_lines([run]):
            save_plot(lines, path / CURVE, y_label="return")
        write_report([run])
    return run


def report_page(runs: Sequence[RunRecord], *, live: bool = False, links_from: Path | None = None, title: str = "", lead: str = "") -> str:
    """Return the page of runs. `live` makes it fetch its newest content from where it was served; `lead` is HTML that comes first."""
    return whole_page(title or _title(runs), lead + report_body(runs, links_from=links_from), live=live)


def whole_page(title: str, body: str, *, live: bool = False) -> str:
    """A page with its title, style and script around its content, which is HTML."""
    style, script = (
        assets("inchworm.analysis").joinpath("report_assets", name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    allowed = f"default-src 'none'; style-src '{inline_hash(style)}'; script-src '{inline_hash(script)}'; img-src data:; media-src data:; "
    allowed += "connect-src 'self'; " if live else ""
    made = "<span id=live></span>; made" if live else f"written {time.strftime('%Y-%m-%d %H:%M')}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"{allowed}base-uri 'none'; form-action 'none'\">"
        f"<title>{e(title)}</title><style>{style}</style></head>\n<body{' data-live=1' if live else ''}>"
        f'<main id="page">{body}</main>\n'
        f"<footer>{made} by inchworm; hover or use the arrow keys on a chart to read values</footer>\n"
        f'<div id="tip" role="status" hidden></div><script>{script}</script></body></html>\n'
    )


def report_body(runs: Sequence[RunRecord], *, links_from: Path | None = None) -> str:
    """Return the content of the page."""
    groups = group_runs(runs)
    parts = [_header(runs), _cards(runs[0]) if len(runs) == 1 else _overview(runs, groups)]
    parts += [_findings(runs), _returns(runs), _diagnostics(runs, groups), _time(runs, groups), _ratings(runs)]
    if len(runs) == 1:
        parts += [_media(runs[0], links_from), _evaluations(runs[0]), f'<div class="two">{_config(runs)}{_environment(runs[0])}</div>']
    else:
        parts.append(_config(runs))
    return "\n".join(part for part in parts if part)


def section(title: str, *content: str) -> str:
    """A card of the page with a heading; nothing if it has no content."""
    filled = [part for part in content if part]
    return f"<section><h2>{e(title)}</h2>{''.join(filled)}</section>" if filled else ""


def table(head: Iterable[object], rows: Iterable[Iterable[object]], kind: str = "") -> str:
    """A table of texts, which scrolls sideways where it is too wide."""
    body = "".join(f"<tr>{''.join(f'<td>{e(cell)}</td>' for cell in row)}</tr>" for row in rows)
    titles = "".join(f"<th>{e(cell)}</th>" for cell in head)
    return f'<div class="scroll"><table class="{kind}"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def figure(lines: Sequence[Line], caption: str, hint: str = "", *, points: int, zero: bool = False) -> str:
    """A small chart with its name."""
    drawn = chart_svg([shorten(line, points) for line in lines], caption, width=380.0, height=190.0, zero=zero)
    return f"<figure><figcaption>{e(caption)} <small>{e(hint)}</small></figcaption>{drawn}</figure>"


def large_chart(
    lines: Sequence[Line], label: str, *, zero: bool = False, over: str = "env steps", size: tuple[float, float] = (1160.0, 360.0)
) -> str:
    """A chart of this size for wide pages, and one for narrow pages: texts of a scaled one would be too small to read."""
    wide, narrow = (chart_svg(lines, label, width=width, height=height, zero=zero, over=over) for width, height in (size, (380.0, 240.0)))
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'


def _header(runs: Sequence[RunRecord]) -> str:
    if len(runs) > 1:
        environments = ", ".join(dict.fromkeys(run.config.env.id for run in runs))
        return f"<header><h1>{e(_title(runs))}</h1><p>{e(environments)}</p></header>"
    run = runs[0]
    config = run.config
    reason = {"interrupted": "", "callback": "stopped by a callback"}.get(run.reason, run.reason)
    if run.reason in ("total_timesteps", "max_iterations", "max_episodes"):
        reason = f"reached run.{run.reason}"
    facts = (config.env.id, f"policy {config.policy.kind}", f"backend {config.run.backend}", f"seed {config.run.seed}", reason)
    return (
        f'<header><h1>{e(run.name)} <span class="badge {run.state}">{run.state}</span></h1>'
        f"<p>{e(' · '.join(filter(None, facts)))}</p></header>"
    )


def _title(runs: Sequence[RunRecord]) -> str:
    """The runs in a few words: `first: CartPole-v1`, `first: 3 seeds` for one bundle, else `4 runs`."""
    if len(runs) == 1:
        return f"{runs[0].name}: {runs[0].config.env.id}"
    bundles = {run.name.rpartition("/")[0] for run in runs}
    return f"{bundles.pop()}: {len(runs)} seeds" if len(bundles) == 1 and "" not in bundles else f"{len(runs)} runs"


def score_text(run: RunRecord) -> tuple[str, str]:
    """The score of a run, and what it is."""
    if not run.evaluations:
        return (f"{run.score:.5g}", "mean return of training") if run.score is not None else ("–", "no episode has ended")
    last = run.evaluations[-1]
    mean, meaning = last["evaluation/mean_return"], f"mean return of {last.get('evaluation/episodes', 0):.0f} evaluation episodes"
    low, high = (last.get(f"evaluation/interval95_{end}") for end in ("low", "high"))
    if low is None or high is None or not high > low:
        return f"{mean:.5g}", meaning
    half = (high - low) / 2
    decimals = max(0, 1 - math.floor(math.log10(half)))  # two digits of the interval, and no more of the mean
    return f"{mean:.{decimals}f} ± {half:.{decimals}f}", meaning


def _cards(run: RunRecord) -> str:
    score, meaning = score_text(run)
    seconds = sum(run.seconds.values())
    best = max((row["evaluation/mean_return"] for row in run.evaluations), default=None)
    wins = run.evaluations[-1].get("evaluation/win_rate") if run.evaluations else None
    last = run.rows[-1] if run.rows else {}
    cards = [
        ("score", score, meaning),
        ("env steps", f"{run.env_steps:,}", f"of {run.config.run.total_timesteps:,}"),
        ("training time", duration(seconds) if seconds else "–", f"{run.env_steps / seconds:,.0f} steps per second" if seconds else ""),
        ("iterations", f"{last.get('iteration', 0):,.0f}", f"{max(run.column('episodes'), default=0):,.0f} episodes"),
    ]
    if wins is not None:
        cards.insert(1, ("win rate", f"{wins:.0%}", "of the last evaluation"))
    if best is not None and len(run.evaluations) > 1:
        cards.insert(1, ("best evaluation", f"{best:.5g}", f"of {len(run.evaluations)}"))
    body = "".join(f"<div><dt>{e(name)}</dt><dd>{e(value)}<small>{e(hint)}</small></dd></div>" for name, value, hint in cards)
    return f'<dl class="cards">{body}</dl>'


def _overview(runs: Sequence[RunRecord], groups: Sequence[Group]) -> str:
    """The runs as a table, and each group's score over its seeds."""
    times = [duration(sum(run.seconds.values())) if run.seconds else "" for run in runs]
    rows = [(run.name, run.config.run.seed, run.state, score_text(run)[0], f"{run.env_steps:,}", spent) for run, spent in zip(runs, times)]
    each = table(("run", "seed", "state", "score", "env steps", "time"), rows)
    lines = []
    for group in groups:
        scores = [run.score for run in group.runs if run.score is not None]
        if scores:
            interval = "[{:.5g}, {:.5g}]".format(*bootstrap_interval95(scores)) if len(scores) > 1 else "one seed"
            lines.append((group.label, len(scores), f"{interquartile_mean(scores):.5g}", interval))
    if len(groups) == len(runs):
        return section("scores", each)
    head = ("group", "seeds", "interquartile mean of the score", "95 % bootstrap interval")
    return section("scores", table(head, lines), f"<details id=each><summary>each run</summary>{each}</details>")


def _findings(runs: Sequence[RunRecord]) -> str:
    parts = []
    for run in runs:
        found = diagnose(run)
        parts += [f"<h3>{e(run.name)}</h3>"] if len(runs) > 1 and found else []
        for number, finding in enumerate(found, 1):
            follows = f'<span class="hint">{e(because(finding, found))}</span>'
            tries = "".join(f"<li>{e(text)}</li>" for text in finding.tries)
            parts.append(
                f'<div class="finding{" note" if finding.note else ""}"><h3>{number}. {e(finding.title)}{follows}</h3>'
                f'<p class="why">{e(finding.why)}</p><p>What to try:</p><ul>{tries}</ul></div>'
            )
    if not parts:
        short = all(len(run.column("loss")) < MIN_UPDATES for run in runs)
        well = '<p class="well">Nothing wrong was found in the metrics.</p>'
        parts.append(f'<p class="hint">Too few updates to judge: {MIN_UPDATES} are needed.</p>' if short else well)
    return section("doctor", *parts)


def _returns(runs: Sequence[RunRecord]) -> str:
    lines = return_lines(runs)
    if not lines:
        return section("learning curve", '<p class="hint">No episode has ended yet.</p>')
    drawn = large_chart(lines, "return")
    shown = [line for line in lines if line.style != "faint"]
    means = {"mean_return": "mean return of the last 100 training episodes", "episode/team_return": "mean team return of training"}
    hints = [means.get(return_metric(runs), "mean return of evaluations")] if len(runs) > 1 else []
    if any(line.low is not None for line in lines):
        several = "interquartile mean over seeds with its 95 % bootstrap interval"
        hints.append("95 % interval of each evaluation's mean" if len(runs) == 1 else several)
    return section("learning curve", drawn, legend(shown or lines), f'<p class="hint">{"; ".join([*hints, "over env steps"])}</p>')


def _diagnostics(runs: Sequence[RunRecord], groups: Sequence[Group]) -> str:
    """Small charts of the metrics that matter, and all others behind a button."""
    points, colours = max(60, min(300, 900 // len(runs))), _colours(runs, groups)

    def lines_of(name: str) -> list[Line]:
        labels = [name] if len(runs) == 1 else [run.name for run in runs]
        made = (metric_line(run, name, label=label, colour=colour) for run, label, colour in zip(runs, labels, colours))
        return [line for line in made if line is not None]

    shown = "".join(figure(lines, name, hint, points=points) for name, hint in CHARTS.items() if (lines := lines_of(name)))
    names = dict.fromkeys(name for run in runs for name in run.names if name not in CHARTS and name not in _HIDDEN)
    others = [name for name in names if not name.startswith(("evaluation/interval95", "convergence/"))]
    drawn = "".join(figure(lines, name, points=points // 2) for name in others[:MOST_OTHERS] if (lines := lines_of(name)))
    left = f'<p class="hint">{len(others) - MOST_OTHERS} more are in metrics.jsonl</p>' if len(others) > MOST_OTHERS else ""
    more = f"<details id=more><summary>{min(len(others), MOST_OTHERS)} more metrics</summary><div class=grid>{drawn}</div>{left}</details>"
    keys = _key(runs, groups)
    return section("losses and diagnostics", keys, f'<div class="grid">{shown}</div>' if shown else "", more if drawn else "")


def _colours(runs: Sequence[RunRecord], groups: Sequence[Group]) -> list[int]:
    """A colour for each run: that of its group, or its own where there is one group."""
    return [next(n for n, group in enumerate(groups) if run in group.runs) if len(groups) > 1 else n for n, run in enumerate(runs)]


def _key(runs: Sequence[RunRecord], groups: Sequence[Group]) -> str:
    """What the colours of several runs mean."""
    names = [group.label for group in groups] if len(groups) > 1 else [run.name for run in runs]
    nothing = np.zeros(0)
    return legend([Line(name, nothing, nothing, colour=colour) for colour, name in enumerate(names[:24])]) if len(runs) > 1 else ""


def _time(runs: Sequence[RunRecord], groups: Sequence[Group]) -> str:
    several, colours = len(runs) > 1, _colours(runs, groups)
    bars = "".join((f"<h3>{e(run.name)}</h3>" if several else "") + bar_html(run.seconds) for run in runs[:12] if run.seconds)
    labels = [run.name if several else "steps per second" for run in runs]
    made = [metric_line(run, "steps_per_second", timing=True, label=labels[n], colour=colours[n]) for n, run in enumerate(runs)]
    lines = [shorten(line, 200) for line in made if line is not None]
    chart = large_chart(lines, "steps per second", zero=True, size=(560.0, 220.0)) if lines else ""
    speed = f"<figure><figcaption>steps per second</figcaption>{chart}</figure>{_key(runs, groups)}" if lines else ""
    return section("where the time went", f'<div class="two"><div>{bars}</div><div>{speed}</div></div>' if bars or speed else "")


def _ratings(runs: Sequence[RunRecord]) -> str:
    parts = []
    for run in runs:
        book = run.ratings
        if book is None:
            continue
        entries = sorted({entry.env_steps: entry for entry in book.history}.values(), key=lambda entry: entry.env_steps)
        x, y, low, high = (
            list(column) for column in zip(*((entry.env_steps, entry.rating.mu, *entry.rating.interval95) for entry in entries))
        )
        lines = [Line("the policy", np.array(x, float), np.array(y), np.array(low), np.array(high), 0, "dots")]
        lines += [
            Line(name, np.array([0.0, max(1.0, x[-1])]), np.full(2, rating.mu), colour=1 + index, style="dashed")
            for index, (name, rating) in enumerate(book.anchors.items())
        ]
        rows = [
            (f"{entry.env_steps:,}", f"{entry.rating.mu:.1f} ± {2 * entry.rating.sigma:.1f}",
             *(f"{entry.win_rates[name]:.0%}" if name in entry.win_rates else "" for name in book.anchors))
            for entry in entries[-8:]
        ]  # fmt: skip
        head = ("env steps", "rating ± 2 sigma", *(f"win rate vs {name}" for name in book.anchors))
        parts += [large_chart(lines, "rating"), legend(lines), table(head, rows)]
    return section("ratings", *parts)


def _media(run: RunRecord, links_from: Path | None) -> str:
    """Videos and animations, the newest in the page while they are small; others as links relative to the page, or by name."""
    parts, notes, room = [], [], EMBEDDED_BYTES
    kinds = {".mp4": "video/mp4", ".webm": "video/webm", ".gif": "image/gif"}
    for path in run.media[:20]:
        size, kind, name = path.stat().st_size, kinds.get(path.suffix), e(path.relative_to(run.path))
        if kind is not None and size <= room:
            room -= size
            data = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
            shown = f'<img alt="{name}" src="{data}">' if path.suffix == ".gif" else f'<video controls muted loop src="{data}"></video>'
            parts.append(f"<figure><figcaption>{name}</figcaption>{shown}</figure>")
            continue
        if links_from is not None and path.resolve().is_relative_to(links_from.resolve()):
            target = quote(path.resolve().relative_to(links_from.resolve()).as_posix())
            name = f'<a href="./{e(target)}">{name}</a>'
        hint = f"; inchworm replay {e(shlex.quote(str(path)))} shows it" if path.suffix == ".json" else ""
        hint = hint or (f" ({size / 1e6:.1f} MB, not in this page)" if kind is not None else "")
        notes.append(f"<li>{name}{hint}</li>")
    grid = f'<div class="grid">{"".join(parts)}</div>' if parts else ""
    return section("videos and replays", grid, f"<ul>{''.join(notes)}</ul>" if notes else "")


def _evaluations(run: RunRecord) -> str:
    names = ("mean_return", "std_return", "min_return", "median_return", "max_return", "mean_episode_length", "episodes", "success_rate",
             "win_rate", "difference", "capped_episodes")  # fmt: skip
    shown = [name for name in names if any(f"evaluation/{name}" in row for row in run.evaluations)]
    rows = [
        (f"{row['env_steps']:,}", *(f"{row[key]:.5g}" if (key := f"evaluation/{name}") in row else "" for name in shown))
        for row in run.evaluations[:-13:-1]
    ]
    return section("evaluations, newest first", table(("env steps", *(name.replace("_", " ") for name in shown)), rows) if rows else "")


def _config(runs: Sequence[RunRecord]) -> str:
    """What differs from the preset, or between runs, and the whole config."""
    configs = [flatten_config(run.config.to_dict()) for run in runs]
    if len(runs) == 1:
        run = runs[0]
        has_preset, base = find_preset(run.config.env.id) is not None, flatten_config(config_for(run.config.env.id).to_dict())
        what = f"the preset of {run.config.env.id}" if has_preset else "the defaults"
        changed = [name for name in configs[0] if name not in _UNSHOWN and configs[0][name] != base.get(name) and base.get(name) != "auto"]
        rows = [(name, _setting(base, name), _setting(configs[0], name)) for name in changed]
        top = table(("setting", what, "this run"), rows, "texts") if rows else f'<p class="hint">Equal to {e(what)}.</p>'
        text = f"<details id=config><summary>the whole config</summary><pre>{e(run.config.to_yaml())}</pre></details>"
        return section("configuration", top, text)
    names = [name for name in dict.fromkeys(name for config in configs for name in config) if name not in ("run.name", "run.directory")]
    differing = [name for name in names if len({_setting(config, name) for config in configs}) > 1]
    columns = [(name, *(_setting(config, name) for config in configs[:12])) for name in differing]
    head = ("setting", *(run.name for run in runs[:12]))
    return section("what differs in the configuration", table(head, columns, "texts") if columns else '<p class="hint">Nothing.</p>')


def _setting(config: Mapping[str, Any], name: str) -> str:
    """A setting as it is written in YAML, on one line."""
    value = config.get(name, "–")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _environment(run: RunRecord) -> str:
    versions = table(("package", "version"), [(name, version or "not installed") for name, version in run.versions.items()], "texts")
    return section(
        "environment",
        table(("fact", "value"), run.facts.items(), "texts"),
        f"<details id=versions><summary>versions and machine</summary>{versions}</details>" if run.versions else "",
    )


class LivePage:
    """The content of the page, made again only when a file of a run has changed."""

    def __init__(self, runs: Sequence[Path]) -> None:
        self.runs = runs
        self._made_from: object = None
        self._body = ""
        self._lock = threading.Lock()

    def whole(self) -> str:
        """The page with its style and script."""
        return report_page([read_run(path, rows=False) for path in self.runs], live=True)

    def body(self) -> str:
        """What the page's script fetches."""
        with self._lock:
            records = [read_run(path, rows=False) for path in self.runs]
            found = [(record.state, record.changed, len(record.rows)) for record in records]
            if found != self._made_from:
                self._body, self._made_from = report_body(records), found
            return self._body


def make_server(runs: Sequence[Path], port: int = 0) -> ThreadingHTTPServer:
    """A server of the page on loopback; port 0 takes a free one, `server_address` has it. Nothing but the page is served."""
    page = LivePage(runs)

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "inchworm", ""

        def do_GET(self) -> None:
            """Answer the two addresses of the page."""
            answers = {"/": page.whole, "/page": page.body}
            own = {f"{name}:{self.connection.getsockname()[1]}" for name in (HOST, "localhost")}
            if self.headers.get("Host") not in own:  # a foreign name that resolves to loopback is another site's page
                self._send(403, "this page is served to 127.0.0.1 only")
                return
            answer = answers.get(self.path)
            try:
                self._send(200 if answer else 404, answer() if answer else "there is no such page")
            except (InchwormError, OSError) as error:  # the run is being deleted
                self._send(503, f"the run cannot be read: {error}")

        def _send(self, code: int, text: str) -> None:
            content = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", f"text/{'html' if code == 200 else 'plain'}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing about requests."""

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise ConfigError(f"cannot serve the page at {HOST}:{port}: {error.strerror}; without --port a free one is taken") from error
    server.daemon_threads = True
    return server
