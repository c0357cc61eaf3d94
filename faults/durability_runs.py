"""Serves section A: a short run that uses all that a run can use, started as people start it, and what it left as hashes."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from faults.programme import Work
from inchworm.core.errors import CorruptFileError
from inchworm.core.trees import flatten_tree
from inchworm.run.checkpoint import Checkpoint, TrainingCheckpointer

HERE = Path(__file__).parent
LIMIT = 60.0
"""Seconds after which a child counts as hung."""
NAME = "run"
LANES, STEPS = 4, 32
BATCH = LANES * STEPS
FILES = ("metrics.jsonl", "policy.safetensors", "best_policy.safetensors")


MEMORY = "/dev/shm"


@contextlib.contextmanager
def in_memory(work: Work) -> Iterator[Work]:
    """The same work in a directory in memory, where there is one: thousands of syncs are slow on a disk."""
    if os.access(MEMORY, os.W_OK):
        with tempfile.TemporaryDirectory(dir=MEMORY, prefix="faults-") as directory:
            moved = copy.copy(work)
            moved.scratch = Path(directory)
            yield moved
    else:
        yield work


def arguments(updates: int = 20, *, eval_interval: int = 4) -> list[str]:
    """`inchworm train` with NumPy, a checkpoint an update, a linear learning rate, both normalisers and evaluations."""
    return [
        "train", "CartPole-v1", "--run.name", NAME, "--run.directory", ".", "--run.backend", "numpy", "--run.checkpoint-interval", "1",
        "--env.num-envs", str(LANES), "--env.num-workers", "0", "--ppo.rollout-steps", str(STEPS), "--ppo.num-minibatches", "2",
        "--ppo.update-epochs", "2", "--ppo.learning-rate-schedule", "linear", "--policy.normalize-observations",
        "--policy.normalize-values", "--policy.hidden-sizes", "16", "16", "--evaluation.interval", str(eval_interval),
        "--evaluation.episodes", "2", "--evaluation.final-episodes", "2", "--run.total-timesteps", str(updates * BATCH),
    ]  # fmt: skip


def command(arguments: Sequence[str], *, hooks: Sequence[str] = ()) -> list[str]:
    """The command as people type it; with hooks, the same command inside our child script."""
    if hooks:
        return [sys.executable, "-P", str(HERE / "durability_child.py"), *hooks, "--", *arguments]
    return [sys.executable, "-m", "inchworm", *arguments]


def environment(**more: str) -> dict[str, str]:
    """The environment of a child: one thread, and no bytecode files to write."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "300", **more}


@dataclass(frozen=True)
class Ended:
    """How a child ended, and what it said."""

    code: int
    out: str
    error: str


def run(command: Sequence[str], directory: Path, *, limit: float = LIMIT, **more: str) -> Ended:
    """Run a child to its end, in `directory`; a hung one is killed and ends with code -9 and a word on it."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            command, cwd=directory, env=environment(**more), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return Ended(-9, "", f"it did not end within {limit:.0f} s")
    return Ended(done.returncode, done.stdout, done.stderr)


def digest(tree: Any) -> str:
    """SHA-256 of nested plain data and arrays: every bit of every array, its dtype, its shape, its name."""
    arrays, structure = flatten_tree({"tree": tree})
    made = hashlib.sha256(json.dumps(structure, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        made.update(f"{name} {array.dtype.str} {array.shape}".encode())
        made.update(np.ascontiguousarray(array).tobytes())
    return made.hexdigest()


def newest(directory: Path) -> Checkpoint | None:
    """The newest verified checkpoint of a run, or None where none was committed."""
    checkpointer = TrainingCheckpointer(directory / "checkpoints")
    if not checkpointer.all():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # passing over a damaged one is a failure here
        return checkpointer.load()


def fingerprint(directory: Path) -> dict[str, str]:
    """What a finished run left, as SHA-256 by part: each part of the last checkpoint, its metrics and its policies."""
    try:
        checkpoint = newest(directory)
    except (CorruptFileError, OSError, UserWarning) as error:
        return {"checkpoint": f"cannot be read: {error}"}
    parts = {} if checkpoint is None else {name: digest(part) for name, part in checkpoint.state.items()}
    for name in FILES:
        path = directory / name
        parts[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "missing"
    return parts


def differences(found: dict[str, str], expected: dict[str, str]) -> str:
    """Which parts differ, in words; empty if none does."""
    names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    return ", ".join(f"{name} ({found[name]})" if "cannot" in found.get(name, "") else name for name in names)


def leftovers(directory: Path) -> list[str]:
    """Temporary files and directories anywhere below."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob(".tmp-*"))


def undisturbed(directory: Path, arguments: Sequence[str]) -> dict[str, str]:
    """The fingerprint of the run that nobody disturbs."""
    ended = run(command(arguments), directory)
    if ended.code:
        raise RuntimeError(f"the undisturbed run ended with code {ended.code}: {ended.error[-500:]}")
    return fingerprint(directory / NAME)


def last_iteration(path: Path) -> int:
    """The iteration of the last complete row of a file of rows; 0 if there is none."""
    rows = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [row for row in rows if row.endswith(b"\n")]
    return int(json.loads(whole[-1])["iteration"]) if whole else 0
