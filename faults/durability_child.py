"""The `inchworm` command with hooks around save, learn and collect. The library's code runs unchanged.

    durability_child.py kill PHASE NUMBER MICROSECONDS FILE [thread] -- train …    SIGKILL inside the NUMBERth PHASE, after that time
    durability_child.py time FILE -- train …                                      write how long each phase takes
    durability_child.py fill FROM TO FILE -- train …                              the disk is full from rollout FROM until rollout TO

The kill comes from a kernel timer, so it arrives at its time in Python, in NumPy or in a system call. If a phase ends before the timer,
the next one is tried with a shorter time, so that every kill is inside its phase. `thread` makes every save run in a background thread.
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


class Hook:
    """Called around every phase."""

    def enter(self, phase: str) -> None:
        """Before the phase."""

    def leave(self, phase: str) -> None:
        """After the phase, also if it failed."""


class Killer(Hook):
    """Arms a SIGKILL timer (timer_create(2)) at the chosen entry of the chosen phase, and at later ones while the process is alive."""

    def __init__(self, phase: str, number: int, microseconds: int, note: Path) -> None:
        self._phase, self._number, self._microseconds = phase, number, microseconds
        self._file = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._entries = 0
        self._libc, self._timer = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()
        event = _Event(None, SIGKILL, SIGEV_SIGNAL)
        if self._libc.timer_create(CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), "timer_create")

    def _set(self, microseconds: int) -> None:
        """Die after this time; 0 disarms the timer."""
        times = _Times(0, 0, microseconds // 10**6, microseconds % 10**6 * 1000)
        if self._libc.timer_settime(self._timer, 0, ctypes.byref(times), None):
            raise OSError(ctypes.get_errno(), "timer_settime")

    def enter(self, phase: str) -> None:
        """Record the phase and arm the timer if this is the entry."""
        if phase == self._phase:
            self._entries += 1
            if self._entries >= self._number:
                os.pwrite(self._file, phase.encode().ljust(8), 0)
                self._set(max(1, self._microseconds))

    def leave(self, phase: str) -> None:
        """Disarm the timer; the next try is sooner."""
        if phase == self._phase:
            self._set(0)
            os.pwrite(self._file, b"outside ", 0)
            if self._entries >= self._number:
                self._microseconds = self._microseconds * 2 // 3


class Clock(Hook):
    """Durations of every phase."""

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = {}
        self._began = threading.local()

    def enter(self, phase: str) -> None:
        self._began.at = time.perf_counter()

    def leave(self, phase: str) -> None:
        self.taken.setdefault(phase, []).append(time.perf_counter() - self._began.at)


class Filler(Hook):
    """Fills the disk to its last byte at one rollout and frees it at another."""

    def __init__(self, full_from: int, full_to: int, file: Path) -> None:
        self._from, self._to, self._file, self._rollouts = full_from, full_to, file, 0

    def enter(self, phase: str) -> None:
        """Count rollouts; fill, or free."""
        if phase == "collect":
            self._rollouts += 1
            if self._rollouts == self._from:
                fill(self._file)
            if self._rollouts == self._to:
                self._file.unlink()


def fill(path: Path) -> None:
    """Write until no byte fits any more."""
    with path.open("ab", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError:
                continue


def around(function: Callable[..., Any], phase: str, hook: Hook, inside: threading.local) -> Callable[..., Any]:
    """The function with the hook called before and after; a phase inside a phase of the same thread is not counted."""

    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if getattr(inside, "phase", None):
            return function(*arguments, **named)
        inside.phase = phase
        hook.enter(phase)
        try:
            return function(*arguments, **named)
        finally:
            hook.leave(phase)
            inside.phase = None

    return wrapped


def install(hook: Hook) -> None:
    """Hook every save (of a checkpoint or a policy file, in any thread), update and rollout of the library."""
    from inchworm.backends.learner import BaseLearner
    from inchworm.collect.collector import RolloutCollector
    from inchworm.run.checkpoint import TrainingCheckpointer

    importlib.import_module("inchworm.train.trainer")
    inside = threading.local()
    methods = ((TrainingCheckpointer, "commit", "save"), (BaseLearner, "update", "learn"), (RolloutCollector, "collect", "collect"))
    for owner, method, phase in methods:
        setattr(owner, method, around(getattr(owner, method), phase, hook, inside))
    for module in [module for name, module in sys.modules.items() if name.startswith(("inchworm.run", "inchworm.train"))]:
        if "save_policy" in vars(module):
            vars(module)["save_policy"] = around(vars(module)["save_policy"], "save", hook, inside)


def main() -> int:
    """Install the hook, then run the command."""
    border = sys.argv.index("--")
    mode, *options = sys.argv[1:border]
    clock = Clock()
    if mode == "kill":
        install(Killer(options[0], int(options[1]), int(options[2]), Path(options[3])))
        if "thread" in options:
            importlib.import_module("inchworm.run.saver").BACKGROUND_RATIO = 0  # type: ignore[attr-defined]
    elif mode == "fill":
        install(Filler(int(options[0]), int(options[1]), Path(options[2])))
    else:
        install(clock)
    from inchworm.cli.main import main as inchworm

    code = inchworm(sys.argv[border + 1 :])
    if mode == "time":
        Path(options[0]).write_text(json.dumps(clock.taken))
    return code


if __name__ == "__main__":
    sys.exit(main())
