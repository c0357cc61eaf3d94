"""Serves `check_policy`: the laws of learning (steps 6 to 9), tried on a short rollout that the policy itself made."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import optree
from gymnasium import spaces

from inchworm.policy_check.acting import CLOSE
from inchworm.policy_check.findings import Findings, distance, same_bits
from inchworm.policy_check.subject import Subject, other_past
from inchworm.rollout.rollout import Rollout
from inchworm.spaces import MASK_KEY, Space, build_tree, leaf, leaves, mask_sizes, mask_space
from inchworm.types import Tree

TOLERANCE = 5e-5
"""How far the log-probs of acting and of learning may lie apart in float32."""


def check_evaluation(subject: Subject, rollout: Rollout, found: Findings) -> None:
    """`evaluate` and `value` answer in their shapes, with gradients, the same each time, and in the same units."""
    from inchworm.backends.torch import checking

    policy, law = subject.policy, "shapes"
    faults = found.attempt(law, "evaluate or value", lambda: checking.faults_of_evaluation(subject.spare(), rollout))
    for fault in faults or ():
        found.problem(law, fault)
    if not found.keeps(law):
        return
    once, again = (checking.evaluated(policy, rollout) for _ in range(2))
    if not same_bits(dataclasses.astuple(once), dataclasses.astuple(again)):
        found.problem(
            "repeatable", "evaluate gives other numbers for the same minibatch each time; is dropout on? Call eval() where nobody learns"
        )
        return
    learned = checking.evaluated(subject.spare(), rollout, gradients=True)
    if distance(learned.log_probs, once.log_probs) > TOLERANCE:
        found.note(
            "while gradients are on, evaluate gives other log-probs than act (dropout or batch normalisation in training mode?): "
            "the ratio of the first minibatch is then not 1"
        )
    gap = distance(checking.critic_values(policy, rollout) / once.value_scale, once.values / once.value_scale)
    if gap > 1e-3:
        found.problem(
            "values", f"value and evaluate disagree by {gap:.2g} on the same rows; both speak in reward units, of the same critic"
        )


def check_masks_learning(subject: Subject, rollout: Rollout, found: Findings) -> None:
    """`evaluate` reads the masks too: where the action that was taken is the only legal one, its discrete parts have log-prob 0."""
    from inchworm.backends.torch import checking

    every = optree.tree_map(np.ones_like, rollout.observations[MASK_KEY])
    only = _only_what_was_done(subject.env.action_space, rollout.actions)
    free, bound = (
        checking.evaluated(subject.policy, dataclasses.replace(rollout, observations={**rollout.observations, MASK_KEY: mask})).log_probs
        for mask in (every, only)
    )
    discrete = all(mask_sizes(part) for _, part in leaves(subject.env.action_space))
    if same_bits(free, bound) or (discrete and np.abs(bound).max() > CLOSE):
        found.problem(
            "masks", "evaluate ignores the masks that act obeyed; give the logits of illegal choices a large negative number there too"
        )


def _only_what_was_done(space: Space, actions: Tree) -> Tree:
    """Masks [T, B, n] that allow nothing but the actions [T, B, *act]."""
    parts = dict(leaves(space))

    def one(path: Any, _: Any) -> np.ndarray:
        part = parts[path]
        start = np.asarray(part.start).reshape(-1) if isinstance(part, spaces.Discrete | spaces.MultiDiscrete) else 0
        done = leaf(actions, path)
        chosen = done.reshape(*done.shape[:2], -1) - start  # [T, B, parts]
        hot = [np.eye(size, dtype=np.int8)[chosen[..., place].astype(np.int64)] for place, size in enumerate(mask_sizes(part))]
        return np.concatenate(hot, -1)

    return build_tree(mask_space(space), one)


def check_lanes_learning(subject: Subject, rollout: Rollout, found: Findings) -> None:
    """Changing one column of a minibatch changes no other."""
    from inchworm.backends.torch import checking

    base = checking.evaluated(subject.policy, rollout)
    changed = other_past(subject, rollout, slice(None), lanes=slice(0, 1))
    after = checking.evaluated(subject.policy, changed)
    values = [checking.critic_values(subject.policy, part) for part in (rollout, changed)]
    rows = {"log-probs": (base.log_probs, after.log_probs), "entropy": (base.entropy, after.entropy), "values": (base.values, after.values)}
    for what, (one, other) in {**rows, "values (by value)": (values[0], values[1])}.items():
        lives = rollout.valid[:, 1:]  # rows where nobody lives are filled with a living lane's
        gap = distance(one[:, 1:][lives], other[:, 1:][lives])
        if gap > CLOSE * max(1.0, base.value_scale):
            found.problem(
                "lanes",
                f"changing one lane's observations changed the {what} that evaluate gives other lanes by {gap:.2g}; compute per lane",
            )
            return


def check_memory_learning(subject: Subject, rollout: Rollout, found: Findings) -> None:
    """In `evaluate` memory runs along the rows, begins with `policy_state`, and is forgotten where an episode starts."""
    from inchworm.backends.torch import checking

    policy, last = subject.policy, rollout.rewards.shape[0] - 1
    going = dataclasses.replace(rollout, episode_starts=np.zeros_like(rollout.episode_starts))
    base = checking.evaluated(policy, going)
    changed = checking.evaluated(policy, other_past(subject, going, slice(0, last)))
    if same_bits(base.log_probs[last], changed.log_probs[last]):
        found.problem("memory", "in evaluate earlier rows change no later row's log-prob; carry the memory from row to row")
        return
    if same_bits(base.values[last], changed.values[last]):
        found.note("the critic does not read the memory: its values depend on the present observation alone")
    remembered = optree.tree_map(lambda leaf: np.array(leaf[::-1]), going.policy_state)
    other = checking.evaluated(policy, dataclasses.replace(going, policy_state=remembered))
    if same_bits(base.log_probs[0], other.log_probs[0]) and not same_bits(remembered, going.policy_state):
        found.problem("memory", "evaluate does not begin with minibatch.policy_state, the memory before the first row")
        return
    _check_resets(subject, rollout, found)


def _check_resets(subject: Subject, rollout: Rollout, found: Findings) -> None:
    from inchworm.backends.torch import checking

    policy, middle = subject.policy, rollout.rewards.shape[0] // 2
    starts = np.array(rollout.episode_starts)  # [T, B] an agent that joins later forgets, too
    starts[:middle], starts[middle] = False, True
    begun = dataclasses.replace(rollout, episode_starts=starts)
    past = other_past(subject, begun, slice(0, middle))
    base, changed = (checking.evaluated(policy, part) for part in (begun, past))
    lives = rollout.valid[middle:]  # rows where nobody lives are filled with a living one, perhaps of before
    gap = max(distance(getattr(base, name)[middle:][lives], getattr(changed, name)[middle:][lives]) for name in ("log_probs", "values"))
    values = [checking.critic_values(policy, part)[middle:][lives] for part in (begun, past)]
    if gap > CLOSE:
        found.problem(
            "memory", f"in evaluate rows after an episode's start still depend on rows before it (by {gap:.2g}); forget at episode_starts"
        )
    elif distance(*values) > CLOSE:
        found.problem("memory", "value's rows after an episode's start still depend on rows before it; forget at episode_starts there too")


def check_ratio(subject: Subject, rollout: Rollout, found: Findings) -> None:
    """Whoever acted, `evaluate` gives the same actions the same log-probs, however the rollout is cut into sequences."""
    from inchworm.backends.torch import checking

    steps = rollout.rewards.shape[0]
    for length in sorted({1, max(1, steps // 4), steps}):
        logs = checking.evaluated(subject.policy, rollout, length).log_probs
        gap = np.where(rollout.valid, np.abs(logs - rollout.log_probs), 0)
        if not gap.max() <= TOLERANCE:
            row, lane = np.unravel_index(int(np.nanargmax(gap)), gap.shape)
            found.problem(
                "ratio",
                f"evaluate gives log-prob {logs[row, lane]:.6g} where act gave {rollout.log_probs[row, lane]:.6g} (row {row}, lane {lane}, "
                f"sequences of {length}); both must use the same weights, normalisers, masks and memory, and sum over an action's parts",
            )
            return
