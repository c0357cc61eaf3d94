"""A2 and A3, a whole run from the command line: it is killed, or an error is injected, at system calls from its beginning to its end."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from faults import durability_runs as runs
from faults.durability_fork import inchworm, run_forked
from faults.durability_strace import CALLS, Point, inject, points, trace
from faults.programme import Outcome, Work

UPDATES = 3
BEGINS_AGAIN = "starting over"
"""What a run may say that was killed before its first checkpoint."""
REMOVALS = ("unlink", "unlinkat", "rmdir")


def arguments() -> list[str]:
    """A run of a few updates with an evaluation at the second, which says nothing unless something is wrong."""
    return [*runs.arguments(UPDATES, eval_interval=2), "--quiet"]


def run_points(scratch: Path, most: int) -> tuple[list[Point], int]:
    """The calls of a run that touch its directory, at most so many, evenly spread; and how many there are."""
    directory = scratch / "run-traced"
    calls = trace(inchworm(arguments()), directory, scratch / "run-log", calls=CALLS)
    found = points(calls, directory / runs.NAME)
    chosen = range(0, len(found) * most, max(1, len(found)))
    return (found if len(found) <= most else [found[index // most] for index in chosen]), len(found)


def killed_runs(work: Work, outcome: Outcome, most: int) -> None:
    """A kill, then the same command: it ends with the bits of the undisturbed run."""
    expected = runs.undisturbed(work.scratch / "run-undisturbed", arguments())
    found, there = run_points(work.scratch, most)
    for number in work.each(len(found)):
        directory = work.scratch / f"run-{number}"
        ended, _ = inject(inchworm(arguments()), directory, found[number], "signal=SIGKILL", work.scratch / "run-log")
        problem = f"it ended with code {ended.code}" if ended.code != -9 else restart_problem(directory, expected)
        if outcome.check(not problem, f"the run, killed at {found[number]}: {problem}"):
            shutil.rmtree(directory)
    outcome.figures["crash points of a whole run"] = f"{len(found)} of {there}, evenly spread"


def restart_problem(directory: Path, expected: dict[str, str]) -> str:
    """What is wrong after the same command once more; empty if nothing is."""
    ended = run_forked(inchworm(arguments()), directory)
    if ended.code:
        return f"the restart ended with code {ended.code}: {ended.error[-300:]}"
    if ended.error.strip() and BEGINS_AGAIN not in ended.error:
        return f"the restart complained: {ended.error[-300:]}"
    different = runs.differences(runs.fingerprint(directory / runs.NAME), expected)
    left = runs.leftovers(directory)
    return f"other bits in {different}" if different else f"left behind: {', '.join(left[:3])}" if left else ""


def failing_runs(work: Work, outcome: Outcome, most: int, names: Sequence[str]) -> None:
    """An error at a call of a run: it goes on and tries again, or ends with a code and a message, and the same command mends it."""
    expected = runs.undisturbed(work.scratch / "run-undisturbed", arguments())
    found, there = run_points(work.scratch, most)
    codes = []
    for number in work.each(len(found)):
        name, point = names[number % len(names)], found[number]
        directory = work.scratch / f"run-failing-{number}"
        ended, hit = inject(inchworm(arguments()), directory, point, f"error={name}", work.scratch / "run-log")
        problem = error_problem(directory, ended, hit, name, point, expected) if hit else "the call was not made"
        codes.append(ended.code)
        where = _file_of(hit[0]) if hit else ""
        if outcome.check(not problem, f"the run, {name} at {point} {where}: {problem}"):
            shutil.rmtree(directory)
    outcome.figures["errors injected into a whole run"] = f"at {len(found)} of {there} calls; {codes.count(0)} runs went on to the end"


def error_problem(directory: Path, ended: runs.Ended, hit: Sequence[str], name: str, point: Point, expected: dict[str, str]) -> str:
    """What is wrong with how a run took an error; empty if nothing is."""
    word = os.strerror(getattr(errno, name))
    if ended.code < 0 or "Traceback" in ended.error:
        return f"it ended with code {ended.code}: {ended.error[-400:]}"
    if ended.code == 0:
        different = runs.differences(runs.fingerprint(directory / runs.NAME), expected)
        if different:
            return f"it ended with code 0 and other bits in {different}: {ended.error[-300:]}"
        left = runs.leftovers(directory)
        if left and point.name not in REMOVALS and "O_DIRECTORY" not in hit[0]:  # where removing fails, nothing can be removed
            return f"left behind: {', '.join(left[:3])}"
    elif word not in ended.error or runs.NAME not in ended.error:
        return f"code {ended.code}, and the message names no path or not the error: {ended.error[-300:]}"
    elif "/checkpoints/" in hit[0] and not _was_last_save(directory):
        return f"it stopped with code {ended.code} because one save failed: {ended.error[-300:]}"
    return restart_problem(directory, expected)


def _was_last_save(directory: Path) -> bool:
    """Whether all updates had been made, so that no later save could make up for the one that failed."""
    return runs.last_iteration(directory / runs.NAME / "metrics.jsonl") == UPDATES


def _file_of(line: str) -> str:
    """The file that a call was about, for the message."""
    return " -> ".join(re.findall(r'/(?:run)/([^">]*)', line)[:2])
