"""A rollout as samples: what belongs to a row stays with it, through sequences, shuffle, windows and micro-batches."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import optree
import pytest
from gymnasium import spaces

from inchworm.backends.numpy.learner import RolloutSamples, as_minibatch, micro_batches
from inchworm.core.spaces import mask_space, with_mask
from inchworm.core.types import Advantages, Minibatch
from inchworm.rollout.rollout import Rollout

T, B = 6, 2
SPACE = spaces.Dict({"x": spaces.Box(-100, 100, (2,))})
ACTIONS = spaces.Dict({"d": spaces.MultiDiscrete([2, 3], start=[4, -1]), "g": spaces.Box(-9, 9, (2,))})


def numbered(valid=None):
    """Every array of row (t, b) tells its number 2 t + b; masks are legal at the number's own bits."""
    number = np.arange(T * B, dtype=np.float32).reshape(T, B)
    whole = number.astype(np.int64)
    rollout = Rollout.from_dict(
        {
            "observations": {"x": np.stack([number, -number], -1), "action_mask": {"d": mask_of(whole)}},
            "actions": {"d": np.stack([4 + whole % 2, whole % 3 - 1], -1), "g": np.stack([number / 2, number / 4], -1)},
            "log_probs": -number,
            "rewards": 10 * number,
            "terminated": whole % 5 == 4,
            "truncated": np.zeros((T, B), bool),
            "valid": np.ones((T, B), bool) if valid is None else valid,
            "next_observations": {"x": np.stack([number + 2, -number - 2], -1), "action_mask": {"d": mask_of(whole + 2)}},
        }
    )
    return rollout, Advantages(number + 100, number + 200, number + 300, number + 400)


def mask_of(number):
    """[..., 5] with the first choice of either group always legal."""
    bits = (np.asarray(number)[..., None] >> np.arange(5)) & 1
    bits[..., 0] = bits[..., 2] = 1
    return bits.astype(np.int8)


@pytest.fixture
def samples_of(make_policy):
    def make(length=1, *, valid=None, successors=False, **options):
        policy = make_policy(with_mask(SPACE, mask_space(ACTIONS)), ACTIONS, **options)
        rollout, advantages = numbered(valid)
        return RolloutSamples(policy, rollout, advantages, length, successors=successors)

    return make


def check_rows(samples):
    """Each column tells one number in all of its fields; the numbers."""
    number = samples.inputs[:, 0]
    whole = number.astype(np.int64)
    np.testing.assert_array_equal(samples.inputs[:, 1], -number)
    np.testing.assert_array_equal(samples.choices, [whole % 2, whole % 3])
    np.testing.assert_array_equal(samples.gaussians, [number / 2, number / 4])
    np.testing.assert_array_equal(samples.mask, (mask_of(whole) != 0).T)
    np.testing.assert_array_equal(samples.log_probs, -number)
    np.testing.assert_array_equal(samples.advantages, number + 300)
    np.testing.assert_array_equal(samples.returns, number + 400)
    np.testing.assert_array_equal(samples.values, number + 100)
    minibatch = as_minibatch(samples)
    rows = number.reshape(samples.length, -1)
    np.testing.assert_array_equal(minibatch.observations["x"][..., 0], rows)
    np.testing.assert_array_equal(minibatch.observations["action_mask"]["d"], mask_of(rows.astype(np.int64)))
    np.testing.assert_array_equal(minibatch.actions["d"][..., 0], 4 + rows % 2)
    np.testing.assert_array_equal(minibatch.actions["g"][..., 0], rows / 2)
    for name, expected in {"log_probs": -rows, "rewards": 10 * rows, "advantages": rows + 300, "returns": rows + 400}.items():
        np.testing.assert_array_equal(getattr(minibatch, name), expected, err_msg=name)
    np.testing.assert_array_equal(minibatch.values, rows + 100)
    np.testing.assert_array_equal(minibatch.terminated, rows % 5 == 4)
    np.testing.assert_array_equal(minibatch.episode_starts, numbered()[0].episode_starts.reshape(-1)[rows.astype(int)])
    valid = np.ones(len(whole), bool) if samples.valid is None else samples.valid
    np.testing.assert_array_equal(minibatch.valid, valid.reshape(samples.length, -1))
    assert samples.count == valid.sum()
    return whole


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_row_once_and_whole(samples_of, dtype):
    permutation = np.random.default_rng(0).permutation(12)
    whole = samples_of(dtype=dtype)
    parts = whole.shuffled(3, permutation)
    found = [check_rows(part) for part in parts]
    np.testing.assert_array_equal(np.concatenate(found), permutation)
    assert all(part.valid is None and part.count == 4 for part in parts)
    assert parts[0].inputs.dtype == parts[0].gaussians.dtype == np.float32  # as the advantages of this test
    np.testing.assert_array_equal(whole.valid, np.ones((1, 12), bool))


def test_minibatches_that_do_not_divide_are_padded_and_the_padding_is_not_valid(samples_of):
    # 12 in 5: sizes 3, 3, 2, 2, 2, each padded to 3.
    permutation = np.random.default_rng(1).permutation(12)
    parts = samples_of().shuffled(5, permutation)
    assert [part.count for part in parts] == [3, 3, 2, 2, 2]
    assert {len(part.inputs) for part in parts} == {3}
    np.testing.assert_array_equal(np.concatenate([check_rows(part)[part.valid] for part in parts]), permutation)


def test_sequences_go_on_in_time(samples_of):
    # L = 4 of T = 6: chunks of 4 and of 2 + 2 repeated rows. Column chunk · B + lane begins at number 8 · chunk + lane.
    whole = samples_of(4)
    np.testing.assert_array_equal(whole.valid, [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]])
    permutation = np.array([2, 1, 3, 0])
    parts = whole.shuffled(3, permutation)  # 2, 1 and 1 sequences, padded to 2
    numbers = [check_rows(part).reshape(4, -1) for part in parts]
    np.testing.assert_array_equal(numbers[0], [[8, 1], [10, 3], [10, 5], [10, 7]])
    np.testing.assert_array_equal(parts[0].valid.reshape(4, -1), [[1, 1], [1, 1], [0, 1], [0, 1]])
    np.testing.assert_array_equal(numbers[1][:, 0], [9, 11, 11, 11])
    np.testing.assert_array_equal(parts[1].valid.reshape(4, -1), [[1, 0], [1, 0], [0, 0], [0, 0]])
    np.testing.assert_array_equal(numbers[2][:, 0], [0, 2, 4, 6])
    assert sum(part.count for part in parts) == 12


def test_dead_rows_do_not_count_and_have_no_advantage_and_no_value_error(samples_of):
    valid = np.ones((T, B), bool)
    valid[2, 1] = valid[5, 0] = False  # numbers 5 and 10
    (part,) = samples_of(valid=valid).shuffled(1, np.arange(12))
    np.testing.assert_array_equal(part.valid, ~np.isin(np.arange(12), [5, 10]))
    assert part.count == 10
    np.testing.assert_array_equal(part.advantages[[5, 10]], 0)
    np.testing.assert_array_equal(part.returns[[5, 10]], part.values[[5, 10]])
    np.testing.assert_array_equal(part.values[[5, 10]], [105, 110])
    np.testing.assert_array_equal(part.advantages[[4, 11]], [304, 311])


def test_an_epochs_scalars_are_its_own(samples_of):
    # A minibatch that normalises its advantages in place changes neither the next epoch nor its neighbours.
    whole = samples_of()
    first, second = whole.shuffled(2, np.arange(12))
    first.advantages[:] = 0
    np.testing.assert_array_equal(as_minibatch(first).advantages, 0)  # what people read is what the step has
    np.testing.assert_array_equal(second.advantages, np.arange(6, 12) + 300)
    for part in whole.shuffled(2, np.arange(12)):
        check_rows(part)


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("pieces", [1, 2, 3, 99])
def test_micro_batches_are_the_minibatch_in_pieces(samples_of, length, pieces):
    valid = np.ones((T, B), bool)
    valid[1, 0] = False
    (whole,) = samples_of(length, valid=valid, successors=True).shuffled(1, np.random.default_rng(2).permutation(12 // length))
    parts = list(micro_batches(whole, pieces))
    assert len(parts) == min(pieces, 12 // length)
    assert sum(part.count for part in parts) == whole.count == 11
    for name in ("inputs", "choices", "gaussians", "mask", "log_probs", "advantages", "returns", "values", "valid"):
        axis = 1 if name in ("choices", "gaussians", "mask") else 0

        def rows(part, name=name, axis=axis):
            leaf = getattr(part, name)
            return leaf.reshape(*leaf.shape[:axis], length, -1, *leaf.shape[axis + 1 :])

        joined = np.concatenate([rows(part) for part in parts], axis + 1)
        np.testing.assert_array_equal(joined, rows(whole), err_msg=name)
    expected = as_minibatch(whole)
    found = [as_minibatch(part) for part in parts]
    for field in fields(Minibatch):
        trees = [getattr(part, field.name) for part in found]
        joined = optree.tree_map(lambda *leaves: np.concatenate(leaves, 1), *trees)
        optree.tree_map(np.testing.assert_array_equal, joined, getattr(expected, field.name))


def test_pieces_have_the_advantages_that_their_minibatch_has_now(samples_of):
    (whole,) = samples_of().shuffled(1, np.arange(12))
    whole.advantages[:] *= -1
    for part in micro_batches(whole, 3):
        np.testing.assert_array_equal(as_minibatch(part).advantages[0], -(as_minibatch(part).observations["x"][0, :, 0] + 300))


def test_successors_on_demand(samples_of):
    (part,) = samples_of().shuffled(1, np.arange(12))
    assert as_minibatch(part).next_observations == ()
    (part,) = samples_of(successors=True).shuffled(1, np.arange(12))
    found = as_minibatch(part).next_observations["x"][0, :, 0]
    goes_on = np.arange(12) % 5 != 4  # nothing follows a terminated row
    np.testing.assert_array_equal(found[goes_on], np.arange(12)[goes_on] + 2)


def test_without_masks_and_choices_there_are_none(make_policy):
    policy = make_policy(spaces.Box(-100, 100, (1,)), spaces.Box(-1, 1, (2,)))
    rollout, advantages = numbered()
    rollout = replace(rollout, observations=rollout.observations["x"][..., :1], actions=rollout.actions["g"])
    (part,) = RolloutSamples(policy, rollout, advantages, 1, successors=False).shuffled(1, np.arange(12))
    assert part.mask is None
    assert part.choices.shape == (0, 12)
    assert part.inputs.shape == (12, 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_inputs_are_what_the_policy_itself_reads(make_policy, dtype):
    # mean 3, variance 4, clip 1.5: number 4 becomes 0.5, number 11 would be 4 and is held at 1.5.
    policy = make_policy(
        spaces.Box(-100, 100, (1,)), spaces.Box(-1, 1, (2,)), dtype=dtype, normalize_observations=True, observation_clip=1.5
    )
    statistics = {"mean": np.array([3.0]), "var": np.array([4.0]), "count": np.array(9)}
    policy.set_weights(policy.get_weights() | {f"observation_normalizer.{name}": value for name, value in statistics.items()})
    rollout, advantages = numbered()
    rollout = replace(rollout, observations=rollout.observations["x"][..., :1], actions=rollout.actions["g"])
    wide = Advantages(*[getattr(advantages, field.name).astype(dtype) for field in fields(Advantages)])
    (part,) = RolloutSamples(policy, rollout, wide, 1, successors=False).shuffled(1, np.arange(12))
    np.testing.assert_allclose(part.inputs[:, 0], np.clip((np.arange(12) - 3) / 2, -1.5, 1.5), atol=1e-6)
    assert part.inputs.dtype == part.advantages.dtype == part.gaussians.dtype == dtype
