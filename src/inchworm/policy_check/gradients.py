"""Serves `check_policy`: the gradient reaches every parameter, and with memory also through time (step 9)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import optree

from inchworm.policy_check.findings import Findings
from inchworm.policy_check.subject import ROWS, Subject, lane_of, names, other_past
from inchworm.rollout.rollout import Rollout

_ROWS = ("observations", "actions", "log_probs", "rewards", "terminated", "truncated", "episode_starts", "valid", "global_state")
"""What a rollout holds [T, …] besides the memory."""
_CUTS = ("cut_rows", "cut_observations", "cut_state", "cut_valid", "cut_global_state")
"""And [K, …]."""


def check_gradients(subject: Subject, rollout: Rollout, found: Findings) -> None:
    """The gradient reaches every parameter, and with memory also through time."""
    from inchworm.backends.torch import checking

    steps = rollout.rewards.shape[0]
    rollout = other_past(subject, rollout, slice(None))  # a world may show the same thing for ever, and zeros move no weight
    gradients = found.attempt(
        "gradient", "the backward pass", lambda: checking.parameter_gradients(subject.spare(), rollout, steps, slice(None))
    )
    if gradients is None:
        return
    unreached = [name for name, gradient in gradients.items() if gradient is None]
    if unreached:
        found.problem(
            "gradient", f"{names(unreached)} get no gradient: not connected to evaluate's outputs; use them, or set requires_grad=False"
        )
    still = [name for name, gradient in gradients.items() if gradient is not None and not gradient.any()]
    if still:
        found.note(f"{names(still)} get a gradient of exactly 0 here: behind a layer of zeros, dead units, or of no effect")
    bad = [name for name, gradient in gradients.items() if gradient is not None and not np.isfinite(gradient).all()]
    if bad:
        found.problem("gradient", f"{names(bad)} get a gradient that is not finite; look for log(0), sqrt(0) or a division by 0")
    if subject.has_memory and found.keeps("gradient", "memory"):
        _check_time(subject, rollout, found)


def _check_time(subject: Subject, rollout: Rollout, found: Findings) -> None:
    """The last row's gradient must differ from that of the row alone, which begins with the same memory and so has no past."""
    from inchworm.backends.torch import checking

    length = min(ROWS, rollout.rewards.shape[0])
    window = _rows(dataclasses.replace(rollout, episode_starts=np.zeros_like(rollout.episode_starts)), slice(0, length))
    window = dataclasses.replace(window, policy_state=lane_of(rollout.policy_state, slice(0, length)))
    through = _arrays(checking.parameter_gradients(subject.spare(), window, length, slice(length - 1, length)))
    alone = _arrays(checking.parameter_gradients(subject.spare(), _last_row(subject, window), 1, slice(0, 1)))
    gap = max(float(np.abs(gradient - other).max()) for gradient, other in zip(through, alone) if gradient.size)
    if gap <= 1e-5 * max(float(np.abs(gradient).max()) for gradient in through if gradient.size):
        found.problem("memory", "no gradient flows through time: a row's loss does not reach earlier rows; detach nothing between rows")


def _rows(rollout: Rollout, rows: slice) -> Rollout:
    """Some rows of a rollout, without what followed them."""
    cut: Any = {name: optree.tree_map(lambda leaf: leaf[rows], getattr(rollout, name)) for name in _ROWS}
    none: Any = {name: optree.tree_map(lambda leaf: leaf[:0], getattr(rollout, name)) for name in _CUTS}
    return dataclasses.replace(rollout, **cut, **none)


def _last_row(subject: Subject, window: Rollout) -> Rollout:
    """The last row alone; its memory is what acting on the rows before leaves."""
    last = window.rewards.shape[0] - 1
    state = lane_of(window.policy_state, 0)
    for row in range(last):
        state = subject.act(lane_of(window.observations, row), state).state
    return dataclasses.replace(_rows(window, slice(last, last + 1)), policy_state=optree.tree_map(lambda leaf: leaf[None], state))


def _arrays(gradients: dict[str, np.ndarray | None]) -> list[np.ndarray]:
    return [np.zeros(0) if gradient is None else gradient for gradient in gradients.values()]
