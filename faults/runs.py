"""Short training runs as child processes, what they leave on disk, and their processes as /proc shows them."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from faults.programme import Work, child_environment
from inchworm.config.sections import PPOConfig
from inchworm.core.errors import CorruptFileError
from inchworm.core.tensor_file import flatten_tree
from inchworm.run.checkpoint import Checkpoint, TrainingCheckpointer

LIMIT = 120.0
"""Seconds after which a child counts as hung."""
RUN = "run"
"""Name and directory of every run, relative to the child's directory, so that configs are equal too."""
LANES, STEPS = 4, 32
BATCH = LANES * STEPS
WORLD = "faults.processes_worlds:Pole"
SHARED = Path("/dev/shm")


def env_steps(updates: int) -> int:
    """Env steps of a run of `arguments` after so many updates; the first is the short one that initialises the normalisers."""
    return LANES * PPOConfig(rollout_steps=STEPS).warm_up_steps + (updates - 1) * BATCH


def arguments(updates: int = 20, *, eval_interval: int = 4) -> list[str]:
    """`train` on CartPole with a checkpoint per update, a learning-rate schedule, both normalizers and evaluations."""
    return [
        "train", "CartPole-v1", "--run.name", RUN, "--run.directory", ".", "--run.backend", "numpy", "--run.checkpoint-interval", "1",
        "--env.num-envs", str(LANES), "--env.num-workers", "0", "--ppo.rollout-steps", str(STEPS), "--ppo.num-minibatches", "2",
        "--ppo.update-epochs", "2", "--ppo.learning-rate-schedule", "linear", "--policy.normalize-observations",
        "--policy.normalize-values", "--policy.hidden-sizes", "16", "16", "--evaluation.interval", str(eval_interval),
        "--evaluation.episodes", "2", "--evaluation.final-episodes", "2", "--run.total-timesteps", str(env_steps(updates)),
    ]  # fmt: skip


def command(arguments: Sequence[str], *, hooks: Sequence[str] = ()) -> list[str]:
    """The command line of `inchworm`; with `hooks`, inside the script `durability_child.py`."""
    if hooks:
        return [sys.executable, "-P", str(Path(__file__).with_name("durability_child.py")), *hooks, "--", *arguments]
    return [sys.executable, "-m", "inchworm", *arguments]


def train_command(*flags: str, entrance: str = "inchworm", workers: int = 4, updates: int = 20, steps: int = 32) -> list[str]:
    """`updates` updates on 8 lanes of `WORLD`, an environment that can misbehave."""
    return [
        *(sys.executable, "-m", entrance, "train", WORLD, "--backend", "numpy", "--num-envs", "8", "--num-workers", str(workers)),
        *("--ppo.rollout-steps", str(steps), "--total-timesteps", str(updates * steps * 8), "--run.directory", ".", "--run.name", RUN),
        *("--ppo.minibatch-size", "128", "--ppo.update-epochs", "4", "--env.max-episode-steps", "200"),
        *("--evaluation.interval", "0", "--evaluation.final-episodes", "0", "--quiet", *flags),
    ]


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a child; a hung child is killed and has code -9."""

    code: int
    out: str
    error: str


@dataclass
class Child:
    """A running child with its output in files."""

    process: subprocess.Popen[bytes]
    directory: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def running(self) -> bool:
        return self.process.poll() is None

    def errors(self) -> str:
        """Standard error so far."""
        return (self.directory / "stderr").read_text(errors="replace")

    def code_within(self, seconds: float) -> int | None:
        """Exit code, or None if it does not end in time."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


@contextlib.contextmanager
def started(command: Sequence[str], directory: Path, stdout: int | None = None, **variables: str) -> Iterator[Child]:
    """Start a child in `directory`; at the end it and its descendants are killed."""
    directory.mkdir(parents=True, exist_ok=True)
    environment = child_environment(COLUMNS="300", **variables)
    for name in ("stdout", "stderr"):  # another child may still write to the files of this name
        (directory / name).unlink(missing_ok=True)
    with (directory / "stdout").open("wb") as out, (directory / "stderr").open("wb") as errors:
        out_file = out if stdout is None else stdout
        process = subprocess.Popen(command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=out_file, stderr=errors)
    try:
        yield Child(process, directory)
    finally:
        left = descendants(process.pid) if process.poll() is None else []
        if process.poll() is None:
            process.kill()
        process.wait()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if process.stdout is not None:
            process.stdout.close()


def run(command: Sequence[str], directory: Path, **variables: str) -> Ended:
    """Run a child to its end."""
    with started(command, directory, **variables) as child:
        code = child.code_within(LIMIT)
        error = child.errors() + ("" if code is not None else f"\ndid not end within {LIMIT:.0f} s")
        return Ended(-9 if code is None else code, (directory / "stdout").read_text(errors="replace"), error)


def undisturbed(directory: Path, command: Sequence[str]) -> dict[str, str]:
    """Fingerprint of a run that is not disturbed."""
    ended = run(command, directory)
    if ended.code:
        raise RuntimeError(f"the undisturbed run ended with code {ended.code}: {ended.error[-2000:]}")
    return fingerprint(directory / RUN)


def newest(directory: Path) -> Checkpoint | None:
    """The newest checkpoint of a run, verified; None if none was committed. Skipping a damaged one is an error here."""
    checkpointer = TrainingCheckpointer(directory / "checkpoints")
    if not checkpointer.all():
        return None
    with warnings.catch_warnings(action="error"):
        return checkpointer.load()


def fingerprint(directory: Path) -> dict[str, str]:
    """SHA-256 of everything that is a function of config and seed: metrics, policies and the newest checkpoint."""
    try:
        checkpoint = newest(directory)
    except (CorruptFileError, OSError, UserWarning) as error:
        return {"checkpoint": f"cannot be read: {error}"}
    paths = [directory / name for name in ("metrics.jsonl", "policy.safetensors", "best_policy.safetensors")]
    if checkpoint is not None:
        paths += [checkpoint.path / "state.json", checkpoint.path / "arrays.safetensors"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.exists()}


def differences(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """Names of the files that differ or that only one side has; empty if all are equal."""
    names = sorted(name for name in {**expected, **found} if found.get(name) != expected.get(name))
    return ", ".join(f"{name} ({found[name]})" if name == "checkpoint" else name for name in names)


def digest(tree: Any) -> str:
    """SHA-256 of nested plain data and arrays: names, dtypes, shapes and every bit."""
    arrays, structure = flatten_tree({"tree": tree})
    result = hashlib.sha256(json.dumps(structure, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        result.update(f"{name} {array.dtype.str} {array.shape}".encode())
        result.update(np.ascontiguousarray(array).tobytes())
    return result.hexdigest()


def leftovers(directory: Path) -> str:
    """An error that names temporary files below a directory; empty if there are none."""
    found = sorted(str(path.relative_to(directory)) for path in directory.rglob(".tmp-*"))
    return f"left behind: {', '.join(found[:3])}" if found else ""


def last_iteration(path: Path) -> int:
    """Iteration of the last complete row of a JSONL file; 0 if there is none."""
    rows = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    complete = [row for row in rows if row.endswith(b"\n")]
    return int(json.loads(complete[-1])["iteration"]) if complete else 0


def fresh(directory: Path) -> Path:
    """Create a directory, or replace it by an empty one."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


@contextlib.contextmanager
def in_memory(work: Work) -> Iterator[Work]:
    """The same work with its scratch directory in memory where possible: thousands of fsyncs are slow on a disk."""
    if os.access(SHARED, os.W_OK):
        with tempfile.TemporaryDirectory(dir=SHARED, prefix="faults-") as directory:
            moved = copy.copy(work)
            moved.scratch = Path(directory)
            yield moved
    else:
        yield work


def children(pid: int) -> list[int]:
    """Children of all threads of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def state_of(pid: int) -> str:
    """State letter of a process: R running, S sleeping, T stopped, Z zombie; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_gone(pid: int) -> bool:
    """Whether a process has ended, waited for or not."""
    return state_of(pid) in ("", "Z", "X")


def zombies(pid: int) -> list[int]:
    """Children that have ended and were not waited for."""
    return [child for child in children(pid) if state_of(child) == "Z"]


def workers_of(pid: int) -> list[int]:
    """Running env workers of a process, in the order of their start."""
    found = []
    for child in children(pid):
        with contextlib.suppress(OSError):
            if b"inchworm.env.workers.program" in Path(f"/proc/{child}/cmdline").read_bytes():  # a zombie has no command line
                found.append(child)
    return sorted(found)


def count_descriptors(pid: int) -> int:
    """Number of open file descriptors; -1 if the process has ended."""
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return -1


def status_number(pid: int, name: str) -> int:
    """A number of /proc/PID/status, such as VmRSS (kB) or Threads."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0


def shared_names() -> set[str]:
    """Names in /dev/shm, without those of libfaketime, of this programme and of other running processes."""
    names = {entry.name for entry in SHARED.iterdir()} if SHARED.is_dir() else set()
    names = {name for name in names if "faketime" not in name and not name.startswith("faults-")}
    others = {name for name in names for pid in map(int, re.findall(r"\d{3,}", name)) if not is_gone(pid) and pid not in (1, os.getpid())}
    return names - others


def wait_for(condition: Callable[[], object], seconds: float, every: float = 0.002) -> float | None:
    """Seconds until the condition holds, or None if it does not in time."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            return None
        time.sleep(every)
    return time.monotonic() - began


def longest(values: Sequence[float], digits: int = 2) -> str:
    """The largest of some durations, as a figure."""
    return f"{max(values):.{digits}f} s" if values else "none measured"
