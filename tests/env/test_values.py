"""Tests of env/values.py: values and masks are checked on their way into their rows, and batches of actions are split into elements."""

import functools
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from doubles.stepping import assert_equal_steps, assert_equal_trees, continue_run, run
from doubles.toys import SpacesEnv
from inchworm.core.errors import EnvError, SpaceError
from inchworm.core.spaces import MASK_KEY, mask_space, zeros
from inchworm.env.source import make_vector_env
from inchworm.env.values import Refusal, flag, info_numbers, is_legal, make_put, make_split, make_writer, random_mask, real_scalar

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


SEEN = spaces.Box(-1, 1, (2,), np.float32)


class Masked(gym.Env):
    """Returns whatever masks it is given, one per observation."""

    def __init__(self, masks, action_space=None, by="info", observation_space=SEEN):
        self.observation_space, self.action_space = observation_space, action_space or spaces.Discrete(3)
        self.masks, self.by, self.turn = masks, by, 0
        if by in ("action_masks", "get_action_mask"):
            setattr(self, by, lambda: self.masks[self.turn])

    def _see(self):
        mask = {} if self.masks[self.turn] is None else {MASK_KEY: self.masks[self.turn]}
        seen = np.zeros(2, np.float32)
        if isinstance(self.observation_space, spaces.Dict):
            seen = {"seen": seen} | (mask if self.by == "key" else {})
        return seen, mask if self.by == "info" else {}

    def reset(self, *, seed=None, options=None):
        self.turn = 0
        return self._see()

    def step(self, action):
        self.turn += 1
        over = self.turn == len(self.masks) - 1
        observation, info = self._see()
        return observation, 0.0, over, False, info


def played(masks, **kwargs):
    env = make_vector_env(lambda: Masked(masks, **kwargs), 1)
    env.reset()
    for _ in masks[1:]:
        step = env.step(np.array([0]) if isinstance(env.action_space, spaces.Discrete) else np.array([[0, 0]]))
    return step


@pytest.mark.parametrize("by", ["info", "action_masks", "get_action_mask"])
def test_masks_are_added_to_the_observation(by):
    env = make_vector_env(lambda: gym.wrappers.TimeLimit(Masked([np.array([1, 0, 1], np.int8), [True, True, False], None], by=by), 9), 2)
    assert env.observation_space == spaces.Dict({"observation": SEEN, MASK_KEY: spaces.MultiBinary(3)})
    assert env.reset().observations[MASK_KEY].tolist() == [[1, 0, 1], [1, 0, 1]]
    assert env.step(np.zeros(2, int)).observations[MASK_KEY].tolist() == [[1, 1, 0], [1, 1, 0]]
    keyed = make_vector_env(lambda: Masked([[1, 0, 1]] * 3, by=by, observation_space=spaces.Dict(seen=SEEN)), 1)
    assert set(keyed.reset().observations) == {"seen", MASK_KEY}


def test_a_mask_as_observation_key_stays_as_it_is():
    space = spaces.Dict({"seen": SEEN, MASK_KEY: spaces.Box(0, 1, (3,), np.int8)})
    masks = [np.array([1, 1, 0], np.int8), np.array([0, 0, 1], np.int8), np.zeros(3, np.int8)]
    env = make_vector_env(lambda: Masked(masks, by="key", observation_space=space), 1)
    assert env.observation_space == space
    assert env.reset().observations[MASK_KEY].tolist() == [[1, 1, 0]]
    assert env.step(np.array([0])).observations[MASK_KEY].tolist() == [[0, 0, 1]]
    ended = env.step(np.array([2])).ended[0]
    assert ended.final_observation[MASK_KEY].tolist() == [0, 0, 0]  # no agent acts on it
    space = spaces.Dict({"seen": SEEN, MASK_KEY: spaces.MultiBinary(2)})
    with pytest.raises(EnvError, match=r"masks of Discrete\(3\) need MultiBinary\(3\)"):
        make_vector_env(lambda: Masked([np.zeros(2, np.int8)] * 3, by="key", observation_space=space), 1)


def test_the_mask_of_a_last_state_may_be_missing_or_empty():
    for last in (None, np.zeros(3, bool)):
        step = played([np.ones(3, bool), last])
        assert step.ended[0].final_observation[MASK_KEY].tolist() == [1, 1, 1]
        assert step.observations[MASK_KEY].tolist() == [[1, 1, 1]]
    masks = [np.ones(3, bool), np.zeros(3, bool), np.ones(3, bool), np.ones(3, bool)]
    env = make_vector_env(lambda: gym.wrappers.TimeLimit(Masked(masks), 1), 1)
    env.reset()
    step = env.step(np.array([0]))
    assert step.truncated[0]
    assert step.ended[0].final_observation[MASK_KEY].tolist() == [0, 0, 0]  # kept: its value is needed


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (None, "action_mask missing"),
        (np.ones(4, bool), r"action_mask has shape \(4,\), but masks of Discrete\(3\) need \(3,\)"),
        (np.ones((1, 3), bool), r"has shape \(1, 3\)"),
        (np.zeros(3, bool), "leaves no legal action"),
        (np.array([0, 2, 1]), "must hold true and false"),
        (np.array([0.0, -np.inf, 1.0]), "must hold true and false"),
        (np.array(["a", "b", "c"]), "must hold true and false"),
        (7, "must be a vector"),
    ],
)
def test_bad_masks_are_rejected_with_lane_and_step(bad, words):
    with pytest.raises(EnvError, match=rf"lane 0, step 1 of episode 1 with seed \d+: .*{words}"):
        played([np.ones(3, bool), bad, np.ones(3, bool), np.ones(3, bool)])


def test_every_part_of_a_multidiscrete_needs_a_legal_action():
    space = spaces.MultiDiscrete([2, 3])
    fine = np.array([1, 0, 0, 1, 0])
    step = played([fine, (np.array([0, 1]), np.array([1, 1, 0])), fine, fine], action_space=space)
    assert step.observations[MASK_KEY].tolist() == [fine.tolist()]
    with pytest.raises(EnvError, match="leaves no legal action in a part"):
        played([fine, np.array([1, 1, 0, 0, 0]), fine, fine], action_space=space)


def test_box_actions_have_no_masks_and_no_extra_reset():
    class Counts(Masked):
        resets = 0

        def reset(self, *, seed=None, options=None):
            Counts.resets += 1
            return super().reset()

    make_vector_env(lambda: Counts([None, None], spaces.Box(-1, 1, (1,))), 1)
    assert Counts.resets == 0


def test_masks_of_hybrid_actions_are_trees():
    space = spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(-1, 1, (1,)), c=spaces.Tuple([spaces.MultiBinary(2), spaces.Box(0, 1, (1,))]))
    assert mask_space(space)["a"].n == 2

    env = make_vector_env(lambda: Masked([{"a": [1, 0], "c": (np.array([1, 0, 0, 1]), None)}] * 3, space), 1)
    mask = env.reset().observations[MASK_KEY]
    assert mask["a"].tolist() == [[1, 0]]
    assert mask["c"][0].tolist() == [[1, 0, 0, 1]]
    assert mask["c"][1] == ()
    action = {"a": np.array([0]), "b": np.zeros((1, 1)), "c": (np.array([[0, 1]]), np.zeros((1, 1)))}
    env.step(action)
    with pytest.raises(EnvError, match=r"action_mask must have the structure of Dict\("):
        make_vector_env(lambda: Masked([np.ones(6)] * 3, space), 1).reset()


def test_random_masks_leave_legal_actions():
    space = spaces.Tuple([spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 2]), spaces.MultiBinary(2)])
    mask = (np.array([0, 1, 0]), np.array([1, 0, 0, 1]), np.array([0, 1, 1, 1]))
    assert is_legal(space, (2, np.array([0, 1]), np.array([1, 0])), mask)
    assert not is_legal(space, (1, np.array([0, 1]), np.array([1, 0])), mask)
    assert not is_legal(space, (2, np.array([0, 0]), np.array([1, 0])), mask)
    assert not is_legal(space, (2, np.array([0, 1]), np.array([0, 0])), mask)
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b, c = random_mask(space, rng)
        assert a.any()
        assert b[:2].any()
        assert b[2:].any()
        assert c.reshape(2, 2).any(1).all()


OBSERVATIONS = {
    "box": spaces.Box(-1, 1, (3,), np.float32),
    "box64": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "discrete": spaces.Discrete(4, start=-1),
    "multidiscrete": spaces.MultiDiscrete([3, 2]),
    "multibinary": spaces.MultiBinary((2, 2)),
    "dict": spaces.Dict(image=spaces.Box(0, 255, (4, 4), np.uint8), inner=spaces.Dict(goal=spaces.Discrete(3))),
    "tuple": spaces.Tuple([spaces.Box(-1, 1, (2,), np.float32), spaces.MultiBinary(2)]),
}
ACTIONS = {
    "discrete": spaces.Discrete(3),
    "started": spaces.Discrete(3, start=5),
    "multidiscrete": spaces.MultiDiscrete([3, 2]),
    "multibinary": spaces.MultiBinary(3),
    "box": spaces.Box(-2, 2, (2,), np.float32),
    "box64": spaces.Box(-2, 2, (1, 2), np.float64),
    "dict": spaces.Dict(go=spaces.Discrete(2, start=1), turn=spaces.Box(-1, 1, (1,), np.float32)),
    "tuple": spaces.Tuple([spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (), np.float32), spaces.Dict(b=spaces.MultiBinary(2))]),
}
MASKS = [None, "key", "info", "action_masks", "get_action_mask"]
CASES = [  # each two of the three meet
    (observation, action, None if action.startswith("box") else MASKS[(i + j) % len(MASKS)])
    for i, observation in enumerate(OBSERVATIONS)
    for j, action in enumerate(ACTIONS)
]


@pytest.mark.parametrize(("observation", "action", "mask"), CASES)
def test_every_pair_of_spaces_and_masks(observation, action, mask):
    """Legal actions reach the env as its own (it raises otherwise), and a replay restores the same state."""
    make = functools.partial(SpacesEnv, OBSERVATIONS[observation], ACTIONS[action], 3, mask)
    env = make_vector_env(make, 2, seed=1)
    taken = run(env, 7)
    assert (MASK_KEY in taken[0].observations if isinstance(taken[0].observations, dict) else False) == (mask is not None)
    assert sum(len(step.ended) for step in taken) == 4  # 2 lanes, 2 ends in 7 steps of episodes of 3
    assert taken[-1].rewards.tolist() == [1, 1]
    for step in taken:
        for ended in step.ended:
            assert env.observation_space.contains(_as_element(env.observation_space, ended.final_observation))
    other = make_vector_env(make, 2, seed=1)
    other.load_state_dict(env.state_dict())
    assert_equal_trees(other.reset(indices=()).observations, taken[-1].observations)
    assert_equal_steps(continue_run(env, 1, 5), continue_run(other, 1, 5))


def _as_element(space, tree):
    if isinstance(space, spaces.Dict):
        return {key: _as_element(inner, tree[key]) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_as_element(inner, part) for inner, part in zip(space.spaces, tree))
    return np.int64(tree) if isinstance(space, spaces.Discrete) else np.asarray(tree)


EVERYTHING_SEEN = spaces.Dict({name: space for name, space in OBSERVATIONS.items() if name != "dict"} | {"nested": OBSERVATIONS["dict"]})
EVERYTHING_DONE = spaces.Dict({name: space for name, space in ACTIONS.items() if name != "dict"} | {"nested": ACTIONS["dict"]})


@pytest.mark.parametrize("mask", ["key", "get_action_mask"])
def test_all_kinds_of_spaces_at_once_in_two_workers(mask):
    make = functools.partial(SpacesEnv, EVERYTHING_SEEN, EVERYTHING_DONE, 3, mask)
    with make_vector_env(make, 3, 2, seed=1) as workers, make_vector_env(make, 3, seed=1) as here:
        assert workers.observation_space == here.observation_space
        assert workers.action_space == here.action_space
        taken = run(workers, 7)
        assert_equal_steps(taken, run(here, 7))
        state = here.state_dict()
        assert workers.state_dict()["copies"] == state["copies"]
        workers.load_state_dict(state)
        assert_equal_trees(workers.reset(indices=()).observations, taken[-1].observations)
