"""File-system calls that fail, and a record of those that make a write durable."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest


def failing(code: int) -> Callable[..., Any]:
    """A function that raises OSError with this code, whatever it is given."""

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return fail


def record_syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files and directories that are synced from now on, and "rename" or "replace" for each of these, in order."""
    events, sync = list[str](), os.fsync

    def record(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def recorded(name: str, move: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def moved(self: Path, target: Path) -> Path:
            events.append(name)
            return move(self, target)

        return moved

    monkeypatch.setattr(os, "fsync", record)
    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, recorded(name, getattr(Path, name)))
    return events
