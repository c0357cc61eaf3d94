"""Serves `TrainingCheckpointer`: one checkpoint read back, after every byte of it has been checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inchworm.errors import CorruptFileError, InchwormError
from inchworm.files import distrusted, read_bytes, read_json, read_tensor_file
from inchworm.manifest import check_arrays, digest, read_manifest
from inchworm.trees import unflatten_tree

KIND, VERSION = "checkpoint", 1
STATE, ARRAYS, PROCESS = "state.json", "arrays.safetensors", "process.json"
NAME = re.compile(r"step-(\d{12})(?:\.(\d+))?")  # the number after the dot tells apart checkpoints of one step


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that has been read and verified."""

    state: dict[str, Any]
    step: int
    path: Path
    manifest: Mapping[str, Any]
    """`step`, `files`, `arrays`, `versions` of everything that made it, and what `Note` adds."""
    process: Mapping[str, Any] = field(default_factory=dict)
    """What belonged to the process around the run, such as its generators."""


def order(path: Path) -> tuple[int, int]:
    """(step, revision) from a checkpoint's name."""
    match = NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def is_best(path: Path) -> bool:
    """Whether the manifest says that the iteration had the best evaluation so far."""
    try:
        with distrusted(str(path)):
            return bool(read_manifest(path).get("best"))
    except (OSError, InchwormError):
        return False


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a directory."""
    if not path.is_dir():
        raise FileNotFoundError(f"there is no checkpoint directory {path}")
    try:
        with distrusted(f"the checkpoint {path} is damaged"):
            return _read(path)
    except OSError as error:
        raise CorruptFileError(f"the checkpoint {path} is damaged: {error}") from None


def _read(path: Path) -> Checkpoint:
    manifest = read_manifest(path)
    step, texts = manifest["step"], {}
    if order(path)[0] not in (-1, step):
        raise ValueError(f"its manifest.json is of step {step}")
    for name in (ARRAYS, STATE, *((PROCESS,) if PROCESS in manifest["files"] else ())):
        content = read_bytes(path / name)
        if digest(content) != manifest["files"][name]:
            raise CorruptFileError(f"{name} does not match the manifest")
        texts[name] = content if name != ARRAYS else b""
    arrays, header = read_tensor_file(path / ARRAYS, kind=KIND, max_version=VERSION)
    if header["step"] != step:
        raise ValueError(f"its manifest.json is of step {step}, and its {ARRAYS} of step {header['step']}")
    check_arrays(manifest, arrays)
    state = unflatten_tree(arrays, read_json(texts[STATE].decode())["state"])
    if not isinstance(state, dict):
        raise TypeError("its state is no mapping")
    process = read_json(texts[PROCESS].decode())["process"] if PROCESS in texts else {}
    if not isinstance(process, dict):
        raise TypeError("what it says of its process is no mapping")
    return Checkpoint(state, step, path, manifest, process)
