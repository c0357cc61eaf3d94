"""Rollouts as sequences, minibatches and micro-batches of tensors."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace

import numpy as np
import optree
import torch
from gymnasium import spaces

from inchworm.backends.torch.learner import PackedSequences, micro_batches, sequences_of
from inchworm.backends.torch.network import to_tensor
from inchworm.core.types import Advantages, Minibatch
from inchworm.rollout.fake import create_fake_rollout

SPACE = spaces.Dict({"x": spaces.Box(-1, 1, (2,)), "action_mask": spaces.MultiBinary(3)})


def tensors(rollout):
    return rollout.map(lambda array: torch.from_numpy(array.astype(np.int64) if array.dtype == np.uint64 else np.array(array)))


def advantages_of(rollout):
    number = torch.arange(rollout.rewards.numel(), dtype=torch.float32).reshape(rollout.rewards.shape)
    return Advantages(number, number, number, number)


def test_dead_rows_have_no_advantage_and_no_value_error():
    rollout = create_fake_rollout(SPACE, spaces.Discrete(3), 4, 2)
    valid = rollout.valid.copy()
    valid[2, 1] = False
    held = tensors(replace(rollout, valid=valid))
    numbers = torch.arange(8.0).reshape(4, 2)
    sequences = sequences_of(held, Advantages(numbers, numbers, numbers + 10, numbers + 20), 1, successors=False)
    dead = 2 * 2 + 1  # column of row 2, lane 1
    assert not sequences.valid[0, dead]
    assert sequences.advantages[0, dead] == 0
    assert sequences.returns[0, dead] == sequences.values[0, dead] == 5
    assert sequences.advantages[0, 0] == 10
    assert sequences.returns[0, 0] == 20


def test_tensors_of_read_only_memory_are_copies():
    rollout = create_fake_rollout(SPACE, spaces.Discrete(3), 3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where a tensor would write to read-only memory
        tensor = to_tensor(rollout.rewards, "cpu")
    before = rollout.rewards.copy()
    tensor.zero_()
    np.testing.assert_array_equal(rollout.rewards, before)
    assert to_tensor(np.array([2**40], np.uint64), "cpu").dtype == torch.int64  # torch hardly knows unsigned ones
    assert to_tensor(tensor, "cpu") is tensor


def test_a_minibatch_is_a_choice_of_columns():
    rollout = tensors(create_fake_rollout(SPACE, spaces.Discrete(3), 6, 2))
    sequences = sequences_of(rollout, advantages_of(rollout), 2, successors=False)
    assert sequences.valid.shape == (2, 6)
    permutation = np.random.default_rng(0).permutation(6)
    parts = PackedSequences(sequences).shuffled(4, permutation)  # 6 columns in 4: sizes 2, 2, 1, 1, padded to 2
    assert [int(part.valid.sum()) for part in parts] == [4, 4, 2, 2]
    starts = [int(part.values[0, column]) for part in parts for column in range(2) if part.valid[0, column]]
    # Column chunk * 2 + lane begins at row 2 * chunk of its lane: number 4 * chunk + lane.
    assert starts == [4 * (column // 2) + column % 2 for column in permutation]
    for part in parts:
        torch.testing.assert_close(part.values[1], part.values[0] + 2)  # the next row of the same lane


def test_advantages_are_normalised_minibatch_by_minibatch():
    rollout = tensors(create_fake_rollout(SPACE, spaces.Discrete(3), 6, 2))
    packed = PackedSequences(sequences_of(rollout, advantages_of(rollout), 2, successors=False))
    permutation = np.random.default_rng(0).permutation(6)  # 6 columns in 4: sizes 2, 2, 1, 1, padded to 2
    for plain, scaled in zip(packed.shuffled(4, permutation), packed.shuffled(4, permutation, normalized=True)):
        numbers = plain.advantages[plain.valid].double()
        expected = (numbers - numbers.mean()) / (numbers.std() + 1e-8)
        torch.testing.assert_close(scaled.advantages[scaled.valid].double(), expected, rtol=0, atol=1e-6)


def test_micro_batches_are_the_minibatch_in_pieces():
    rollout = tensors(create_fake_rollout(SPACE, spaces.Discrete(3), 5, 2))
    whole = sequences_of(rollout, advantages_of(rollout), 1, successors=True)
    assert list(micro_batches(whole, 1)) == [whole]
    for pieces in (2, 3, 10, 99):
        parts = list(micro_batches(whole, pieces))
        assert len(parts) == min(pieces, 10)
        for field in fields(Minibatch):
            trees = [getattr(part, field.name) for part in parts]
            if field.name != "policy_state" and optree.tree_leaves(trees[0]):
                joined = optree.tree_map(lambda *leaves: torch.cat(leaves, 1), *trees)
                assert optree.tree_all(optree.tree_map(torch.equal, joined, getattr(whole, field.name)))


def test_recorded_memory_follows_its_sequence():
    rollout = create_fake_rollout(SPACE, spaces.Discrete(3), 4, 2)
    memory = np.arange(2 * 2, dtype=np.float32).reshape(2, 2, 1)  # [T/L, B, mem]: 2 chunks of 2 lanes
    cut_state = np.zeros((len(rollout.cut_rows), 1), np.float32)
    held = tensors(replace(rollout, policy_state=memory, cut_state=cut_state))
    sequences = sequences_of(held, advantages_of(held), 2, successors=False)
    assert sequences.policy_state.shape == (4, 1)
    for part in PackedSequences(sequences).shuffled(2, np.array([3, 1, 0, 2])):
        chunks, lanes = (part.values[0] // 4).long(), (part.values[0] % 2).long()
        torch.testing.assert_close(part.policy_state[:, 0], torch.from_numpy(memory)[chunks, lanes, 0])
        for half in micro_batches(part, 2):
            assert half.policy_state.shape == (1, 1)
