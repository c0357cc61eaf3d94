"""A2 and A3: faults at every system call of a save, and of a whole run."""

from __future__ import annotations

from faults import durability_points, durability_run_points, durability_strace
from faults import durability_runs as runs
from faults.programme import Outcome, Work, procedure

ERRORS = ["ENOSPC", "EIO", "EDQUOT", "EROFS"]
RUN_POINTS = 100
"""Calls of a whole run that are tried, evenly spread."""


@procedure(
    "A2",
    title="kill -9 at every system call of a save (mkdir, open, write, fsync, rename, unlink, rmdir)",
    must="at every point the newest committed state loads unchanged and the next save, or run, goes on",
    full=4,
    test=1,
    needs="strace",
    possible=durability_strace.possible,
)
def crash_points(work: Work) -> Outcome:
    """`count` states are saved one after another; the points are all calls that this takes."""
    outcome = Outcome()
    with runs.in_memory(work) as here:
        durability_points.killed_writers(here, outcome, states=work.count)
        if work.count > 1:
            durability_run_points.killed_runs(here, outcome, most=RUN_POINTS)
    return outcome


@procedure(
    "A3",
    title="ENOSPC, EIO, EDQUOT or EROFS at every system call of a save",
    must="the old checkpoint stays; the message names path and error; training goes on and tries again; a failing last save: "
    "exit code not 0; nothing left behind",
    full=4,
    test=1,
    needs="strace",
    possible=durability_strace.possible,
)
def failing_disk(work: Work) -> Outcome:
    """`count` is the number of errors, of the four."""
    outcome, names = Outcome(), ERRORS[: work.count]
    with runs.in_memory(work) as here:
        durability_points.failing_writers(here, outcome, states=3 if work.count > 1 else 1, names=names)
        if work.count > 1:
            durability_run_points.failing_runs(here, outcome, most=RUN_POINTS, names=names)
    return outcome
