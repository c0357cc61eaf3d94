"""Serves `check_policy`: weights, statistics and buffers travel together (rule 5)."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np

from inchworm.policy_check.findings import Findings, distance, same_bits
from inchworm.policy_check.subject import LANES, ROWS, Subject, lane_of, names
from inchworm.rollout.rollout import Rollout
from inchworm.types import Tree


def check_form(subject: Subject, found: Findings) -> None:
    """`get_weights` gives named arrays."""
    weights: Any = found.attempt("weights", "get_weights", subject.policy.get_weights)
    named = isinstance(weights, dict) and all(isinstance(key, str) and isinstance(part, np.ndarray) for key, part in weights.items())
    if weights is not None and not named:
        found.problem("weights", "get_weights must return a dict of names and NumPy arrays")


def check_weights(subject: Subject, rollout: Rollout, found: Findings) -> None:
    """`get_weights` is a copy of all that acting and learning depend on, and `set_weights` brings all of it back."""
    from inchworm.backends.torch import checking

    law, moved = "weights", subject.spare()
    weights = moved.get_weights()
    kept = {name: value.copy() for name, value in weights.items()}
    before, tensors = _behaviour(subject, moved, rollout), checking.tensors(moved)
    checking.disturb(moved)
    changed = [name for name in kept if not same_bits(kept[name], weights[name])]
    if changed:
        found.problem(law, f"get_weights hands out the policy's own memory ({names(changed)} changed with it); return copies")
        return
    found.attempt(law, "set_weights", lambda: moved.set_weights(kept))
    if found.keeps(law) and distance(before, _behaviour(subject, moved, rollout)) > 1e-6:
        lost = [name for name, value in checking.tensors(moved).items() if not same_bits(value, tensors[name])]
        found.problem(
            law, f"set_weights(get_weights()) does not bring the policy back: {names(lost) or 'something'} stays changed; save all of it"
        )
    if found.keeps(law):
        _check_statistics(subject, moved, rollout, found)


def _check_statistics(subject: Subject, moved: Any, rollout: Rollout, found: Findings) -> None:
    """What learning moves besides the parameters travels with them: into an untouched copy, and it is the same policy."""
    from inchworm.backends.torch import checking

    fresh, law = copy.deepcopy(moved), "weights"
    found.attempt(law, "update_statistics", lambda: checking.exercise(moved, rollout))
    found.attempt(law, "set_weights after update_statistics", lambda: fresh.set_weights(moved.get_weights()))
    if found.keeps(law) and distance(_behaviour(subject, moved, rollout), _behaviour(subject, fresh, rollout)) > 1e-5:
        theirs = checking.tensors(fresh)
        lost = [name for name, value in checking.tensors(moved).items() if not same_bits(value, theirs[name])]
        what = names(lost) or "something"
        found.problem(law, f"{what} moved in update_statistics or evaluate, but is not in get_weights: save it with the weights")


def _behaviour(subject: Subject, policy: Any, rollout: Rollout) -> Tree:
    """What a policy does, as numbers: greedy actions, log-probs, memory, and what it says of the rollout."""
    from inchworm.backends.torch import checking

    acting = dataclasses.replace(subject, policy=policy, actor=policy)
    rows = subject.observations("behaviour", ROWS, LANES)
    step = acting.act(lane_of(rows, 0), acting.remember(rows))
    says = checking.evaluated(policy, rollout)
    return (
        step.actions,
        step.log_probs,
        step.state,
        says.log_probs,
        says.values / says.value_scale,
        checking.critic_values(policy, rollout),
    )
