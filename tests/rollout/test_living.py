"""Rows where no agent lived: nothing in them reaches a network, and nothing else changes."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import optree
import pytest
from gymnasium import spaces

from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.sequences import fill_invalid_rows

SPACE = spaces.Dict({"x": spaces.Box(-1, 1, (2,)), "action_mask": spaces.MultiBinary(3)})
READ = ("observations", "actions", "log_probs")


@pytest.fixture
def clean():
    return create_fake_rollout(SPACE, spaces.Discrete(3, start=4), 4, 2)


@pytest.fixture
def valid():
    """Three dead rows; the first living one is (0, 1)."""
    alive = np.ones((4, 2), bool)
    alive[0, 0] = alive[1, 0] = alive[3, 1] = False
    return alive


def dirty(rollout, valid, garbage=np.nan):
    data = {name: optree.tree_map(np.array, rollout[name]) for name in (*READ, "rewards", "cut_observations")}
    data["observations"]["x"][~valid] = garbage
    data["observations"]["action_mask"][~valid] = 0
    data["actions"][~valid] = 0  # which the space does not have
    data["log_probs"][~valid] = garbage
    data["rewards"][0, 0], data["rewards"][1, 0], data["rewards"][3, 1] = 7, -7, np.inf
    data["cut_observations"]["x"][~valid[tuple(rollout.cut_rows.T)]] = garbage
    return replace(rollout, valid=valid, cut_valid=valid[tuple(rollout.cut_rows.T)], **data)


def test_dead_rows_become_the_first_living_one(clean, valid):
    safe = fill_invalid_rows(dirty(clean, valid))
    for name in READ:
        for found, expected in zip(optree.tree_leaves(safe[name]), optree.tree_leaves(clean[name])):
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found[valid], expected[valid])  # what is alive is left as it is
            for t, b in np.argwhere(~valid):
                np.testing.assert_array_equal(found[t, b], expected[0, 1])


def test_cut_rows_of_the_dead_too(clean, valid):
    safe = fill_invalid_rows(dirty(clean, valid))
    dead = ~valid[tuple(clean.cut_rows.T)]
    assert dead.any()
    assert not dead.all()
    np.testing.assert_array_equal(safe.cut_observations["x"][~dead], clean.cut_observations["x"][~dead])
    for row in safe.cut_observations["x"][dead]:
        np.testing.assert_array_equal(row, clean.observations["x"][0, 1])
    np.testing.assert_array_equal(safe.cut_rows, clean.cut_rows)


def test_an_agent_that_joins_right_after_a_dead_row_is_seen(clean, valid):
    bad = dirty(clean, valid)
    joins = replace(bad, cut_observations=clean.cut_observations, cut_valid=np.ones_like(bad.cut_valid))
    np.testing.assert_array_equal(fill_invalid_rows(joins).cut_observations["x"], clean.cut_observations["x"])


def test_rewards_stay_if_they_are_numbers(clean, valid):
    rewards = fill_invalid_rows(dirty(clean, valid)).rewards
    assert rewards.dtype == np.float32
    assert (rewards[0, 0], rewards[1, 0], rewards[3, 1]) == (7, -7, 0)  # a reward after death may count for a team
    np.testing.assert_array_equal(rewards[valid], clean.rewards[valid])


def test_a_living_rows_reward_is_never_touched(clean, valid):
    # What is not finite in a living row is somebody's mistake, and not to be hidden.
    rewards = np.array(clean.rewards)
    rewards[2, 0] = np.nan
    assert np.isnan(fill_invalid_rows(replace(clean, valid=valid, rewards=rewards)).rewards[2, 0])


def test_the_result_does_not_depend_on_the_garbage(clean, valid):
    results = [fill_invalid_rows(dirty(clean, valid, garbage)) for garbage in (np.nan, np.inf, 1e30, 0.0)]
    for other in results[1:]:
        for field in fields(other):
            if field.name != "episodes":
                optree.tree_map(np.testing.assert_array_equal, results[0][field.name], other[field.name])


def test_the_input_is_not_written_to(clean, valid):
    given = dirty(clean, valid).map(np.array)
    before = [leaf.tobytes() for leaf in optree.tree_leaves(given.to_dict()) if isinstance(leaf, np.ndarray)]
    fill_invalid_rows(given)
    assert before == [leaf.tobytes() for leaf in optree.tree_leaves(given.to_dict()) if isinstance(leaf, np.ndarray)]


def test_nothing_to_do_is_nothing_copied(clean):
    nobody = replace(clean, valid=np.zeros((4, 2), bool))
    assert fill_invalid_rows(clean) is clean
    assert fill_invalid_rows(nobody) is nobody


def test_trees_of_actions():
    space = spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Dict({"k": spaces.MultiDiscrete([2, 3])})])
    rollout = create_fake_rollout(spaces.Discrete(4, start=2), space, 3, 2)
    valid = np.ones((3, 2), bool)
    valid[1, 1] = False
    safe = fill_invalid_rows(replace(rollout, valid=valid))
    np.testing.assert_array_equal(safe.actions[0][1, 1], rollout.actions[0][0, 0])
    np.testing.assert_array_equal(safe.actions[1]["k"][1, 1], rollout.actions[1]["k"][0, 0])
    assert safe.observations[1, 1] == rollout.observations[0, 0]
