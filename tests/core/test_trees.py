"""Nested data taken apart and put together again."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inchworm.core.errors import CorruptFileError
from inchworm.core.trees import flatten_tree, unflatten_tree


def round_trip(tree):
    arrays, structure = flatten_tree(tree)
    return unflatten_tree(arrays, json.loads(json.dumps(structure, allow_nan=False)))


def test_everything_comes_back_as_it_was():
    tree = {"a": (1, [2.5, None], ()), "b": {"x": np.arange(3), "y": {}}, "c": True, "d": "ü", "e": -0.0, "f": 2**80, "g": []}
    back = round_trip(tree)
    np.testing.assert_array_equal(back["b"].pop("x"), tree["b"].pop("x"))
    assert back == tree
    assert list(back) == list(tree)  # the order of keys too
    assert isinstance(back["a"], tuple)
    assert isinstance(back["a"][1], list)
    assert back["c"] is True
    assert math.copysign(1, back["e"]) == -1


def test_numbers_that_json_lacks():
    back = round_trip([float("nan"), float("inf"), float("-inf"), np.float32(0.1), np.int64(3), np.bool_(True)])
    assert math.isnan(back[0])
    assert back[1:] == [math.inf, -math.inf, float(np.float32(0.1)), 3, True]
    assert type(back[4]) is int
    assert type(back[5]) is bool


def test_names_are_paths_and_never_collide():
    one, two, three = np.ones(1), np.ones(2), np.ones(3)
    arrays, structure = flatten_tree({"a/b": one, "a": {"b": two}, "__metadata__": three})
    assert {name: len(array) for name, array in arrays.items()} == {"a/b": 1, "a/b'": 2, "__metadata__'": 3}
    back = unflatten_tree(arrays, structure)
    assert (len(back["a/b"]), len(back["a"]["b"]), len(back["__metadata__"])) == (1, 2, 3)
    assert list(flatten_tree(one)[0]) == ["array"]
    assert list(flatten_tree({"x": (one, [two])})[0]) == ["x/0", "x/1/0"]


plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
)
keys = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5)
trees = st.recursive(plain, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner), max_leaves=15)


@given(trees)
def test_any_plain_tree(tree):
    assert round_trip(tree) == tree


@pytest.mark.parametrize(
    "tree, words",
    [({1: 2}, "must be text"), ({"a": {"b\0": 1}}, "key of a"), ({"x": [object()]}, "x/0 is object"), ({1.5}, "the tree is set")],
)
def test_what_a_file_cannot_hold(tree, words):
    with pytest.raises(TypeError, match=words):
        flatten_tree(tree)


@pytest.mark.parametrize(
    "structure, words",
    [
        *((broken, "structure does not fit") for broken in ({"array": "y"}, {"what": 1}, {"dict": 3}, {"dict": {}, "list": []}, {}, [])),
        *(({kind: content}, "structure does not fit") for kind, content in (("list", 3), ("float", "x"), ("float", None), ("array", []))),
        ({"float": 10**400}, "OverflowError"),
        ({"list": []}, r"does not name the arrays \['x'\]"),  # every array is used exactly once
        ({"list": [{"array": "x"}, {"array": "x"}]}, "structure does not fit"),
    ],
)
def test_broken_structures(structure, words):
    with pytest.raises(CorruptFileError, match=words):
        unflatten_tree({"x": np.ones(1)}, structure)
