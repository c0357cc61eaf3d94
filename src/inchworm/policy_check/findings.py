"""Serves `check_policy`: what was found, and calls into somebody's code whose exceptions become findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import optree

from inchworm.env.checker import CheckReport
from inchworm.errors import InchwormError
from inchworm.types import Tree

Result = TypeVar("Result")


class PolicyReport(CheckReport):
    """What was found of a policy: `problems` break or spoil training, `notes` are worth knowing."""

    def __str__(self) -> str:
        head = "the policy is ready for training" if self.ok else f"{len(self.problems)} problem(s) would break or spoil training"
        return "\n".join([head, *(f"problem: {text}" for text in self.problems), *(f"note: {text}" for text in self.notes)])


@dataclass
class Findings:
    """What has been found so far, and the laws that are broken: those that rest on them are not tried."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)

    def problem(self, law: str, text: str) -> None:
        """A broken law, in words."""
        self.broken.add(law)
        self.problems.append(f"{law}: {text}")

    def note(self, text: str) -> None:
        """Something worth knowing."""
        self.notes.append(text)

    def keeps(self, *laws: str) -> bool:
        """Whether all of these laws are kept so far."""
        return self.broken.isdisjoint(laws)

    def attempt(self, law: str, what: str, action: Callable[[], Result]) -> Result | None:
        """The action's result; an exception becomes a problem that says where it happened."""
        try:
            return action()
        except InchwormError as error:
            self.problem(law, f"{what} was refused: {error}")
        except Exception as error:  # a policy may raise anything, and all of it is worth reporting
            self.problem(law, f"{what} raised {type(error).__name__}: {str(error)[:500]}{place_of(error)}")
        return None

    def report(self) -> PolicyReport:
        """All of it, each sentence once."""
        return PolicyReport(tuple(dict.fromkeys(self.problems)), tuple(dict.fromkeys(self.notes)))


def place_of(error: Exception) -> str:
    """Where an exception was raised: the last place outside of installed packages, which is where somebody can change something."""
    place, last = error.__traceback__, None
    while place is not None:
        name = place.tb_frame.f_code.co_filename
        if "site-packages" not in Path(name).parts and not name.startswith("<"):
            last = f" at {name}:{place.tb_lineno}"
        place = place.tb_next
    return last or ""


def distance(one: Tree, other: Tree) -> float:
    """The largest difference between two trees of arrays; infinite where only one of them is a number."""
    largest = 0.0
    for a, b in zip(optree.tree_leaves(one), optree.tree_leaves(other), strict=True):
        first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if not np.array_equal(np.isfinite(first), np.isfinite(second)):
            return float("inf")
        gaps = np.abs(np.nan_to_num(first) - np.nan_to_num(second))
        largest = max(largest, float(gaps.max(initial=0.0)))
    return largest


def same_bits(one: Any, other: Any) -> bool:
    """Whether two trees hold the same numbers, to the bit."""
    return distance(one, other) == 0.0
