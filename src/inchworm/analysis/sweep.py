"""Hyperparameter search with Optuna: trials of several seeds each, pruned between rungs, in a directory that can be continued.

```
runs/first/
  sweep.yaml             the config that trials start from, the search space, the objective
  study.db               the trials: Optuna's storage in SQLite
  trial-0/ trial-1/ …    a bundle of runs each: trial-0/seed-123 …
  best.yaml              the config of the best trial, for inchworm train --config
  sweep.json  report.html
```

A trial is suggested from the sweep's seed, its number and the trials that have ended, and its runs are exact on resume. A sweep that was
killed therefore ends with the trials of one that was not, if one run is trained at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from inchworm.analysis.runs import areas, read_run
from inchworm.analysis.search_space import Range, Space, Values, base_values, check_space, default_space
from inchworm.analysis.sweep_results import Sweep, SweepConfig, TrialResult, sweep_page
from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import USAGE_ERRORS, ConfigError, InchwormError, MissingExtraError
from inchworm.core.seeding import derive_seed
from inchworm.core.tensor_file import write_atomically
from inchworm.core.types import SeedEvent
from inchworm.env.registry import config_for
from inchworm.env.source import make_vector_env
from inchworm.run.bundle import Bundle, create_bundle, is_bundle, open_bundle
from inchworm.run.directory import CONFIG, LOCK, REPORT, SWEEP, flatten_config, is_locked, make_run_directory, refuse_code, take_lock
from inchworm.train.seed_trainers import STOP_SECONDS, ProcessTrainer, default_jobs
from inchworm.train.seeds import SeedScore, SeedsSummary, score_of, score_seed

if TYPE_CHECKING:
    from optuna import Study, Trial

STUDY, BEST, RESULT = "study.db", "best.yaml", "sweep.json"
UNREACHED = 2.0
"""The steps of a run that does not reach the target, in budgets: the penalised average runtime (PAR2) of algorithm configuration."""
STARTUP_TRIALS = 6
"""Trials that are suggested at random before the sampler learns from them."""
_STUDY_NAME = "sweep"


def sweep(
    env: str | TrainingConfig,
    *,
    space: Mapping[str, Any] | None = None,
    trials: int = 20,
    seeds: int = 3,
    jobs: int | None = None,
    overwrite: bool = False,
    on_trial: Callable[[TrialResult], None] | None = None,
    **options: Any,
) -> Sweep:
    """Search the settings with which training reaches the best objective, and return the trials and the best of them.

    `env` is an id or a config to start from, by default the preset's; its `run.seed` is that of the sweep, and `run.name` its directory. In
    the space, a field has a list of values or a range such as "1e-4..1e-2:log"; by default it is `default_space`. Other options are those
    of `SweepConfig`: `objective`, `pruner`, `sampler`, `rungs`, `evaluations`. `jobs` runs are trained at a time, in processes; `on_trial`
    is called when a trial has ended. Called again with the same settings, a sweep is continued; Ctrl-C saves every run.
    """
    base = config_for(env) if isinstance(env, str) else env
    config = SweepConfig(base=base, space=dict(space or default_space(base)), trials=trials, seeds=seeds, **options)
    return run_sweep(config, jobs=jobs, overwrite=overwrite, on_trial=on_trial)


def run_sweep(
    config: SweepConfig, *, jobs: int | None = None, overwrite: bool = False, on_trial: Callable[[TrialResult], None] | None = None
) -> Sweep:
    """Begin or continue the sweep that is described, in the directory that `config.base` names."""
    space, lanes = check_sweep(config)
    config = config.replace(space={name: entry.plain for name, entry in space.items()})
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs={jobs} must be 1 or more")
    path = make_run_directory(config.base)
    descriptor = take_lock(path / LOCK, f"the sweep {path}")
    try:
        config = open_sweep(path, config, overwrite=overwrite)
        try:
            with quiet_optuna():
                searcher = Searcher(path, config, space, lanes, on_trial)
                searcher.run(ProcessTrainer(None, config.base.env, jobs or default_jobs(config.base, config.trials)))
                return searcher.result(write=True)
        except USAGE_ERRORS:
            if not any(path.glob("trial-*/seed-*/metrics.jsonl")) and not (path / RESULT).exists():
                remove_trials(path, config)  # wrong use leaves nothing behind
                shutil.rmtree(path)
            raise
    finally:
        os.close(descriptor)


def check_sweep(config: SweepConfig) -> tuple[Space, int]:
    """Return the space of a sweep and the lanes of a copy of its environment; refuse what cannot be searched or made."""
    import_optuna()
    with contextlib.closing(make_vector_env(config.base.env, 1, 0)) as probe:
        lanes = probe.lanes_per_copy
    return check_space(config.base, config.space, lanes), lanes


def import_optuna() -> Any:
    """Import Optuna, or name the extra."""
    try:
        import optuna
    except ImportError as error:
        raise MissingExtraError('a sweep needs Optuna; type: pip install "inchworm[hpo]"') from error
    return optuna


@contextlib.contextmanager
def quiet_optuna() -> Iterator[None]:
    """Keep Optuna's messages about each trial off the terminal, and its warnings about experimental parts that we use."""
    logging = import_optuna().logging
    before = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", import_optuna().exceptions.ExperimentalWarning)
            yield
    finally:
        logging.set_verbosity(before)


# The directory


def find_sweep(path_or_name: str | Path, directory: str | Path = "runs") -> Path | None:
    """The directory of a sweep that a path, or a name in `directory`, names; None if it names none."""
    places = (Path(path_or_name), Path(directory) / path_or_name)
    return next((path for path in places if str(path_or_name) and (path / SWEEP).is_file()), None)


def read_sweep_config(path: Path, *, env: str | None = None) -> SweepConfig:
    """Read `sweep.yaml`; like a run's config it cannot import code, unless that is also given as `env`."""
    try:
        config = SweepConfig.from_yaml(path / SWEEP)
    except OSError as error:
        raise ConfigError(f"{path} is not a readable sweep: {error}") from error
    refuse_code(config.base, path / SWEEP, env, "{id} as ENV, with --run.name and the flags that it began with")
    return config


def open_sweep(path: Path, asked: SweepConfig, *, overwrite: bool) -> SweepConfig:
    """Write `sweep.yaml`, or check that the one that is there asks the same but for more trials; with `overwrite` begin again."""
    if (path / SWEEP).exists() and not overwrite:
        found = read_sweep_config(path, env=asked.base.env.id)
        before, now = (flatten_config({**config.to_dict(), "trials": 0}) for config in (found, asked))
        differing = [name for name in (*now, *(one for one in before if one not in now)) if before.get(name) != now.get(name)]
        differing = [name for name in differing if name not in ("base.run.name", "base.run.directory")]
        if differing:
            changes = ", ".join(f"{name}: {before.get(name)} → {now.get(name)}" for name in differing[:4])
            raise ConfigError(f"{path} holds another sweep ({changes}); use another run.name, or overwrite it")
    elif (path / SWEEP).exists():
        remove_trials(path, read_sweep_config(path, env=asked.base.env.id))
    else:
        others = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)
        if others:
            what = "is a single run" if CONFIG in others else f"is not a sweep and holds {', '.join(others[:3])}"
            raise ConfigError(f"{path} {what}; use another run.name")
    write_atomically(path / SWEEP, asked.to_yaml())
    return asked


def remove_trials(path: Path, config: SweepConfig) -> None:
    """Delete everything that a sweep has written, so that it is new again. No run may be in use."""
    for trial in sorted(path.glob("trial-*")):
        if is_bundle(trial):
            with open_bundle(trial, env=config.base.env.id) as bundle:
                bundle.lock()
                bundle.clear()
        shutil.rmtree(trial)
    for name in (SWEEP, STUDY, f"{STUDY}-journal", BEST, RESULT, REPORT):
        (path / name).unlink(missing_ok=True)


def open_study(path: Path, space: Space) -> Study:
    """Open the storage of a sweep, or make it; one that is damaged, or that holds something else, is one `ConfigError`."""
    optuna = import_optuna()
    file = path / STUDY
    new = not file.exists()
    if new and any(path.glob("trial-*")):
        raise ConfigError(f"{file} is missing, and {path} has trials; restore it, or start over with --overwrite")
    if not new:
        check_sqlite(file)
    # A creator instead of an address: paths may hold characters that addresses escape.
    options = {"creator": lambda: sqlite3.connect(file, timeout=60.0)}
    try:
        storage = optuna.storages.RDBStorage("sqlite:///study.db", engine_kwargs=options)
        if new:
            return cast("Study", optuna.create_study(study_name=_STUDY_NAME, storage=storage, direction="maximize"))
        study = cast("Study", optuna.load_study(study_name=_STUDY_NAME, storage=storage))
        found = study.get_trials(deepcopy=False)
    except KeyError:
        raise ConfigError(f"{file} is Optuna's, but not of a sweep of inchworm; move it away") from None
    except (RuntimeError, ValueError, sqlite3.Error, optuna.exceptions.OptunaError) as error:
        raise ConfigError(f"{file} cannot be read by Optuna {optuna.__version__}: {' '.join(str(error).split())[:300]}") from error
    expected = distributions(space)
    for trial in found:
        for name, distribution in trial.distributions.items():
            if expected.get(name) != distribution:
                raise ConfigError(f"{file} has trials of another space ({name}: {distribution} → {expected.get(name)}); move it away")
    return study


def check_sqlite(file: Path) -> None:
    """Refuse a file that is damaged, or not SQLite, or not of Optuna."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{file.resolve().as_posix().replace('?', '%3f')}?mode=rw", uri=True)) as connection:
            state = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error as error:
        raise ConfigError(f"{file} is not a readable SQLite file ({error}); restore it, or start over with --overwrite") from None
    if state != "ok":
        raise ConfigError(f"{file} is damaged ({' '.join(str(state).split())[:200]}); restore it, or start over with --overwrite")
    if not {"studies", "trials"} <= tables:
        raise ConfigError(f"{file} is SQLite, but not Optuna's (tables: {', '.join(sorted(tables)) or 'none'}); move it away")


# Values in Optuna's terms: what it stores as a choice is a number, text, a truth value or None, so others are their JSON text.


def distributions(space: Space) -> dict[str, Any]:
    """The space as Optuna's distributions."""
    optuna = import_optuna()
    found: dict[str, Any] = {}
    for name, entry in space.items():
        if not isinstance(entry, Range):
            found[name] = optuna.distributions.CategoricalDistribution([_label(value) for value in entry.values])
        elif entry.whole:
            found[name] = optuna.distributions.IntDistribution(int(entry.low), int(entry.high), log=entry.log, step=int(entry.step or 1))
        else:
            found[name] = optuna.distributions.FloatDistribution(entry.low, entry.high, log=entry.log, step=entry.step)
    return found


def _label(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)


def _values(space: Space, params: Mapping[str, Any]) -> Values:
    """The values of a trial from Optuna's."""
    found: Values = {}
    for name, entry in space.items():
        if name in params:
            value = params[name]
            found[name] = value if isinstance(entry, Range) else next(one for one in entry.values if _label(one) == value)
    return found


def read_trials(study: Study, space: Space, config: SweepConfig) -> tuple[TrialResult, ...]:
    """The trials of a study. One that was killed while it was suggested has no values and is left out: it is suggested again."""
    states: dict[str, Any] = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}
    found = []
    for trial in study.get_trials(deepcopy=False):
        if trial.state.name not in states or trial.params.keys() != space.keys():
            continue
        attributes = trial.user_attrs
        value = trial.value if trial.state.name == "COMPLETE" else None
        found.append(
            TrialResult(
                trial.number,
                states[trial.state.name],
                _values(space, trial.params),
                None if value is None else config.shown(value),
                attributes.get("seeds", {}),
                dict(sorted(trial.intermediate_values.items())),
                attributes.get("env_steps", 0),
                attributes.get("error", ""),
            )
        )
    return tuple(found)


# Training


class ActiveTrial:
    """A trial that is being trained: its runs up to the current rung."""

    def __init__(self, trial: Trial, values: Values, bundle: Bundle, rung: int) -> None:
        self.trial, self.values, self.bundle, self.rung = trial, values, bundle, rung
        self.waiting: deque[int] = deque()
        self.running: set[int] = set()
        self.retried: set[int] = set()
        self.scores: dict[int, SeedScore] = {}
        self.error = ""


class Searcher:
    """Suggests trials, trains their runs rung by rung, and decides about them when all seeds have come to the end of a rung."""

    def __init__(
        self, path: Path, config: SweepConfig, space: Space, lanes_per_copy: int, on_trial: Callable[[TrialResult], None] | None = None
    ) -> None:
        self.path, self.config, self.space = path, config, space
        self._lanes, self._on_trial = lanes_per_copy, on_trial
        self._distributions = distributions(space)
        self.study = open_study(path, space)
        self.study.pruner = make_pruner(config)
        self._active: dict[Path, ActiveTrial] = {}

    def run(self, trainer: ProcessTrainer) -> None:
        """Train until there are as many trials as asked for. A trial that was killed is continued first."""
        try:
            self._restore()
            with contextlib.closing(trainer.train(self._next_run)) as events:
                for bundle, event in events:
                    self._take(self._active[bundle.path], event)
        finally:
            for active in self._active.values():
                active.bundle.close()

    def _restore(self) -> None:
        """Continue the trials that were under way; one whose suggestion was cut off is suggested again."""
        optuna = import_optuna()
        for frozen in self.study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            if frozen.params.keys() != self.space.keys():
                self.study.tell(frozen.number, state=optuna.trial.TrialState.FAIL)
                continue
            reported = max(frozen.intermediate_values, default=0)
            active = self._open(optuna.trial.Trial(self.study, frozen._trial_id), reported)
            for seed in self.config.all_seeds:  # a run notices that its sweep was killed, saves and ends
                deadline = time.monotonic() + STOP_SECONDS
                while is_locked(active.bundle.run_path(seed)) and time.monotonic() < deadline:
                    time.sleep(0.05)
            if reported and active.trial.should_prune():
                active.scores = {seed: score_seed(active.bundle, seed, None) for seed in self.config.all_seeds}
                values = {seed: self._measure(active, seed, final=False) for seed in self.config.all_seeds}
                self._end(active, optuna.trial.TrialState.PRUNED, values)
            else:
                self._begin_rung(active)

    def _next_run(self) -> tuple[Bundle, int] | None:
        """The next run to train: of a trial that has begun, else of a new one."""
        while True:
            for active in self._active.values():
                if active.waiting:
                    seed = active.waiting.popleft()
                    active.running.add(seed)
                    return active.bundle, seed
            if len(read_trials(self.study, self.space, self.config)) >= self.config.trials:
                return None
            self._begin_rung(self._suggest())

    def _suggest(self) -> ActiveTrial:
        """Ask for a new trial; the first one has the settings that the sweep starts from, if the space has them."""
        optuna = import_optuna()
        index = len(read_trials(self.study, self.space, self.config))
        self.study.sampler = make_sampler(self.config, index)
        start = base_values(self.config.base, self.space)
        if index == 0 and start is not None and not self.study.get_trials(states=(optuna.trial.TrialState.WAITING,)):
            self.study.enqueue_trial({name: _label(value) for name, value in start.items()})
        return self._open(self.study.ask(self._distributions))

    def _open(self, trial: Trial, rung: int = 0) -> ActiveTrial:
        """Open the directory of a trial that has come to a rung."""
        values = _values(self.space, trial.params)
        bundle = create_bundle(self._config(values, trial.number, max(1, rung)), self.config.all_seeds)
        active = ActiveTrial(trial, values, bundle, rung)
        self._active[active.bundle.path] = active
        return active

    def _config(self, values: Values, number: int, rung: int) -> TrainingConfig:
        config = self.config.trial_config(values, rung, self._lanes)
        return config.replace(run=config.run.replace(seed=self.config.all_seeds[0], name=f"trial-{number}", directory=str(self.path)))

    def _begin_rung(self, active: ActiveTrial) -> None:
        """Train a trial's runs up to its next rung; runs that are there already are not trained again."""
        active.rung += 1
        bundle = active.bundle
        bundle.update(self._config(active.values, active.trial.number, active.rung))
        active.scores = {seed: score_seed(bundle, seed, None) for seed in bundle.seeds}
        active.waiting = deque(seed for seed, score in active.scores.items() if score.status != "done")
        if not active.waiting:
            self._settle(active)

    def _take(self, active: ActiveTrial, event: SeedEvent) -> None:
        """Take in what a run reports. One that failed is tried once more; then its trial fails."""
        if event.kind == "progress":
            return
        seed = event.seed
        active.running.discard(seed)
        if event.kind == "done":
            active.scores[seed] = score_seed(active.bundle, seed, None, event)
        elif event.wrong_use and not self._some_ended():
            raise ConfigError(event.text)  # as every other trial would
        elif seed in active.retried or event.wrong_use:
            active.error = f"seed {seed}: {event.text}"
            active.waiting.clear()
        else:
            active.retried.add(seed)
            active.waiting.append(seed)
        if not active.waiting and not active.running:
            self._settle(active)

    def _settle(self, active: ActiveTrial) -> None:
        """Decide about a trial all of whose runs have come to the end of a rung: it ends, is pruned, or trains on."""
        states = import_optuna().trial.TrialState
        final = active.rung >= self.config.rungs or all(row.stop_reason != "max_iterations" for row in active.scores.values())
        values: dict[int, float] = {}
        if not active.error:
            try:
                values = {seed: self._measure(active, seed, final=final) for seed in active.bundle.seeds}
            except InchwormError as error:
                active.error = str(error)
        if active.error:
            if not self._some_ended():
                raise InchwormError(f"trial {active.trial.number} failed, and none before it has ended: {active.error}")
            self._end(active, states.FAIL)
        elif final:
            self._end(active, states.COMPLETE, values)
        else:
            active.trial.report(fmean(values.values()), active.rung)
            if active.trial.should_prune():
                self._end(active, states.PRUNED, values)
            else:
                self._begin_rung(active)

    def _measure(self, active: ActiveTrial, seed: int, *, final: bool) -> float:
        """The objective of one run, to be maximised; before the end, what pruning compares."""
        config, row = active.bundle.config, active.scores[seed]
        record = read_run(active.bundle.run_path(seed))
        if self.config.objective == "area":
            total = config.run.total_timesteps
            return areas([record], end=total if final else total * active.rung / self.config.rungs)[0]
        if self.config.objective == "steps" and final:
            return -float(row.converged["env_steps"] if row.converged is not None else UNREACHED * config.run.total_timesteps)
        score = record.score
        if config.evaluation.interval > 0 or config.evaluation.final_episodes > 0:  # never of training instead of one that failed
            score = record.evaluations[-1]["evaluation/mean_return"] if record.evaluations else None
        if score is None:
            raise InchwormError(f"seed {seed} has no score: its evaluation failed, or no episode has ended; train longer")
        return score

    def _some_ended(self) -> bool:
        return any(trial.state in ("complete", "pruned") for trial in read_trials(self.study, self.space, self.config))

    def _end(self, active: ActiveTrial, state: Any, values: Mapping[int, float] | None = None) -> None:
        """Record how a trial ended."""
        trial, bundle = active.trial, active.bundle
        values = values or {}
        rows = [active.scores[seed] for seed in bundle.seeds]
        shown = {str(seed): self.config.shown(value) if state.name == "COMPLETE" else value for seed, value in values.items()}
        trial.set_user_attr("seeds", shown)
        trial.set_user_attr("env_steps", sum(row.env_steps for row in rows))
        if active.error:
            trial.set_user_attr("error", active.error)
        self.study.tell(trial.number, fmean(values.values()) if state.name == "COMPLETE" else None, state)
        summary = SeedsSummary(bundle.path, bundle.config.env.id, tuple(rows), score_of(bundle.config))
        bundle.write_summary(summary.to_dict(), summary.page())
        del self._active[bundle.path]
        bundle.close()
        result = self.result(write=True)
        if self._on_trial is not None:
            self._on_trial(next(row for row in result.trials if row.number == trial.number))

    def result(self, *, write: bool = False) -> Sweep:
        """The trials so far; with `write` also as files."""
        trials = read_trials(self.study, self.space, self.config)
        found = Sweep(self.path, self.config, self.space, trials, importances(self.study))
        if write:
            write_atomically(self.path / RESULT, json.dumps(found.to_dict(), indent=2, allow_nan=False) + "\n")
            if found.best is not None:
                write_atomically(self.path / BEST, found.best_config.to_yaml())
            if self.config.base.run.report:
                write_atomically(self.path / REPORT, sweep_page(found))
        return found


def make_sampler(config: SweepConfig, index: int) -> Any:
    """The sampler of one trial: a function of the sweep's seed and the number of trials before it, so that a resume needs no state."""
    samplers = import_optuna().samplers
    seed = derive_seed(config.base.run.seed, "sweep sampler", index)
    if config.sampler == "random":
        return samplers.RandomSampler(seed=seed)
    return samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS)


def make_pruner(config: SweepConfig) -> Any:
    """The pruner, which counts resources in rungs."""
    pruners = import_optuna().pruners
    if config.pruner == "median":
        return pruners.MedianPruner(n_startup_trials=4)
    if config.pruner == "hyperband":
        return pruners.HyperbandPruner(min_resource=1, max_resource=config.rungs, reduction_factor=2)
    return pruners.NopPruner()


def importances(study: Study) -> dict[str, float]:
    """The importance of each field by PED-ANOVA; empty while there are too few complete trials."""
    optuna = import_optuna()
    complete = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if len(complete) < 10 or len({trial.value for trial in complete}) < 2:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.3)
    found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: float(value) for name, value in found.items()}
