"""Tests of env/actions.py: batches of actions are checked, and taken apart."""

import numpy as np
import pytest
from gymnasium import spaces

from inchworm.core.errors import SpaceError
from inchworm.core.spaces import zeros
from inchworm.env.values import make_put, make_split

HYBRID = spaces.Dict(
    move=spaces.Discrete(3, start=2),
    aim=spaces.Tuple([spaces.Box(-1, 1, (2,), np.float32), spaces.MultiBinary(2), spaces.MultiDiscrete([2, 3])]),
    power=spaces.Box(0, 1, (), np.float32),
)
BATCH = {
    "aim": (np.array([[0.1, 0.2], [0.3, 0.4]]), np.array([[0, 1], [1, 0]]), np.array([[1, 2], [0, 1]])),
    "move": np.array([2, 4]),
    "power": np.array([0.25, 0.75], np.float32),
}


def test_each_lane_gets_its_own_element():
    rows = zeros(HYBRID, (2,))
    make_put(HYBRID)(BATCH, rows)
    first, second = make_split(HYBRID)(rows)
    assert type(first["move"]) is int
    assert (first["move"], second["move"]) == (2, 4)
    assert HYBRID.contains(first)
    assert HYBRID.contains(second)
    assert second["aim"][0].tolist() == [np.float32(0.3), np.float32(0.4)]
    assert second["aim"][1].tolist() == [1, 0]
    assert first["aim"][2].tolist() == [1, 2]
    assert second["power"].shape == ()
    assert second["power"] == 0.75


def test_elements_share_no_memory_with_the_rows_or_each_other():
    space = spaces.Box(-1, 1, (2,), np.float32)
    rows = np.zeros((2, 2), np.float32)
    first, second = make_split(space)(rows)
    first += 5
    assert rows.tolist() == [[0, 0], [0, 0]]
    assert second.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("space", "actions", "words"),
    [
        (spaces.Discrete(2), np.array([[0], [1]]), r"shape \(2, 1\), but 2 lanes need \(2,\)"),
        (spaces.Discrete(2), np.array(1), r"shape \(\)"),  # would broadcast
        (spaces.Discrete(2), np.array([0.0, 1.0]), "dtype float64, but the space has int64"),
        (spaces.Box(-1, 1, (2,), np.float32), np.zeros((3, 2)), r"shape \(3, 2\)"),
        (spaces.Dict(a=spaces.Discrete(2)), np.zeros(2, int), "must have the structure"),
        (spaces.Dict(a=spaces.Discrete(2)), {"b": np.zeros(2, int)}, "lack the part 'a'"),
        (spaces.Dict(a=spaces.Tuple([spaces.Discrete(2)])), {"a": (np.zeros(3, int),)}, r"actions\['a'\]\[0\] have shape"),
    ],
)
def test_actions_of_the_wrong_form_are_refused(space, actions, words):
    with pytest.raises(SpaceError, match=words):
        make_put(space)(actions, zeros(space, (2,)))


def test_an_action_space_without_parts_is_refused():
    with pytest.raises(SpaceError, match="has no parts"):
        make_put(spaces.Dict({}))
