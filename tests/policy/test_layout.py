"""Layouts: the place of each part of an observation and of an action, and which spaces are refused."""

import numpy as np
import pytest
from gymnasium import spaces

from inchworm.config.sections import PolicyConfig
from inchworm.core.errors import SpaceError
from inchworm.policy.layout import action_layout, observation_layout
from inchworm.policy.spec import PolicySpec

BOX = spaces.Box(-1, 1, (2,))


def test_observation_parts_and_offsets():
    space = spaces.Dict({"b": spaces.Box(-1, 1, (2, 2)), "a": spaces.Discrete(3), "c": spaces.Box(0, 255, (4, 4, 1), np.uint8)})
    flat = observation_layout(space)
    assert [(part.path, part.kind, part.offset, part.size) for part in flat.parts] == [
        (("a",), "one_hot", 0, 3),
        (("b",), "box", 3, 4),
        (("c",), "box", 7, 16),
    ]
    assert flat.size == 23
    np.testing.assert_array_equal(flat.normalized, [False] * 3 + [True] * 4 + [False] * 16)
    assert flat.parts[2].scale == pytest.approx(1 / 255)
    split = observation_layout(space, 1)
    assert split.size == 7
    assert [part.path for part in split.images] == [("c",)]
    assert not flat.has_mask


def test_action_groups():
    layout = action_layout(spaces.Tuple([spaces.MultiDiscrete([2, 3]), BOX, spaces.MultiBinary(1)]), "clip")
    assert layout.group_sizes == (2, 3, 2)
    assert layout.groups == (slice(0, 2), slice(2, 5), slice(5, 7))
    assert (layout.num_logits, layout.num_gaussians, layout.num_outputs) == (7, 2, 9)
    np.testing.assert_array_equal(layout.low, [-1, -1])
    np.testing.assert_array_equal(layout.high, [1, 1])


def test_unflatten_gives_each_leaf_its_place_dtype_and_start():
    space = spaces.Dict(
        {"n": spaces.Discrete(3, start=5, dtype=np.int32), "x": spaces.Box(-1, 1, (2, 1), np.float64), "m": spaces.MultiBinary(2)}
    )
    tree = action_layout(space, "clip").unflatten(np.array([[1, 0, 2]]), np.array([[0.5, -0.5]], np.float32))
    assert (tree["n"].tolist(), tree["n"].dtype) == ([7], np.int32)
    assert (tree["m"].tolist(), tree["m"].dtype) == ([[1, 0]], np.int8)
    assert (tree["x"].tolist(), tree["x"].dtype) == ([[[0.5], [-0.5]]], np.float64)


def test_a_sampled_action_is_not_rounded_to_a_narrow_box():
    layout = action_layout(spaces.Box(-1, 1, (1,), np.float16), "clip")
    value = np.array([[0.123456]], np.float32)
    choices = np.zeros((1, 0), np.int64)
    assert layout.unflatten(choices, value, sampled=True)[0, 0] == value[0, 0]
    assert layout.unflatten(choices, value).dtype == np.float16


@pytest.mark.parametrize(
    ("space", "bounds", "words"),
    [
        (spaces.Box(0, 9, (2,), np.int64), "clip", "continuous actions need a float Box, else use MultiDiscrete"),
        (spaces.Box(-np.inf, np.inf, (2,)), "tanh", 'needs finite bounds.*use "clip"'),
        (spaces.Box(-3e38, 3e38, (2,)), "tanh", 'needs finite bounds.*use "clip"'),
        (spaces.Text(3), "clip", "Text spaces are not supported"),
        (spaces.Dict({}), "clip", "has nothing to choose"),
        (spaces.Box(-1, 1, (0,)), "clip", "has nothing to choose"),
        (spaces.Dict({"a": spaces.Graph(BOX, None)}), "clip", "Graph spaces at a are not supported"),
    ],
)
def test_action_spaces_that_are_refused(space, bounds, words):
    with pytest.raises(SpaceError, match=words):
        action_layout(space, bounds)


def test_observation_spaces_that_are_refused():
    with pytest.raises(SpaceError, match="Sequence spaces are not supported"):
        observation_layout(spaces.Sequence(BOX))
    with pytest.raises(SpaceError, match="has nothing that a policy could read"):
        observation_layout(spaces.Box(-1, 1, (0,)))
    with pytest.raises(SpaceError, match="has nothing that a policy could read"):
        observation_layout(spaces.Dict({"action_mask": spaces.MultiBinary(2)}))


@pytest.mark.parametrize(
    ("mask", "action_space", "words"),
    [
        (spaces.MultiBinary(3), spaces.Discrete(4), "has 3 entries where the action .* has 4 choices"),
        (spaces.Dict({"b": spaces.MultiBinary(2)}), spaces.Dict({"a": spaces.Discrete(2)}), "has no part a for the action of that name"),
        (spaces.MultiBinary(2), spaces.Dict({"a": spaces.Discrete(2)}), "has no part a"),
        (spaces.Tuple([]), spaces.Tuple([spaces.Discrete(2)]), "has no part 0"),
        (spaces.MultiBinary(3), BOX, r"the key action_mask, but the action space .* has no discrete part; rename it"),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask, action_space, words):
    with pytest.raises(SpaceError, match=words):
        PolicySpec(spaces.Dict({"x": BOX, "action_mask": mask}), action_space, PolicyConfig())
