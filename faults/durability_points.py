"""A2 and A3, the writer alone: it is killed, or told that the disk is full, at every system call that it makes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import durability_runs as runs
from faults.durability_strace import Point, inject, points, trace
from faults.durability_writer import CHECKPOINTS, NOTES, POLICY, policy_of, save, state_of, write_states
from faults.programme import Outcome, Work
from inchworm.core.errors import CorruptFileError
from inchworm.core.tensor_file import read_tensor_file
from inchworm.run.checkpoint import TrainingCheckpointer

REMOVALS = ("unlink", "unlinkat", "rmdir")


def writer(directory: Path, states: int) -> Callable[[], int]:
    """What saves so many states."""
    directory.mkdir(parents=True, exist_ok=True)
    return lambda: write_states(directory, states)


def writer_points(work: Work, states: int) -> list[Point]:
    """Every call of the writer that touches its directory."""
    (work.scratch / "warm").mkdir()
    write_states(work.scratch / "warm", 1)  # so that children find imported what they need, and the first makes the calls of all others
    directory = work.scratch / "traced"
    calls = trace(writer(directory, states), work.scratch, work.scratch / "log")
    return [point for point in points(calls, directory / "run") if states > 1 or point.name != "openat"]


def killed_writers(work: Work, outcome: Outcome, states: int) -> None:
    """A kill at every point: the newest committed state loads, and the next save works."""
    found = writer_points(work, states)
    for number in work.each(len(found)):
        directory = work.scratch / f"writer-{number}"
        ended, _ = inject(writer(directory, states), work.scratch, found[number], "signal=SIGKILL", work.scratch / "log")
        problem = f"it ended with code {ended.code}" if ended.code != -9 else _problem_after(directory)
        if outcome.check(not problem, f"the writer, killed at {found[number]}: {problem}"):
            shutil.rmtree(directory)
    outcome.figures["crash points of the writer"] = f"{len(found)} ({_by_name(found)})"


def _problem_after(directory: Path) -> str:
    """What is wrong with what a killed writer left; empty if nothing is."""
    notes = _notes(directory)
    problem = _problem_with_newest(directory, notes["saved"], notes["begun"])
    if problem:
        return problem
    step = notes["begun"] + 1
    save(directory, step)
    problem = _problem_with_newest(directory, step, step)
    left = runs.leftovers(directory / CHECKPOINTS)
    return problem or (f"after the next save there is still {left[0]}" if left else "")


def _problem_with_newest(directory: Path, saved: int, begun: int) -> str:
    """The newest checkpoint, and the file beside it, must be whole and of a state whose save had begun and none before the last saved."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoint = TrainingCheckpointer(directory / CHECKPOINTS).load()
    except FileNotFoundError:
        return "" if saved == 0 else f"no checkpoint is there, and {saved} had been saved"
    except (CorruptFileError, UserWarning) as error:
        return str(error)
    if not saved <= checkpoint.step <= begun:
        return f"the newest is of step {checkpoint.step}, but {saved} had been saved"
    if runs.digest(checkpoint.state) != runs.digest(state_of(checkpoint.step)):
        return f"the state of step {checkpoint.step} is another than was saved"
    return _problem_with_policy(directory / POLICY, saved, begun)


def _problem_with_policy(path: Path, saved: int, begun: int) -> str:
    if not path.exists():
        return "" if saved == 0 else "the policy file is gone"
    try:
        arrays, header = read_tensor_file(path, kind="policy", max_version=1)
    except CorruptFileError as error:
        return str(error)
    right = saved <= header["step"] <= begun and runs.digest(arrays) == runs.digest(policy_of(header["step"]))
    return "" if right else f"the policy file of step {header['step']} is another than was saved"


def failing_writers(work: Work, outcome: Outcome, states: int, names: list[str]) -> None:
    """Each error at every point: the old checkpoint stays, the message says what and where, trying again works, nothing is left."""
    found = writer_points(work, states)
    cases = [
        (name, point, onwards) for name in names for point in found for onwards in (False, True) if _makes_sense(point, onwards, states)
    ]
    for number in work.each(len(cases)):
        name, point, onwards = cases[number]
        directory = work.scratch / f"failing-{number}"
        ended, hit = inject(writer(directory, states), work.scratch, point, f"error={name}", work.scratch / "log", onwards=onwards)
        if ended.code or not hit:
            problem = f"it ended with code {ended.code}: {ended.error[-300:]}" if ended.code else "the call was not made"
        else:
            problem = _problem_after_error(directory, states, name, point, onwards)
        word = " and every one after it" if onwards else ""
        if outcome.check(not problem, f"the writer, {name} at {point}{word}: {problem}"):
            shutil.rmtree(directory)
    outcome.figures["errors injected into the writer"] = f"{len(cases)} ({', '.join(names)} at {len(found)} points, once or from there on)"


def _makes_sense(point: Point, onwards: bool, states: int) -> bool:
    """A disk stays full for writes; that other calls fail for ever is tried at each first one only."""
    return not onwards or (states > 1 and (point.name in ("write", "fsync") or point.number == 1) and point.name != "openat")


def _problem_after_error(directory: Path, states: int, name: str, point: Point, onwards: bool) -> str:
    notes = _notes(directory)
    for step, number, text in notes["errors"]:
        if number != getattr(errno, name) or os.strerror(getattr(errno, name)) not in text or str(directory) not in text:
            return f"the message of step {step} names no path or not the errno: {text}"
    if not all(notes["intact"]):
        return f"after the failure the checkpoint before was not intact: {notes['intact']}"
    if not onwards and notes["saved"] != states:
        return f"trying again did not work: {notes['errors']}"
    if onwards and notes["saved"] != states and not notes["errors"]:
        return f"only {notes['saved']} states were saved, and nothing was said"
    problem = _problem_with_newest(directory, notes["saved"] if not onwards else 0, states)
    left = runs.leftovers(directory)
    if not problem and left and point.name not in REMOVALS:  # where removing fails, nothing can be removed
        problem = f"left behind: {', '.join(left[:3])}"
    return problem or _problem_after(directory)


def _notes(directory: Path) -> dict[str, Any]:
    path = directory / NOTES
    text = path.read_text().strip() if path.exists() else ""
    return dict(json.loads(text)) if text else {"begun": 0, "saved": 0, "errors": [], "intact": []}


def _by_name(found: list[Point]) -> str:
    names = [point.name for point in found]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
