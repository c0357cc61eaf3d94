"""Observations, masks and actions as flat arrays, entry by entry."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from inchworm.backends.numpy.policy import encode_mask, encode_observations, flatten_actions
from inchworm.policy.layout import action_layout, observation_layout


def encode(space, tree, leading=1):
    return encode_observations(observation_layout(space, convolutions=False), tree, leading)


def test_each_kind_by_hand():
    np.testing.assert_array_equal(encode(spaces.Discrete(3, start=5), np.array([5, 7])), [[1, 0, 0], [0, 0, 1]])
    np.testing.assert_array_equal(encode(spaces.MultiDiscrete([2, 3], start=[0, 1]), np.array([[1, 3]])), [[0, 1, 0, 0, 1]])
    np.testing.assert_array_equal(encode(spaces.MultiBinary(3), np.array([[1, 0, 1]], np.int8)), [[1, 0, 1]])
    np.testing.assert_array_equal(encode(spaces.Box(-9, 9, (2, 2)), np.array([[[1.0, 2], [3, 4]]], np.float32)), [[1, 2, 3, 4]])
    np.testing.assert_allclose(encode(spaces.Box(0, 255, (2,), np.uint8), np.array([[255, 51]], np.uint8)), [[1, 0.2]], rtol=1e-6)
    # Bytes that are no image (another range) are numbers.
    np.testing.assert_array_equal(encode(spaces.Box(0, 9, (2,), np.uint8), np.array([[9, 3]], np.uint8)), [[9, 3]])


def test_parts_of_a_dict_stand_in_the_order_of_their_names_and_the_mask_is_left_out():
    space = spaces.Dict({"b": spaces.Box(-9, 9, (1,)), "action_mask": spaces.MultiBinary(2), "a": spaces.Discrete(2)})
    tree = {"b": np.array([[7.0]], np.float32), "a": np.array([1]), "action_mask": np.array([[1, 0]], np.int8)}
    np.testing.assert_array_equal(encode(space, tree), [[0, 1, 7]])


def test_leading_axes_stay():
    space = spaces.Tuple([spaces.Box(-9, 9, (2,)), spaces.Discrete(2)])
    tree = (np.arange(12.0).reshape(2, 3, 2), np.ones((2, 3), int))
    found = encode(space, tree, 2)
    assert found.shape == (2, 3, 4)
    np.testing.assert_array_equal(found[1, 2], [10, 11, 0, 1])


def test_masks_stand_in_the_order_of_the_logits():
    layout = action_layout(spaces.Dict({"z": spaces.Discrete(2), "b": spaces.Box(-1, 1, (1,)), "a": spaces.MultiBinary(1)}), "clip")
    mask = {"z": np.array([[0, 1]], np.int8), "a": np.array([[1, 0]], np.int8)}
    np.testing.assert_array_equal(encode_mask(layout, mask), [[True, False, False, True]])


def test_actions_are_counted_from_zero():
    layout = action_layout(spaces.Dict({"z": spaces.Discrete(4, start=-2), "b": spaces.Box(-1, 1, (2,))}), "clip")
    choices, gaussians = flatten_actions(layout, {"z": np.array([-2, 1]), "b": np.array([[1.0, 2], [3, 4]], np.float32)})
    np.testing.assert_array_equal(choices, [[0], [3]])
    np.testing.assert_array_equal(gaussians, [[1, 2], [3, 4]])
