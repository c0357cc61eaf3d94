"""What `check_policy` reports, the policy under test with its observations, and tools to compare results."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import optree
from gymnasium import spaces

from inchworm.core.errors import InchwormError
from inchworm.core.protocols import Actor, VectorEnv
from inchworm.core.seeding import make_stream
from inchworm.core.spaces import MASK_KEY, zeros
from inchworm.core.types import PolicyStep, Tree
from inchworm.env.check import CheckReport
from inchworm.env.trial import put_legal_actions
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.rollout import Rollout

Result = TypeVar("Result")


class PolicyReport(CheckReport):
    """Result of `check_policy`: `problems` break or degrade training, `notes` are worth knowing."""

    def __str__(self) -> str:
        head = "the policy is ready for training" if self.ok else f"{len(self.problems)} problem(s) would break or degrade training"
        return "\n".join([head, *(f"problem: {text}" for text in self.problems), *(f"note: {text}" for text in self.notes)])


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
            self.problem(check, f"{what} raised {type(error).__name__}: {str(error)[:500]}{place_of(error)}")
        return None

    def report(self) -> PolicyReport:
        """Return all findings, without duplicates."""
        return PolicyReport(tuple(dict.fromkeys(self.problems)), tuple(dict.fromkeys(self.notes)))


def place_of(error: Exception) -> str:
    """Return the last place in a traceback outside of installed packages, as ` at file:line`."""
    place, last = error.__traceback__, None
    while place is not None:
        name = place.tb_frame.f_code.co_filename
        if "site-packages" not in Path(name).parts and not name.startswith("<"):
            last = f" at {name}:{place.tb_lineno}"
        place = place.tb_next
    return last or ""


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


LANES, ROWS = 6, 5
"""Size of the batches for the checks of acting."""
_ENOUGH = 2 * LANES
"""With fewer distinct observations from the environment, random legal ones are used instead."""


@dataclasses.dataclass
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


def observation_pool(env: VectorEnv, seed: int, steps: int = 24) -> Tree:
    """Collect distinct observations [R, *obs] by random legal actions, or make up legal ones if there are too few. Masks are all true."""
    rng = make_stream(seed, "check play")
    seen = [optree.tree_map(np.array, env.reset().observations)]
    for _ in range(steps):
        actions = zeros(env.action_space, (env.num_lanes,))
        put_legal_actions(env.action_space, seen[-1], rng, actions, range(env.num_lanes))
        seen.append(optree.tree_map(np.array, env.step(actions).observations))
    rows: Any = optree.tree_map(lambda *parts: np.concatenate(parts), *seen)  # [steps * B, *obs]
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


def with_other_observations(subject: Subject, rollout: Rollout, rows: slice, lanes: slice = slice(None)) -> Rollout:
    """Replace the observations in some rows and lanes; masks are kept, because the actions were taken under them."""
    others = subject.observations("another past", *rollout.rewards.shape)

    def one(leaf: np.ndarray, new: np.ndarray) -> np.ndarray:
        changed = np.array(leaf)
        changed[rows, lanes] = new[rows, lanes]
        return changed

    changed: Any = optree.tree_map(one, rollout.observations, others)
    if subject.has_mask:
        changed[MASK_KEY] = rollout.observations[MASK_KEY]
    return dataclasses.replace(rollout, observations=changed)


def format_names(names: list[str]) -> str:
    """Format the first few names of a list."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
