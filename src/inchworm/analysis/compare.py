"""Two settings compared: pairs of runs with the same seeds, trained until a sequential test shows a difference or all seeds are done.

```
runs/first/
  comparison.yaml        the two configs, and the number of seeds
  base/ changed/         a bundle of runs each: base/seed-0 and changed/seed-0 are a pair
  comparison.json        the answer
  report.html            the answer as a page, with all runs side by side
```
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from inchworm.analysis.charts import Line, e, legend, metric_line, shared_steps
from inchworm.analysis.report import large_chart, report_page, section, table
from inchworm.analysis.runs import RunRecord, areas, read_run
from inchworm.config.reading import ConfigBase, config_class
from inchworm.config.sections import Count, TrainingConfig
from inchworm.core.errors import USAGE_ERRORS, ConfigError, CorruptFileError, InchwormError
from inchworm.core.tensor_file import read_bytes, read_json, write_atomically
from inchworm.evaluate.stats import mean_interval95
from inchworm.run.bundle import SUMMARY_JSON, create_bundle, is_bundle, open_bundle
from inchworm.run.directory import (
    COMPARISON,
    CONFIG,
    LOCK,
    REPORT,
    config_changes,
    find_named,
    flatten_config,
    make_run_directory,
    refuse_code,
    take_lock,
)
from inchworm.tracking.console import SeedsView
from inchworm.train.seed_trainers import default_jobs
from inchworm.train.seeds import SeedScore, plan_seeds, train_bundle

RESULT = "comparison.json"
SETTINGS = ("base", "changed")
"""The directories of the two settings."""
LEVEL = 0.05
"""How often a difference of any measure is claimed where there is none, at most. Each measure gets an equal part of it (Bonferroni)."""
MEASURES = {"area": "area under curve", "score": "final score"}
"""What is compared, with its name in texts."""
ViewMaker = Callable[[str, Sequence[int], TrainingConfig], SeedsView]
"""Makes the display of the runs of one setting, from its name, the seeds and its config."""
FIXED = ("run.seed", "run.name", "run.directory")
"""Settings that a comparison chooses itself."""


@config_class("comparison.")
class ComparisonConfig(ConfigBase):
    """The content of `comparison.yaml`."""

    base: TrainingConfig
    """The first setting; `run.seed` is the first seed."""
    changed: TrainingConfig
    """The second setting."""
    seeds: Count = 8
    """The most pairs of runs. The test depends on it, so that it is fixed when a comparison begins."""

    @property
    def all_seeds(self) -> range:
        """The seeds of all pairs."""
        return range(self.base.run.seed, self.base.run.seed + self.seeds)

    @property
    def changes(self) -> list[str]:
        """What differs, such as `ppo.gae_lambda: 0.95 → 0.9`."""
        return [line for name, line in config_changes(self.base, self.changed).items() if name not in FIXED]


@dataclass(frozen=True)
class Comparison:
    """The answer of a comparison; `str` of it is a sentence."""

    path: Path
    config: ComparisonConfig
    pairs: int
    """Pairs of runs that are done, in the order of their seeds."""
    values: dict[str, np.ndarray]
    """measure -> [2, pairs] f64: of the base and of the changed setting."""
    answers: dict[str, Answer]
    """measure -> the mean of changed less base, with its interval."""
    failed: tuple[SeedScore, ...] = ()
    """Seeds whose training raised an error in this call."""

    @property
    def seeds(self) -> range:
        """The seeds of these pairs."""
        return self.config.all_seeds[: self.pairs]

    @property
    def answered(self) -> bool:
        """Whether a difference of any measure is shown."""
        return any(answer.differs for answer in self.answers.values())

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train."""
        return self.answered or self.pairs >= self.config.seeds

    def __str__(self) -> str:
        what = ", ".join(self.config.changes)
        if not self.finished:
            return f"{what}: not answered after {self.pairs} of {self.config.seeds} pairs"
        shown = [
            f"the {MEASURES[name]} is {'higher' if answer.mean > 0 else 'lower'}" for name, answer in self.answers.items() if answer.differs
        ]
        if not shown:
            return f"{what}: no difference is shown by {self.pairs} pairs"
        pairs = max(answer.pairs for answer in self.answers.values() if answer.differs)
        return f"{what}: {' and '.join(shown)}, as {pairs} of up to {self.config.seeds} pairs show"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The headings and rows of a table with a row per measure."""
        rows = []
        for name, answer in self.answers.items():
            before, after = self.values[name][:, : answer.pairs].mean(1) if answer.pairs else (math.nan, math.nan)
            interval = f"[{answer.low:.4g}, {answer.high:.4g}]" if math.isfinite(answer.high) else "too few pairs"
            verdict = "yes" if answer.differs else "no"
            rows.append([MEASURES[name], f"{before:.5g}", f"{after:.5g}", f"{answer.mean:+.4g}", interval, str(answer.pairs), verdict])
        return ["measure", *SETTINGS, "difference", "95 % interval", "pairs", "shown"], rows

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for `comparison.json`: finite floats or None."""

        def plain(value: float) -> float | None:
            return value if math.isfinite(value) else None

        measures = {
            name: {
                **{setting: [plain(value) for value in row] for setting, row in zip(SETTINGS, self.values[name].tolist())},
                "difference": plain(answer.mean),
                "interval": [plain(answer.low), plain(answer.high)],
                "pairs": answer.pairs,
                "differs": answer.differs,
            }
            for name, answer in self.answers.items()
        }
        return {"changes": self.config.changes, "seeds": self.config.seeds, "pairs": self.pairs, "level": LEVEL, "measures": measures}


def find_comparison(path_or_name: str | Path, directory: str | Path = "runs") -> Path | None:
    """The directory of a comparison that a path, or a name in `directory`, names; None if it names none."""
    return find_named(path_or_name, COMPARISON, directory)


def compare_settings(
    base: TrainingConfig,
    changed: TrainingConfig,
    *,
    seeds: int = 8,
    jobs: int | None = None,
    together: bool | None = None,
    overwrite: bool = False,
    make_view: ViewMaker | None = None,
) -> Comparison:
    """Train both settings with the same seeds, pair after pair, and test after each whether a difference is shown.

    Both runs of a pair have the same initial weights, episodes and random numbers as far as the settings use them alike (common random
    numbers), so that their difference varies less than either. `jobs` runs are trained at a time, in processes, or `together` in one
    program (see `train_seeds`). Written to `base.run.name` in `base.run.directory`; called again, finished runs are left alone.
    """
    check_settings(base, changed, seeds)
    path = make_run_directory(base)
    descriptor = take_lock(path / LOCK, f"the comparison {path}")
    try:
        config = open_comparison(path, ComparisonConfig(base=base, changed=changed, seeds=seeds), overwrite=overwrite)
        try:
            result = train_pairs(path, config, jobs=jobs, together=together, make_view=make_view)
        except USAGE_ERRORS:
            if not any((path / name).exists() for name in SETTINGS):  # wrong use leaves nothing behind
                shutil.rmtree(path)
            raise
        write_atomically(path / RESULT, json.dumps(result.to_dict(), indent=2, allow_nan=False) + "\n")
        if base.run.report and result.pairs:
            write_atomically(path / REPORT, comparison_page(result))
    finally:
        os.close(descriptor)
    return result


def check_settings(base: TrainingConfig, changed: TrainingConfig, seeds: int) -> None:
    """Refuse a comparison that has no answer."""
    if seeds < FIRST_LOOK:
        raise ConfigError(f"--seeds {seeds} is too few to show a difference; a comparison needs {FIRST_LOOK} or more")
    changes = config_changes(base, changed)
    for name in FIXED:
        if name in changes:
            raise ConfigError(f"{changes[name]}: both settings have the same seeds, in one directory; change another setting")
    if not changes:
        raise ConfigError("the two settings are equal; change one, such as --change ppo.gae_lambda=0.9")


def open_comparison(path: Path, asked: ComparisonConfig, *, overwrite: bool) -> ComparisonConfig:
    """Write `comparison.yaml`, or check that the one that is there asks the same; with `overwrite` begin again."""
    if not (path / COMPARISON).exists():
        others = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)
        if others:
            what = "is a single run" if CONFIG in others else f"is not a comparison and holds {', '.join(others[:3])}"
            raise ConfigError(f"{path} {what}; use another run.name")
    elif overwrite:
        for name in SETTINGS:
            if is_bundle(path / name):
                with open_bundle(path / name, env=asked.base.env.id) as bundle:
                    bundle.lock()
                    bundle.clear()
                shutil.rmtree(path / name)
        for name in (RESULT, REPORT):
            (path / name).unlink(missing_ok=True)
    else:
        found = read_comparison(path, env=asked.base.env.id)
        before, now = (flatten_config(config.to_dict()) for config in (found, asked))
        differing = [name for name in now if before.get(name) != now[name] and not name.endswith(FIXED[1:])]
        if differing:
            changes = ", ".join(f"{name}: {before.get(name)} → {now[name]}" for name in differing[:3])
            raise ConfigError(f"{path} holds another comparison ({changes}); use another run.name, or overwrite it")
        return found
    write_atomically(path / COMPARISON, asked.to_yaml())
    return asked


def read_comparison(path: Path, *, env: str | None = None) -> ComparisonConfig:
    """Read `comparison.yaml`; like a run's config it cannot import code, unless that is also given as `env`."""
    try:
        config = ComparisonConfig.from_yaml(path / COMPARISON)
    except OSError as error:
        raise ConfigError(f"{path} is not a readable comparison: {error}") from error
    for setting in (config.base, config.changed):
        refuse_code(setting, path / COMPARISON, env, "{id} as ENV, with --run.name and the flags that it began with")
    return config


def train_pairs(
    path: Path, config: ComparisonConfig, *, jobs: int | None, together: bool | None, make_view: ViewMaker | None = None
) -> Comparison:
    """Train as many pairs at a time as there are jobs, until the question is answered or a seed has failed.

    The test looks at the pairs in the order of their seeds, one by one, so that the answer does not depend on the number of jobs.
    """
    jobs = None if together else jobs or default_jobs(config.base, config.seeds)
    result = measure_pairs(path, config)
    while not result.finished and not result.failed:
        seeds = config.all_seeds[: None if jobs is None else result.pairs + jobs]
        failed: list[SeedScore] = []
        for name, setting in zip(SETTINGS, (config.base, config.changed)):
            placed = setting.replace(run=setting.run.replace(name=name, directory=str(path)))
            with create_bundle(placed, seeds) as bundle:
                try:
                    trainer, _ = plan_seeds(placed.policy, placed.env, bundle, jobs=jobs, together=together)
                    view = None if make_view is None else make_view(name, seeds, setting)
                    failed += train_bundle(bundle, trainer, view).failed
                except USAGE_ERRORS:
                    bundle.discard()
                    raise
        result = measure_pairs(path, config, failed)
    return result


def measure_pairs(path: Path, config: ComparisonConfig, failed: Sequence[SeedScore] = ()) -> Comparison:
    """The answer by the pairs that are done, in the order of their seeds up to the first that is not."""
    scores = [_scores(path / name) for name in SETTINGS]
    columns: dict[str, list[tuple[float, ...]]] = {name: [] for name in MEASURES}
    for seed in config.all_seeds:
        if not all(seed in found for found in scores):
            break
        columns["score"].append(tuple(found[seed] for found in scores))
        columns["area"].append(areas([read_run(path / name / f"seed-{seed}") for name in SETTINGS]))
    values = {name: np.array(column, np.float64).reshape(-1, 2).T for name, column in columns.items()}  # [2, pairs]
    answers = {name: look(after - before, config.seeds, LEVEL / len(MEASURES)) for name, (before, after) in values.items()}
    return Comparison(path, config, len(columns["score"]), values, answers, tuple(failed))


def _scores(bundle: Path) -> dict[int, float]:
    """The scores of the seeds of a bundle that are done, by its last summary; none if there is none."""
    try:
        rows = read_json(read_bytes(bundle / SUMMARY_JSON, limit=10_000_000).decode())["seeds"]
        done = {int(row["seed"]): row["score"] for row in rows if row["status"] == "done"}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, CorruptFileError) as error:
        raise ConfigError(f"{bundle / SUMMARY_JSON} is not a readable summary ({error}); delete it, and compare again") from None
    for seed, score in done.items():
        if score is None:
            raise InchwormError(f"seed {seed} in {bundle} has no score: its evaluation failed, or no episode has ended; train longer")
    return done


# The page


def write_comparison_page(path: Path, out: str | Path | None = None) -> Path:
    """Write the page of a comparison, by default into its directory, from the pairs that are done."""
    found = measure_pairs(path, read_comparison(path))
    if not found.pairs:
        raise ConfigError(f"the comparison {path} has no pair of finished runs yet; inchworm compare {path} continues it")
    return write_atomically(path / REPORT if out is None else Path(out), comparison_page(found))


def comparison_page(found: Comparison) -> str:
    """Return the page of a comparison: the answer, how it came about pair by pair, and all runs side by side."""
    pairs = [[read_run(found.path / name / f"seed-{seed}") for name in SETTINGS] for seed in found.seeds]
    facts = (found.config.base.env.id, *found.config.changes)
    columns = ["seed", *(f"{text}: {what}" for text in MEASURES.values() for what in (*SETTINGS, "difference"))]
    rows: list[list[object]] = [[seed] for seed in found.seeds]
    for values in found.values.values():
        for row, (before, after) in zip(rows, values.T.tolist()):
            row += [f"{before:.5g}", f"{after:.5g}", f"{after - before:+.4g}"]
    lead = [
        f"<header><h1>comparison {e(found.path.name)}</h1><p>{' · '.join(map(e, facts))}</p></header>",
        section("answer", f"<p>{e(found)}</p>", table(*found.table())),
        *(_looks(name, values[1] - values[0], found.config.seeds) for name, values in found.values.items()),
        _curve_differences(pairs),
        section("each pair", table(columns, rows)),
    ]
    runs = [pair[index] for index in range(len(SETTINGS)) for pair in pairs]
    return report_page(runs, links_from=found.path, title=f"comparison {found.path.name}", lead="".join(lead))


def _looks(name: str, differences: np.ndarray, most: int) -> str:
    """The mean difference after each pair with its interval, and the boundary beyond which the test claims a difference."""
    answers: list[Answer] = []
    for count in range(1, len(differences) + 1):
        answer = look(differences[:count], most, LEVEL / len(MEASURES))
        if math.isfinite(answer.high) and not (answers and answers[-1].differs):
            answers.append(answer)
    title = f"{MEASURES[name]}: the mean difference after each pair"
    if not answers:
        return section(title, f'<p class="hint">The first look needs {FIRST_LOOK} pairs or more.</p>')
    pairs, mean, low, high = np.array([(each.pairs, each.mean, each.low, each.high) for each in answers], np.float64).T  # [n] each
    lines = [Line("changed less base", pairs, mean, low, high, style="dots")]
    lines += [Line(f"boundary {way}", pairs, sign * (high - mean), colour=7, style="dashed") for way, sign in (("above", 1), ("below", -1))]
    hint = "a difference is claimed beyond the boundary, where the interval, which holds at all looks together, leaves out 0"
    return section(title, large_chart(lines, title, zero=True, over="pairs"), legend(lines), f'<p class="hint">{hint}</p>')


def _curve_differences(pairs: Sequence[Sequence[RunRecord]]) -> str:
    """The learning curve of each changed run less that of its base run, and the mean of the pairs with its interval at each point."""
    curves = [[metric_line(run, "mean_return") for run in pair] for pair in pairs]
    known = [(one, other) for one, other in curves if one is not None and other is not None]
    steps = shared_steps([line for pair in known for line in pair])
    if not len(steps):
        return ""
    differences = np.stack([np.interp(steps, other.x, other.y) - np.interp(steps, one.x, one.y) for one, other in known])  # [pairs, n]
    middle = Line("mean of the pairs", steps, differences.mean(0))
    if len(known) > 1:
        middle = replace(middle, **dict(zip(("low", "high"), np.apply_along_axis(mean_interval95, 0, differences))))
    lines = [*(Line(f"pair {number}", steps, row, style="faint") for number, row in enumerate(differences, 1)), middle]
    hint = "returns of training, changed less base; the band is the 95 % interval of the mean at each point alone"
    drawn = large_chart(lines, "difference of returns", zero=True)
    return section("difference of the learning curves", drawn, legend([middle]), f'<p class="hint">{hint}</p>')


# A paired test that may stop after any pair: whether the mean of differences is 0, with an interval that holds whenever one stops.
#
# Looking at a t-test after every pair and stopping at the first p below 5 % would find a difference where there is none in far more than
# 5 % of all cases. Here an error-spending function divides the 5 % over the looks.

FIRST_LOOK = 3
"""Pairs before the first look: with fewer, no t-statistic is convincing."""
POWER = 2.0
"""After n of N pairs, the share (n/N)^POWER of the error has been spent."""
PATHS = 200_000
"""Simulated sequences of differences that the bounds are computed from."""
LEAST_PATHS = 20
"""Fewer sequences beyond a bound would not determine it: their error is spent later."""


@lru_cache(maxsize=16)
def bounds(most: int, level: float) -> tuple[float, ...]:
    """The bound of |t| after each number of pairs, from 0 to `most`; infinite where no claim is made.

    Normal differences of mean 0 and any variance exceed the bounds at any of the looks with probability `level`. The error is spent as in
    Lan & DeMets 1983, "Discrete sequential boundaries for clinical trials", with the power family of Kim & DeMets 1987, "Design and
    analysis of group sequential tests based on the type I error spending rate function". Their integrals assume a known variance; with few
    pairs that is far off, so the bounds are quantiles of simulated t-statistics, always the same.
    """
    rng, found = np.random.default_rng(0), [math.inf] * (most + 1)
    total, squares = np.zeros(PATHS), np.zeros(PATHS)
    going, crossed = np.ones(PATHS, np.bool_), 0
    for count in range(1, most + 1):
        drawn = rng.standard_normal(PATHS)
        total += drawn
        squares += drawn * drawn
        if count < FIRST_LOOK:
            continue
        allowed = int(level * (count / most) ** POWER * PATHS) - crossed
        if allowed < LEAST_PATHS:
            continue
        statistics = np.abs(total) / np.sqrt((squares - total * total / count) / (count - 1) * count)
        statistics[~going] = 0.0
        found[count] = float(-np.partition(-statistics, allowed - 1)[allowed - 1])
        going &= statistics < found[count]
        crossed += allowed
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known of the mean difference after some pairs."""

    pairs: int
    """Pairs that were looked at, up to the first look that showed a difference."""
    mean: float
    """NaN without pairs."""
    low: float
    high: float
    """The interval of the mean, at the confidence 1 - level at all looks together; infinite as long as no claim would be made."""
    differs: bool
    """Whether a difference is shown."""


def look(differences: np.ndarray, most: int, level: float) -> Answer:
    """Look at differences [n] in order, of up to `most` that are planned, and stop at the first look that shows a mean other than 0.

    The interval is the repeated confidence interval of Jennison & Turnbull 1989, "Interim analyses: the repeated confidence interval
    approach": the means that the bound would not reject. Differences without any spread, as of scores that are won or lost, have no
    t-statistic: they are shown when so many of one sign are as unlikely as what may have been spent by then, 2^(1 - n).
    """
    limits, answer = bounds(most, level), Answer(0, math.nan, -math.inf, math.inf, differs=False)
    for count in range(1, min(len(differences), most) + 1):
        seen = differences[:count]
        mean, half = float(seen.mean()), math.inf
        spread = float(seen.std(ddof=1)) if count > 1 else 0.0
        if spread > 0 or 2.0 ** (1 - count) <= level * (count / most) ** POWER:
            half = limits[count] * spread / math.sqrt(count) if spread > 0 else 0.0
        answer = Answer(count, mean, mean - half, mean + half, differs=abs(mean) > half)
        if answer.differs:
            break
    return answer
