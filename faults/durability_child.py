"""Serves section A: `inchworm` in a process of its own, with hooks round its parts. The library's own code runs unchanged.

    durability_child.py kill PHASE NUMBER MICROSECONDS FILE -- train …    die of SIGKILL inside the NUMBERth PHASE, so long after it began
                        (… FILE beside: every save is written in a thread)
    durability_child.py time FILE -- train …                             write down how long each phase takes
    durability_child.py fill FROM TO FILE -- train …                     the disk is full from the FROMth rollout on, until the TOth

The kill comes from a timer of the kernel, at its moment, whatever the process is doing: in Python, in NumPy, in a system call. A
phase that ends too soon is let go, and the next one is tried with a shorter time, so that every kill is inside its phase.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIGKILL, SIGEV_SIGNAL, CLOCK_MONOTONIC = 9, 0, 1


class _Event(ctypes.Structure):
    _fields_ = [("value", ctypes.c_void_p), ("signal", ctypes.c_int), ("notify", ctypes.c_int), ("rest", ctypes.c_byte * 48)]


class _Times(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


class KernelTimer:
    """SIGKILL for this process after a while (timer_create(2))."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._id = ctypes.c_void_p()
        event = _Event(None, SIGKILL, SIGEV_SIGNAL)
        if self._libc.timer_create(CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._id)):
            raise OSError(ctypes.get_errno(), "timer_create")

    def set(self, microseconds: int) -> None:
        """Die so much later; 0 is not to die."""
        times = _Times(0, 0, microseconds // 10**6, microseconds % 10**6 * 1000)
        if self._libc.timer_settime(self._id, 0, ctypes.byref(times), None):
            raise OSError(ctypes.get_errno(), "timer_settime")


class Phases:
    """Calls `enter` and `leave` round every save, learn and collect."""

    def __init__(self, enter: Callable[[str], None], leave: Callable[[str], None]) -> None:
        self._enter, self._leave = enter, leave
        self._inside = threading.local()

    def watch(self) -> None:
        """Put the hooks in: a save is the checkpoint or a policy file beside it, in whatever thread it is written."""
        from inchworm.backends.learner import BaseLearner
        from inchworm.collect.collector import RolloutCollector
        from inchworm.run.checkpoint import TrainingCheckpointer

        for owner, method, phase in (
            (TrainingCheckpointer, "commit", "save"),
            (BaseLearner, "update", "learn"),
            (RolloutCollector, "collect", "collect"),
        ):
            setattr(owner, method, self._around(getattr(owner, method), phase))
        importlib.import_module("inchworm.train.trainer")
        for module in [module for name, module in sys.modules.items() if name.startswith(("inchworm.run", "inchworm.train"))]:
            if "save_policy" in vars(module):
                vars(module)["save_policy"] = self._around(vars(module)["save_policy"], "save")

    def _around(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if getattr(self._inside, "phase", None):  # a save inside a save
                return function(*arguments, **named)
            self._inside.phase = phase
            self._enter(phase)
            try:
                return function(*arguments, **named)
            finally:
                self._leave(phase)
                self._inside.phase = None

        return wrapped


class Killer:
    """Arms the timer at the chosen entry of the chosen phase, and at later ones for as long as the process lives on."""

    def __init__(self, phase: str, number: int, microseconds: int, note: Path) -> None:
        self._phase, self._number, self._microseconds = phase, number, microseconds
        self._timer = KernelTimer()
        self._file = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._entries = 0

    def enter(self, phase: str) -> None:
        """Write the phase down; arm, if this is the one."""
        if phase != self._phase:
            return
        self._entries += 1
        if self._entries >= self._number:
            os.pwrite(self._file, phase.encode().ljust(8), 0)
            self._timer.set(max(1, self._microseconds))

    def leave(self, phase: str) -> None:
        """It ended before the timer: not here, then; sooner next time."""
        if phase == self._phase:
            self._timer.set(0)
            os.pwrite(self._file, b"outside ", 0)
            if self._entries >= self._number:
                self._microseconds = self._microseconds * 2 // 3


class Clock:
    """Durations of every phase, for the choice of moments."""

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = {}
        self._began = threading.local()

    def enter(self, phase: str) -> None:
        """Look at the clock."""
        del phase
        self._began.at = time.perf_counter()

    def leave(self, phase: str) -> None:
        """Look again."""
        self.taken.setdefault(phase, []).append(time.perf_counter() - self._began.at)


class Filler:
    """Takes the last byte of the disk at one rollout and gives all back at another."""

    def __init__(self, full_from: int, full_to: int, file: Path) -> None:
        self._from, self._to, self._file, self._rollouts = full_from, full_to, file, 0

    def enter(self, phase: str) -> None:
        """Count rollouts; fill, or free."""
        self._rollouts += phase == "collect"
        if phase == "collect" and self._rollouts == self._from:
            fill(self._file)
        if phase == "collect" and self._rollouts == self._to:
            self._file.unlink()

    def leave(self, phase: str) -> None:
        """Nothing to do."""


def fill(path: Path) -> None:
    """Write until nothing more fits."""
    with path.open("ab", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError:
                continue


def main() -> int:
    """Hook, then run the command."""
    border = sys.argv.index("--")
    mode, *options = sys.argv[1:border]
    clock = Clock()
    if mode == "kill":
        killer = Killer(options[0], int(options[1]), int(options[2]), Path(options[3]))
        if "beside" in options:
            importlib.import_module("inchworm.run.saver").BACKGROUND_RATIO = 0  # type: ignore[attr-defined]
        phases = Phases(killer.enter, killer.leave)
    elif mode == "fill":
        filler = Filler(int(options[0]), int(options[1]), Path(options[2]))
        phases = Phases(filler.enter, filler.leave)
    else:
        phases = Phases(clock.enter, clock.leave)
    phases.watch()
    from inchworm.cli.main import main as inchworm

    code = inchworm(sys.argv[border + 1 :])
    if mode == "time":
        Path(options[0]).write_text(json.dumps(clock.taken))
    return code


if __name__ == "__main__":
    sys.exit(main())
