"""Serves the front door: keeps a run safe. Takes all that it is between two iterations, has it written, and brings it back."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inchworm.backends.interface import describe_policy
from inchworm.backends.process import cpu_capability, generators_state, restore_generators, thread_count
from inchworm.checkpoint import Checkpoint
from inchworm.config import RunConfig
from inchworm.errors import ConfigError, EnvError, InchwormError
from inchworm.files import distrusted
from inchworm.manifest import Note
from inchworm.protocols import Callback, Tracker
from inchworm.train.callbacks import LAST_SAVE_FAILED, CheckpointCallback, SnapshotCallback
from inchworm.train.moment import FORMAT, Moment, binding_config, check_parts, give_states, inexactness, states_of
from inchworm.train.run_files import RunFiles
from inchworm.train.saving import Saver

if TYPE_CHECKING:
    from inchworm.train.trainer import PPOTrainer


class Keeper:
    """What a trainer has to do with its checkpoints. One save is under way at most, and nothing else touches the files meanwhile."""

    def __init__(self, trainer: PPOTrainer, files: RunFiles, trackers: Sequence[Tracker]) -> None:
        """`trackers` are those that somebody gave; the run's own remember nothing."""
        self._trainer, self._files, self._trackers = trainer, files, list(trackers)
        self._callbacks: list[Callback] = list(trainer.callbacks)
        self._unclaimed: Sequence[Mapping[str, Any]] = ()
        self._saver = Saver()
        self.snapshot = SnapshotCallback(self.moment)

    def full_state(self) -> dict[str, Any]:
        """All that the run is at this moment, as plain data and arrays."""
        trainer = self._trainer
        return {
            "format": FORMAT,
            "config": binding_config(self._files.recorded_config(trainer.config)),
            "spec": describe_policy(trainer.policy),
            "weights": trainer.policy.get_weights(),
            "learner": trainer.learner.state_dict(),
            "collector": trainer.collector.state_dict(),
            "state": trainer.state.state_dict(),
            "callbacks": states_of(self._callbacks),
            "trackers": states_of(self._trackers),
        }

    def moment(self) -> Moment:
        """That, and what its record must say of it."""
        run, state = self._trainer.config.run, self._trainer.state
        note = Note(
            exact=inexactness(self._trainer.envs),
            score=state.best_score if state.best_iteration == state.iteration else None,
            scored=state.scored == state.iteration,
            rows=self._files.row_counts(),
            threads=thread_count(run.threads),
            cpu_capability=cpu_capability(),
        )
        return Moment(self.full_state(), {"generators": generators_state()}, note)

    def begin(self, callbacks: Sequence[Callback]) -> None:
        """Training begins with these callbacks: they are given what a checkpoint that was loaded remembers of them."""
        self._callbacks = list(callbacks)
        give_states(self._callbacks, self._unclaimed, "callback")
        self._unclaimed = ()

    def callbacks(self, run: RunConfig) -> tuple[CheckpointCallback, SnapshotCallback] | None:
        """Who saves during training, beside it where that pays; nobody without a run directory."""
        if self._files.directory is None:
            return None

        def save() -> None:
            self._saver.run(self._files.job(self.moment()))

        finish = self._files.check_all_written
        checkpoint = CheckpointCallback(save, run.checkpoint_interval, keep_best=run.keep_best, settle=self._settle, finish=finish)
        return checkpoint, self.snapshot

    def save(self, directory: str | Path | None = None) -> Path:
        """Write a checkpoint now, into the run's directory or the one given."""
        self.wait()
        path = self._files.job(self.moment(), directory)()
        self._files.check_all_written()
        return path

    def save_snapshot(self) -> None:
        """After an interruption in the middle of an iteration: the last complete one that was kept, unless a later one is written."""
        self.wait()
        moment: Moment | None = self.snapshot.taken
        if self._files.directory is None or moment is None or moment.iteration <= self._files.saved_iteration:
            return
        try:
            self._files.job(moment)()
        except OSError as error:
            raise InchwormError(f"{LAST_SAVE_FAILED}: {error}") from error

    def load(self, path: str | Path | None = None) -> None:
        """Bring the trainer to where a checkpoint is."""
        self.wait()
        checkpoint = self._files.read_checkpoint(path)
        with distrusted(f"the checkpoint {checkpoint.path} does not fit this trainer", keep=(ConfigError, EnvError)):
            check_parts(checkpoint.state, checkpoint.step, describe_policy(self._trainer.policy) if path is None else None)
            self._give(checkpoint)
        self._files.go_on_from(checkpoint)

    def _give(self, checkpoint: Checkpoint) -> None:
        """Hand every part of the trainer its own."""
        trainer, state = self._trainer, checkpoint.state
        trainer.keep_choices(state["config"]["ppo"]["compile"])
        trainer.policy.set_weights(state["weights"])
        trainer.learner.load_state_dict(state["learner"])
        trainer.collector.set_weights(state["weights"])
        trainer.collector.load_state_dict(state["collector"])
        trainer.state.load_state_dict(state["state"])
        trainer.state.best_iteration = checkpoint.step if checkpoint.manifest.get("best") else None
        trainer.state.scored = checkpoint.step if checkpoint.manifest.get("scored", True) else None  # those from before do not know
        trainer.state.follow(trainer.collector)
        give_states(self._trackers, state.get("trackers", ()), "tracker")
        self._unclaimed = state.get("callbacks", ())  # given when training begins: only then all callbacks are known
        if "generators" in checkpoint.process:
            restore_generators(checkpoint.process["generators"])

    def wait(self) -> None:
        """Wait for a save that is under way; what went wrong in it is told, and stops nothing."""
        try:
            self._saver.wait()
        except OSError as error:
            warnings.warn(f"a save failed: {error}", stacklevel=3)

    def _settle(self, wait: bool) -> None:
        """Raise what went wrong beside training; a policy file that could not be written is tried again."""
        self._saver.wait() if wait else self._saver.poll()
        if not self._saver.busy:
            self._files.retry()
