"""A run directory as a value: state, config, rows, evaluations and facts, read from its files alone; and lists of runs.

Nothing is trusted and nothing is imported: a torn last line is skipped, a value that is not a number is left out, and a directory that
is empty, foreign or damaged is one `ConfigError` with one line.
"""

from __future__ import annotations

import math
import os
import shutil
import tarfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from inchworm.config.sections import TrainingConfig
from inchworm.core.errors import ConfigError, CorruptFileError, InchwormError
from inchworm.core.spaces import in_one_line
from inchworm.core.tensor_file import make_directory, read_bytes, read_json, sync_directory, untrusted
from inchworm.policy.file import read_policy_file
from inchworm.policy.spec import PolicySpec
from inchworm.run.bundle import find_bundle
from inchworm.run.directory import (
    BUNDLE,
    COMPARISON,
    CONFIG,
    LOCK,
    OUTCOME,
    POLICY,
    RATINGS,
    REPLAYS,
    REPORT,
    SWEEP,
    VERSIONS,
    find_named,
    find_run,
    is_locked,
    take_lock,
)
from inchworm.selfplay.opponent_pool import RatingBook
from inchworm.tracking.jsonl import METRICS, TIMING, read_rows

State = Literal["running", "finished", "interrupted", "failed"]
ARCHIVE = "archive"
MEDIA = (".mp4", ".webm", ".gif", ".html")
_OURS = (REPORT, "ratings.html")  # the second one by earlier versions
_SEVERAL = {BUNDLE: "bundle of seeds", COMPARISON: "comparison", SWEEP: "sweep"}


@dataclass(frozen=True, eq=False)
class RunRecord:
    """What the files of a run say. Rows are those of `metrics.jsonl` and `timing.jsonl`, without values that are not numbers."""

    path: Path
    config: TrainingConfig
    state: State
    reason: str
    """Why it ended, as `History.stop_reason`, or the error; empty if that is not known."""
    rows: Sequence[Mapping[str, float]]
    timing: Sequence[Mapping[str, float]]
    versions: Mapping[str, str | None] = field(default_factory=dict)
    ratings: RatingBook | None = None
    changed: float = 0.0
    """When its files last changed, in seconds since 1970."""

    @cached_property
    def name(self) -> str:
        """The directory's name; of one of several seeds with that of its bundle: `first/seed-0`."""
        path = self.path.resolve()
        return f"{path.parent.name}/{path.name}" if (path.parent / BUNDLE).is_file() else path.name

    @property
    def env_steps(self) -> int:
        """Env steps of the newest row."""
        return int(max((row["env_steps"] for row in self.rows), default=0))

    @cached_property
    def names(self) -> list[str]:
        """The names of all metrics, in the order in which they first appear."""
        return list(dict.fromkeys(name for row in self.rows for name in row if name not in ("iteration", "env_steps")))

    def series(self, name: str, *, timing: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Env steps and values [n] of the rows that have a metric."""
        found = [(row["env_steps"], row[name]) for row in (self.timing if timing else self.rows) if name in row]
        table = np.array(found, np.float64).reshape(len(found), 2)
        return table[:, 0], table[:, 1]

    def column(self, name: str) -> np.ndarray:
        """The values of a metric in the updates that took steps: the warm-up of a normaliser is not one."""
        return np.array([row[name] for row in self.rows if name in row and "warm_up" not in row], np.float64)

    @property
    def evaluations(self) -> list[Mapping[str, float]]:
        """The rows with an evaluation that did not fail."""
        return [row for row in self.rows if "evaluation/mean_return" in row]

    @property
    def score(self) -> float | None:
        """The mean return of the last evaluation, else of the latest episodes of training."""
        for name in ("evaluation/mean_return", "mean_return"):
            for row in reversed(self.rows):
                if name in row:
                    return row[name]
        return None

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time went: env, act, learn and rest, in seconds; of the rows that are there, times the iterations each stands for.

        Where collecting and learning are one compiled program, that and the rest.
        """
        total = {name: sum(row.get(name, 0.0) for row in self.timing) for name in _SECONDS}
        env = min(total["env_seconds"], total["collect_seconds"])
        rest = total["seconds"] - total["collect_seconds"] - total["learn_seconds"] + total["between_seconds"]
        collected = "env" if env else "collect"  # files of earlier versions do not split collecting
        parts = {collected: env or total["collect_seconds"], "learn": total["learn_seconds"], "rest": max(0.0, rest)}
        if env:
            parts = {"env": env, "act": total["collect_seconds"] - env, **parts}
        elif not total["collect_seconds"]:
            parts = {"compiled loop": total["seconds"], "rest": total["between_seconds"]}
        every = self.config.run.log_interval
        return {name: value * every for name, value in parts.items()} if total["seconds"] else {}

    @cached_property
    def spec(self) -> PolicySpec | None:
        """The architecture and the spaces of its policy; None if there is no readable file of one built-in policy."""
        try:
            return read_policy_file(self.path / POLICY)[0].spec
        except (OSError, InchwormError):
            return None

    @property
    def facts(self) -> dict[str, str]:
        """The environment in words."""
        env, spec = self.config.env, self.spec
        facts = {"environment": env.id, "copies": f"{env.num_envs}", "worker processes": f"{env.num_workers}"}
        if spec is not None:
            facts |= {"observations": in_one_line(spec.observation_space), "actions": in_one_line(spec.action_space)}
            facts["parameters"] = f"{sum(math.prod(shape) for shape in spec.layers.values()):,}"
        for name, label, form in (
            ("mean_length", "episode length", ".4g"),
            ("truncated_share", "truncated episodes", ".0%"),
            ("observation_scale", "observation scale", ".4g"),
        ):
            if len(values := self.column(name)[-20:]):
                facts[label] = format(values.mean(), form)
        return facts

    @property
    def media(self) -> list[Path]:
        """Videos, animations, replays and their pages in the directory; those of later evaluations first."""
        found = [path for path in (*self.path.glob("*"), *self.path.glob("videos/*")) if path.suffix in MEDIA and path.name not in _OURS]
        found += [path for path in self.path.glob(f"{REPLAYS}/*") if path.suffix in (*MEDIA, ".json")]
        return sorted((path for path in found if path.is_file() and not path.is_symlink()), reverse=True)


_SECONDS = ("seconds", "collect_seconds", "env_seconds", "learn_seconds", "between_seconds")


def read_run(path_or_name: str | Path, *, directory: str | Path = "runs", rows: bool = True) -> RunRecord:
    """Read a run by its path, or by its name in `directory`. With `rows` one without any row of metrics is an error."""
    places = [place for place in (Path(path_or_name), Path(directory) / path_or_name) if place.is_dir()]
    if places and not any((place / name).exists() for place in places for name in (CONFIG, BUNDLE)):
        held = sorted(entry.name for entry in places[0].iterdir() if entry.name != LOCK)
        if several := next((what for what in _SEVERAL if what in held), None):
            inside = sorted(path.parent for path in places[0].glob(f"*/{BUNDLE}"))
            named = f"; it holds runs of several seeds, such as {inside[0]}" if inside else ""
            raise ConfigError(f"{places[0]} is a {_SEVERAL[several]}, not a run{named}")
        holds = f"it has no {CONFIG} but {', '.join(held[:3])}" if held else "it is empty"
        raise ConfigError(f"{places[0]} is not a run: {holds}; inchworm runs lists those in runs/")
    path = find_run(path_or_name, directory=directory)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # names of older trainers were reported when it was trained
            config = TrainingConfig.from_yaml(path / CONFIG)
    except (InchwormError, OSError) as error:
        raise ConfigError(f"{path} is not a readable run: {error}") from error
    found, timing = _numbers(path / METRICS), _numbers(path / TIMING)
    if rows and not found:
        why = "it is still in its first iteration" if is_locked(path) else "it ended before the first iteration was written"
        if (path / METRICS).exists() and (path / METRICS).stat().st_size:
            why = f"{METRICS} has no readable row"
        raise ConfigError(f"the run {path} has no metrics: {why}")
    state, reason = _state(path, config, found)
    changed = max((os.stat(path / name).st_mtime for name in (CONFIG, METRICS, RATINGS) if (path / name).exists()), default=0.0)
    return RunRecord(path, config, state, reason, found, timing, _small_json(path / VERSIONS), _ratings(path), changed)


def read_runs(names: Iterable[str | Path], *, directory: str | Path = "runs", rows: bool = True) -> list[RunRecord]:
    """Read runs as `read_run` does, each once. A comparison stands for its two bundles, and a bundle of seeds for its runs.

    These are the runs with metrics, if `rows` are needed.
    """
    found: list[RunRecord] = []
    for name in names:
        where = find_bundle(name, directory) or find_named(name, COMPARISON, directory)
        if where is None:
            found.append(read_run(name, directory=directory, rows=rows))
            continue
        runs = [read_run(path.parent, rows=False) for pattern in ("seed-*", "*/seed-*") for path in where.glob(f"{pattern}/{CONFIG}")]
        begun = sorted((run for run in runs if run.rows or not rows), key=lambda run: (run.path.parent.name, run.config.run.seed))
        if not begun:
            how = f"; inchworm resume {where} trains its seeds" if (where / BUNDLE).exists() else ""
            raise ConfigError(f"{where} holds no run with metrics yet{how}")
        found += begun
    return list({run.path.resolve(): run for run in found}.values())


def _numbers(path: Path) -> list[dict[str, float]]:
    """The rows of a file that have env steps, each without what is not a finite number."""
    try:
        rows = read_rows(path)
    except (OSError, InchwormError):
        return []
    # The comparison is false for NaN and infinity, too.
    kept = [{name: value for name, value in row.items() if type(value) in (int, float) and abs(value) < 1e300} for row in rows]
    return [row for row in kept if "env_steps" in row]


def _small_json(path: Path) -> dict[str, Any]:
    """A small JSON file of the run; empty if it is missing or damaged."""
    try:
        with untrusted(str(path)):
            return read_json(read_bytes(path, limit=10_000_000).decode())
    except (OSError, CorruptFileError):
        return {}


def _ratings(path: Path) -> RatingBook | None:
    book = RatingBook()
    try:
        with untrusted(RATINGS):
            book.load_state_dict(_small_json(path / RATINGS))
    except CorruptFileError:
        return None
    return book if book.history else None


def _state(path: Path, config: TrainingConfig, rows: Sequence[Mapping[str, float]]) -> tuple[State, str]:
    """The state of a run, and why it ended. Without an outcome it was killed, unless it has reached a limit."""
    if is_locked(path):
        return "running", ""
    outcome = _small_json(path / OUTCOME)
    for state in ("finished", "interrupted", "failed"):
        if outcome.get("outcome") == state:
            return state, str(outcome.get("reason", ""))[:500]
    last = rows[-1] if rows else {}
    limits = {"env_steps": config.run.total_timesteps, "iteration": config.run.max_iterations, "episodes": config.run.max_episodes}
    reached = [name for name, limit in limits.items() if limit is not None and last.get(name, 0) >= limit]
    return ("finished", "") if reached else ("interrupted", "")


# Lists of runs


@dataclass(frozen=True)
class Listed:
    """An entry of a list of runs: a run, a bundle of seeds, a comparison or a sweep."""

    name: str
    kind: str
    """`run`, `3 seeds`, `comparison` or `sweep`."""
    state: str
    """As of a run, of several the worst; `unreadable`; empty for a comparison or a sweep that nothing trains now."""
    runs: Sequence[RunRecord] = ()
    """The run, or those of a bundle."""
    changed: float = 0.0
    problem: str = ""
    """Why it is unreadable."""


def list_runs(directory: str | Path = "runs") -> dict[str, Listed]:
    """What a directory holds by name, the newest last. Runs of comparisons and sweeps are not read: there may be hundreds."""
    parent = Path(directory)
    if not parent.is_dir():
        raise ConfigError(f"there is no directory {parent}; inchworm train ENV makes runs/, and --directory names another one")
    found: list[Listed] = []
    for path in sorted(entry for entry in parent.iterdir() if entry.is_dir()):
        file = next((name for name in (CONFIG, *_SEVERAL) if (path / name).is_file()), None)
        if file is None:
            continue
        inside = {CONFIG: [path], BUNDLE: [each.parent for each in path.glob(f"*/{CONFIG}")]}.get(file, [])
        kind = {CONFIG: "run", BUNDLE: f"{len(inside)} seed{'s' if len(inside) != 1 else ''}"}.get(file) or _SEVERAL[file]
        changed = path.stat().st_mtime
        try:
            runs = [read_run(each, rows=False) for each in inside]
        except InchwormError as error:
            found.append(Listed(path.name, kind, "unreadable", changed=changed, problem=str(error)))
            continue
        states = {run.state for run in runs} | ({"running"} if is_locked(path) else set())
        state = next((state for state in ("running", "failed", "interrupted", "finished") if state in states), "")
        found.append(Listed(path.name, kind, state, runs, max((run.changed for run in runs), default=changed)))
    return {entry.name: entry for entry in sorted(found, key=lambda entry: entry.changed)}


def remove_run(name: str, *, directory: str | Path = "runs", archive: bool = False) -> Path:
    """Delete a run, or what holds several, or move it into `archive/NAME.tar.gz`.

    Never anything outside `directory`, nor a run that is in use.
    """
    parent = Path(directory)
    path = parent / name
    is_ours = any((path / file).is_file() for file in (CONFIG, *_SEVERAL))
    if Path(name).name != name or name in ("", ".", "..") or path.is_symlink() or not is_ours:
        raise ConfigError(f"{name} is not a run in {parent}; inchworm runs lists them, and only those can be removed")
    if archive and (parent / ARCHIVE / CONFIG).exists():
        raise ConfigError(f"{parent / ARCHIVE} is a run, and archives would be in its directory; rename it first")
    inside = [path, *(file.parent for what in (CONFIG, BUNDLE) for file in path.glob(f"**/*/{what}"))]
    with ExitStack() as locks:
        for each in inside:  # one that is training is in use
            locks.callback(os.close, take_lock(each / LOCK, f"the run {each}"))
        packed = path
        if archive:
            packed = parent / ARCHIVE / f"{name}.tar.gz"
            make_directory(packed.parent)
            if packed.exists():
                raise ConfigError(f"{packed} exists; rename it first")
            temporary = packed.with_name(f".{name}.{os.getpid()}.tmp")
            try:
                with tarfile.open(temporary, "w:gz") as file:
                    file.add(path, arcname=name)
                temporary.replace(packed)
            finally:
                temporary.unlink(missing_ok=True)
            sync_directory(packed.parent)
        shutil.rmtree(path)
    return packed


def areas(runs: Sequence[RunRecord], *, end: float | None = None) -> tuple[float, ...]:
    """The mean return of training over env steps: the area under each curve, divided by the steps that both have, or by those up to `end`.

    A run that has ended earlier keeps its last return, and before its first row it has that one's; one in which no episode has ended has 0.
    """
    curves = [run.series("mean_return") for run in runs]
    known = [steps for steps, _ in curves if len(steps)]
    if not known:
        return tuple(0.0 for _ in runs)
    grid = (
        np.linspace(max(steps[0] for steps in known), max(steps[-1] for steps in known), 1_000)
        if end is None
        else np.linspace(0, end, 1_000)
    )
    return tuple(float(np.interp(grid, *curve).mean()) if len(curve[0]) else 0.0 for curve in curves)
