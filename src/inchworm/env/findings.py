"""Serves `check_env`: what was found, in words, and how an attempt that fails becomes a finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from inchworm.errors import InchwormError
from inchworm.spaces import Space, leaf, leaves, path_name
from inchworm.types import Tree

_LARGE = 50.0
"""Observations beyond this size slow learning down enough to say so."""


class Findings:
    """Problems, which break or spoil training, and notes, which are worth knowing."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []

    def problem(self, text: str) -> None:
        """Add what would break or spoil training."""
        self.problems.append(text)

    def note(self, text: str) -> None:
        """Add what is worth knowing."""
        self.notes.append(text)

    def attempt(self, what: str, action: Callable[[], Any]) -> Any:
        """The action's result; an exception becomes a problem that says where it happened."""
        try:
            return action()
        except InchwormError as error:
            self.problem(str(error))
        except Exception as error:  # an environment may raise anything, and all of it is worth reporting
            hint = _signature_hint(error)
            place = error.__traceback__
            while place is not None and place.tb_next is not None:
                place = place.tb_next
            at = f" at {place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place is not None else ""
            self.problem(f"{what} raised {type(error).__name__}: {str(error)[:500]}{at}{hint}")
        return None


def _signature_hint(error: Exception) -> str:
    if isinstance(error, TypeError) and any(f"'{name}'" in str(error) for name in ("seed", "options")):
        return "; reset must accept the keywords seed and options: def reset(self, *, seed=None, options=None)"
    return ""


def check_action_space(space: Space, found: Findings) -> None:
    """Say what an action space does not allow."""
    for path, part in leaves(space):
        if isinstance(part, spaces.Box) and not (np.isfinite(part.low).all() and np.isfinite(part.high).all()):
            found.note(
                f"the action{f' {path_name(path)}' if path else ''} has infinite bounds {part}: policy.action_bounds=tanh is refused"
            )


def check_leaves(seen: Space, tree: Tree, when: str, found: Findings) -> bool:
    """Whether an observation is finite and within its bounds; `when` says which it is."""
    for path, space in leaves(seen):
        value = leaf(tree, path)
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            found.problem(f"{path_name(path)} {when} has values that are not finite: {np.asarray(value).ravel()[:8]}")
            return False
        if isinstance(space, spaces.Box):
            outside = (value < space.low) | (value > space.high)
            if outside.any():
                found.problem(f"{path_name(path)} {when} leaves its bounds: {value[outside].ravel()[:4]} is outside {space}")
                return False
            if value.dtype.kind == "f" and value.size and np.abs(value).max() > _LARGE:
                found.note(f"{path_name(path)} has values beyond {_LARGE:g}: policy.normalize_observations=true will help")
    return True


def not_deterministic(who: str, difference: str) -> str:
    """What to say of an environment that went another way."""
    return (
        f"not deterministic: {who}, reset with the same seed, gave {difference} under the same actions; "
        "draw all random numbers from self.np_random, after super().reset(seed=seed)"
    )
