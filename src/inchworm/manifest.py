"""Serves checkpoints: the manifest, which says what a checkpoint holds, how it was made, and proves it whole."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inchworm.errors import CorruptFileError
from inchworm.files import distrusted, read_bytes, read_json
from inchworm.versions import versions

NAME, VERSION = "manifest.json", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a manifest says besides what can be read off the files."""

    exact: Sequence[str] = ()
    """What could not be made exact, a sentence each; empty if a run that goes on from here has the bits of one that never stopped."""
    score: float | None = None
    """The best evaluation of the run, if it was of this very iteration."""
    scored: bool = False
    """Whether the evaluation at the end was taken after this very iteration."""
    rows: Mapping[str, int] | None = None
    """How many rows of each file of metrics belong to the past of this checkpoint."""
    threads: int | None = None
    """Threads it was learned with."""
    cpu_capability: str | None = None
    """Vector instructions of the learning framework; `versions` has those of NumPy."""

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the manifest."""
        score = self.score if self.score is not None and math.isfinite(self.score) else None
        return {
            "exact": list(self.exact),
            "best": self.score is not None,
            "score": score,
            "scored": self.scored,
            "rows": None if self.rows is None else dict(self.rows),
            "threads": self.threads,
            "cpu_capability": self.cpu_capability,
        }


def describe(directory: Path, names: Sequence[str], step: int, arrays: Mapping[str, np.ndarray], note: Note) -> dict[str, Any]:
    """The manifest of the files `names` in a directory, which hold `arrays`."""
    files = {name: digest((directory / name).read_bytes()) for name in names}
    shapes = {name: {"dtype": array.dtype.name, "shape": list(array.shape)} for name, array in arrays.items()}
    return {"version": VERSION, "step": step, "versions": versions(), "files": files, "arrays": shapes, **note.to_dict()}


def digest(content: bytes) -> dict[str, Any]:
    """Size and checksum of a file."""
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """The one way to write a manifest, so that a manifest written any other way is a damaged one."""
    checksum = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return json.dumps({"manifest": manifest, "sha256": checksum}, indent=1, sort_keys=True) + "\n"


def read_manifest(directory: Path) -> dict[str, Any]:
    """A checkpoint's manifest, if it is undamaged and of a version that is known."""
    content = read_bytes(directory / NAME)
    with distrusted(NAME):
        text = content.decode()
        manifest: dict[str, Any] = read_json(text)["manifest"]
        if manifest_text(manifest) != text:
            raise ValueError("it does not match its own checksum")
        if not 1 <= manifest["version"] <= VERSION:
            raise ValueError(f"it has version {manifest['version']}; this inchworm reads up to version {VERSION}; update inchworm")
    return manifest


def check_arrays(manifest: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Refuse arrays that are not those that the manifest lists; one from before has no list."""
    listed = manifest.get("arrays")
    found = {name: {"dtype": array.dtype.name, "shape": list(array.shape)} for name, array in arrays.items()}
    if listed is not None and listed != found:
        names = sorted(name for name in {*listed, *found} if listed.get(name) != found.get(name))
        raise CorruptFileError(f"the arrays {', '.join(names[:3])} are not as the manifest lists them")
