"""Serves `check_policy`: what was found, and calls into somebody's code whose exceptions become findings."""

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
from inchworm.core.spaces import MASK_KEY, Space, leaf_shape, leaves, zeros
from inchworm.core.types import PolicyStep, Tree
from inchworm.env.check import CheckReport
from inchworm.env.trial import put_legal_actions
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.rollout import Rollout

Result = TypeVar("Result")


class PolicyReport(CheckReport):
    """What was found of a policy: `problems` break or spoil training, `notes` are worth knowing."""

    def __str__(self) -> str:
        head = "the policy is ready for training" if self.ok else f"{len(self.problems)} problem(s) would break or spoil training"
        return "\n".join([head, *(f"problem: {text}" for text in self.problems), *(f"note: {text}" for text in self.notes)])


@dataclass
class Findings:
    """What has been found so far, and the laws that are broken: those that rest on them are not tried."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)

    def problem(self, law: str, text: str) -> None:
        """A broken law, in words."""
        self.broken.add(law)
        self.problems.append(f"{law}: {text}")

    def note(self, text: str) -> None:
        """Something worth knowing."""
        self.notes.append(text)

    def keeps(self, *laws: str) -> bool:
        """Whether all of these laws are kept so far."""
        return self.broken.isdisjoint(laws)

    def attempt(self, law: str, what: str, action: Callable[[], Result]) -> Result | None:
        """The action's result; an exception becomes a problem that says where it happened."""
        try:
            return action()
        except InchwormError as error:
            self.problem(law, f"{what} was refused: {error}")
        except Exception as error:  # a policy may raise anything, and all of it is worth reporting
            self.problem(law, f"{what} raised {type(error).__name__}: {str(error)[:500]}{place_of(error)}")
        return None

    def report(self) -> PolicyReport:
        """All of it, each sentence once."""
        return PolicyReport(tuple(dict.fromkeys(self.problems)), tuple(dict.fromkeys(self.notes)))


def place_of(error: Exception) -> str:
    """Where an exception was raised: the last place outside of installed packages, which is where somebody can change something."""
    place, last = error.__traceback__, None
    while place is not None:
        name = place.tb_frame.f_code.co_filename
        if "site-packages" not in Path(name).parts and not name.startswith("<"):
            last = f" at {name}:{place.tb_lineno}"
        place = place.tb_next
    return last or ""


def distance(one: Tree, other: Tree) -> float:
    """The largest difference between two trees of arrays; infinite where only one of them is a number."""
    largest = 0.0
    for a, b in zip(optree.tree_leaves(one), optree.tree_leaves(other), strict=True):
        first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if not np.array_equal(np.isfinite(first), np.isfinite(second)):
            return float("inf")
        gaps = np.abs(np.nan_to_num(first) - np.nan_to_num(second))
        largest = max(largest, float(gaps.max(initial=0.0)))
    return largest


def same_bits(one: Any, other: Any) -> bool:
    """Whether two trees hold the same numbers, to the bit."""
    return distance(one, other) == 0.0


LANES, ROWS = 6, 5
"""Of the batches that the laws of acting are tried on."""
_ENOUGH = 2 * LANES
"""So many different observations must have been seen to be used; else legal ones are made up."""


@dataclasses.dataclass
class Subject:
    """A policy, who acts for it (itself, or its NumPy twin), and what it may see."""

    policy: Any
    actor: Actor
    env: VectorEnv
    pool: Tree
    """[R, *obs] different observations, every mask all true."""
    seed: int
    copies: bool = True
    """Whether the policy can be copied."""

    def spare(self) -> Any:
        """A copy for what may change a policy, such as evaluating with gradients; the policy itself where it cannot be copied."""
        return copy.deepcopy(self.policy) if self.copies else self.policy

    @property
    def has_mask(self) -> bool:
        """Whether the world offers action masks."""
        space = self.env.observation_space
        return isinstance(space, spaces.Dict) and MASK_KEY in space.spaces

    @property
    def has_memory(self) -> bool:
        """Whether the policy's state is more than `()`."""
        return bool(optree.tree_leaves(self.actor.initial_state(1)))

    def observations(self, purpose: str, *leading: int) -> Tree:
        """Observations [*leading, *obs], other ones for every purpose."""
        size = len(optree.tree_leaves(self.pool)[0])
        count = int(np.prod(leading))
        stream = make_stream(self.seed, f"check {purpose}")
        chosen = np.concatenate([stream.permutation(size) for _ in range(-(-count // size))])[:count].reshape(leading)
        return optree.tree_map(lambda leaf: leaf[chosen], self.pool)

    def act(self, observations: Tree, state: Tree, *, starts: Any = None, stream: int = 0, deterministic: bool = True) -> PolicyStep:
        """One step on copies of what is given: nobody else is changed by it."""
        lanes = len(optree.tree_leaves(observations)[0])
        begins = np.zeros(lanes, bool) if starts is None else np.array(starts)
        rng = make_stream(self.seed, "check acting", stream)
        seen, remembered = optree.tree_map(np.array, observations), optree.tree_map(np.array, state)
        step = self.actor.act(seen, remembered, begins, rng, deterministic=deterministic)
        return PolicyStep(*[optree.tree_map(np.array, part) for part in (step.actions, step.env_actions, step.log_probs, step.state)])

    def remember(self, rows: Tree) -> Tree:
        """The memory after reading observations [L, N, *obs] from the beginning of an episode."""
        length, lanes = optree.tree_leaves(rows)[0].shape[:2]
        state = self.actor.initial_state(lanes)
        for row in range(length):
            seen = optree.tree_map(lambda leaf, row=row: leaf[row], rows)
            state = self.act(seen, state, starts=np.full(lanes, row == 0)).state
        return state


def observation_pool(env: VectorEnv, seed: int, steps: int = 24) -> Tree:
    """Different observations [R, *obs] of random legal play; made-up legal ones where the world shows too few. Masks are all true."""
    rng = make_stream(seed, "check play")
    now = env.reset()
    seen = [optree.tree_map(np.array, now.observations)]
    for _ in range(steps):
        actions = zeros(env.action_space, (env.num_lanes,))
        put_legal_actions(env.action_space, seen[-1], rng, actions, range(env.num_lanes))
        seen.append(optree.tree_map(np.array, env.step(actions).observations))
    rows = optree.tree_map(lambda *leaves_: np.concatenate(leaves_), *seen)  # [steps * B, *obs]
    rows = unmasked(rows)
    different = _different(rows)
    if len(different) >= _ENOUGH:
        return optree.tree_map(lambda leaf: leaf[different], rows)
    made_up = create_fake_rollout(env.observation_space, env.action_space, 1, 4 * _ENOUGH, seed=seed).observations
    return optree.tree_map(lambda leaf: leaf[0], made_up)


def unmasked(observations: Tree) -> Tree:
    """The observations with every action allowed."""
    if not (isinstance(observations, dict) and MASK_KEY in observations):
        return observations
    return {**observations, MASK_KEY: optree.tree_map(np.ones_like, observations[MASK_KEY])}


def _different(rows: Tree) -> list[int]:
    """The places of the first of each observation."""
    leaves_ = [np.ascontiguousarray(leaf) for leaf in optree.tree_leaves(rows)]
    first: dict[bytes, int] = {}
    for place in range(len(leaves_[0])):
        first.setdefault(b"".join(leaf[place].tobytes() for leaf in leaves_), place)
    return list(first.values())


def lane_of(tree: Tree, lane: Any) -> Tree:
    """One lane of a batch, or some."""
    return optree.tree_map(lambda leaf: leaf[lane], tree)


def with_lane(tree: Tree, lane: int, other: Tree) -> Tree:
    """A batch with one lane taken from another batch."""

    def one(leaf: np.ndarray, new: np.ndarray) -> np.ndarray:
        changed = np.array(leaf)
        changed[lane] = new[lane]
        return changed

    return optree.tree_map(one, tree, other)


def action_shapes(space: Space, lanes: int) -> list[tuple[tuple[str | int, ...], tuple[int, ...]]]:
    """The path and shape [B, *act] of every part of an action."""
    return [(path, (lanes, *leaf_shape(part))) for path, part in leaves(space)]


def other_past(subject: Subject, rollout: Rollout, rows: slice, lanes: slice = slice(None)) -> Rollout:
    """The rollout with other observations in some rows and lanes; masks stay, because the actions were taken under them."""
    others = subject.observations("another past", *rollout.rewards.shape)

    def one(leaf: np.ndarray, new: np.ndarray) -> np.ndarray:
        changed = np.array(leaf)
        changed[rows, lanes] = new[rows, lanes]
        return changed

    changed: Any = optree.tree_map(one, rollout.observations, others)
    if subject.has_mask:
        changed[MASK_KEY] = rollout.observations[MASK_KEY]
    return dataclasses.replace(rollout, observations=changed)


def names(some: list[str]) -> str:
    """A list in words, its first few."""
    return ", ".join(some[:6]) + (f" and {len(some) - 6} more" if len(some) > 6 else "")
