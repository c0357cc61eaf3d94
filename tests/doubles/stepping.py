"""Running vector envs by legal random actions, and comparing bit for bit what was returned or collected."""

import copy

import numpy as np
import optree

from inchworm.core.spaces import map_tree, tree_leaves
from inchworm.env.values import legal_action
from inchworm.rollout.rollout import ARRAY_FIELDS


def stack(elements):
    """Elements of a space as one batch [B, *leaf]."""
    first = elements[0]
    if isinstance(first, dict):
        return {key: stack([element[key] for element in elements]) for key in first}
    if isinstance(first, tuple):
        return tuple(stack([element[index] for element in elements]) for index in range(len(first)))
    return np.stack([np.asarray(element) for element in elements])


def random_actions(env, step, rng):
    rows = [map_tree(lambda array, lane=lane: array[lane], step.observations) for lane in range(env.num_lanes)]
    return stack([legal_action(env.action_space, row, rng) for row in rows])


def frozen(step):
    """A copy of an EnvStep that later steps do not overwrite."""
    return copy.deepcopy(step)


def reset_and_step(env, steps):
    """Reset and take steps with the action 0."""
    env.reset()
    for _ in range(steps):
        env.step(np.zeros(env.num_lanes, int))


def run(env, steps, seed=0):
    """A fresh run of random legal steps: all EnvSteps, the reset's first."""
    env.reset()
    return continue_run(env, steps, seed)


def continue_run(env, steps, seed=0):
    """Random legal steps from the current state: all EnvSteps, the current one first."""
    rng = np.random.default_rng(seed)
    taken = [frozen(env.reset(indices=()))]
    for _ in range(steps):
        taken.append(frozen(env.step(random_actions(env, taken[-1], rng))))
    return taken


def assert_equal_steps(ours, theirs):
    assert len(ours) == len(theirs)
    for index, (one, other) in enumerate(zip(ours, theirs)):
        for name in ("observations", "rewards", "terminated", "truncated", "episode_starts", "valid", "global_state", "infos"):
            assert_equal_trees(getattr(one, name), getattr(other, name), f"{name} at step {index}")
        assert len(one.ended) == len(other.ended), f"ended at step {index}"
        for first, second in zip(one.ended, other.ended):
            assert (first.lane, first.seed, dict(first.info)) == (second.lane, second.seed, dict(second.info))
            assert_equal_trees(first.final_observation, second.final_observation, f"final observation at step {index}")
            assert_equal_trees(first.final_global_state, second.final_global_state, f"final global state at step {index}")


def assert_equal_trees(one, other, what=""):
    ones, others = tree_leaves(one), tree_leaves(other)
    assert len(ones) == len(others), what
    for a, b in zip(ones, others):
        assert a.dtype == b.dtype, what
        assert a.shape == b.shape, what
        assert a.tobytes() == b.tobytes(), what


def assert_equal_rollouts(one, other):
    for name in ARRAY_FIELDS:
        assert optree.tree_structure(one[name]) == optree.tree_structure(other[name]), name
        assert_equal_trees(one[name], other[name], name)
    assert one.episodes == other.episodes
