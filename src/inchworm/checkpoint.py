"""A run's complete state on disk: atomic, verified, without pickle. Serves the training loop and resume.

```
checkpoints/step-000000000150/   state.json   arrays.safetensors   manifest.json
```
A checkpoint is written beside its final name, synced, and appears by one rename, so that a crash at any moment leaves the ones
before it intact. The manifest holds size and SHA-256 of every file, and its own.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inchworm.errors import CorruptFileError
from inchworm.files import TEMPORARY, read_json, read_tensor_file, sync_directory, write_synced, write_tensor_file
from inchworm.trees import flatten_tree, unflatten_tree
from inchworm.versions import versions

KIND, VERSION = "checkpoint", 1
_STATE, _ARRAYS, _MANIFEST = "state.json", "arrays.safetensors", "manifest.json"
_NAME = re.compile(r"step-(\d{12})(?:\.(\d+))?")  # the number after the dot tells apart checkpoints of one step


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that has been read and verified."""

    state: dict[str, Any]
    step: int
    path: Path
    manifest: Mapping[str, Any]
    """`step`, `versions` of everything that made it, and `files`."""


class TrainingCheckpointer:
    """The checkpoints of one run, in one directory; the newest `keep` stay."""

    def __init__(self, directory: str | Path, keep: int = 2) -> None:
        if keep < 2:
            raise ValueError(f"keep={keep}: at least 2 checkpoints are kept, so that one is left if the other is damaged")
        self.directory = Path(directory)
        self.keep = keep

    def all(self) -> list[Path]:
        """Every complete checkpoint, oldest first; whether they are undamaged shows when they are loaded."""
        found = [path for path in self.directory.glob("step-*") if _NAME.fullmatch(path.name)]
        return sorted(found, key=_order)

    def latest(self) -> Path | None:
        """The newest checkpoint, or None."""
        found = self.all()
        return found[-1] if found else None

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write nested plain data and arrays as the checkpoint of iteration `step`, whole or not at all; older ones are pruned after.

        A run that went back to an earlier checkpoint leaves later ones behind; they are of another history and go too.
        """
        if not 0 <= step < 10**12:
            raise ValueError(f"step={step} must be from 0 to 999999999999")
        arrays, structure = flatten_tree(dict(state))
        self.directory.mkdir(parents=True, exist_ok=True)
        self._remove_stale()
        final = self._free_name(step)
        try:
            self._commit(final, step, arrays, json.dumps({"state": structure}, allow_nan=False).encode())
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} while saving the checkpoint of iteration {step}", str(final)) from error
        try:
            self._prune(final)
        except OSError as error:  # the checkpoint is safe; the next save prunes again
            warnings.warn(f"old checkpoints in {self.directory} could not be removed: {error}", stacklevel=2)
        return final

    def _commit(self, final: Path, step: int, arrays: Mapping[str, np.ndarray], state: bytes) -> None:
        temporary = self.directory / f"{TEMPORARY}{uuid.uuid4().hex}"
        try:
            temporary.mkdir()
            write_tensor_file(temporary / _ARRAYS, arrays, kind=KIND, version=VERSION, header={"step": step})
            write_synced(temporary / _STATE, [state])
            write_synced(temporary / _MANIFEST, [_manifest_text(_describe(temporary, step)).encode()])
            sync_directory(temporary)
            temporary.rename(final)
            sync_directory(self.directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # gone after the rename; else an unfinished one

    def _free_name(self, step: int) -> Path:
        revisions = [_order(path)[1] for path in self.all() if _order(path)[0] == step]
        return self.directory / (f"step-{step:012d}" + (f".{max(revisions) + 1}" if revisions else ""))

    def _prune(self, newest: Path) -> None:
        """Leave the newest and the `keep` - 1 steps before it. What goes loses its name first, so that no half of one is ever found."""
        step = _order(newest)[0]
        before = [path for path in self.all() if _order(path)[0] < step][-(self.keep - 1) :]
        for path in self.all():
            if path != newest and path not in before:
                path.rename(self.directory / f"{TEMPORARY}{uuid.uuid4().hex}")
        self._remove_stale()

    def _remove_stale(self) -> None:
        """What an interrupted save or prune left."""
        for path in self.directory.glob(f"{TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def load(self, path: str | Path | None = None) -> Checkpoint:
        """The checkpoint at `path`; without one the newest that is undamaged, with a warning for every damaged one passed over."""
        if path is not None:
            return _read(Path(path))
        candidates = self.all()
        if not candidates:
            raise FileNotFoundError(f"there is no checkpoint in {self.directory}; run.checkpoint_interval says how often one is written")
        problems = []
        for candidate in reversed(candidates):
            try:
                checkpoint = _read(candidate)
            except CorruptFileError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                warnings.warn(f"{problem}; going on from {checkpoint.path.name} instead", stacklevel=2)
            return checkpoint
        raise CorruptFileError("no checkpoint is undamaged: " + "; ".join(problems))


def _order(path: Path) -> tuple[int, int]:
    """(step, revision) from a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def _describe(directory: Path, step: int) -> dict[str, Any]:
    files = {name: _digest((directory / name).read_bytes()) for name in (_ARRAYS, _STATE)}
    return {"version": VERSION, "step": step, "versions": versions(), "files": files}


def _digest(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _manifest_text(manifest: Mapping[str, Any]) -> str:
    """The one way to write a manifest, so that a manifest written any other way is a damaged one."""
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return json.dumps({"manifest": manifest, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def _read(path: Path) -> Checkpoint:
    """A checkpoint, after every byte of it has been checked."""
    if not path.is_dir():
        raise FileNotFoundError(f"there is no checkpoint directory {path}")
    try:
        manifest = _read_manifest(path / _MANIFEST)
        for name in (_ARRAYS, _STATE):
            if _digest((path / name).read_bytes()) != manifest["files"][name]:
                raise CorruptFileError(f"{name} does not match the manifest")
        structure = read_json((path / _STATE).read_text(encoding="utf-8"))["state"]
        arrays, header = read_tensor_file(path / _ARRAYS, kind=KIND, max_version=VERSION)
        if header["step"] != manifest["step"] or _order(path)[0] not in (-1, manifest["step"]):
            raise ValueError(f"its name, its manifest (step {manifest['step']}) and its arrays (step {header['step']}) disagree")
        state = unflatten_tree(arrays, structure)
        if not isinstance(state, dict):
            raise TypeError("its state is no mapping")
    except (CorruptFileError, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"the checkpoint {path} is damaged: {error}") from None
    return Checkpoint(state, manifest["step"], path, manifest)


def _read_manifest(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    manifest: dict[str, Any] = read_json(text)["manifest"]
    if _manifest_text(manifest) != text:
        raise CorruptFileError(f"{path.name} does not match its own checksum")
    if not 1 <= manifest["version"] <= VERSION:
        raise CorruptFileError(
            f"{path.name} has version {manifest['version']}; this inchworm reads up to version {VERSION}; update inchworm"
        )
    return manifest
