"""Serves E6: the bugs of `bugs_data.toml`, which others shipped, as values.

Where the design leaves no room for a bug as it was, its `here` says what stands for it. A text that no longer occurs exactly once is an
error, so that the list stays true.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Edit:
    """In `file` (under src/inchworm) the text `old`, which occurs once, becomes `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Form:
    """One way to have a bug: all its edits at once, and the tests (under tests) that notice."""

    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Bug:
    """One historic bug."""

    number: int
    title: str
    origin: str
    forms: tuple[Form, ...]
    here: str = ""


def _form(data: dict[str, Any]) -> Form:
    return Form(tuple(Edit(**edit) for edit in data["edit"]), tuple(data["tests"]))


def _bug(data: dict[str, Any]) -> Bug:
    return Bug(data["number"], data["title"], data["origin"], tuple(map(_form, data["form"])), data.get("here", ""))


BUGS = tuple(map(_bug, tomllib.loads(FILE.read_text(encoding="utf-8"))["bug"]))
