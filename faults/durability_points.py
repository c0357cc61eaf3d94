"""A2, A3 and A5: kills and I/O errors at every system call of a save and of a whole run, and the order of the calls."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from faults import durability_strace, runs
from faults.durability_strace import CALLS, Call, Point, inchworm, inject, points, run_forked, trace
from faults.programme import Outcome, Work, procedure
from inchworm.core.errors import CorruptFileError, InchwormError
from inchworm.core.tensor_file import read_tensor_file, write_tensor_file
from inchworm.run.checkpoint import TrainingCheckpointer

SIZE = 300
CHECKPOINTS, POLICY, NOTES = "run/checkpoints", "run/policy.safetensors", "notes"
REMOVALS = ("unlink", "unlinkat", "rmdir")
ERRORS = ["ENOSPC", "EIO", "EDQUOT", "EROFS"]
RUN_POINTS = 100
"""Calls of a whole run that are tried, evenly spread."""
UPDATES = 3
RUN = [*runs.arguments(UPDATES, eval_interval=2), "--quiet"]
"""A run of a few updates with an evaluation at the second; prints nothing unless something is wrong."""


def state_of(step: int) -> dict[str, Any]:
    """The state of a step, in which nothing is equal to the state of another step."""
    rng = np.random.default_rng(step)
    weights = {"a": rng.standard_normal(SIZE).astype(np.float32), "b": rng.integers(0, 9, (3, 4))}
    return {"weights": weights, "counters": {"iteration": step, "score": step / 7}, "text": f"state of {step}", "none": None}


def policy_of(step: int) -> dict[str, np.ndarray]:
    """The arrays of the policy file of a step."""
    return {"w": np.random.default_rng(1000 + step).standard_normal(SIZE)}


def save_policy_file(path: Path, step: int) -> None:
    write_tensor_file(path, policy_of(step), kind="policy", version=1, header={"step": step})


def save(directory: Path, step: int) -> None:
    """Save a checkpoint, then a policy file next to the checkpoints."""
    TrainingCheckpointer(directory / CHECKPOINTS).save(step, state_of(step))
    save_policy_file(directory / POLICY, step)


def writer(directory: Path, states: int) -> Callable[[], int]:
    """A function that saves states one after another and notes its progress.

    The notes are written with pwrite, which is neither counted nor made to fail. A failed save is tried again at once, as a trainer does
    at the next iteration; after a second failure the next state is saved.
    """
    directory.mkdir(parents=True, exist_ok=True)

    def write() -> int:
        notes: dict[str, Any] = {"begun": 0, "saved": 0, "errors": [], "intact": []}
        descriptor = os.open(directory / NOTES, os.O_WRONLY | os.O_CREAT)
        for step, _ in ((step, attempt) for step in range(1, states + 1) for attempt in range(2)):
            if notes["saved"] == step:
                continue
            notes["begun"] = step
            os.pwrite(descriptor, json.dumps(notes).encode().ljust(8000), 0)
            try:
                with warnings.catch_warnings(action="ignore"):
                    save(directory, step)
                notes["saved"] = step
            except (OSError, InchwormError) as error:
                cause = error if isinstance(error, OSError) else error.__cause__
                notes["errors"].append([step, cause.errno if isinstance(cause, OSError) else None, str(error)])
                notes["intact"].append(not newest_problem(directory, notes["saved"], step, policy=False))
            os.pwrite(descriptor, json.dumps(notes).encode().ljust(8000), 0)
        return 0

    return write


def writer_points(work: Work, states: int) -> list[Point]:
    """Every call of the writer that touches its directory."""
    writer(work.scratch / "warm", 1)()  # so that children find everything imported and the first makes the same calls as the others
    directory = work.scratch / "traced"
    calls = trace(writer(directory, states), work.scratch, work.scratch / "log")
    return [point for point in points(calls, directory / "run") if states > 1 or point.name != "openat"]


def newest_problem(directory: Path, saved: int, begun: int, *, policy: bool = True) -> str:
    """What is wrong with the newest checkpoint and policy file: they must be intact, of a step from the last saved to the last begun."""
    try:
        with warnings.catch_warnings(action="error"):
            checkpoint = TrainingCheckpointer(directory / CHECKPOINTS).load()
    except FileNotFoundError:
        return "" if saved == 0 else f"there is no checkpoint although {saved} had been saved"
    except (CorruptFileError, UserWarning) as error:
        return str(error)
    if not saved <= checkpoint.step <= begun:
        return f"the newest checkpoint is of step {checkpoint.step}; {saved} was saved, {begun} begun"
    if runs.digest(checkpoint.state) != runs.digest(state_of(checkpoint.step)):
        return f"step {checkpoint.step} does not have the content that was saved"
    if not policy:
        return ""
    if not (directory / POLICY).exists():
        return "" if saved == 0 else "the policy file is missing"
    try:
        arrays, header = read_tensor_file(directory / POLICY, kind="policy", max_version=1)
    except CorruptFileError as error:
        return str(error)
    right = saved <= header["step"] <= begun and runs.digest(arrays) == runs.digest(policy_of(header["step"]))
    return "" if right else f"the policy file of step {header['step']} does not have the content that was saved"


def notes_of(directory: Path) -> dict[str, Any]:
    """What the writer noted."""
    path = directory / NOTES
    text = path.read_text().strip() if path.exists() else ""
    return dict(json.loads(text)) if text else {"begun": 0, "saved": 0, "errors": [], "intact": []}


def after_problem(directory: Path) -> str:
    """What is wrong with what a killed writer left; empty if the newest state loads and the next save works."""
    notes = notes_of(directory)
    if problem := newest_problem(directory, notes["saved"], notes["begun"]):
        return problem
    step = notes["begun"] + 1
    save(directory, step)
    return newest_problem(directory, step, step) or runs.leftovers(directory / CHECKPOINTS)


@procedure("A2", full=4, test=1, needs="strace", possible=durability_strace.possible)
def crash_points(work: Work) -> Outcome:
    """kill -9 at every system call of a save (mkdir, open, write, fsync, rename, unlink, rmdir).

    Must: at every point the newest committed state loads unchanged and the next save, or run, succeeds.
    `count` states are saved one after another; the points are all calls that this takes. Then some of those of a whole run.
    """
    outcome = Outcome()
    with runs.in_memory(work) as here:
        found = writer_points(here, work.count)
        for number in here.each(len(found)):
            directory = here.scratch / f"writer-{number}"
            ended, _ = inject(writer(directory, work.count), here.scratch, found[number], "signal=SIGKILL", here.scratch / "log")
            problem = f"it ended with code {ended.code}" if ended.code != -9 else after_problem(directory)
            if outcome.check(not problem, f"the writer, killed at {found[number]}: {problem}"):
                shutil.rmtree(directory)
        names = Counter(point.name for point in found)
        outcome.figures["crash points of the writer"] = f"{len(found)} ({', '.join(f'{count} {name}' for name, count in names.items())})"
        if work.count > 1:
            expected = runs.undisturbed(here.scratch / "undisturbed", runs.command(RUN))
            found, total = run_points(here.scratch)
            for number in here.each(len(found)):
                directory = here.scratch / f"run-{number}"
                ended, _ = inject(inchworm(RUN), directory, found[number], "signal=SIGKILL", here.scratch / "log")
                problem = f"it ended with code {ended.code}" if ended.code != -9 else restart_problem(directory, expected)
                if outcome.check(not problem, f"the run, killed at {found[number]}: {problem}"):
                    shutil.rmtree(directory)
            outcome.figures["crash points of a whole run"] = f"{len(found)} of {total}, evenly spread"
    return outcome


@procedure("A3", full=4, test=1, needs="strace", possible=durability_strace.possible)
def failing_disk(work: Work) -> Outcome:
    """ENOSPC, EIO, EDQUOT or EROFS at every system call of a save.

    Must: the old checkpoint stays; the message names path and error; training continues and tries again; a failing last save: exit code not
        0; nothing left behind.
    `count` is the number of errors, of the four.
    """
    outcome, names, states = Outcome(), ERRORS[: work.count], 3 if work.count > 1 else 1
    with runs.in_memory(work) as here:
        found = writer_points(here, states)
        # A disk stays full for writes; that other calls fail for ever is tried at each first one only.
        lasting = [p for p in found if states > 1 and p.name != "openat" and (p.name in ("write", "fsync") or p.number == 1)]
        cases = [(name, point, onwards) for name in names for onwards in (False, True) for point in (lasting if onwards else found)]
        for number in here.each(len(cases)):
            name, point, onwards = cases[number]
            directory = here.scratch / f"failing-{number}"
            ended, hit = inject(writer(directory, states), here.scratch, point, f"error={name}", here.scratch / "log", onwards=onwards)
            if ended.code or not hit:
                problem = f"it ended with code {ended.code}: {ended.error[-300:]}" if ended.code else "the call was not made"
            else:
                problem = _writer_problem(directory, states, name, point, onwards)
            words = f"{point}{' and all after it' if onwards else ''}"
            if outcome.check(not problem, f"the writer, {name} at {words}: {problem}"):
                shutil.rmtree(directory)
        tried = f"{len(cases)} ({', '.join(names)} at {len(found)} points, once or from there on)"
        outcome.figures["errors injected into the writer"] = tried
        if work.count > 1:
            expected = runs.undisturbed(here.scratch / "undisturbed", runs.command(RUN))
            found, total = run_points(here.scratch)
            codes = []
            for number in here.each(len(found)):
                name, point, directory = names[number % len(names)], found[number], here.scratch / f"run-failing-{number}"
                ended, hit = inject(inchworm(RUN), directory, point, f"error={name}", here.scratch / "log")
                codes.append(ended.code)
                problem = _run_problem(directory, ended, hit, name, point, expected) if hit else "the call was not made"
                file = " -> ".join(re.findall(r'/(?:run)/([^">]*)', hit[0])[:2]) if hit else ""
                if outcome.check(not problem, f"the run, {name} at {point} {file}: {problem}"):
                    shutil.rmtree(directory)
            tried = f"at {len(found)} of {total} calls; {codes.count(0)} runs continued to the end"
            outcome.figures["errors injected into a whole run"] = tried
    return outcome


def _writer_problem(directory: Path, states: int, name: str, point: Point, onwards: bool) -> str:
    notes = notes_of(directory)
    for step, number, text in notes["errors"]:
        if number != getattr(errno, name) or os.strerror(getattr(errno, name)) not in text or str(directory) not in text:
            return f"the message of step {step} does not name the path or the error: {text}"
    if not all(notes["intact"]):
        return f"after the failure the previous checkpoint was not intact: {notes['intact']}"
    if not onwards and notes["saved"] != states:
        return f"trying again did not work: {notes['errors']}"
    if onwards and notes["saved"] != states and not notes["errors"]:
        return f"only {notes['saved']} states were saved, without an error"
    problem = newest_problem(directory, notes["saved"] if not onwards else 0, states)
    if not problem and point.name not in REMOVALS:  # where removing fails, nothing can be removed
        problem = runs.leftovers(directory)
    return problem or after_problem(directory)


def run_points(scratch: Path) -> tuple[list[Point], int]:
    """Up to `RUN_POINTS` calls of a run that touch its directory, evenly spread, and how many there are."""
    directory = scratch / "run-traced"
    found = points(trace(inchworm(RUN), directory, scratch / "log"), directory / runs.RUN)
    chosen = min(len(found), RUN_POINTS)
    return [found[index * len(found) // chosen] for index in range(chosen)], len(found)


def restart_problem(directory: Path, expected: dict[str, str]) -> str:
    """What is wrong after running the same command again; empty if nothing is."""
    had_saved = any((directory / runs.RUN / "checkpoints").glob("step-*"))
    ended = run_forked(inchworm(RUN), directory)
    if ended.code:
        return f"the restart ended with code {ended.code}: {ended.error[-300:]}"
    if ended.error.strip() and had_saved:  # without a checkpoint it warns that it starts anew
        return f"the restart complained: {ended.error[-300:]}"
    different = runs.differences(runs.fingerprint(directory / runs.RUN), expected)
    return f"other bits in {different}" if different else runs.leftovers(directory)


def _run_problem(directory: Path, ended: runs.Ended, hit: Sequence[str], name: str, point: Point, expected: dict[str, str]) -> str:
    """What is wrong with how a run handled an error; empty if nothing is."""
    run = directory / runs.RUN
    if ended.code < 0 or "Traceback" in ended.error:
        return f"it ended with code {ended.code}: {ended.error[-400:]}"
    if ended.code == 0:
        if different := runs.differences(runs.fingerprint(run), expected):
            return f"it ended with code 0 and other bits in {different}: {ended.error[-300:]}"
        left = runs.leftovers(directory)
        if left and point.name not in REMOVALS and "O_DIRECTORY" not in hit[0]:  # where removing fails, nothing can be removed
            return left
    elif os.strerror(getattr(errno, name)) not in ended.error or runs.RUN not in ended.error:
        return f"code {ended.code}, and the message does not name the path or the error: {ended.error[-300:]}"
    elif "/checkpoints/" in hit[0] and runs.last_iteration(run / "metrics.jsonl") != UPDATES:  # a later save could have made up for it
        return f"it stopped with code {ended.code} because one save failed: {ended.error[-300:]}"
    return restart_problem(directory, expected)


@dataclass
class Disk:
    """What is certainly on the disk, according to the log: the bytes of a file after its fsync, a name after its directory's."""

    below: Path
    dirty: set[str] = field(default_factory=set)
    """Files with bytes that were not synced."""
    unsynced: dict[str, str] = field(default_factory=dict)
    """New or changed names -> their directory, until it is synced."""
    violations: list[str] = field(default_factory=list)
    renames: int = 0

    def follow(self, call: Call) -> None:
        """Apply one call."""
        if call.failed:
            return
        descriptor = re.match(r"^\d+<([^>]*)>", call.text)
        paths = [str(Path(self.below.parent, found)) for found in re.findall(r'"([^"]*)"', call.text)]
        if call.name in ("write", "pwrite64", "writev", "ftruncate"):
            if descriptor and descriptor[1].startswith(str(self.below)):
                self.dirty.add(descriptor[1])
        elif call.name in ("fsync", "fdatasync"):
            if descriptor:
                self.dirty.discard(descriptor[1])
                self.unsynced = {name: parent for name, parent in self.unsynced.items() if parent != descriptor[1]}
        elif call.name.startswith("rename"):
            self._rename(paths[0], paths[1])
        elif call.name.startswith("mkdir") or (call.name == "openat" and "O_CREAT" in call.text):
            self._add_name(paths[0])

    def _add_name(self, path: str) -> None:
        if path.startswith(str(self.below)):
            self.unsynced[path] = str(Path(path).parent)

    def _rename(self, old: str, new: str) -> None:
        """A rename that commits: everything that belongs to it must be on the disk before."""
        inside = f"{old}/"
        if not Path(new).name.startswith(".tmp-"):
            self.renames += 1
            late = [path for path in self.dirty if path == old or path.startswith(inside)]
            late += [name for name, parent in self.unsynced.items() if parent == old or parent.startswith(inside)]
            self.violations += [f"{Path(new).name} got its name before {Path(path).name} was synced" for path in late]
            # A name not synced when the next one of its directory comes: the save before had returned by then.
            late = [name for name in self.committed() if name != new and self.unsynced[name] == str(Path(new).parent)]
            self.violations += [f"the name of {Path(name).name} was not synced before {Path(new).name} came" for name in late]
        self.dirty = {path for path in self.dirty if path != old and not path.startswith(inside)}
        self.unsynced = {name: parent for name, parent in self.unsynced.items() if name != old and not name.startswith(inside)}
        self._add_name(new)

    def committed(self) -> list[str]:
        """Unsynced names on which a later start relies: neither temporary nor files that are appended to."""
        appended = ("lock", "metrics.jsonl", "timing.jsonl", "hashes.jsonl")
        return [name for name in self.unsynced if "/.tmp-" not in name and Path(name).name not in appended]


@procedure("A5", full=50, test=2, needs="strace", possible=durability_strace.possible)
def order(work: Work) -> Outcome:
    """power loss: the order of write, fsync and rename in the log of system calls.

    Must: every file is synced before the rename that commits it, and its directory, and those that were made for it, after: 0 violations.
    `count` saves of the writer, then a whole run from the command line.
    """
    outcome, saves, whole = Outcome(), work.scratch / "saves", work.scratch / "whole"
    commits = []
    for what, function, directory, below in (
        ("the writer", writer(saves, work.count), work.scratch, saves / "run"),
        ("a run", inchworm(RUN), whole, whole / runs.RUN),
    ):
        disk = Disk(below)
        for call in trace(function, directory, work.scratch / "log", calls=(*CALLS, "pwrite64", "writev")):
            disk.follow(call)
        disk.violations += [f"the name {Path(name).name} was never synced" for name in disk.committed()]
        outcome.total += disk.renames
        outcome.passed += max(0, disk.renames - len(disk.violations))
        outcome.failures += [f"{what}: {text}" for text in dict.fromkeys(disk.violations)]
        commits.append(disk.renames)
    outcome.figures["commits followed"] = f"{commits[0]} of the writer, {commits[1]} of a whole run"
    outcome.notes.append("the order alone; a file system that drops what was not synced (LazyFS) was not tried")
    return outcome
