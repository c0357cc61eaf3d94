"""Serves `check_policy`: action masks are obeyed, whoever samples, and the log-prob knows of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree

from inchworm.env.toys import is_legal, random_mask
from inchworm.policy_check.acting import CLOSE
from inchworm.policy_check.findings import Findings
from inchworm.policy_check.subject import LANES, ROWS, Subject, lane_of
from inchworm.seeding import make_stream
from inchworm.spaces import MASK_KEY, build_tree, leaves, mask_sizes, mask_space
from inchworm.types import Tree

_DRAWS = 12
"""Of masks and samples under each: an actor that ignores masks takes an illegal action in nearly every one."""


def check_masks(subject: Subject, found: Findings) -> None:
    """No illegal action is ever sampled or taken greedily, and what is legal alone has probability 1."""
    rows = subject.observations("masks", ROWS, LANES)
    state, seen = subject.remember(rows), lane_of(rows, 0)
    rng = make_stream(subject.seed, "check masks")
    for draw in range(_DRAWS):
        masked = {**seen, MASK_KEY: _stacked([random_mask(subject.env.action_space, rng) for _ in range(LANES)])}
        for deterministic in (False, True):
            step = subject.act(masked, state, stream=draw, deterministic=deterministic)
            for lane in range(LANES):
                mask = lane_of(masked[MASK_KEY], lane)
                if not is_legal(subject.env.action_space, lane_of(step.env_actions, lane), mask):
                    how = "greedily took" if deterministic else "sampled"
                    found.problem("masks", f"act {how} {lane_of(step.actions, lane)!r} under the mask {mask!r}; {_HINT}")
                    return
    _check_log_probs(subject, seen, state, found)


_HINT = "give the logits of illegal choices a large negative number before the softmax, in act and in evaluate"


def _check_log_probs(subject: Subject, seen: Tree, state: Tree, found: Findings) -> None:
    """With one legal choice the discrete parts add 0 to the log-prob, so it does not matter which one it is."""
    logs = [subject.act({**seen, MASK_KEY: _only(subject, place)}, state).log_probs for place in (0, 1)]  # [2][B]
    purely_discrete = all(mask_sizes(part) for _, part in leaves(subject.env.action_space))
    if purely_discrete and np.abs(logs).max() > CLOSE:
        found.problem("masks", f"where one action is legal its log-prob is 0, but act gives {logs[0][0]:.3g}; {_HINT}")
    elif np.abs(logs[0] - logs[1]).max() > CLOSE:
        gap = np.abs(logs[0] - logs[1]).max()
        found.problem("masks", f"where one choice is legal the log-prob must not depend on which (it does, by {gap:.2g}); {_HINT}")


def _only(subject: Subject, place: int) -> Tree:
    """Masks [B, n] that allow one choice in every part: the first for place 0, the last for place 1."""
    actions = dict(leaves(subject.env.action_space))

    def one(path: Any, _: Any) -> np.ndarray:
        parts = [np.eye(size, dtype=np.int8)[0 if place == 0 else size - 1] for size in mask_sizes(actions[path])]
        return np.tile(np.concatenate(parts), (LANES, 1))

    return build_tree(mask_space(subject.env.action_space), one)


def _stacked(trees: list[Tree]) -> Tree:
    return optree.tree_map(lambda *parts: np.stack(parts), *trees)
