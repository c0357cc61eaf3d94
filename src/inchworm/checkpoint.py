"""A run's complete state on disk: atomic, verified, without pickle. Serves the training loop and resume.

```
checkpoints/step-000000000150/   state.json   arrays.safetensors   process.json   manifest.json
```
A checkpoint is written beside its final name, synced, and appears by one rename, so that a crash at any moment leaves the ones
before it intact. The manifest holds size and SHA-256 of every file, and its own. `state.json` and `arrays.safetensors` are a function
of the run; `process.json` holds what belongs to the process around it.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inchworm.checkpoint_reading import ARRAYS, KIND, NAME, PROCESS, STATE, VERSION, Checkpoint, is_best, order, read_checkpoint
from inchworm.checkpoint_views import PolicyRecord, TrainerRecord, policy_of, policy_part, trainer_of, trainer_part
from inchworm.errors import CorruptFileError, InchwormError
from inchworm.files import (
    JSON_PIECES,
    TEMPORARY,
    json_pieces,
    make_directory,
    remove_temporaries,
    sync_directory,
    write_synced,
    write_tensor_file,
)
from inchworm.manifest import NAME as MANIFEST
from inchworm.manifest import Note, describe, manifest_text
from inchworm.protocols import Policy
from inchworm.trees import flatten_tree

__all__ = ["Checkpoint", "PolicyRecord", "Prepared", "TrainerRecord", "TrainingCheckpointer", "prepare"]

_ATTEMPTS = 100  # at reading while another process writes and prunes


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checkpoint that only needs writing: nothing in it is shared with whoever goes on training."""

    step: int
    arrays: Mapping[str, np.ndarray]
    state: bytes
    process: bytes | None
    note: Note


def prepare(step: int, state: Mapping[str, Any], *, process: Mapping[str, Any] | None = None, note: Note | None = None) -> Prepared:
    """Take nested plain data and arrays, as they are now, for the checkpoint of iteration `step`."""
    if not 0 <= step < 10**12:
        raise ValueError(f"step={step} must be from 0 to 999999999999")
    arrays, structure = flatten_tree(dict(state))
    text = json.dumps({"state": structure}, allow_nan=False)
    if json_pieces(text) > JSON_PIECES:
        raise ValueError(f"the state has more than {JSON_PIECES:,} single values, too many to be read again; keep them in arrays")
    beside = None if process is None else json.dumps({"process": process}, allow_nan=False).encode()
    return Prepared(step, {name: array.copy() for name, array in arrays.items()}, text.encode(), beside, note or Note())


class TrainingCheckpointer:
    """The checkpoints of one run, in one directory; the newest `keep` stay, and the best by evaluation."""

    def __init__(self, directory: str | Path, keep: int = 2, *, keep_best: bool = True) -> None:
        if keep < 2:
            raise ValueError(f"keep={keep}: at least 2 checkpoints are kept, so that one is left if the other is damaged")
        self.directory = Path(directory)
        self.keep, self.keep_best = keep, keep_best

    def all(self) -> list[Path]:
        """Every complete checkpoint, oldest first; whether they are undamaged shows when they are loaded."""
        try:
            return self._all()
        except FileNotFoundError:
            if self.directory.is_symlink():
                raise InchwormError(f"{self.directory} is a link to nowhere; mend or remove it") from None
            return []
        except OSError as error:
            raise InchwormError(f"the checkpoints in {self.directory} cannot be read: {error}; make it a readable directory") from error

    def _all(self) -> list[Path]:
        return sorted((self.directory / name for name in os.listdir(self.directory) if NAME.fullmatch(name)), key=order)

    def latest(self) -> Path | None:
        """The newest checkpoint, or None."""
        found = self.all()
        return found[-1] if found else None

    def best(self) -> Path | None:
        """The newest checkpoint of an iteration whose evaluation was the best so far, or None."""
        return next((path for path in reversed(self.all()) if is_best(path)), None)

    def save(self, step: int, state: Mapping[str, Any], *, process: Mapping[str, Any] | None = None, note: Note | None = None) -> Path:
        """Write nested plain data and arrays as the checkpoint of iteration `step`, whole or not at all; older ones are pruned after.

        A run that went back to an earlier checkpoint leaves later ones behind; they are of another history and go too.
        """
        return self.commit(prepare(step, state, process=process, note=note))

    def commit(self, prepared: Prepared) -> Path:
        """Write what `prepare` made; an `OSError` names the checkpoint, and leaves nothing of it."""
        final = self.directory / f"step-{prepared.step:012d}"
        try:
            make_directory(self.directory)
            remove_temporaries(self.directory)
            final = self._free_name(prepared.step)
            self._write(final, prepared)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} while saving the checkpoint of iteration {prepared.step}", str(final)) from error
        self._tidy(final)
        return final

    def _tidy(self, newest: Path) -> None:
        """Prune, and once more if the disk is in passing trouble: the checkpoint is safe, and the next save prunes again."""
        for _ in range(2):
            try:
                self._prune(newest)
            except OSError as error:
                trouble = error
            else:
                return
        warnings.warn(f"old checkpoints in {self.directory} could not be removed: {trouble}", stacklevel=3)

    def _write(self, final: Path, prepared: Prepared) -> None:
        temporary = self.directory / f"{TEMPORARY}{uuid.uuid4().hex}"
        names = [ARRAYS, STATE]
        try:
            temporary.mkdir()
            write_tensor_file(temporary / ARRAYS, prepared.arrays, kind=KIND, version=VERSION, header={"step": prepared.step})
            write_synced(temporary / STATE, [prepared.state])
            if prepared.process is not None:
                write_synced(temporary / PROCESS, [prepared.process])
                names.append(PROCESS)
            manifest = describe(temporary, names, prepared.step, prepared.arrays, prepared.note)
            write_synced(temporary / MANIFEST, [manifest_text(manifest).encode()])
            sync_directory(temporary)
            temporary.rename(final)
            sync_directory(self.directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # gone after the rename; else an unfinished one

    def _free_name(self, step: int) -> Path:
        revisions = [order(path)[1] for path in self._all() if order(path)[0] == step]
        return self.directory / (f"step-{step:012d}" + (f".{max(revisions) + 1}" if revisions else ""))

    def _prune(self, newest: Path) -> None:
        """Leave the newest, the `keep` - 1 steps before it, and the best. What goes loses its name first: no half of one is ever found."""
        older = [path for path in self._all() if order(path) < order(newest)]
        kept = {newest, *[path for path in older if order(path)[0] < order(newest)[0]][-(self.keep - 1) :]}
        if self.keep_best:
            kept |= set([path for path in (*older, newest) if is_best(path)][-1:])
        for path in self._all():
            if path not in kept:
                path.rename(self.directory / f"{TEMPORARY}{uuid.uuid4().hex}")
        remove_temporaries(self.directory)

    def load(self, path: str | Path | None = None) -> Checkpoint:
        """The checkpoint at `path`; without one the newest that is undamaged, with a warning for every damaged one passed over."""
        if path is not None:
            return read_checkpoint(Path(path))
        for _ in range(_ATTEMPTS):
            problems: dict[Path, str] = {}
            for candidate in reversed(self.all()):
                try:
                    checkpoint = read_checkpoint(candidate)
                except (CorruptFileError, FileNotFoundError) as error:
                    problems[candidate] = str(error)
                    continue
                for problem in problems.values():
                    warnings.warn(f"{problem}; going on from {checkpoint.path.name} instead", stacklevel=2)
                return checkpoint
            if all(os.path.lexists(candidate) for candidate in problems):  # else a writer has pruned meanwhile: look again
                break
        if not problems:
            raise FileNotFoundError(f"there is no checkpoint in {self.directory}; run.checkpoint_interval says how often one is written")
        raise CorruptFileError("no checkpoint is undamaged: " + "; ".join(problems.values()))

    def save_policy(self, policy: Policy, epoch: int, metadata: Mapping[str, Any] | None = None) -> PolicyRecord:
        """A policy as the checkpoint of `epoch`, together with the trainer state of that epoch if that is saved already."""
        state = self._of_epoch(epoch) | policy_part(policy, metadata)
        return PolicyRecord(policy, epoch, self.save(epoch, state), dict(metadata or {}))

    def load_policy(self, checkpoint: str | Path | Checkpoint | TrainerRecord | None = None, env: Any = None) -> PolicyRecord:
        """The policy of a checkpoint, or the newest one; with `env`, it is made sure that it fits."""
        if checkpoint is not None:
            given = checkpoint.path if isinstance(checkpoint, Checkpoint | TrainerRecord) else checkpoint
            return policy_of(self.load(given), env)
        return policy_of(self._newest_with("weights", "policy"), env)

    def save_trainer_state(
        self, agent_step: int, epoch: int, optimizer_state: Mapping[str, Any], run_dir: str | Path | None = None
    ) -> Path:
        """Counters and optimiser as the checkpoint of `epoch`, together with the policy of that epoch if that is saved already."""
        keeper = self._in(run_dir)
        return keeper.save(epoch, keeper._of_epoch(epoch) | trainer_part(agent_step, epoch, optimizer_state))

    def load_trainer_state(self, run_dir: str | Path | None = None) -> TrainerRecord:
        """The newest trainer state, of a `PPOTrainer`'s run too; give it to `load_policy` for the policy of the same checkpoint."""
        return trainer_of(self._in(run_dir)._newest_with("trainer", "trainer state"))

    def _in(self, run_dir: str | Path | None) -> TrainingCheckpointer:
        return self if run_dir is None else TrainingCheckpointer(Path(run_dir) / "checkpoints", self.keep, keep_best=self.keep_best)

    def _of_epoch(self, epoch: int) -> dict[str, Any]:
        """What is saved of an epoch already: policy and trainer state of one epoch are one checkpoint."""
        newest = self.latest()
        return self.load(newest).state if newest is not None and order(newest)[0] == epoch else {}

    def _newest_with(self, part: str, what: str) -> Checkpoint:
        newest = self.load()
        for path in reversed([path for path in self.all() if order(path) <= order(newest.path)]):
            checkpoint = newest if path == newest.path else self.load(path)
            if part in checkpoint.state or (part == "trainer" and "learner" in checkpoint.state):
                return checkpoint
        raise FileNotFoundError(f"no checkpoint in {self.directory} holds a {what}")
