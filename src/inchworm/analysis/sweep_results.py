"""What a sweep is asked and has found, and its page.

The page shows the best trial so far, what each field does to the objective, all trials, and the best config.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from inchworm.analysis.charts import Line, e, legend, scatter_svg
from inchworm.analysis.report import large_chart, section, table, whole_page
from inchworm.analysis.search_space import Choice, Range, Space, Values, base_values, with_values
from inchworm.config.reading import ConfigBase, config_class
from inchworm.config.sections import Count, TrainingConfig
from inchworm.core.errors import ConfigError, InchwormError
from inchworm.core.seeding import derive_seed
from inchworm.run.directory import config_changes

OBJECTIVES = {"score": "final score", "area": "area under curve", "steps": "env steps to the target"}
"""What trials are compared by, with its name in texts; fewer steps are better."""


@config_class("sweep.")
class SweepConfig(ConfigBase):
    """The content of `sweep.yaml`."""

    base: TrainingConfig
    """What trials start from; `run.seed` is the seed of the sweep."""
    space: dict[str, Any]
    """field -> its values, as in a file of `--space`."""
    objective: Literal["score", "area", "steps"] = "score"
    """What trials are compared by."""
    trials: Count = 20
    """Trials in all; may be raised later."""
    seeds: Count = 3
    """Runs of each trial, with seeds that all trials share."""
    rungs: Count = 4
    """Parts of a run; after each but the last one, a trial may be pruned."""
    pruner: Literal["median", "hyperband", "none"] = "median"
    """What prunes."""
    sampler: Literal["tpe", "random"] = "tpe"
    """What suggests values."""
    evaluations: Count = 40
    """Evaluations of a whole run with objective steps: how finely the time to the target is measured."""

    def __post_init__(self) -> None:
        if self.objective == "steps" and self.base.convergence.target is None:
            raise ConfigError(
                f"the objective steps needs a target, and {self.base.env.id} has no preset with one; add --convergence.target RETURN"
            )

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds of every trial's runs, derived from the sweep's."""
        return tuple(sorted(derive_seed(self.base.run.seed, "sweep seed", index) for index in range(self.seeds)))

    def shown(self, value: float) -> float:
        """A value of the study, which is maximised, as it is shown: steps are positive."""
        return -value if self.objective == "steps" else value

    def trial_config(self, values: Values, rung: int, lanes_per_copy: int = 1) -> TrainingConfig:
        """The config of a trial's runs up to a rung, from 1 on.

        The total number of steps is that of the whole run, which schedules stretch over. Evaluations that no objective needs are left out,
        and others are as many for any size of rollout.
        """
        config = with_values(self.base, values)
        run, evaluation, convergence, last = config.run, config.evaluation, config.convergence, rung >= self.rungs
        iterations = -(-run.total_timesteps // (config.env.num_envs * lanes_per_copy * config.ppo.rollout_steps))
        iterations = min(iterations, run.max_iterations or iterations)
        run = run.replace(max_iterations=run.max_iterations if last else -(-iterations * rung // self.rungs), keep_best=False, report=False)
        final = {"score": evaluation.final_episodes if last else 0}.get(self.objective, 0)
        final = final or (evaluation.episodes if self.objective == "score" else 0)
        if self.objective == "steps":
            convergence = convergence.replace(stop=True)
        needed = convergence.stops and convergence.returns == "evaluation"
        every = max(1, round(iterations / self.evaluations)) if self.objective == "steps" else evaluation.interval
        evaluation = evaluation.replace(final_episodes=final, interval=every if needed else 0)
        return config.replace(run=run, evaluation=evaluation, convergence=convergence)


@dataclass(frozen=True)
class TrialResult:
    """One trial of a sweep."""

    number: int
    """Its directory is `trial-NUMBER`."""
    state: Literal["complete", "pruned", "failed", "running"]
    values: Values
    """The searched fields."""
    score: float | None = None
    """The objective as the mean over seeds; of a pruned trial None."""
    seeds: Mapping[str, float] = field(default_factory=dict)
    """seed -> its objective; of a pruned trial what it was pruned by."""
    rungs: Mapping[int, float] = field(default_factory=dict)
    """rung -> what the pruner compared: the area up to there, with other objectives the mean return of the latest evaluations."""
    env_steps: int = 0
    """Env steps of all its runs."""
    error: str = ""
    """Why it failed."""


@dataclass(frozen=True)
class Sweep:
    """The trials of a sweep and the best of them."""

    path: Path
    config: SweepConfig
    space: Space
    trials: tuple[TrialResult, ...]
    """In the order of their numbers."""
    importance: Mapping[str, float] = field(default_factory=dict)
    """field -> its share in what sets good trials apart (PED-ANOVA); empty below 10 complete trials."""

    @property
    def ended(self) -> tuple[TrialResult, ...]:
        """The trials that count: complete, pruned and failed ones."""
        return tuple(trial for trial in self.trials if trial.state != "running")

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train."""
        return len(self.ended) >= self.config.trials

    @property
    def best(self) -> TrialResult | None:
        """The best complete trial, the first of equals."""
        rows = [(trial.score, trial) for trial in self.trials if trial.state == "complete" and trial.score is not None]
        sign = -1.0 if self.config.objective == "steps" else 1.0
        return max(rows, key=lambda row: (sign * row[0], -row[1].number))[1] if rows else None

    @property
    def base(self) -> TrialResult | None:
        """The trial with the settings that the sweep starts from, if they are in the space and it is complete."""
        values = base_values(self.config.base, self.space)
        return next((trial for trial in self.trials if trial.values == values and trial.state == "complete"), None)

    @property
    def best_config(self) -> TrainingConfig:
        """What the sweep starts from with the values of the best trial, without a name."""
        if self.best is None:
            raise InchwormError(f"no trial of {self.path} is complete")
        base = self.config.base
        return with_values(base.replace(run=base.run.replace(name=None, directory="runs")), self.best.values)

    def __str__(self) -> str:
        """One line, such as `CartPole-v1, 20 trials (12 complete, 8 pruned): best final score 499.1, trial 7 (trial 0: 480.2)`."""
        states = [trial.state for trial in self.trials]
        counts = ", ".join(f"{states.count(one)} {one}" for one in ("complete", "pruned", "failed", "running") if one in states)
        what = f"{self.config.base.env.id}, {len(self.trials)} of {self.config.trials} trials ({counts})"
        if self.best is None or self.best.score is None:
            return f"{what}: none is complete"
        start = f"; the settings it starts from: {self.base.score:,.6g}" if self.base is not None and self.base.score is not None else ""
        return f"{what}: best {OBJECTIVES[self.config.objective]} {self.best.score:,.6g}, trial {self.best.number}{start}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for `sweep.json`."""
        return {
            "env": self.config.base.env.id,
            "objective": self.config.objective,
            "best": None if self.best is None else self.best.number,
            "importance": dict(self.importance),
            "trials": [asdict(trial) for trial in self.trials],
        }


def trial_rows(found: Sweep) -> tuple[list[str], list[list[str]]]:
    """The headings and rows of a table with a row per trial, the best first, then by number."""
    names = list(found.space)
    order: Sequence[TrialResult] = sorted(found.trials, key=lambda trial: (trial is not found.best, trial.number))
    rows = []
    for trial in order:
        last = max(trial.rungs, default=0)
        score = f"{trial.score:,.6g}" if trial.score is not None else f"(rung {last}: {trial.rungs[last]:,.5g})" if last else ""
        rows.append([str(trial.number), trial.state, score, f"{trial.env_steps:,}", *(show_value(trial.values[name]) for name in names)])
    return ["trial", "state", OBJECTIVES[found.config.objective], "env steps", *names], rows


def show_value(value: Any) -> str:
    """A value of a field in a few characters."""
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False).strip('"')


# The page

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
