"""Tests of env/values.py: values are checked on their way into their rows, and batches of actions are checked and split into elements."""

import warnings

import numpy as np
import pytest
from gymnasium import spaces

from inchworm.core.errors import SpaceError
from inchworm.core.spaces import zeros
from inchworm.env.values import Refusal, flag, info_numbers, make_put, make_split, make_writer, real_scalar

F32 = spaces.Box(-1.0, 1.0, (3,), np.float32)
BYTES = spaces.Box(0, 255, (2, 2), np.uint8)


def write(space, value, lanes=2, lane=1):
    rows = zeros(space, (lanes,))
    make_writer(space)(value, rows, lane)
    return rows


@pytest.mark.parametrize(
    ("space", "value", "words"),
    [
        (F32, None, "observation must be a NumPy array of shape .3,. and dtype float32; got NoneType"),
        (F32, [1.0, 2.0, 3.0], "must be a NumPy array.*got list"),
        (F32, np.zeros((1,), np.float32), r"has shape \(1,\), but its space has \(3,\)"),  # would broadcast
        (F32, np.zeros((), np.float32), r"has shape \(\)"),  # would broadcast
        (F32, np.zeros((1, 3), np.float32), r"has shape \(1, 3\)"),
        (F32, np.zeros(3, np.int64), "has dtype int64, but its space has float32"),
        (F32, np.zeros(3, np.bool_), "has dtype bool"),
        (F32, np.array([None, 1, 2]), "has dtype object"),
        (F32, np.zeros(3, np.complex64), "has dtype complex64"),
        (BYTES, np.full((2, 2), 256), "values that uint8 cannot hold"),
        (BYTES, np.zeros((2, 2), np.float32), "has dtype float32, but its space has uint8"),
        (spaces.Discrete(3), 3, r"is outside Discrete\(3\); got int: 3"),
        (spaces.Discrete(3), -1, "is outside"),
        (spaces.Discrete(3, start=5), 4, "is outside"),
        (spaces.Discrete(3), 1.0, "must be one integer"),
        (spaces.Discrete(3), True, "must be one integer"),
        (spaces.Discrete(3), np.array([1]), "must be one integer"),
        (spaces.MultiDiscrete([2, 3]), np.array([1, 3]), "is outside"),
        (spaces.MultiDiscrete([2, 3]), np.array([-1, 0]), "is outside"),
        (spaces.MultiBinary(3), np.array([0, 1, 2], np.int8), "is outside"),
        (spaces.Dict(a=F32), {"b": np.zeros(3, np.float32)}, r"has the keys \['b'\], but its space has \['a'\]"),
        (spaces.Dict(a=F32), {"a": np.zeros(3, np.float32), "b": 1}, "has the keys"),
        (spaces.Dict(a=F32), np.zeros(3), "must be a dict with the keys"),
        (spaces.Dict(a=spaces.Dict(b=F32)), {"a": {"b": None}}, "a.b must be a NumPy array"),
        (spaces.Tuple([F32, F32]), (np.zeros(3, np.float32),), "must be a tuple of 2 values"),
        (spaces.Tuple([F32, F32]), np.zeros((2, 3), np.float32), "must be a tuple of 2 values"),
    ],
)
def test_values_that_do_not_fit_their_space_are_rejected(space, value, words):
    with pytest.raises(Refusal, match=words):
        write(space, value)


def test_values_of_every_kind_of_space_are_written():
    space = spaces.Dict(
        a=F32,
        b=spaces.Discrete(3, start=5),
        c=spaces.Tuple([spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2)]),
        d=spaces.Box(0, 9, (), float),
    )
    value = {"a": np.full(3, 0.5, np.float32), "b": np.int64(7), "c": (np.array([1, 2]), np.array([True, False])), "d": np.float64(2.5)}
    rows = write(space, value)  # row 1; row 0 stays as it was
    assert rows["a"].tolist() == [[0, 0, 0], [0.5, 0.5, 0.5]]
    assert rows["b"].tolist() == [0, 7]
    assert (rows["c"][0][1].tolist(), rows["c"][1][1].tolist()) == ([1, 2], [1, 0])
    assert rows["d"].tolist() == [0.0, 2.5]
    assert write(spaces.Discrete(3), np.array(2)).tolist() == [0, 2]
    assert write(spaces.Box(0, 9, (), np.float32), 1.5).tolist() == [0.0, 1.5]


def test_float64_is_cast_with_one_warning():
    put, rows = make_writer(F32), zeros(F32, (1,))
    with pytest.warns(UserWarning, match="comes as float64, but its space has float32"):
        put(np.array([0.1, 0.2, 0.3]), rows, 0)
    assert rows[0].tolist() == np.array([0.1, 0.2, 0.3], np.float32).tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        put(np.array([0.4, 0.5, 0.6]), rows, 0)
    assert rows[0, 0] == np.float32(0.4)


def test_a_cast_that_loses_nothing_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert write(spaces.Box(-1, 1, (3,), np.float64), np.ones(3, np.float32))[1].tolist() == [1, 1, 1]
    with pytest.warns(UserWarning, match="int64"):
        assert write(BYTES, np.full((2, 2), 255))[1].tolist() == [[255, 255], [255, 255]]


def test_subclasses_of_arrays_are_accepted():
    class Mine(np.ndarray):
        pass

    assert write(F32, np.ones(3, np.float32).view(Mine))[1].tolist() == [1, 1, 1]


@pytest.mark.parametrize("reward", [1, 1.0, True, np.float32(1), np.int64(1), np.array(1.0), np.bool_(True)])
def test_real_scalars(reward):
    assert real_scalar(reward) == 1.0
    assert type(real_scalar(reward)) is float


@pytest.mark.parametrize("reward", [None, "1", np.array([1.0]), np.array([1.0, 2.0]), 1j, [1.0], np.array(None)])
def test_rewards_that_are_not_real_scalars_are_rejected(reward):
    with pytest.raises(Refusal, match="reward must be one real number"):
        real_scalar(reward)


def test_flags():
    assert [flag(value, "terminated") for value in (True, np.bool_(False), np.array(True))] == [True, False, True]
    for value in (None, 0, 1, "yes", np.array([True])):
        with pytest.raises(Refusal, match="terminated must be one bool"):
            flag(value, "terminated")


def test_info_numbers():
    info = {"a": 1, "b": 2.5, "c": True, "d": np.float32(0.5), "e": np.nan, "f": "text", "g": {"h": 1}, "i": np.ones(2), 3: 4, "j": 10**400}
    info |= {"k": np.inf, "l": np.float32(-np.inf)}
    numbers = info_numbers(info)
    assert numbers == {"a": 1.0, "b": 2.5, "c": 1.0, "d": 0.5, "3": 4.0}  # neither NaN nor infinite
    assert all(type(value) is float for value in numbers.values())

    for wrong in (None, [], 3):
        with pytest.raises(Refusal, match="info must be a dict"):
            info_numbers(wrong)


def test_an_integer_reward_too_large_for_a_float():
    assert real_scalar(2**100) == 2.0**100
    with pytest.raises(Refusal, match="reward is an integer too large for a float; got int: 1000"):
        real_scalar(10**400)


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
    assert (second["aim"][1].tolist(), first["aim"][2].tolist()) == ([1, 0], [1, 2])
    assert (second["power"].shape, second["power"]) == ((), 0.75)


def test_elements_share_no_memory_with_the_rows_or_each_other():
    space = spaces.Box(-1, 1, (2,), np.float32)
    rows = np.zeros((2, 2), np.float32)
    first, second = make_split(space)(rows)
    first += 5
    assert (rows.tolist(), second.tolist()) == ([[0, 0], [0, 0]], [0, 0])


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
def test_actions_of_the_wrong_form_are_rejected(space, actions, words):
    with pytest.raises(SpaceError, match=words):
        make_put(space)(actions, zeros(space, (2,)))


def test_unsupported_spaces_are_rejected():
    with pytest.raises(SpaceError, match="has no parts"):
        make_put(spaces.Dict({}))
    with pytest.raises(SpaceError, match="Text"):
        make_writer(spaces.Text(5))
