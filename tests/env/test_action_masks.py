"""Tests of env/action_masks.py: masks are found, checked and added to the observation, with every kind of observation and action."""

import functools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from doubles.stepping import assert_equal_steps, assert_equal_trees, continue_run, run
from doubles.toys import SpacesEnv
from inchworm.core.errors import EnvError
from inchworm.core.spaces import MASK_KEY, mask_space
from inchworm.env.action_masks import is_legal, random_mask
from inchworm.env.source import make_vector_env

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
CASES = [(o, a, m) for o in OBSERVATIONS for a in ACTIONS for m in MASKS if m is None or not a.startswith("box")]


@pytest.mark.parametrize(("observation", "action", "mask"), CASES)
def test_every_combination_of_spaces_and_masks(observation, action, mask):
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


@pytest.mark.parametrize("mask", MASKS)
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
