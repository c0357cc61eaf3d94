"""The policy under test, what was found, and the checks of acting: shapes, randomness, masks, independent lanes, memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import optree
from gymnasium import spaces

from inchworm.core.errors import InchwormError, describe_error
from inchworm.core.protocols import Actor, VectorEnv
from inchworm.core.seeding import make_stream, stream_state
from inchworm.core.spaces import MASK_KEY, Space, build_tree, leaf, leaf_dtype, leaf_shape, leaves, mask_sizes, mask_space, path_name, zeros
from inchworm.core.types import PolicyStep, Tree
from inchworm.env.values import is_legal, put_legal_actions, random_mask
from inchworm.rollout.fake import create_fake_rollout

Result = TypeVar("Result")

CLOSE = 1e-4
"""Tolerance for numbers that are computed in another order."""
LANES, ROWS = 6, 5
"""Size of the batches for the checks of acting."""
_POOL_STEPS = 24
_ENOUGH = 2 * LANES
"""With fewer distinct observations from the environment, random legal ones are used instead."""


@dataclass
class Findings:
    """Problems and notes so far, and the names of the checks that failed."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)

    def problem(self, check: str, text: str) -> None:
        """Add a problem and mark its check as failed."""
        self.failed.add(check)
        self.problems.append(f"{check}: {text}")

    def note(self, text: str) -> None:
        """Add something worth knowing."""
        self.notes.append(text)

    def passed(self, *checks: str) -> bool:
        """Tell whether none of these checks has failed so far."""
        return self.failed.isdisjoint(checks)

    def attempt(self, check: str, what: str, action: Callable[[], Result]) -> Result | None:
        """Return the action's result; report an exception as a problem, with the place where it was raised."""
        try:
            return action()
        except InchwormError as error:
            self.problem(check, f"{what} was rejected: {error}")
        except Exception as error:  # user code may raise anything
            self.problem(check, f"{what} raised {' '.join(describe_error(error).split())}")
        return None


@dataclass
class Subject:
    """The policy under test, the actor for it (itself or its NumPy twin), and observations to try it on."""

    policy: Any
    actor: Actor
    env: VectorEnv
    pool: Tree
    """[R, *obs] distinct observations, every mask all true."""
    seed: int
    can_be_copied: bool
    tools: Any
    """What the checks need from the backend: its module `checking`."""

    def copy_policy(self) -> Any:
        """Copy the policy, for checks that may change it; the policy itself if it cannot be copied."""
        return copy.deepcopy(self.policy) if self.can_be_copied else self.policy

    @property
    def has_mask(self) -> bool:
        """Whether the environment provides action masks."""
        space = self.env.observation_space
        return isinstance(space, spaces.Dict) and MASK_KEY in space.spaces

    @property
    def has_memory(self) -> bool:
        """Whether the policy's state is more than `()`."""
        return bool(optree.tree_leaves(self.actor.initial_state(1)))

    def observations(self, purpose: str, *leading: int) -> Tree:
        """Draw observations [*leading, *obs], different ones for every purpose."""
        size = len(optree.tree_leaves(self.pool)[0])
        count = int(np.prod(leading))
        stream = make_stream(self.seed, f"check {purpose}")
        chosen = np.concatenate([stream.permutation(size) for _ in range(-(-count // size))])[:count].reshape(leading)
        return optree.tree_map(lambda leaf: leaf[chosen], self.pool)

    def act(self, observations: Tree, state: Tree, *, starts: Any = None, stream: int = 0, deterministic: bool = True) -> PolicyStep:
        """Act on copies of the inputs, and return a copy of the step."""
        lanes = len(optree.tree_leaves(observations)[0])
        begins = np.zeros(lanes, bool) if starts is None else np.array(starts)
        rng = make_stream(self.seed, "check acting", stream)
        seen, remembered = optree.tree_map(np.array, observations), optree.tree_map(np.array, state)
        step = self.actor.act(seen, remembered, begins, rng, deterministic=deterministic)
        return PolicyStep(*[optree.tree_map(np.array, part) for part in (step.actions, step.env_actions, step.log_probs, step.state)])

    def remember(self, rows: Tree) -> Tree:
        """Return the memory after reading observations [L, N, *obs] from the start of an episode."""
        length, lanes = optree.tree_leaves(rows)[0].shape[:2]
        state = self.actor.initial_state(lanes)
        for row in range(length):
            seen = optree.tree_map(lambda leaf, row=row: leaf[row], rows)
            state = self.act(seen, state, starts=np.full(lanes, row == 0)).state
        return state


def observation_pool(env: VectorEnv, seed: int) -> Tree:
    """Collect distinct observations [R, *obs] by random legal actions, or make up legal ones if there are too few. Masks are all true."""
    rng = make_stream(seed, "check play")
    seen = [optree.tree_map(np.array, env.reset().observations)]
    for _ in range(_POOL_STEPS):
        actions = zeros(env.action_space, (env.num_lanes,))
        put_legal_actions(env.action_space, seen[-1], rng, actions, range(env.num_lanes))
        seen.append(optree.tree_map(np.array, env.step(actions).observations))
    rows: Any = optree.tree_map(lambda *parts: np.concatenate(parts), *seen)  # [R, *obs]
    if isinstance(rows, dict) and MASK_KEY in rows:
        rows = {**rows, MASK_KEY: optree.tree_map(np.ones_like, rows[MASK_KEY])}
    parts = [np.ascontiguousarray(leaf) for leaf in optree.tree_leaves(rows)]
    distinct: dict[bytes, int] = {}  # content -> its first row
    for row in range(len(parts[0])):
        distinct.setdefault(b"".join(part[row].tobytes() for part in parts), row)
    if len(distinct) >= _ENOUGH:
        return lane_of(rows, list(distinct.values()))
    return lane_of(create_fake_rollout(env.observation_space, env.action_space, 1, 4 * _ENOUGH, seed=seed).observations, 0)


def lane_of(tree: Tree, lane: Any) -> Tree:
    """Index every leaf of a batch: one lane, or several."""
    return optree.tree_map(lambda leaf: leaf[lane], tree)


def distance(one: Tree, other: Tree) -> float:
    """Return the largest difference between two trees of arrays; infinite where only one of them is finite."""
    largest = 0.0
    for a, b in zip(optree.tree_leaves(one), optree.tree_leaves(other), strict=True):
        first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if not np.array_equal(np.isfinite(first), np.isfinite(second)):
            return float("inf")
        gaps = np.abs(np.nan_to_num(first) - np.nan_to_num(second))
        largest = max(largest, float(gaps.max(initial=0.0)))
    return largest


def same_bits(one: Any, other: Any) -> bool:
    """Tell whether two trees hold the same numbers."""
    return distance(one, other) == 0.0


def check_step(subject: Subject, findings: Findings) -> None:
    """Check that a `PolicyStep` has the shapes and dtypes of its spaces, and that its actions are in theirs."""
    state = findings.attempt("shapes", "initial_state", lambda: subject.actor.initial_state(LANES))
    if state is None:
        return
    for place, part in enumerate(optree.tree_leaves(state)):
        if np.shape(part)[:1] != (LANES,) or not isinstance(part, np.ndarray):
            findings.problem("shapes", f"initial_state({LANES}) must hold NumPy arrays [{LANES}, …]; leaf {place} is {_describe(part)}")
            return
    observations = subject.observations("step", LANES)

    def step(deterministic: bool) -> PolicyStep:
        seen, remembered, starts = optree.tree_map(np.array, observations), optree.tree_map(np.array, state), np.ones(LANES, bool)
        result = subject.actor.act(seen, remembered, starts, make_stream(subject.seed, "check step"), deterministic=deterministic)
        if not (same_bits(seen, observations) and same_bits(remembered, state) and starts.all()):
            findings.problem("shapes", "act modifies the observations, the memory or the episode_starts that it is given; work on a copy")
        if not isinstance(result, PolicyStep):
            raise TypeError(f"act must return PolicyStep(actions, env_actions, log_probs, state), not {type(result).__name__}")
        return result

    sampled = findings.attempt("shapes", "act(deterministic=False)", lambda: step(False))
    greedy = findings.attempt("shapes", "act(deterministic=True)", lambda: step(True))
    for result in (sampled, greedy):
        if result is not None:
            _check_actions(result, subject.env.action_space, findings)
            _check_log_probs_and_state(result, state, findings)


def _check_actions(step: PolicyStep, space: Space, findings: Findings) -> None:
    for what in ("actions", "env_actions"):
        for path, part_space in leaves(space):
            try:
                part = leaf(getattr(step, what), path)
            except (KeyError, IndexError, TypeError):
                findings.problem("shapes", f"act's {what} lack the part {path_name(path)} of {space}")
                return
            shape = [LANES, *leaf_shape(part_space)]
            if not isinstance(part, np.ndarray) or list(part.shape) != shape:
                where = f".{path_name(path)}" if path else ""
                findings.problem("shapes", f"act's {what}{where} must be a NumPy array {shape} for {LANES} lanes, not {_describe(part)}")
                return

    for lane in range(LANES):

        def value(path: tuple[str | int, ...], part_space: Space, lane: int = lane) -> Any:
            number = np.asarray(leaf(step.env_actions, path)[lane])
            # the vector env casts between kinds of floats, but a choice must be an integer
            fits = isinstance(part_space, spaces.Box) or number.dtype.kind in "iub"
            return number.astype(leaf_dtype(part_space))[()] if fits else number[()]

        action = build_tree(space, value)
        if not space.contains(action):
            findings.problem("shapes", f"act's env_actions hold {action!r} in lane {lane}, which is not in {space}; clip or squash it")
            return


def _check_log_probs_and_state(step: PolicyStep, state: Tree, findings: Findings) -> None:
    logs = step.log_probs
    if not isinstance(logs, np.ndarray) or logs.shape != (LANES,) or logs.dtype.kind != "f":
        findings.problem("shapes", f"act's log_probs must be floats [{LANES}], summed over the parts of an action, not {_describe(logs)}")
    elif not np.isfinite(logs).all():
        findings.problem("shapes", f"act's log_probs are not finite: {logs}")
    try:
        found = [(np.shape(part), np.asarray(part).dtype) for part in optree.tree_leaves(step.state)]
    except (TypeError, ValueError, RuntimeError):
        findings.problem("shapes", f"act's state must be a tree of arrays like initial_state, not {_describe(step.state)}")
        return
    expected = [(part.shape, part.dtype) for part in optree.tree_leaves(state)]
    if found != expected or optree.tree_structure(step.state) != optree.tree_structure(state):
        findings.problem("shapes", f"act's state must have the form of initial_state({LANES}), {expected}; it has {found}")


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} {list(shape)} of {getattr(value, 'dtype', '?')}"


def check_randomness(subject: Subject, findings: Findings) -> None:
    """Check that all randomness comes from `rng`: the same stream gives the same actions, whatever is drawn elsewhere."""
    rows = subject.observations("randomness", ROWS, LANES)
    state, seen = subject.remember(rows), lane_of(rows, 0)

    def sample() -> Tree:
        return _parts(subject.act(seen, state, deterministic=False, stream=1))

    if not same_bits(sample(), sample()):
        global_streams = subject.tools.GlobalStreams()
        if same_bits(global_streams.replayed(sample), global_streams.replayed(sample)):
            text = "act draws from a global stream (numpy.random, random or torch), or a layer such as dropout is on; draw from rng, eval()"
        else:
            text = (
                "the same observations, memory and rng gave different results the second time; "
                "keep memory in the state that act returns, not in the policy, and draw from rng only"
            )
        findings.problem("randomness", text)
        return
    rng = make_stream(subject.seed, "check sampling")
    before = stream_state(rng)
    subject.actor.act(optree.tree_map(np.array, seen), optree.tree_map(np.array, state), np.zeros(LANES, bool), rng, deterministic=False)
    if stream_state(rng) == before:
        findings.problem("randomness", "act never draws from rng, but PPO needs sampled actions; sample unless deterministic")
    if not same_bits(*[_parts(subject.act(seen, state, stream=stream)) for stream in (1, 2)]):
        findings.problem("deterministic acting", "act(deterministic=True) depends on rng; take the most likely action (argmax, mean)")


def _parts(step: PolicyStep) -> Tree:
    return (step.actions, step.env_actions, step.log_probs, step.state)


def check_lanes(subject: Subject, findings: Findings) -> None:
    """Check that a lane's action, log-prob and memory depend on that lane only."""
    rows, others = (subject.observations(purpose, ROWS, LANES) for purpose in ("lanes", "other lanes"))
    state, other_state = subject.remember(rows), subject.remember(others)
    seen = lane_of(rows, 0)
    base, everyone = subject.act(seen, state), np.arange(LANES)
    hint = "compute nothing over the batch axis (batch normalisation? a mean over dim 0?) and nothing by the lane's number"

    def with_first_lane(tree: Tree, other: Tree) -> Tree:
        return optree.tree_map(lambda ours, theirs: np.concatenate([theirs[:1], ours[1:]]), tree, other)

    changed = {"saw": subject.act(with_first_lane(seen, lane_of(others, 0)), state)}
    if subject.has_memory:
        changed["remembered"] = subject.act(seen, with_first_lane(state, other_state))
    for what, step in changed.items():
        gap, where = _gap(base, step, everyone[1:])
        if gap > CLOSE:
            findings.problem("lanes", f"changing what lane 0 {what} changed the {where} of other lanes by {gap:.2g}; {hint}")
            return
    subsets = {
        "the same lanes in another order have different": np.roll(everyone, 2),
        "a lane alone has, compared with the whole batch, different": everyone[:1],
    }
    for what, lanes in subsets.items():
        expected = PolicyStep(*[lane_of(part, lanes) for part in _parts(base)])
        gap, where = _gap(expected, subject.act(lane_of(seen, lanes), lane_of(state, lanes)), np.arange(len(lanes)))
        if gap > CLOSE:
            findings.problem("lanes", f"{what} {where} (by {gap:.2g}); {hint}")
            return


def _gap(one: PolicyStep, other: PolicyStep, lanes: np.ndarray) -> tuple[float, str]:
    """Return the largest difference over some lanes, and in what. Discrete actions are compared by their log-probs."""
    numbers = [[part for part in optree.tree_leaves(step.actions) if part.dtype.kind == "f"] for step in (one, other)]
    pairs = {"actions": numbers, "log-probs": [one.log_probs, other.log_probs], "memory": [one.state, other.state]}
    gaps = {name: distance(*[lane_of(tree, lanes) for tree in pair]) for name, pair in pairs.items()}
    worst = max(gaps, key=lambda name: gaps[name])
    return gaps[worst], worst


def check_memory(subject: Subject, findings: Findings) -> None:
    """Check that past observations change the output, and that memory is reset where an episode starts."""
    first, second = (subject.observations(purpose, ROWS, LANES) for purpose in ("memory", "other memory"))
    seen = lane_of(subject.observations("present", 1, LANES), 0)
    one, other = subject.remember(first), subject.remember(second)
    if same_bits(one, other):
        findings.problem("memory", f"{ROWS} different observations lead to the same memory; act must return what it remembers as its state")
        return
    steps = [subject.act(seen, state) for state in (one, other)]
    if same_bits(*[(step.actions, step.log_probs) for step in steps]):
        findings.problem("memory", "the memory changes no action and no log-prob; feed the state to the actor")
        return
    starts = np.arange(LANES) % 2 == 0
    fresh = subject.act(seen, subject.actor.initial_state(LANES))
    for begins, what in ((np.ones(LANES, bool), "every lane starts"), (starts, "some lanes start")):
        step = subject.act(seen, one, starts=begins)
        gap, where = _gap(fresh, step, np.flatnonzero(begins))
        if gap > CLOSE:
            findings.problem(
                "memory", f"where {what} an episode, act's {where} still depend on the past (by {gap:.2g}); reset to initial_state first"
            )
            return
    gap, where = _gap(steps[0], step, np.flatnonzero(~starts))
    if gap > CLOSE:
        findings.problem(
            "memory", f"when a lane starts an episode, the {where} of lanes that continue change (by {gap:.2g}); reset memory per lane"
        )


_DRAWS = 12
"""Random masks, with one sample each: an actor that ignores masks takes an illegal action in nearly every one."""


def check_masks(subject: Subject, findings: Findings) -> None:
    """Check that illegal actions are never taken, and that a single legal action has probability 1."""
    rows = subject.observations("masks", ROWS, LANES)
    state, seen, space = subject.remember(rows), lane_of(rows, 0), subject.env.action_space
    rng = make_stream(subject.seed, "check masks")
    hint = "give the logits of illegal choices a large negative number before the softmax, in act and in evaluate"
    for draw in range(_DRAWS):
        masks = optree.tree_map(lambda *parts: np.stack(parts), *[random_mask(space, rng) for _ in range(LANES)])
        for deterministic in (False, True):
            step = subject.act({**seen, MASK_KEY: masks}, state, stream=draw, deterministic=deterministic)
            for lane in range(LANES):
                mask = lane_of(masks, lane)
                if not is_legal(space, lane_of(step.env_actions, lane), mask):
                    how = "greedily took" if deterministic else "sampled"
                    findings.problem("masks", f"act {how} {lane_of(step.actions, lane)!r} under the mask {mask!r}; {hint}")
                    return

    # With a single legal choice the discrete parts add 0 to the log-prob, whichever choice it is.
    actions = dict(leaves(space))

    def only_choice(place: int) -> Tree:
        def mask(path: Any, _: Any) -> np.ndarray:
            parts = [np.eye(size, dtype=np.int8)[place] for size in mask_sizes(actions[path])]
            return np.tile(np.concatenate(parts), (LANES, 1))  # [B, n]

        return build_tree(mask_space(space), mask)

    logs = [subject.act({**seen, MASK_KEY: only_choice(place)}, state).log_probs for place in (0, -1)]  # [2][B]
    gap = np.abs(logs[0] - logs[1]).max()
    if all(mask_sizes(part) for part in actions.values()) and np.abs(logs).max() > CLOSE:
        findings.problem("masks", f"a single legal action must have log-prob 0, but act gives {logs[0][0]:.3g}; {hint}")
    elif gap > CLOSE:
        findings.problem("masks", f"with a single legal choice the log-prob must not depend on which (it does, by {gap:.2g}); {hint}")
