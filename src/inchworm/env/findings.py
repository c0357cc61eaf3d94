"""What `check_env` found, and the checks that one environment and a vector env share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from inchworm.core.errors import InchwormError, describe_error, error_text
from inchworm.core.spaces import Space, check_action_space, check_observation_space, leaf, leaves, path_name, wide_one_hots
from inchworm.core.types import Tree

_LARGE = 50.0
"""Larger observations slow learning down enough to report them."""


class Findings:
    """Problems, which break or degrade training, and notes, which are worth knowing."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []

    def problem(self, text: str) -> None:
        """Add what would break or degrade training."""
        self.problems.append(text)

    def note(self, text: str) -> None:
        """Add what is worth knowing."""
        self.notes.append(text)

    def attempt(self, what: str, action: Callable[[], Any]) -> Any:
        """The action's result; an exception becomes a problem, with the place where it was raised."""
        try:
            return action()
        except InchwormError as error:
            self.problems.append(error_text(error))
        except (Exception, SystemExit) as error:  # an environment may raise anything, and all of it is worth reporting
            self.problems.append(f"{what} raised {' '.join(describe_error(error).split())}")
        return None


def check_spaces(observation_space: Space, action_space: Space, found: Findings) -> None:
    """Check that a policy can read the observations and choose the actions."""
    found.attempt("reading its observation space", lambda: check_observation_space(observation_space))
    found.notes += found.attempt("reading its observation space", lambda: wide_one_hots(observation_space)) or []
    found.attempt("reading its action space", lambda: check_action_space(action_space))
    for path, part in leaves(action_space):
        if isinstance(part, spaces.Box) and not (np.isfinite(part.low).all() and np.isfinite(part.high).all()):
            which = f"the action{f' {path_name(path)}' if path else ''}"
            found.notes.append(f"{which} has infinite bounds {part}: policy.action_bounds=tanh is refused")


def check_leaves(seen: Space, tree: Tree, when: str, found: Findings) -> bool:
    """Whether an observation is finite and within its bounds; `when` names it in messages."""
    for path, space in leaves(seen):
        value = leaf(tree, path)
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            found.problems.append(f"{path_name(path)} {when} has values that are not finite: {np.asarray(value).ravel()[:8]}")
            return False
        if isinstance(space, spaces.Box):
            outside = (value < space.low) | (value > space.high)
            if outside.any():
                found.problems.append(f"{path_name(path)} {when} leaves its bounds: {value[outside].ravel()[:4]} is outside {space}")
                return False
            if value.dtype.kind == "f" and value.size and np.abs(value).max() > _LARGE:
                found.notes.append(f"{path_name(path)} has values beyond {_LARGE:g}: policy.normalize_observations=true will help")
    return True
