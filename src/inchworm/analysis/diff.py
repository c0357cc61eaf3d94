"""Where two runs part: the first iteration and the first stage of it whose hashes differ, and what differs around them.

Everything is read from the files of the runs: `hashes.jsonl` (see `train/stages`), `config.yaml` and `versions.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inchworm.analysis.runs import RunRecord, read_run
from inchworm.core.errors import ConfigError
from inchworm.run.directory import FREE_FIELDS, config_changes
from inchworm.tracking.jsonl import HASHES
from inchworm.train.stages import STAGES, comparable, is_compiled, read_hashes, unpack_marks

MACHINE = ("platform", "cpu", "simd")
"""Entries of `versions.json` that describe the machine."""
NAMES = ("run.name", "run.directory")
"""Settings that differ between any two runs."""

CAUSES = {
    "environment": "another seed or version of the environment, other settings or wrappers, or one that is not deterministic "
    "(inchworm check-env)",
    "acting": "other random numbers (run.seed), or another machine, version or number of threads",
    "advantages": "ppo.gamma, ppo.gae_lambda, ppo.scale_rewards, a callback that changes the rollout, or another backend or machine",
    "order": "other random numbers (run.seed), or another number of epochs or minibatches",
    "weights": "the loss, the optimizer, the learning rate, a custom loss, or another backend, machine or number of threads",
}
"""What may make two runs part in a stage, if all before it is equal."""
INITIAL_CAUSES = "run.seed, the policy's settings, or run.init_from"


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two runs part."""

    iteration: int
    """0 for the weights that the runs begin with."""
    env_steps: int
    """Of the first run, after the iteration."""
    stage: str
    """One of `STAGES`."""
    step: int | None = None
    """For environment and acting, after how many steps of the iteration, if that is known."""

    def __str__(self) -> str:
        """One line, such as `iteration 3 (192 env steps), stage environment, after 5 steps`."""
        if self.iteration == 0:
            return "the initial weights, before iteration 1"
        steps = "" if self.step is None else f", after {self.step} step{'' if self.step == 1 else 's'} of it"
        return f"iteration {self.iteration} ({self.env_steps:,} env steps), stage {STAGES[self.stage]}{steps}"


@dataclass(frozen=True)
class RunDiff:
    """What `diff_runs` found; `str` of it is the text of `inchworm diff`."""

    first: RunRecord
    second: RunRecord
    parting: Parting | None
    """None if no hash differs."""
    iterations: tuple[int, int]
    """The last iteration with hashes of each run."""
    begins: int
    """The first iteration with hashes of both; above 0 where a run was begun by an earlier version."""
    missing: Mapping[str, int]
    """Stages that cannot be compared, with the number of iterations in which that is so."""
    compiled: tuple[bool, bool]
    """Which of the runs were compiled loops, whose hashes are made in another way."""
    settings: tuple[str, ...]
    """Settings that differ and affect training, such as `ppo.gamma: 0.99 → 0.9`."""
    other_settings: tuple[str, ...]
    """Settings that differ and do not affect training."""
    versions: tuple[str, ...]
    machine: tuple[str, ...]

    @property
    def names(self) -> tuple[str, str]:
        """The names of the runs, or their paths where these are the same."""
        runs = self.first, self.second
        one, other = (run.name for run in runs) if self.first.name != self.second.name else (str(run.path) for run in runs)
        return one, other

    @property
    def identical(self) -> bool:
        """Whether no hash differs."""
        return self.parting is None

    def __str__(self) -> str:
        one, other = self.names
        names, shared = f"{one} and {other}", min(self.iterations)
        lines = []
        if self.parting is None:
            lines.append(f"{names} are identical in all {shared:,} iterations{self._longer()}")
        else:
            lines.append(f"{names} part in {self.parting}")
            lines.append(f"likely:        {CAUSES[self.parting.stage] if self.parting.iteration else INITIAL_CAUSES}")
        sections = {
            "config:": self.settings,
            "no effect on training:": self.other_settings,
            "versions:": self.versions,
            "machine:": self.machine,
        }
        for title, differences in sections.items():
            if differences or title != "no effect on training:":
                titles = [title, *[""] * len(differences)]
                lines += [f"{label:<14} {line}" for label, line in zip(titles, differences or ("equal",))]
        if self.begins > 0:
            lines.append(f"not recorded:  iterations before {self.begins:,}, by an earlier version of inchworm; they may have parted there")
        lines += [
            f"not recorded:  {STAGES[stage]} in {count:,} of {shared - max(0, self.begins - 1):,} iterations"
            for stage, count in self.missing.items()
        ]
        if self.missing and self.compiled[0] != self.compiled[1]:
            lines.append("               (the hashes of a compiled loop can be compared only with those of another one)")
        return "\n".join(lines)

    def _longer(self) -> str:
        """Which run has more iterations."""
        first, second = self.iterations
        if first == second:
            return ""
        return f" that both have; {self.names[0 if first > second else 1]} has {abs(first - second):,} more"


def diff_runs(first: str | Path, second: str | Path, *, directory: str | Path = "runs") -> RunDiff:
    """Compare two runs, by their paths or their names in `directory`."""
    one, other = (read_run(given, directory=directory, rows=False) for given in (first, second))
    hashes = _read_hashes(one), _read_hashes(other)
    shared, ends = sorted(hashes[0].keys() & hashes[1].keys()), (max(hashes[0]), max(hashes[1]))
    if not shared or not all(ends):
        spans = " and ".join(f"{min(rows)} to {max(rows)} of {run.name}" for run, rows in zip((one, other), hashes))
        raise ConfigError(f"these runs have no iteration in common that could be compared: there are hashes of the iterations {spans}")
    numbers = range(max(1, shared[0]), min(ends) + 1)
    lacking = {stage: sum(not comparable(*(rows.get(number, {}).get(stage) for rows in hashes)) for number in numbers) for stage in STAGES}
    changes = {name: line for name, line in config_changes(one.config, other.config).items() if name not in NAMES}
    versions = {
        name: f"{name}: {one.versions.get(name)} → {other.versions.get(name)}"
        for name in dict.fromkeys([*one.versions, *other.versions])
        if one.versions.get(name) != other.versions.get(name)
    }
    return RunDiff(
        one,
        other,
        parting=find_parting(*hashes),
        iterations=ends,
        begins=shared[0],
        missing={stage: count for stage, count in lacking.items() if count},
        compiled=(is_compiled(hashes[0]), is_compiled(hashes[1])),
        settings=tuple(line for name, line in changes.items() if name not in FREE_FIELDS),
        other_settings=tuple(line for name, line in changes.items() if name in FREE_FIELDS),
        versions=tuple(line for name, line in versions.items() if name not in MACHINE),
        machine=tuple(line for name, line in versions.items() if name in MACHINE),
    )


def _read_hashes(run: RunRecord) -> dict[int, dict[str, Any]]:
    """The rows of a run's hashes by iteration."""
    try:
        rows = read_hashes(run.path / HASHES)
    except OSError as error:
        raise ConfigError(f"the hashes of the run {run.path} cannot be read: {error}") from error
    if not rows:
        version = run.versions.get("inchworm")
        why = "its first iteration is not over, or it was trained by an earlier version"
        raise ConfigError(f"the run {run.path} has no hashes in {HASHES}: {why}{f' (inchworm {version})' if version else ''}")
    return rows


def find_parting(first: Mapping[int, Mapping[str, Any]], second: Mapping[int, Mapping[str, Any]]) -> Parting | None:
    """The first iteration that both have, and the first stage of it, whose hashes differ; `first` and `second` are rows by iteration."""
    for number in sorted(first.keys() & second.keys()):
        one, other = first[number], second[number]
        differing = [stage for stage in STAGES if comparable(one.get(stage), other.get(stage)) and one[stage] != other[stage]]
        if not differing:
            continue
        steps = {stage: _first_step(one, other, stage) for stage in ("environment", "acting")}
        stage = differing[0]
        # In a step the environment comes first: it has shown what is acted on.
        if differing[:2] == ["environment", "acting"] and _later(steps["environment"], steps["acting"]):
            stage = "acting"
        env_steps = one.get("env_steps", 0)
        return Parting(number, env_steps if isinstance(env_steps, int) else 0, stage, steps.get(stage))
    return None


def _first_step(one: Mapping[str, Any], other: Mapping[str, Any], stage: str) -> int | None:
    """The first step whose marks differ; None if there is none."""
    marks = [unpack_marks(row.get(f"{stage}_steps")) for row in (one, other)]
    length = min(map(len, marks))
    differing = np.flatnonzero(marks[0][:length] != marks[1][:length])
    if len(differing):
        return int(differing[0])
    return None if len(marks[0]) == len(marks[1]) else length


def _later(environment: int | None, acting: int | None) -> bool:
    """Whether the environment's first different step comes after the acting's."""
    return acting is not None and (environment is None or environment > acting)
