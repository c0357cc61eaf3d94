"""Spaces: their leaves, their arrays, their masks, and their description as plain data."""

import json
from collections import OrderedDict

import numpy as np
import pytest
from gymnasium import spaces

from inchworm.core.errors import SpaceError
from inchworm.core.spaces import (
    build_tree,
    check_same_form,
    form_of,
    in_one_line,
    leaf,
    leaves,
    mask_sizes,
    mask_space,
    space_from_dict,
    space_to_dict,
    split_mask,
    with_mask,
    zeros,
)

NESTED = spaces.Dict(
    {
        "z": spaces.Box(0, 255, (2, 2, 3), np.uint8),
        "a": spaces.Tuple([spaces.Discrete(3), spaces.Dict({"k": spaces.MultiBinary(4)})]),
        "m": spaces.MultiDiscrete([2, 3]),
    }
)


def test_leaves_and_trees_are_sorted_and_have_the_structure_of_the_space():
    assert [path for path, _ in leaves(NESTED)] == [("a", 0), ("a", 1, "k"), ("m",), ("z",)]
    assert build_tree(NESTED, lambda path, _: path) == {"a": (("a", 0), {"k": ("a", 1, "k")}), "m": ("m",), "z": ("z",)}
    ordered = spaces.Dict(OrderedDict(z=spaces.Discrete(2), a=spaces.Discrete(3)))  # Gymnasium keeps this order; a tree does not
    assert [path for path, _ in leaves(ordered)] == [("a",), ("z",)]
    assert list(build_tree(ordered, lambda path, _: path)) == ["a", "z"]
    assert list(leaves(spaces.Discrete(2))) == [((), spaces.Discrete(2))]
    assert build_tree(spaces.Discrete(2), lambda path, _: path) == ()
    assert list(leaves(spaces.Tuple([]))) == []


@pytest.mark.parametrize(
    "space, named",
    [
        (spaces.Text(5), "Text spaces"),
        (spaces.Dict({"x": spaces.Tuple([spaces.Sequence(spaces.Discrete(2))])}), "Sequence spaces at x.0"),
        (spaces.Graph(spaces.Discrete(2), None), "Graph spaces"),
    ],
)
def test_other_spaces_are_refused_by_name_and_place(space, named):
    for refuse in (lambda: list(leaves(space)), lambda: build_tree(space, lambda path, leaf: None)):
        with pytest.raises(SpaceError, match=f"^{named} are not supported; use Box"):
            refuse()
    with pytest.raises(SpaceError, match="not supported"):
        space_to_dict(space)


def test_zeros():
    tree = zeros(NESTED, (5, 2))
    assert tree["z"].shape == (5, 2, 2, 2, 3)
    assert tree["z"].dtype == np.uint8
    assert tree["a"][0].shape == (5, 2)
    assert tree["a"][1]["k"].dtype == np.int8
    assert not any(np.any(leaf(tree, path)) for path, _ in leaves(NESTED))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (3,), np.float32),
        spaces.Box(0, 255, (4, 4, 1), np.uint8),
        spaces.Box(-np.inf, np.inf, (), np.float64),
        spaces.Box(np.array([-1, -np.inf], np.float32), np.array([0.1, np.inf], np.float32)),
        spaces.Box(np.array([[0, 1]]), np.array([[2, 3]]), dtype=np.int16),
        spaces.Box(0, 1, (0,), np.float32),
        spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64),
        spaces.Discrete(5),
        spaces.Discrete(5, start=-2),
        spaces.MultiDiscrete([2, 3], start=[1, -1]),
        spaces.MultiDiscrete([[2, 3], [4, 5]], dtype=np.int32),
        spaces.MultiBinary(3),
        spaces.MultiBinary([2, 3]),
        spaces.Tuple([]),
        spaces.Box(0, 255, (2048, 2048, 4), np.uint8),
        NESTED,
    ],
)
def test_spaces_as_plain_data(space):
    data = json.loads(json.dumps(space_to_dict(space), allow_nan=False))
    back = space_from_dict(data)
    assert back == space
    for (_, one), (_, other) in zip(leaves(back), leaves(space)):
        assert one.dtype == other.dtype


# masks
def test_mask_sizes():
    assert mask_sizes(spaces.Discrete(4)) == (4,)
    assert mask_sizes(spaces.MultiDiscrete([[2, 3], [4, 5]])) == (2, 3, 4, 5)
    assert mask_sizes(spaces.MultiBinary(3)) == (2, 2, 2)  # off or on, each
    assert mask_sizes(spaces.MultiBinary([2, 2])) == (2,) * 4
    assert mask_sizes(spaces.Box(0, 1)) == ()


def test_mask_spaces():
    assert mask_space(spaces.Discrete(4, start=7)) == spaces.MultiBinary(4)
    assert mask_space(spaces.MultiDiscrete([2, 3])) == spaces.MultiBinary(5)
    assert mask_space(spaces.MultiBinary(3)) == spaces.MultiBinary(6)
    box = spaces.Box(0, 1)
    assert mask_space(spaces.Dict({"go": spaces.Discrete(2), "aim": box})) == spaces.Dict({"go": spaces.MultiBinary(2)})
    # a tuple keeps its places; what has no mask is an empty tree
    assert mask_space(spaces.Tuple([box, spaces.Discrete(2)])) == spaces.Tuple([spaces.Tuple([]), spaces.MultiBinary(2)])
    inner = spaces.Dict({"x": spaces.Tuple([spaces.Discrete(3)]), "y": spaces.Dict({"b": box})})
    assert mask_space(inner) == spaces.Dict({"x": spaces.Tuple([spaces.MultiBinary(3)])})
    with pytest.raises(SpaceError, match="needs a discrete part"):
        mask_space(spaces.Dict({"aim": box}))


def test_masks_next_to_observations():
    box, mask = spaces.Box(0, 1, (2,)), mask_space(spaces.Discrete(3))
    assert split_mask(box) == (box, None)
    masked = with_mask(box, mask)
    assert masked == spaces.Dict({"observation": box, "action_mask": mask})
    assert split_mask(masked) == (spaces.Dict({"observation": box}), mask)
    assert with_mask(spaces.Dict({"x": box}), mask) == spaces.Dict({"x": box, "action_mask": mask})


@pytest.mark.parametrize(
    "change, words",
    [
        ({"kind": "Sphere"}, "'Sphere'"),
        ({"shape": [2**40]}, "too large"),
        ({"shape": [-1]}, "not a valid shape"),
        ({"shape": [2.0]}, "not a valid shape"),
        ({"shape": [1] * 40}, "not a valid shape"),
        ({"shape": [True]}, "not a valid shape"),
        ({"dtype": "object"}, "unknown dtype"),
        ({"dtype": "f4,f4"}, "unknown dtype"),
        ({"dtype": ["float32"]}, "unknown dtype"),
        ({"dtype": ">f4"}, "unknown dtype"),
    ],
)
def test_a_description_is_not_trusted(change, words):
    good = {"kind": "Box", "shape": [2], "dtype": "float32", "low": "-inf", "high": [1.0, 2.0]}
    assert space_from_dict(good) == spaces.Box(np.array([-np.inf, -np.inf], np.float32), np.array([1, 2], np.float32))
    with pytest.raises(SpaceError, match=words):
        space_from_dict({**good, **change})


def test_the_form_of_a_space_is_its_tree_shapes_and_choices_without_bounds():
    tight, loose = spaces.Box(-1, 1, (2,)), spaces.Box(-5, 5, (2,))
    assert form_of(tight) == form_of(loose)
    others = [spaces.Box(-1, 1, (3,)), spaces.Discrete(2), spaces.Dict({"a": tight}), spaces.Tuple([tight])]
    for other in others:
        assert form_of(other) != form_of(tight)
    assert form_of(spaces.Discrete(2)) != form_of(spaces.Discrete(3))
    assert form_of(spaces.MultiDiscrete([2, 3])) != form_of(spaces.MultiDiscrete([3, 2]))
    check_same_form("it", (tight, spaces.Discrete(2)), (loose, spaces.Discrete(2)))
    with pytest.raises(SpaceError, match=r"^it was made for the action space Discrete\(2\), but the environment has Discrete\(3\)$"):
        check_same_form("it", (tight, spaces.Discrete(2)), (loose, spaces.Discrete(3)))
    wide = spaces.Box(np.zeros((9, 9), np.float32), np.arange(81, dtype=np.float32).reshape(9, 9))
    assert "\n" in str(wide)
    assert "\n" not in in_one_line(wide)
