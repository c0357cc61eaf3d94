"""Serves `check_policy`: the laws of learning (steps 6 to 9), tried on a short rollout that the policy itself made."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import optree
from gymnasium import spaces

from inchworm.core.spaces import MASK_KEY, Space, build_tree, leaf, leaves, mask_sizes, mask_space
from inchworm.core.types import Tree
from inchworm.policy_check.acting import CLOSE
from inchworm.policy_check.findings import LANES, ROWS, Findings, Subject, distance, lane_of, names, other_past, same_bits
from inchworm.rollout.rollout import Rollout

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
