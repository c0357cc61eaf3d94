"""What the procedures about processes share: starting a trainer, watching it and its workers from outside, comparing what it wrote."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from faults.programme import child_environment

WORLD = "faults.processes_worlds:Pole"
LIMIT_SECONDS = 90.0
"""No trainer of these procedures may take longer."""
RUN = Path("runs") / "x"
SHARED = Path("/dev/shm")


def train_command(*flags: str, entrance: str = "inchworm", workers: int = 4, updates: int = 20, steps: int = 32) -> list[str]:
    """A small run of `updates` updates on 8 lanes, under the name that all runs here have, so that their configs are equal too."""
    return [
        *(sys.executable, "-m", entrance, "train", WORLD, "--backend", "numpy", "--num-envs", "8", "--num-workers", str(workers)),
        *("--ppo.rollout-steps", str(steps), "--total-timesteps", str(updates * steps * 8), "--run.directory", "runs", "--run.name", "x"),
        *("--ppo.minibatch-size", "128", "--ppo.update-epochs", "4", "--env.max-episode-steps", "200"),
        *("--evaluation.interval", "0", "--evaluation.final-episodes", "0", "--quiet", *flags),
    ]


@dataclass
class Child:
    """A process that a procedure started, with its output in files."""

    process: subprocess.Popen[bytes]
    directory: Path

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def said(self) -> str:
        """What it wrote to standard error so far."""
        return (self.directory / "stderr").read_text(errors="replace")

    def code_within(self, seconds: float) -> int | None:
        """Its exit code, or None if it has not ended in time."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


@contextlib.contextmanager
def started(command: Sequence[str], directory: Path, stdout: int | None = None, **variables: str) -> Iterator[Child]:
    """A child in `directory`; it is gone at the end, and its workers with it."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "stdout").open("wb") as out, (directory / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=child_environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=out if stdout is None else stdout,
            stderr=errors,
        )
    try:
        yield Child(process, directory)
    finally:
        mine = descendants(process.pid) if process.poll() is None else []
        if process.poll() is None:
            process.kill()
        process.wait()
        for pid in mine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if process.stdout is not None:
            process.stdout.close()


def finished(command: Sequence[str], directory: Path, **variables: str) -> tuple[int | None, str]:
    """Run to the end: exit code (None if it took too long) and standard error."""
    with started(command, directory, **variables) as child:
        code = child.code_within(LIMIT_SECONDS)
        return code, child.said()


def undisturbed(command: Sequence[str], directory: Path, **variables: str) -> dict[str, str]:
    """The fingerprint of a run to which nothing happens."""
    code, said = finished(command, directory, **variables)
    if code != 0:
        raise RuntimeError(f"the undisturbed run ended with {code}: {said[-2000:]}")
    return fingerprint(directory / RUN)


def fingerprint(run: Path) -> dict[str, str]:
    """SHA-256 of all that is a function of config and seed: policy, metrics, and the newest checkpoint's arrays and state."""
    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    files = [run / "policy.safetensors", run / "metrics.jsonl"]
    if checkpoints:
        files += [checkpoints[-1] / "arrays.safetensors", checkpoints[-1] / "state.json"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.exists()}


def differences(ours: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Which files are not as they must be, in words; empty if all are."""
    return ", ".join(name for name in wanted if ours.get(name) != wanted[name])


def fresh(directory: Path) -> Path:
    """An empty directory in this place."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def children(pid: int) -> list[int]:
    """The children of all threads of a process."""
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
    """One letter: R running, S asleep, T stopped, Z zombie; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie waits only for somebody to look at it."""
    return state_of(pid) in ("", "Z", "X")


def zombies(pid: int) -> list[int]:
    """Children that have ended and that nobody has looked at."""
    return [child for child in children(pid) if state_of(child) == "Z"]


def workers_of(pid: int) -> list[int]:
    """The living env workers of a process, in the order in which they were started."""
    found = []
    for child in children(pid):
        with contextlib.suppress(OSError):
            if b"inchworm.env.workers.program" in Path(f"/proc/{child}/cmdline").read_bytes():  # a zombie has no command line
                found.append(child)
    return sorted(found)


def count_descriptors(pid: int) -> int:
    """Open file descriptors."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def status_number(pid: int, name: str) -> int:
    """A number from /proc/PID/status, such as VmRSS (kB) or Threads."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0


def shared_names() -> set[str]:
    """The names in /dev/shm, without those of procedures that run beside this one: libfaketime's, and of processes that live."""
    names = {entry.name for entry in SHARED.iterdir()} if SHARED.is_dir() else set()
    return {name for name in names if "faketime" not in name and not any(_lives(int(part)) for part in re.findall(r"\d{3,}", name))}


def _lives(pid: int) -> bool:
    return not is_gone(pid) and pid not in (1, os.getpid())


def wait_for(condition: Callable[[], object], seconds: float, every: float = 0.002) -> float | None:
    """Seconds until the condition held, or None if it did not in time."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            return None
        time.sleep(every)
    return time.monotonic() - began


def seconds(values: Sequence[float], digits: int = 2) -> str:
    """The longest of some times, as a figure."""
    return f"{max(values):.{digits}f} s" if values else "none measured"
