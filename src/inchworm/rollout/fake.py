"""Random rollouts that satisfy every check, to learn from without an environment: for tests, examples and benchmarks."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree
from gymnasium import spaces

from inchworm.core.seeding import derive_seed, make_stream
from inchworm.core.spaces import MASK_KEY, Space, build_tree, leaf_dtype, leaf_shape, leaves, mask_sizes
from inchworm.core.types import EpisodeRecord, Tree
from inchworm.rollout.fields import action_dtype
from inchworm.rollout.rollout import Rollout

_WIDE = 1e6  # a Box with a bound beyond this counts as unbounded


def create_fake_rollout(
    observation_space: Space,
    action_space: Space,
    num_steps: int = 125,
    num_lanes: int = 8,
    *,
    seed: int = 0,
    episode_length: int = 25,
    memory: Tree = (),
    sequence_length: int = 1,
) -> Rollout:
    """Make a rollout of random data: legal observations and actions, episodes that terminate or are truncated, all masks true.

    Actions are uniform over choices or standard normal, with matching `log_probs`. For a policy with memory, `memory` is
    `policy.initial_state(1)`: random states of that form are recorded every `sequence_length` rows.
    """
    rng = make_stream(seed, "fake rollout")
    shape = (num_steps, num_lanes)
    phase = (np.arange(num_steps)[:, None] + 3 * np.arange(num_lanes)) % episode_length  # [T, B] step within its episode
    ended = phase == episode_length - 1
    terminated = ended & (rng.random(shape) < 0.5)
    needed = ended & ~terminated
    needed[-1:] = True
    cut_rows = np.argwhere(needed).astype(np.int32)  # [K, 2]
    actions, log_probs = _actions(action_space, shape, rng)
    rewards = rng.standard_normal(shape).astype(np.float32)

    def memories(*leading: int) -> Tree:
        return optree.tree_map(lambda leaf: rng.uniform(-1, 1, (*leading, *leaf.shape[1:])).astype(leaf.dtype), memory)

    state, cut_state = memories(-(-num_steps // sequence_length), num_lanes), memories(len(cut_rows))
    return Rollout.from_dict(
        {
            "observations": _observations(observation_space, shape, rng),
            "actions": actions,
            "log_probs": log_probs,
            "rewards": rewards,
            "terminated": terminated,
            "truncated": ended & ~terminated,
            "episode_starts": phase == 0,
            "policy_state": state,
            "state_every": sequence_length if optree.tree_leaves(memory) else 0,
            "cut_state": cut_state,
            "cut_rows": cut_rows,
            "cut_observations": _observations(observation_space, (len(cut_rows),), rng),
            "episodes": _episodes(rewards, ended, episode_length, seed),
        }
    )


def _observations(space: Space, leading: tuple[int, ...], rng: np.random.Generator) -> Tree:
    def one(path: Any, leaf: Space) -> np.ndarray:
        shape = (*leading, *leaf_shape(leaf))
        return np.ones(shape, leaf_dtype(leaf)) if path[:1] == (MASK_KEY,) else _draw(leaf, shape, rng)

    return build_tree(space, one)


def _draw(leaf: Space, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draw legal values of a leaf space, uniform where it is bounded."""
    if isinstance(leaf, spaces.Discrete):
        return rng.integers(leaf.start, leaf.start + leaf.n, shape).astype(leaf_dtype(leaf))
    if isinstance(leaf, spaces.MultiDiscrete):
        return rng.integers(leaf.start, leaf.start + leaf.nvec, shape).astype(leaf_dtype(leaf))
    if not isinstance(leaf, spaces.Box):
        return rng.integers(0, 2, shape).astype(leaf_dtype(leaf))
    low, high = np.maximum(leaf.low.astype(np.float64), -_WIDE), np.minimum(leaf.high.astype(np.float64), _WIDE)
    bounded = (low > -_WIDE) & (high < _WIDE)
    if leaf_dtype(leaf).kind == "f":
        values = np.where(bounded, rng.uniform(low, high, shape), np.clip(rng.standard_normal(shape), low, high))
    else:
        values = np.floor(rng.uniform(low, high + 1, shape))
    return np.clip(values, low, high).astype(leaf_dtype(leaf))


def _actions(space: Space, shape: tuple[int, int], rng: np.random.Generator) -> tuple[Tree, np.ndarray]:
    """Draw actions [T, B, *act]; return them with their log-probs [T, B] f32."""
    log_probs = np.zeros(shape)
    for _, leaf in leaves(space):
        log_probs -= np.log(mask_sizes(leaf)).sum() if mask_sizes(leaf) else 0.0

    def one(_: Any, leaf: Space) -> np.ndarray:
        full = (*shape, *leaf_shape(leaf))
        if not isinstance(leaf, spaces.Box):
            return _draw(leaf, full, rng)
        values = rng.standard_normal(full).astype(action_dtype(leaf))
        density = -0.5 * values.astype(np.float64) ** 2 - 0.5 * np.log(2 * np.pi)
        log_probs[...] += density.sum(tuple(range(2, density.ndim)))
        return values

    actions = build_tree(space, one)
    return actions, log_probs.astype(np.float32)


def _episodes(rewards: np.ndarray, ended: np.ndarray, length: int, seed: int) -> tuple[EpisodeRecord, ...]:
    """Return the records of the episodes that lie completely inside the rollout."""
    return tuple(
        EpisodeRecord(float(rewards[row - length + 1 : row + 1, lane].sum()), length, lane, derive_seed(seed, "fake", lane, row))
        for row, lane in np.argwhere(ended).tolist()
        if row >= length - 1
    )
