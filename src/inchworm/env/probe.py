"""Serves `check_env` and the tests of replay: takes steps as training would, and writes down all that happened."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from inchworm.env.lanes import GymnasiumCopy
from inchworm.env.memory import carve_rows, map_tree, tree_leaves
from inchworm.spaces import MASK_KEY, Space, build_tree, leaf, mask_sizes
from inchworm.types import Tree

_DIFFERENT = 16
"""So many actions are drawn where one would do for all lanes."""


@dataclass
class Trace:
    """What an environment did, step by step; row 0 is the first reset."""

    actions: list[Any] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    """(observation leaves, final observation leaves or None, reward, terminated, truncated)"""
    infos: list[Any] = field(default_factory=list)


class Spy(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps the last info, which the lane reduces to its numbers."""

    last_info: Any = None

    def step(self, action: Any) -> Any:
        """Step, and keep the info."""
        result = self.env.step(action)
        self.last_info = result[-1] if isinstance(result, tuple) and result else None
        return result


def drive(lane: GymnasiumCopy, trace: Trace, steps: int, seed: int, actions: Sequence[Any] | None = None) -> None:
    """Take random legal steps, or the given ones, and write down all that happened."""
    rng = np.random.default_rng(seed)
    rows, _ = carve_rows(lane.observation_space, lane.action_space, 1, 1)
    lane.attach(rows)
    lane.reset(seed, None)
    trace.rows.append((_copy(rows.observations), None, 0.0, False, False))
    trace.infos.append({})
    episodes = 0
    for index in range(steps):
        action = legal_action(lane.action_space, _copy(rows.observations), rng) if actions is None else actions[index]
        trace.actions.append(action)
        rows.terminated[0] = rows.truncated[0] = False
        rows.next_seeds[0] = seed + episodes + 1
        ended = lane.step(map_tree(lambda part: part.copy() if isinstance(part, np.ndarray) else part, action)) is not None
        episodes += ended
        final = _copy(rows.final_observations) if ended else None
        trace.rows.append((_copy(rows.observations), final, float(rows.rewards[0]), bool(rows.terminated[0]), bool(rows.truncated[0])))
        trace.infos.append(lane.env.last_info if isinstance(lane.env, Spy) else {})


def _copy(rows: Tree) -> Tree:
    return map_tree(lambda array: array[0].copy(), rows)


def legal_action(space: Space, observation: Tree, rng: np.random.Generator) -> Any:
    """A random action that the observation's mask allows, if it has one."""
    masks = observation.get(MASK_KEY) if isinstance(observation, dict) else None

    def one(path: tuple[str | int, ...], part: Space) -> Any:
        sizes = mask_sizes(part)
        if not sizes:
            part.seed(int(rng.integers(2**31)))
            return part.sample()
        mask = np.ones(sum(sizes)) if masks is None else np.reshape(leaf(masks, path), -1)
        pieces = np.split(mask, np.cumsum(sizes)[:-1])
        chosen = np.array([rng.choice(np.flatnonzero(piece)) for piece in pieces])
        start = part.start if isinstance(part, spaces.Discrete | spaces.MultiDiscrete) else 0
        if isinstance(part, spaces.Discrete):
            return int(chosen[0] + start)
        return (chosen.reshape(part.shape or ()) + start).astype(part.dtype)

    return build_tree(space, one)


def put_legal_actions(space: Space, observations: Tree, rng: np.random.Generator, rows: Tree, lanes: Sequence[int]) -> None:
    """Write random legal actions of some lanes into the rows [B, *act]; all lanes see `observations` [B, *obs].

    Without masks what is legal for one lane is legal for all, and many lanes share some actions: to draw one takes a while.
    """
    masked = isinstance(observations, dict) and MASK_KEY in observations
    drawn = []
    for place, lane in enumerate(lanes):
        if masked or place < _DIFFERENT:
            seen = map_tree(operator.itemgetter(lane), observations)
            drawn.append(tree_leaves(legal_action(space, seen, rng)))
        for row, part in zip(tree_leaves(rows), drawn[place % len(drawn)]):
            row[lane] = part


def same(one: Tree, other: Tree) -> bool:
    """Whether two trees of arrays hold the same bits (NaN equals NaN)."""
    return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(tree_leaves(one), tree_leaves(other)))


def first_difference(trace: Trace, other: Trace) -> str | None:
    """What two traces differ in first, or None if they are equal."""
    names = ("observation", "final observation", "reward", "terminated", "truncated")
    for step, (row, second) in enumerate(zip(trace.rows, other.rows)):
        for name, a, b in zip(names, row, second):
            equal = (a is None and b is None) or (a is not None and b is not None and (same(a, b) if "observation" in name else a == b))
            if not equal:
                return f"another {name} at step {step}"
    return None
