"""Sequences and minibatches, with data that identify their origin: entry = 100 * t + b. Invalid rows are filled."""

from dataclasses import replace

import numpy as np
import optree
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from inchworm.core.errors import RolloutError
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.rollout import Rollout
from inchworm.rollout.sequences import (
    fill_invalid_rows,
    insert_reset_rows,
    iter_minibatches,
    num_sequences,
    select_sequences,
    sequence_states,
    split_into_sequences,
    split_valid,
)


def identifiable(steps: int, lanes: int) -> np.ndarray:
    return 100 * np.arange(steps)[:, None] + np.arange(lanes)  # [T, B]


@given(st.integers(0, 13), st.integers(0, 4), st.integers(1, 14))
def test_column_is_chunk_times_lanes_plus_lane(steps, lanes, length):
    columns = split_into_sequences(identifiable(steps, lanes), length)
    valid = split_valid(np.ones((steps, lanes), bool), length)
    chunks = -(-steps // length)
    assert columns.shape == valid.shape == (length, chunks * lanes) == (length, num_sequences(steps, lanes, length))
    for chunk in range(chunks):
        for lane in range(lanes):
            for row in range(length):
                t = chunk * length + row
                assert columns[row, chunk * lanes + lane] == 100 * min(t, steps - 1) + lane
                assert valid[row, chunk * lanes + lane] == (t < steps)


def test_trees_and_trailing_axes():
    base = identifiable(4, 2)
    tree = {"image": np.stack([base, base + 0.5], -1), "parts": (base, ())}
    split = split_into_sequences(tree, 2)
    assert split["image"].shape == (2, 4, 2)
    assert split["parts"][1] == ()
    # columns: chunk 0 of lanes 0, 1, then chunk 1 of lanes 0, 1
    np.testing.assert_array_equal(split["parts"][0], [[0, 1, 200, 201], [100, 101, 300, 301]])
    np.testing.assert_array_equal(split["image"][..., 1], split["parts"][0] + 0.5)


def test_length_1_is_the_ordinary_flattening_without_a_copy():
    base = identifiable(5, 3)
    split = split_into_sequences(base, 1)
    np.testing.assert_array_equal(split, base.reshape(1, 15))
    assert np.shares_memory(split, base)


def test_invalid_rows_stay_invalid_and_the_input_is_not_written_to():
    valid = np.ones((3, 2), bool)
    valid[1, 0] = False
    valid.flags.writeable = False
    split = split_valid(valid, 2)
    # lane 0: rows 0, 1 (dead) and 2, padding; lane 1: rows 0, 1 and 2, padding
    np.testing.assert_array_equal(split, [[True, True, True, True], [False, True, False, False]])


def test_recorded_memory_lines_up_with_its_sequence():
    memory = np.stack([identifiable(6, 2)[::3]] * 4, -1)  # [T/S = 2, B = 2, mem = 4], recorded at rows 0 and 3
    first_rows = split_into_sequences(identifiable(6, 2), 3)[0]  # [N]
    np.testing.assert_array_equal(sequence_states({"h": memory}, 6, 3)["h"][:, 0], first_rows)
    assert sequence_states((), 4, 2) == ()


def test_a_known_spacing_refuses_sequences_that_begin_elsewhere():
    """100 rows, memory every 32: rows 0, 32, 64, 96. Sequences of 28 steps are four, too, but begin at 28, 56, 84."""
    memory = np.array([0, 32, 64, 96], np.float32).reshape(4, 1, 1)
    assert sequence_states(memory, 100, 32, 32)[:, 0].tolist() == [0, 32, 64, 96]
    assert sequence_states(memory, 100, 64, 32)[:, 0].tolist() == [0, 64]
    assert sequence_states(memory, 100, 100, 32)[:, 0].tolist() == [0]
    for length in (28, 16, 48):
        with pytest.raises(RolloutError, match=f"does not fit sequences of {length} steps"):
            sequence_states(memory, 100, length, 32)
    assert len(sequence_states(memory, 100, 28)) == 4  # the spacing is unknown: it may be 28


@given(st.integers(0, 40), st.integers(1, 50), st.integers(0, 2**32 - 1))
def test_every_sequence_exactly_once(total, parts, seed):
    permutation = np.random.default_rng(seed).permutation(total)
    batches = list(iter_minibatches(total, parts, permutation))
    assert len(batches) == min(parts, total)
    assert len({columns.shape for columns, _ in batches}) <= 1  # one shape
    sizes = [int(real.sum()) for _, real in batches]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    assert all(columns.dtype == np.int64 and real.dtype == bool and columns.shape == real.shape for columns, real in batches)
    real_columns = [column for columns, real in batches for column in columns[real]]
    np.testing.assert_array_equal(real_columns, permutation)  # in the order of the shuffle, none twice, none missing
    for columns, real in batches:
        assert set(columns[~real]) <= set(columns[real])


def test_seven_sequences_in_three_minibatches():
    batches = list(iter_minibatches(7, 3, np.array([6, 5, 4, 3, 2, 1, 0])))
    # sizes 3, 2, 2; the short ones repeat their first column
    assert [columns.tolist() for columns, _ in batches] == [[6, 5, 4], [3, 2, 3], [1, 0, 1]]
    assert [real.tolist() for _, real in batches] == [[True] * 3, [True, True, False], [True, True, False]]


@pytest.mark.parametrize("permutation", [[0, 1], [0, 1, 1], [0, 1, 3], [[0, 1, 2]]])
def test_an_invalid_permutation_is_rejected(permutation):
    with pytest.raises(ValueError, match=r"rng.permutation\(3\)"):
        list(iter_minibatches(3, 2, np.array(permutation)))
    with pytest.raises(ValueError, match="num_minibatches=0"):
        list(iter_minibatches(3, 0, np.arange(3)))


def test_select_takes_the_same_columns_of_every_leaf():
    base = identifiable(4, 3)
    split = split_into_sequences({"a": base, "b": base[..., None] * 2}, 2)
    chosen = select_sequences(split, np.array([5, 2]))
    # column 5 is chunk 1 of lane 2 (rows 2, 3), column 2 is chunk 0 of lane 2 (rows 0, 1)
    np.testing.assert_array_equal(chosen["a"], [[202, 2], [302, 102]])
    np.testing.assert_array_equal(chosen["b"][..., 0], 2 * chosen["a"])


def test_a_reset_row_before_each_start_but_the_first():
    starts = np.array([[True, False], [False, False], [True, False], [True, True]])  # [L 4, N 2]
    plan = insert_reset_rows(starts)
    assert plan.depth == 4 + 4  # two more rows in the first column, one in the second; rounded up to four
    rows = np.full((8, 2), -1)
    rows.reshape(-1)[plan.places] = np.arange(8)
    rows.reshape(-1)[plan.inserted] = -9
    np.testing.assert_array_equal(rows.T, [[0, 2, -9, 4, -9, 6, -1, -1], [1, 3, 5, -9, 7, -1, -1, -1]])
    assert starts[0, 0]  # not written to


@pytest.mark.parametrize(("resets", "added"), [(1, 4), (4, 4), (5, 8), (33, 36), (65, 72), (129, 144)])
def test_the_number_of_reset_rows_is_round(resets, added):
    starts = np.zeros((200, 1), np.bool_)
    starts[1 : resets + 1] = True
    assert insert_reset_rows(starts).depth == 200 + added


def test_successors_are_the_next_rows_and_at_cuts_the_true_ones():
    # Lane 0: row 0 continues, row 1 is truncated with successor 71, row 2 is the last, with successor 72.
    # Lane 1: row 0 terminated: its successor is the next row, which must not be used.
    observations = np.array([[1.0, 10], [2, 20], [3, 30]])
    zeros = dict.fromkeys(("actions", "log_probs", "rewards"), np.zeros((3, 2), np.float32))
    flags = {"terminated": np.array([[0, 1], [0, 0], [0, 0]], bool), "truncated": np.array([[0, 0], [1, 0], [0, 0]], bool)}
    cuts = {"cut_rows": [[1, 0], [2, 0], [2, 1]], "cut_observations": [71.0, 72.0, 73.0]}
    rollout = Rollout.from_dict({"observations": observations, **zeros, **flags, **cuts})
    np.testing.assert_array_equal(rollout.next_observations, [[2, 20], [71, 30], [72, 73]])
    np.testing.assert_array_equal(rollout.observations, observations)
    assert create_fake_rollout(spaces.Box(-1, 1, (2,)), spaces.Discrete(3), 0, 2).next_observations.shape == (0, 2, 2)


SPACE = spaces.Dict({"x": spaces.Box(-1, 1, (2,)), "action_mask": spaces.MultiBinary(3)})
READ = ("observations", "actions", "log_probs")


@pytest.fixture
def clean():
    return create_fake_rollout(SPACE, spaces.Discrete(3, start=4), 4, 2)


@pytest.fixture
def valid():
    """Three invalid rows; the first valid one is (0, 1)."""
    rows = np.ones((4, 2), bool)
    rows[0, 0] = rows[1, 0] = rows[3, 1] = False
    return rows


def dirty(rollout, valid, garbage=np.nan):
    data = {name: optree.tree_map(np.array, rollout[name]) for name in (*READ, "rewards", "cut_observations")}
    data["observations"]["x"][~valid] = garbage
    data["observations"]["action_mask"][~valid] = 0
    data["actions"][~valid] = 0  # which the space does not have
    data["log_probs"][~valid] = garbage
    data["rewards"][0, 0], data["rewards"][1, 0], data["rewards"][3, 1] = 7, -7, np.inf
    data["cut_observations"]["x"][~valid[tuple(rollout.cut_rows.T)]] = garbage
    return replace(rollout, valid=valid, cut_valid=valid[tuple(rollout.cut_rows.T)], **data)


def test_invalid_rows_become_the_first_valid_one(clean, valid):
    safe = fill_invalid_rows(dirty(clean, valid))
    for name in READ:
        for found, expected in zip(optree.tree_leaves(safe[name]), optree.tree_leaves(clean[name])):
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found[valid], expected[valid])
            for t, b in np.argwhere(~valid):
                np.testing.assert_array_equal(found[t, b], expected[0, 1])


def test_cut_rows_of_invalid_rows_are_filled_too(clean, valid):
    safe = fill_invalid_rows(dirty(clean, valid))
    invalid = ~valid[tuple(clean.cut_rows.T)]
    assert invalid.any()
    assert not invalid.all()
    np.testing.assert_array_equal(safe.cut_observations["x"][~invalid], clean.cut_observations["x"][~invalid])
    for row in safe.cut_observations["x"][invalid]:
        np.testing.assert_array_equal(row, clean.observations["x"][0, 1])
    np.testing.assert_array_equal(safe.cut_rows, clean.cut_rows)


def test_an_agent_that_joins_right_after_an_invalid_row_is_kept(clean, valid):
    bad = dirty(clean, valid)
    joins = replace(bad, cut_observations=clean.cut_observations, cut_valid=np.ones_like(bad.cut_valid))
    np.testing.assert_array_equal(fill_invalid_rows(joins).cut_observations["x"], clean.cut_observations["x"])


def test_finite_rewards_stay(clean, valid):
    rewards = fill_invalid_rows(dirty(clean, valid)).rewards
    assert rewards.dtype == np.float32
    assert (rewards[0, 0], rewards[1, 0], rewards[3, 1]) == (7, -7, 0)  # a reward after death may count for a team
    np.testing.assert_array_equal(rewards[valid], clean.rewards[valid])


def test_a_valid_rows_reward_is_never_changed(clean, valid):
    # A reward that is not finite in a valid row is an error that must not be hidden.
    rewards = np.array(clean.rewards)
    rewards[2, 0] = np.nan
    assert np.isnan(fill_invalid_rows(replace(clean, valid=valid, rewards=rewards)).rewards[2, 0])


def test_without_invalid_rows_nothing_is_copied(clean):
    none_valid = replace(clean, valid=np.zeros((4, 2), bool))
    assert fill_invalid_rows(clean) is clean
    assert fill_invalid_rows(none_valid) is none_valid
