"""The page of a sweep: the best trial so far, what each field does to the objective, all trials, and the best config."""

from __future__ import annotations

import numpy as np

from inchworm.analysis.charts import Line, e, legend, scatter_svg
from inchworm.analysis.report import large_chart, section, table, whole_page
from inchworm.analysis.search_space import Choice, Range
from inchworm.analysis.sweep import OBJECTIVES, Sweep, show_value, trial_rows
from inchworm.run.directory import config_changes

MOST_TICKS = 6
"""Values of a list that are named below a chart; of a longer one only the first and the last."""


def sweep_page(found: Sweep) -> str:
    """Return the page."""
    env, name = found.config.base.env.id, found.path.resolve().name
    header = f"<header><h1>{e(name)}</h1><p>{e(found)}</p></header>"
    parts = [header, _history(found), _importance(found), _slices(found), _trials(found), _best(found)]
    return whole_page(f"{name}: sweep of {env}", "\n".join(part for part in parts if part))


def _history(found: Sweep) -> str:
    """The objective of each complete trial, and the best so far."""
    rows = [(trial.number, trial.score) for trial in found.trials if trial.state == "complete" and trial.score is not None]
    if not rows:
        return section("history", '<p class="hint">No trial is complete yet.</p>')
    numbers, scores = (np.array(column, np.float64) for column in zip(*rows))
    best = (np.minimum if found.config.objective == "steps" else np.maximum).accumulate(scores)
    lines = [Line("best so far", numbers, best, colour=0), Line("each trial", numbers, scores, colour=1, style="points")]
    what = OBJECTIVES[found.config.objective]
    better = "less is better" if found.config.objective == "steps" else "more is better"
    seeds = f"{found.config.seeds} seed{'s' if found.config.seeds > 1 else ''}"
    hint = f'<p class="hint">{e(what)}, mean over {seeds}; {better}; the horizontal axis is the number of the trial</p>'
    return section("history", large_chart(lines, what, over="trial"), legend(lines), hint)


def _importance(found: Sweep) -> str:
    if not found.importance:
        return ""
    entries = sorted(found.importance.items(), key=lambda item: -item[1])
    top = entries[0][1] or 1.0
    bars = [
        f'<tr><td>{e(name)}</td><td><svg class="bar" viewBox="0 0 1000 26" preserveAspectRatio="none" role="img" '
        f'aria-label="{share:.0%}"><rect class="fill c0" x="0" width="{1000 * share / top:.1f}" height="26"></rect></svg></td>'
        f"<td>{share:.0%}</td></tr>"
        for name, share in entries
    ]
    hint = '<p class="hint">the share of each field in what sets the best 30 % of complete trials apart (PED-ANOVA)</p>'
    return section("importance", f'<div class="scroll"><table>{"".join(bars)}</table></div>', hint)


def _slices(found: Sweep) -> str:
    """A chart for each field: the objective of complete trials over its values."""
    trials = [(trial, trial.score) for trial in found.trials if trial.state == "complete" and trial.score is not None]
    if not trials:
        return ""
    scores = [score for _, score in trials]
    names = [f"trial {trial.number}: {score:,.6g}" for trial, score in trials]
    best = next(index for index, (trial, _) in enumerate(trials) if trial is found.best)
    figures = []
    for name, entry in found.space.items():
        shown = [entry.place(trial.values[name]) or 0.0 for trial, _ in trials]
        each = [f"{text}, {show_value(trial.values[name])}" for text, (trial, _) in zip(names, trials)]
        drawn = scatter_svg(shown, scores, _ticks(entry), each, f"objective over {name}", best=best)
        hint = " <small>logarithmic</small>" if isinstance(entry, Range) and entry.log else ""
        figures.append(f"<figure><figcaption>{e(name)}{hint}</figcaption>{drawn}</figure>")
    return section("each field", f'<div class="grid">{"".join(figures)}</div>')


def _ticks(entry: Range | Choice) -> list[tuple[float, str]]:
    """The texts below a chart: both ends and the middle of a range, the values of a short list."""
    if isinstance(entry, Range):
        return [(entry.place(value) or 0.0, show_value(value)) for value in dict.fromkeys(entry.at(share) for share in (0.0, 0.5, 1.0))]
    values = entry.values if len(entry.values) <= MOST_TICKS else (entry.values[0], entry.values[-1])
    return [(entry.place(value) or 0.0, show_value(value)[:16]) for value in values]


def _trials(found: Sweep) -> str:
    failed = [f"<li>trial {trial.number}: {e(trial.error)}</li>" for trial in found.trials if trial.error]
    hint = '<p class="hint">the best first; of a pruned trial, in brackets, what it was pruned by</p>'
    return section("trials", table(*trial_rows(found)), hint, f"<ul>{''.join(failed)}</ul>" if failed else "")


def _best(found: Sweep) -> str:
    """What differs from the settings that the sweep starts from, and the whole config."""
    if found.best is None:
        return ""
    config = found.best_config
    changes = config_changes(found.config.base, config)
    lines = [line for name, line in changes.items() if name not in ("run.name", "run.directory")]
    text = "".join(f"<li>{e(line)}</li>" for line in lines) or "<li>nothing: the settings it starts from are the best</li>"
    whole = f"<details id=config><summary>the whole config, in best.yaml</summary><pre>{e(config.to_yaml())}</pre></details>"
    return section(f"best: trial {found.best.number}", f"<ul>{text}</ul>", whole)
