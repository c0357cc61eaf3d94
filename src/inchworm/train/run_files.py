"""Serves the front door: the files of one run. Checkpoints, policy files and rows of metrics that belong together, and nobody else's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inchworm.backends.interface import is_builtin
from inchworm.checkpoint import TrainingCheckpointer
from inchworm.config import TrainingConfig
from inchworm.errors import ConfigError
from inchworm.policy.weights import save_policy
from inchworm.protocols import Policy, Tracker
from inchworm.run import BEST_POLICY, CHECKPOINTS, POLICY, VERSIONS, Run, check_config, keep_choices, write_versions
from inchworm.tracking.jsonl import JsonlTracker


class RunFiles:
    """What a trainer writes and reads. Without a run directory only checkpoints with a directory of their own can be written."""

    def __init__(self, run: Path | Run | None, policy: Policy, trackers: Sequence[Tracker], config: TrainingConfig) -> None:
        """`run` is a directory, which is locked from the first write on, or a `Run` that somebody has locked already."""
        self.directory = run.path if isinstance(run, Run) else run
        self._lock = Run(run, config, continued=False) if isinstance(run, Path) else None
        self._policy, self._trackers, self._config = policy, trackers, config
        self._is_ours = False
        self._saved_iteration = -1

    def begin(self, iteration: int) -> None:
        """Take possession: a run directory holds one run, the one that goes on here, or none yet."""
        if self.directory is not None and not self._is_ours:
            self._take_lock()
            there = TrainingCheckpointer(self.directory / CHECKPOINTS).latest()
            if there is not None:
                raise ConfigError(
                    f"{self.directory} holds a run already ({there.name}); go on with load_checkpoint(), or give another run_dir"
                )
            self._forget_rows_after(iteration)
        self._is_ours = True

    def write_checkpoint(self, state: Mapping[str, Any], directory: str | Path | None = None) -> Path:
        """A checkpoint, into the run's directory or the one given; in the run's, its policy file with the same weights, too."""
        target = Path(directory) if directory is not None else self._checkpoints("save_checkpoint(directory)")
        iteration = int(state["state"]["iteration"])
        if directory is None:
            self.begin(iteration)
        path = TrainingCheckpointer(target, keep=self._config.run.keep_checkpoints).save(iteration, state)
        if self.directory is not None and target == self.directory / CHECKPOINTS:
            self._saved_iteration = iteration
            self.write_policy(POLICY, state["weights"])
        return path

    def write_snapshot(self, state: Mapping[str, Any] | None) -> None:
        """After an interruption in the middle of an iteration: the last complete one that was kept, unless a later one is written."""
        if self.directory is not None and state and state["state"]["iteration"] > self._saved_iteration:
            self.write_checkpoint(state)

    def read_checkpoint(self, path: str | Path | None = None) -> dict[str, Any]:
        """The state in the newest checkpoint of the run, or in the one (or the directory of them) given; the run goes on from there."""
        target = Path(path) if path is not None else self._checkpoints("load_checkpoint(path)")
        single = (target / "manifest.json").exists()
        state: dict[str, Any] = TrainingCheckpointer(target.parent if single else target).load(target if single else None).state
        if path is None and self._lock is not None:  # the run itself goes on; a checkpoint by name may be the start of something else
            self._take_lock()
            recorded = self._recorded(state["config"])
            check_config(target.parent, recorded, keep_choices(recorded, self._config))
        self._is_ours, self._saved_iteration = True, -1
        self._forget_rows_after(int(state["state"]["iteration"]))
        return state

    def _recorded(self, config: Mapping[str, Any]) -> TrainingConfig:
        """The config that a checkpoint was made with. Where a factory made the environment its name says little, and is not compared."""
        recorded = TrainingConfig.from_dict(config)
        return recorded.replace(env=recorded.env.replace(id=self._config.env.id)) if ":" in recorded.env.id else recorded

    def close(self) -> None:
        """Let others write to the run."""
        if self._lock is not None:
            self._lock.close()

    def _take_lock(self) -> None:
        if self._lock is not None and self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock.lock()
            if not (self.directory / VERSIONS).exists():
                write_versions(self.directory)

    def write_best_policy(self) -> None:
        """The policy as it is now, as the run's best."""
        self.write_policy(BEST_POLICY, self._policy.get_weights())

    def write_policy(self, name: str, weights: Mapping[str, Any]) -> None:
        """A policy file of the run, if there is a run directory and the network is one that a file can describe."""
        if self.directory is not None and is_builtin(self._policy):
            policy: Any = self._policy
            save_policy(self.directory / name, policy.spec, weights)

    def _forget_rows_after(self, iteration: int) -> None:
        """Rows of iterations that are to come: a run that was killed wrote them after its last checkpoint."""
        for tracker in self._trackers:
            if isinstance(tracker, JsonlTracker):
                tracker.truncate_after(iteration)

    def _checkpoints(self, instead: str) -> Path:
        if self.directory is None:
            raise ConfigError(f"this trainer has no run directory; give PPOTrainer(…, run_dir=…) or {instead}")
        return self.directory / CHECKPOINTS
