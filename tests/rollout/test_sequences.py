"""Sequences and minibatches, with data that say where they come from: entry = 100 * t + b."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inchworm.core.errors import RolloutError
from inchworm.rollout.sequences import (
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
    assert len(sequence_states(memory, 100, 28)) == 4  # nobody has told: it may be so


def test_torch_tensors_pass_alike():
    torch = pytest.importorskip("torch")
    base = identifiable(5, 3)
    tensor = torch.from_numpy(base)
    np.testing.assert_array_equal(split_into_sequences(tensor, 2).numpy(), split_into_sequences(base, 2))
    np.testing.assert_array_equal(split_valid(tensor >= 0, 2).numpy(), split_valid(base >= 0, 2))
    chosen = select_sequences({"x": split_into_sequences(tensor, 2)}, torch.tensor([4, 0]))["x"]
    np.testing.assert_array_equal(chosen.numpy(), split_into_sequences(base, 2)[:, [4, 0]])


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
def test_a_shuffle_that_is_none_is_refused(permutation):
    with pytest.raises(ValueError, match=r"rng.permutation\(3\)"):
        list(iter_minibatches(3, 2, np.array(permutation)))


def test_no_minibatches_are_refused():
    with pytest.raises(ValueError, match="num_minibatches=0"):
        list(iter_minibatches(3, 0, np.arange(3)))


def test_select_takes_the_same_columns_of_every_leaf():
    base = identifiable(4, 3)
    split = split_into_sequences({"a": base, "b": base[..., None] * 2}, 2)
    chosen = select_sequences(split, np.array([5, 2]))
    # column 5 is chunk 1 of lane 2 (rows 2, 3), column 2 is chunk 0 of lane 2 (rows 0, 1)
    np.testing.assert_array_equal(chosen["a"], [[202, 2], [302, 102]])
    np.testing.assert_array_equal(chosen["b"][..., 0], 2 * chosen["a"])


def test_room_is_made_before_each_row_that_forgets_but_the_first():
    starts = np.array([[True, False], [False, False], [True, False], [True, True]])  # [L 4, N 2]
    plan = insert_reset_rows(starts)
    assert plan.depth == 4 + 4  # two more rows in the first column, one in the second; rounded up to four
    rows = np.full((8, 2), -1)
    rows.reshape(-1)[plan.places] = np.arange(8)
    rows.reshape(-1)[plan.inserted] = -9
    np.testing.assert_array_equal(rows.T, [[0, 2, -9, 4, -9, 6, -1, -1], [1, 3, 5, -9, 7, -1, -1, -1]])
    assert starts[0, 0]  # not written to


@pytest.mark.parametrize(("resets", "added"), [(1, 4), (4, 4), (5, 8), (33, 36), (65, 72), (129, 144)])
def test_room_is_round(resets, added):
    starts = np.zeros((200, 1), np.bool_)
    starts[1 : resets + 1] = True
    assert insert_reset_rows(starts).depth == 200 + added
