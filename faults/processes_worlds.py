"""CartPole environments that fail at a given moment, set by arguments or environment variables.

A worker imports this module, so it is small. For a fault that must happen once in a run, the process that creates a marker file has the
fault, and writes its process id into the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

STEP_SECONDS, BEATS, MISDEED, MARK = "FAULTS_STEP_SECONDS", "FAULTS_BEATS", "FAULTS_MISDEED", "FAULTS_MARK"
BEAT = struct.Struct("qq")
_made = 0  # worlds in this process
_steps = 0  # steps of all of them
_beats: mmap.mmap | None = None


class Pole(CartPoleEnv):
    """CartPole that can be slow, publish its step count and die, depending on environment variables."""

    def __init__(self) -> None:
        super().__init__()
        self._wait = float(os.environ.get(STEP_SECONDS, "0"))
        self._misdeed, _, when = os.environ.get(MISDEED, "").partition(":")  # such as segv:100, or always-exit:0
        self._when = int(when or 0)
        if self._misdeed and not self._when:
            _do(self._misdeed)

    def step(self, action: Any) -> Any:
        """CartPole's step, after a wait and a possible fault."""
        _beat(inside=True)
        if self._wait:
            time.sleep(self._wait)
        if self._misdeed and _steps >= self._when:
            _do(self._misdeed)
        result = super().step(action)
        _beat(inside=False)
        return result


def _beat(*, inside: bool) -> None:
    """Write the step count of this process, and whether a step is running, to a file that the procedure reads."""
    global _steps, _beats
    _steps += inside
    if BEATS not in os.environ:
        return
    if _beats is None:
        path = Path(os.environ[BEATS]) / str(os.getpid())
        path.write_bytes(bytes(BEAT.size))
        with path.open("r+b") as file:
            _beats = mmap.mmap(file.fileno(), BEAT.size)
    BEAT.pack_into(_beats, 0, _steps, inside)


def claim(path: str | Path, who: str = "") -> bool:
    """Create a file; whether this process was the first."""
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(descriptor, who.encode())
        os.close(descriptor)
        return True
    return False


def _do(misdeed: str) -> None:
    """Die in the named way, once in a run or always, if this process is a worker."""
    if "inchworm.env.workers.program" not in " ".join(sys.orig_argv):
        return
    kind = misdeed.removeprefix("always-")
    if kind == misdeed and not claim(os.environ[MARK], str(os.getpid())):
        return
    if kind == "segv":
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(0)
    elif kind == "exit":
        os._exit(3)
    elif kind == "systemexit":
        raise SystemExit(3)
    elif kind == "hang":
        _hang("in C")
    elif kind == "memory":
        resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))
        np.ones(1 << 30)  # 8 GB


class Unpicklable(Exception):
    """An error that cannot be pickled: it holds a lock, and its class takes two arguments."""

    def __init__(self, text: str, lock: Any) -> None:
        super().__init__(text)
        self.lock = lock


TEXTS = {
    "plain": "the arm is bent",
    "percent": "100 % of %s, %d and %(name)s {braces} {0}",
    "unpicklable": "this one holds a lock",
    "10 MB": "x" * 1000 + "y" * 10_000_000,
    "non-ASCII": "Kühlung fehlt: 温度 → 🐛",
    "KeyboardInterrupt": "a key was pressed",
}


def the_error(kind: str) -> BaseException:
    """The error of a kind."""
    if kind == "unpicklable":
        return Unpicklable(TEXTS[kind], threading.Lock())
    if kind == "KeyboardInterrupt":
        return KeyboardInterrupt(TEXTS[kind])
    return ValueError(TEXTS[kind] + ("\udcff" if kind == "non-ASCII" else ""))  # and a character that UTF-8 has no bytes for


class Wrong(CartPoleEnv):
    """Fails (raises an error of a kind, or hangs in a manner) in one place: constructor, reset, step or close.

    The second environment of a worker fails if it can create `mark`; with `again` it always fails.
    """

    def __init__(self, place: str, deed: str, kind: str, mark: str, again: bool = False) -> None:
        global _made
        self._number, _made = _made, _made + 1
        self._wrong = (place, deed, kind, mark, again)
        self._taken = self._resets = 0
        super().__init__()
        self._maybe("constructor")

    def reset(self, **arguments: Any) -> Any:
        """May fail from the second reset on: the first is the library's check of the environment."""
        self._resets += 1
        if self._resets >= 2:
            self._maybe("reset")
        return super().reset(**arguments)

    def step(self, action: Any) -> Any:
        """May fail from the third step on."""
        self._taken += 1
        if self._taken >= 3:
            self._maybe("step")
        return super().step(action)

    def close(self) -> None:
        self._maybe("close")
        super().close()

    def _maybe(self, here: str) -> None:
        place, deed, kind, mark, again = self._wrong
        if here != place or self._number % 2 != 1:
            return
        if claim(mark, f"{os.getpid()} {self._number} {time.monotonic()}") or again:
            if deed == "raise":
                raise the_error(kind)
            _hang(kind)


def _hang(manner: str) -> None:
    """Never return: asleep, in a loop that ignores SIGTERM, or in C code that holds the interpreter's lock."""
    if manner == "sleep":
        time.sleep(3600)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if manner == "in C":
        ctypes.PyDLL(None).sleep(3600)
    until = time.monotonic() + 3600  # a forgotten test must not run for ever
    while time.monotonic() < until:
        pass


class Big(gym.ObservationWrapper[Any, Any, Any]):
    """CartPole with an observation of 256 kB, most of it zeros: rows that do not fit in a small /dev/shm."""

    def __init__(self) -> None:
        super().__init__(CartPoleEnv())
        self.observation_space = spaces.Box(-np.inf, np.inf, (1 << 16,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        padded = np.zeros(1 << 16, np.float32)
        padded[:4] = observation
        return padded
