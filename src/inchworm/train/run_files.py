"""Serves the front door: the files of one run. Checkpoints, policy files and rows of metrics that belong together, and nobody else's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inchworm.backends.interface import policy_files
from inchworm.backends.process import cpu_capability, thread_count
from inchworm.checkpoint import Checkpoint, TrainingCheckpointer, prepare
from inchworm.config import TrainingConfig
from inchworm.errors import BadNumberError, ConfigError, InchwormError
from inchworm.files import distrusted, make_directory
from inchworm.policy.weights import read_policy, save_policy
from inchworm.protocols import Policy, Tracker
from inchworm.run import BEST_POLICY, CHECKPOINTS, POLICY, VERSIONS, NotExactWarning, Run, check_config, keep_choices, write_versions
from inchworm.tracking.jsonl import JsonlTracker
from inchworm.train.moment import Moment
from inchworm.versions import versions


class RunFiles:
    """What a trainer writes and reads. Without a run directory only checkpoints with a directory of their own can be written."""

    def __init__(self, run: Path | Run | None, policy: Policy, trackers: Sequence[Tracker], config: TrainingConfig) -> None:
        """`run` is a directory, which is locked from the first write on, or a `Run` that somebody has locked already."""
        self.directory = run.path if isinstance(run, Run) else run
        self._run = Run(run, config, continued=False) if isinstance(run, Path) else run
        self._lock = self._run if isinstance(run, Path) else None
        self._policy, self._asked = policy, config
        self._rows = [tracker for tracker in trackers if isinstance(tracker, JsonlTracker)]
        self._is_ours = False
        self._told: set[str] = set()
        self.saved_iteration = -1
        self._unwritten: dict[str, tuple[Mapping[str, Any], OSError]] = {}  # policy files that wait for the next attempt, and why

    @property
    def _config(self) -> TrainingConfig:
        """What the run is bound to: the config of its directory, or what the trainer was asked for."""
        return self._asked if self._lock is self._run or self._run is None else self._run.config

    def recorded_config(self, config: TrainingConfig) -> TrainingConfig:
        """What a checkpoint records: a trainer's own config, unless the run has one that is kept apart from its trainers."""
        return config if self._lock is self._run else self._config

    def begin(self, iteration: int) -> None:
        """Take possession: a run directory holds one run, the one that goes on here, or none yet."""
        self._take_lock()
        if self.directory is not None and not self._is_ours:
            there = TrainingCheckpointer(self.directory / CHECKPOINTS).latest()
            if there is not None:
                raise ConfigError(
                    f"{self.directory} holds a run already ({there.name}); go on with load_checkpoint(), or give another run_dir"
                )
            self._warn_of_lost_checkpoints()
            for rows in self._rows:  # of a run that was killed before its first checkpoint
                rows.truncate_after(iteration)
        self._is_ours = True

    def row_counts(self) -> dict[str, int] | None:
        """How many rows of metrics the run has written so far."""
        return self._rows[0].counts() if self._rows else None

    def job(self, moment: Moment, directory: str | Path | None = None) -> Callable[[], Path]:
        """Take a moment for the run's directory or the one given; what is returned writes it, in this thread or another.

        In the run's directory the rows of metrics are on disk before the checkpoint, and its policy file comes after.
        """
        target = Path(directory) if directory is not None else self._checkpoints("save_checkpoint(directory)")
        if directory is None:
            self.begin(moment.iteration)
        is_run = self._is_here(target)
        rows = self._rows if is_run else []
        for tracker in rows:
            tracker.flush()
        self.warn_of_inexact(moment.note.exact)
        _refuse_bad_weights(moment.state["weights"])
        run = self._config.run
        keeper = TrainingCheckpointer(target, keep=run.keep_checkpoints, keep_best=run.keep_best)
        prepared = prepare(moment.iteration, moment.state, process=moment.process, note=moment.note)

        def write() -> Path:
            for tracker in rows:
                tracker.sync()
            path = keeper.commit(prepared)
            if is_run:
                self.saved_iteration = moment.iteration
                self.write_policy(POLICY, moment.state["weights"])
            return path

        return write

    def read_checkpoint(self, path: str | Path | None = None) -> Checkpoint:
        """The newest checkpoint of the run, or the one given (or the newest of a directory of them); the run goes on from there."""
        target = Path(path) if path is not None else self._checkpoints("load_checkpoint(path)")
        single = (target / "manifest.json").exists()
        keeper = TrainingCheckpointer(target.parent if single else target)
        if path is None:
            self._take_lock()
        checkpoint = keeper.load(target if single else None)
        if path is None and "config" in checkpoint.state:  # the run itself goes on; a checkpoint by name may be the start of something else
            with distrusted(f"the checkpoint {checkpoint.path} has no valid config"):
                recorded = self._recorded(checkpoint.state["config"])
            check_config(target.parent, recorded, keep_choices(recorded, self._config))
        self._warn_of_other_bits(checkpoint)
        return checkpoint

    def go_on_from(self, checkpoint: Checkpoint) -> None:
        """The run is now where the checkpoint is: rows of its future go, and policy files are those of its past."""
        self.saved_iteration = -1
        self._unwritten.clear()
        is_run = self._is_here(checkpoint.path.parent)
        self._is_ours |= is_run or self.directory is None
        counts = checkpoint.manifest.get("rows") if is_run else None
        for tracker in self._rows if self._is_ours else ():
            if counts is None:
                tracker.truncate_after(checkpoint.step)
                continue
            for problem in tracker.truncate_to(counts):
                warnings.warn(f"{problem}; the others go on", stacklevel=3)
        if is_run:
            self._renew_policies(checkpoint)

    def _recorded(self, config: Mapping[str, Any]) -> TrainingConfig:
        """The config that a checkpoint was made with. Where a factory made the environment its name says little, and is not compared."""
        free = {section: dict(fields) for section, fields in self._config.to_dict().items()}
        recorded = TrainingConfig.from_dict({section: free[section] | dict(config[section]) for section in free})
        return recorded.replace(env=recorded.env.replace(id=self._config.env.id)) if ":" in recorded.env.id else recorded

    def close(self) -> None:
        """Let others write to the run."""
        if self._lock is not None:
            self._lock.close()

    def _take_lock(self) -> None:
        if self._lock is not None and self.directory is not None:
            make_directory(self.directory)
            self._lock.lock()
            if not (self.directory / VERSIONS).exists():
                write_versions(self.directory)

    def write_best_policy(self) -> None:
        """The policy as it is now, as the run's best."""
        self.write_policy(BEST_POLICY, self._policy.get_weights())

    def write_policy(self, name: str, weights: Mapping[str, Any]) -> None:
        """A policy file of the run (one for each part of a composite), if there is a run directory and a file can describe the network.

        What cannot be written waits for `retry`: no training ends because of a derived file.
        """
        if self.directory is None:
            return
        try:
            for file, (spec, share) in policy_files(self._policy, name, weights).items():
                save_policy(self.directory / file, spec, share)
        except OSError as error:
            problem = OSError(error.errno, f"{error.strerror} while writing", str(self.directory / name))
            if name not in self._unwritten:  # once, until it works again
                warnings.warn(f"{problem}; training goes on and tries again after each iteration", stacklevel=2)
            self._unwritten[name] = (weights, problem)
        else:
            self._unwritten.pop(name, None)

    def retry(self) -> None:
        """Write the policy files that could not be written before."""
        for name, (weights, _) in list(self._unwritten.items()):
            self.write_policy(name, weights)

    def check_all_written(self) -> None:
        """Raise what keeps a policy file from being written, if one is still waiting."""
        for _, problem in self._unwritten.values():
            raise problem

    def warn_of_inexact(self, sentences: Sequence[str]) -> None:
        """Say what a checkpoint cannot bring back, once."""
        for sentence in sentences:
            if sentence not in self._told:
                warnings.warn(f"a resumed run will not have the bits of this one: {sentence}", NotExactWarning, stacklevel=3)
        self._told |= set(sentences)

    def _warn_of_other_bits(self, checkpoint: Checkpoint) -> None:
        manifest = checkpoint.manifest
        before = dict(manifest["versions"])
        here: dict[str, Any] = {"cpu_capability": cpu_capability()}
        if not self._config.run.threads:  # else the configs have been compared
            here["threads"] = thread_count(0)
        before |= {name: manifest[name] for name in here if manifest.get(name) is not None and here[name] is not None}
        (self._run or Run(checkpoint.path, self._config, continued=True)).warn_of_versions(before, versions() | here)
        self.warn_of_inexact(manifest.get("exact", ()))

    def _warn_of_lost_checkpoints(self) -> None:
        interval = self._config.run.checkpoint_interval
        for tracker in self._rows:
            done = tracker.last_iteration()
            why = "its checkpoints have gone" if interval and done >= interval else "it ended before its first"
            if done:
                warnings.warn(f"{self.directory} has rows up to iteration {done} but no checkpoint ({why}): it begins again", stacklevel=4)

    def _renew_policies(self, checkpoint: Checkpoint) -> None:
        """A kill between a commit and the policy file leaves an old file, a resume from an older checkpoint a new one: write it again."""
        self._renew(POLICY, checkpoint.state["weights"])
        best = TrainingCheckpointer(checkpoint.path.parent).best()
        if best is not None:
            self._renew(BEST_POLICY, TrainingCheckpointer(best.parent).load(best).state["weights"])

    def _renew(self, name: str, weights: Mapping[str, Any]) -> None:
        if self.directory is None:
            return
        for file, (_, share) in policy_files(self._policy, name, weights).items():
            try:
                _, found = read_policy(self.directory / file)
            except (OSError, InchwormError):
                found = {}
            if found.keys() != share.keys() or any(not np.array_equal(found[key], value) for key, value in share.items()):
                self.write_policy(name, weights)
                return

    def _is_here(self, checkpoints: Path) -> bool:
        """Whether that is where the run's own checkpoints are."""
        return self.directory is not None and checkpoints.resolve() == (self.directory / CHECKPOINTS).resolve()

    def _checkpoints(self, instead: str) -> Path:
        if self.directory is None:
            raise ConfigError(f"this trainer has no run directory; give PPOTrainer(…, run_dir=…) or {instead}")
        return self.directory / CHECKPOINTS


def _refuse_bad_weights(weights: Mapping[str, Any]) -> None:
    """Whatever made them so, weights that are not finite are never saved over ones that are."""
    bad = [name for name, array in weights.items() if np.asarray(array).dtype.kind == "f" and not np.isfinite(array).all()]
    if bad:
        raise BadNumberError(
            f"the weight {bad[0]} is not finite: nothing is saved; go on from the last checkpoint with a lower learning rate"
        )
