"""Serves `check_policy`: the laws of acting (step 4). Nothing here needs a learning framework."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import optree
from gymnasium import spaces

from inchworm.core.seeding import make_stream, stream_state
from inchworm.core.spaces import MASK_KEY, Space, build_tree, leaf, leaf_dtype, leaves, mask_sizes, mask_space, path_name
from inchworm.core.types import PolicyStep, Tree
from inchworm.policy_check.findings import LANES, ROWS, Findings, Subject, action_shapes, distance, lane_of, same_bits, with_lane
from inchworm.worlds.toys import is_legal, random_mask

CLOSE = 1e-4
"""How far numbers may lie apart that are computed in another order."""


def check_step(subject: Subject, found: Findings) -> None:
    """A `PolicyStep` has the shapes and dtypes of its spaces, and its actions are in theirs."""
    law, space = "shapes", subject.env.action_space
    state = found.attempt(law, "initial_state", lambda: subject.actor.initial_state(LANES))
    if state is None:
        return
    for place, part in enumerate(optree.tree_leaves(state)):
        if np.shape(part)[:1] != (LANES,) or not isinstance(part, np.ndarray):
            found.problem(law, f"initial_state({LANES}) must hold NumPy arrays [{LANES}, …]; leaf {place} is {_brief(part)}")
            return
    given = subject.observations("step", LANES)
    for deterministic in (False, True):
        attempt = functools.partial(_untouched, subject, given, state, deterministic, found)
        step = found.attempt(law, f"act(deterministic={deterministic})", attempt)
        if step is not None:
            _check_actions(step, space, found)
            _check_rest(step, state, found)


def _untouched(subject: Subject, given: Tree, state: Tree, deterministic: bool, found: Findings) -> PolicyStep:
    """A step, and whether it wrote into what it was given."""
    seen, remembered, starts = optree.tree_map(np.array, given), optree.tree_map(np.array, state), np.ones(LANES, bool)
    step = subject.actor.act(seen, remembered, starts, make_stream(subject.seed, "check step"), deterministic=deterministic)
    if not (same_bits(seen, given) and same_bits(remembered, state) and starts.all()):
        found.problem("shapes", "act writes into the observations, the memory or the episode_starts that it is given; work on a copy")
    if not isinstance(step, PolicyStep):
        raise TypeError(f"act must return PolicyStep(actions, env_actions, log_probs, state), not {type(step).__name__}")
    return step


def _check_actions(step: PolicyStep, space: Space, found: Findings) -> None:
    for what in ("actions", "env_actions"):
        tree = getattr(step, what)
        for path, shape in action_shapes(space, LANES):
            try:
                part = leaf(tree, path)
            except (KeyError, IndexError, TypeError):
                found.problem("shapes", f"act's {what} lack the part {path_name(path)} of {space}")
                return
            if not isinstance(part, np.ndarray) or part.shape != shape:
                where = f".{path_name(path)}" if path else ""
                found.problem("shapes", f"act's {what}{where} must be a NumPy array {list(shape)} for {LANES} lanes, not {_brief(part)}")
                return
    for lane in range(LANES):
        action = _action(space, step.env_actions, lane)
        if not space.contains(action):
            found.problem("shapes", f"act's env_actions hold {action!r} in lane {lane}, which is not in {space}; clip or squash it")
            return


def _action(space: Space, tree: Tree, lane: int) -> Any:
    """A lane's action as the environment gets it."""

    def one(path: tuple[str | int, ...], part: Space) -> Any:
        value = leaf(tree, path)[lane]
        # the vector env casts between kinds of floats, but a choice must be a whole number
        fits = isinstance(part, spaces.Box) or np.asarray(value).dtype.kind in "iub"
        return np.asarray(value).astype(leaf_dtype(part))[()] if fits else value

    return build_tree(space, one)


def _check_rest(step: PolicyStep, state: Tree, found: Findings) -> None:
    logs = step.log_probs
    if not isinstance(logs, np.ndarray) or logs.shape != (LANES,) or logs.dtype.kind != "f":
        found.problem("shapes", f"act's log_probs must be floats [{LANES}], the sum over the parts of an action, not {_brief(logs)}")
    elif not np.isfinite(logs).all():
        found.problem("shapes", f"act's log_probs are not finite: {logs}")
    try:
        alike = [(np.shape(a), np.asarray(a).dtype) for a in optree.tree_leaves(step.state)]
    except (TypeError, ValueError, RuntimeError):
        found.problem("shapes", f"act's state must be the tree of arrays of initial_state, not {_brief(step.state)}")
        return
    wanted = [(part.shape, part.dtype) for part in optree.tree_leaves(state)]
    if alike != wanted or optree.tree_structure(step.state) != optree.tree_structure(state):
        found.problem("shapes", f"act's state must have the form of initial_state({LANES}), {wanted}; it has {alike}")


def _brief(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} {list(shape)} of {getattr(value, 'dtype', '?')}"


def check_randomness(subject: Subject, found: Findings, replayed: Callable[[Callable[[], Any]], Any]) -> None:
    """All randomness comes from `rng`: the same stream gives the same actions, whatever was drawn elsewhere meanwhile.

    `replayed(action)` calls with the process's global streams as they were at its last call, and puts them back.
    """
    rows = subject.observations("randomness", ROWS, LANES)
    state = subject.remember(rows)
    seen = lane_of(rows, 0)

    def once() -> PolicyStep:
        return subject.act(seen, state, deterministic=False, stream=1)

    if not same_bits(_parts(once()), _parts(once())):
        if same_bits(_parts(replayed(once)), _parts(replayed(once))):
            text = "act draws from a global stream (numpy.random, random or torch), or a layer such as dropout is on; draw from rng, eval()"
        else:
            text = (
                "the same observations, memory and rng gave other results the second time; "
                "keep memory in the state that act returns, not in the policy, and draw from rng alone"
            )
        found.problem("randomness", text)
        return
    rng = make_stream(subject.seed, "check sampling")
    before = stream_state(rng)
    subject.actor.act(optree.tree_map(np.array, seen), optree.tree_map(np.array, state), np.zeros(LANES, bool), rng, deterministic=False)
    if stream_state(rng) == before:
        found.problem(
            "randomness", "act never draws from rng: without sampled actions PPO has nothing to compare; sample unless deterministic"
        )
    first, second = (_parts(subject.act(seen, state, stream=stream)) for stream in (1, 2))
    if not same_bits(first, second):
        found.problem("deterministic acting", "act(deterministic=True) depends on rng; take the likeliest action (argmax, mean) there")


def _parts(step: PolicyStep) -> Tree:
    return (step.actions, step.env_actions, step.log_probs, step.state)


def check_lanes(subject: Subject, found: Findings) -> None:
    """A lane's action, log-prob and memory depend on that lane alone."""
    rows, others = (subject.observations(purpose, ROWS, LANES) for purpose in ("lanes", "other lanes"))
    state, other_state = subject.remember(rows), subject.remember(others)
    seen, other = lane_of(rows, 0), lane_of(others, 0)
    base = subject.act(seen, state)
    rest = np.arange(1, LANES)
    changed = {"saw": subject.act(with_lane(seen, 0, other), state)}
    if subject.has_memory:
        changed["remembered"] = subject.act(seen, with_lane(state, 0, other_state))
    for what, step in changed.items():
        gap, where = _gap(base, step, rest)
        if gap > CLOSE:
            found.problem("lanes", f"changing what lane 0 {what} changed the {where} of other lanes by {gap:.2g}; {_LANES_HINT}")
            return
    order = np.roll(np.arange(LANES), 2)
    turned = subject.act(lane_of(seen, order), lane_of(state, order))
    gap, where = _gap(_choose(base, order), turned, np.arange(LANES))
    if gap > CLOSE:
        found.problem("lanes", f"the same lanes in another order have another {where} (by {gap:.2g}); {_LANES_HINT}")
        return
    gap, where = _gap(_choose(base, slice(0, 1)), subject.act(lane_of(seen, slice(0, 1)), lane_of(state, slice(0, 1))), np.arange(1))
    if gap > CLOSE:
        found.problem("lanes", f"a lane alone has another {where} than among others (by {gap:.2g}); {_LANES_HINT}")


_LANES_HINT = "compute nothing over the batch axis (batch normalisation? a mean over dim 0?) and nothing by the lane's number"


def _choose(step: PolicyStep, lanes: Any) -> PolicyStep:
    return PolicyStep(*[lane_of(part, lanes) for part in _parts(step)])


def _gap(one: PolicyStep, other: PolicyStep, lanes: np.ndarray) -> tuple[float, str]:
    """The largest difference over some lanes, and in what; of actions only the continuous parts: choices speak by their log-probs."""
    numbers = [[part for part in optree.tree_leaves(step.actions) if part.dtype.kind == "f"] for step in (one, other)]
    pairs = {"actions": numbers, "log-probs": [one.log_probs, other.log_probs], "memory": [one.state, other.state]}
    gaps = {name: distance(*[lane_of(tree, lanes) for tree in pair]) for name, pair in pairs.items()}
    worst = max(gaps, key=lambda name: gaps[name])
    return gaps[worst], worst


def check_memory(subject: Subject, found: Findings) -> None:
    """A past observation changes the present output, and nothing of the past remains where an episode starts."""
    first, second = (subject.observations(purpose, ROWS, LANES) for purpose in ("memory", "other memory"))
    seen = lane_of(subject.observations("present", 1, LANES), 0)
    one, other = subject.remember(first), subject.remember(second)
    if same_bits(one, other):
        found.problem("memory", f"after {ROWS} other observations the memory is the same; act must return what it remembers as its state")
        return
    if same_bits(_outputs(subject.act(seen, one)), _outputs(subject.act(seen, other))):
        found.problem("memory", "act remembers, but what it remembers changes no action and no log-prob; feed the state to the actor")
        return
    starts = np.arange(LANES) % 2 == 0
    fresh = subject.act(seen, subject.actor.initial_state(LANES))
    for begins, what in ((np.ones(LANES, bool), "every lane starts"), (starts, "some lanes start")):
        step = subject.act(seen, one, starts=begins)
        gap, where = _gap(fresh, step, np.flatnonzero(begins))
        if gap > CLOSE:
            found.problem(
                "memory", f"where {what} an episode, act's {where} still depend on the past (by {gap:.2g}); put initial_state there first"
            )
            return
    gap, where = _gap(subject.act(seen, one), step, np.flatnonzero(~starts))
    if gap > CLOSE:
        found.problem(
            "memory", f"when another lane starts an episode, the {where} of lanes that go on change (by {gap:.2g}): forget per lane"
        )


def _outputs(step: PolicyStep) -> Tree:
    return (step.actions, step.log_probs)


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
