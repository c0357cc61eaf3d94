"""Tests of env/action_masks.py: masks are found, checked and put beside the observation."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

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
        info = {} if self.by != "info" or self.masks[self.turn] is None else {MASK_KEY: self.masks[self.turn]}
        if self.by == "key":
            return {"seen": np.zeros(2, np.float32), MASK_KEY: self.masks[self.turn]}, info
        return np.zeros(2, np.float32), info

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
    return env, step


@pytest.mark.parametrize("by", ["info", "action_masks", "get_action_mask"])
def test_masks_stand_beside_the_observation(by):
    env = make_vector_env(lambda: gym.wrappers.TimeLimit(Masked([np.array([1, 0, 1], np.int8), [True, True, False], None], by=by), 9), 2)
    assert env.observation_space == spaces.Dict({"observation": SEEN, MASK_KEY: spaces.MultiBinary(3)})
    assert env.reset().observations[MASK_KEY].tolist() == [[1, 0, 1], [1, 0, 1]]
    assert env.step(np.zeros(2, int)).observations[MASK_KEY].tolist() == [[1, 1, 0], [1, 1, 0]]


def test_a_dict_observation_keeps_its_keys():
    space = spaces.Dict(seen=SEEN)

    class Dicts(Masked):
        def _see(self):
            return {"seen": np.ones(2, np.float32)}, {MASK_KEY: np.array([0, 1, 0], bool)}

    env = make_vector_env(lambda: Dicts([0, 0, 0], observation_space=space), 1)
    step = env.reset()
    assert set(step.observations) == {"seen", MASK_KEY}
    assert step.observations["seen"].tolist() == [[1, 1]]


def test_a_mask_as_observation_key_stays_as_it_is():
    space = spaces.Dict({"seen": SEEN, MASK_KEY: spaces.Box(0, 1, (3,), np.int8)})
    masks = [np.array([1, 1, 0], np.int8), np.array([0, 0, 1], np.int8), np.zeros(3, np.int8)]
    env = make_vector_env(lambda: Masked(masks, by="key", observation_space=space), 1)
    assert env.observation_space == space
    assert env.reset().observations[MASK_KEY].tolist() == [[1, 1, 0]]
    assert env.step(np.array([0])).observations[MASK_KEY].tolist() == [[0, 0, 1]]
    ended = env.step(np.array([2])).ended[0]
    assert ended.final_observation[MASK_KEY].tolist() == [0, 0, 0]  # nobody acts there


def test_a_mask_key_of_the_wrong_size_is_refused():
    space = spaces.Dict({"seen": SEEN, MASK_KEY: spaces.MultiBinary(2)})
    with pytest.raises(EnvError, match=r"masks of Discrete\(3\) need MultiBinary\(3\)"):
        make_vector_env(lambda: Masked([np.zeros(2, np.int8)] * 3, by="key", observation_space=space), 1)


def test_the_mask_of_a_terminal_state_may_be_missing_or_empty():
    for last in (None, np.zeros(3, bool)):
        _, step = played([np.ones(3, bool), last])
        assert step.ended[0].final_observation[MASK_KEY].tolist() == [1, 1, 1]
        assert step.observations[MASK_KEY].tolist() == [[1, 1, 1]]


def test_the_mask_of_a_truncated_state_is_kept_and_may_be_empty():
    masks = [np.ones(3, bool), np.zeros(3, bool), np.ones(3, bool), np.ones(3, bool)]
    env = make_vector_env(lambda: gym.wrappers.TimeLimit(Masked(masks), 1), 1)
    env.reset()
    step = env.step(np.array([0]))
    assert step.truncated[0]
    assert step.ended[0].final_observation[MASK_KEY].tolist() == [0, 0, 0]


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
def test_bad_masks_are_refused_with_lane_and_step(bad, words):
    with pytest.raises(EnvError, match=rf"lane 0, step 1 of the episode with seed \d+: .*{words}"):
        played([np.ones(3, bool), bad, np.ones(3, bool), np.ones(3, bool)])


def test_every_part_of_a_multidiscrete_needs_a_legal_action():
    space = spaces.MultiDiscrete([2, 3])
    fine = np.array([1, 0, 0, 1, 0])
    _, step = played([fine, (np.array([0, 1]), np.array([1, 1, 0])), fine, fine], action_space=space)
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

    class Trees(Masked):
        def _see(self):
            return np.zeros(2, np.float32), {MASK_KEY: {"a": [1, 0], "c": (np.array([1, 0, 0, 1]), None)}}

    env = make_vector_env(lambda: Trees([0, 0, 0], space), 1)
    mask = env.reset().observations[MASK_KEY]
    assert mask["a"].tolist() == [[1, 0]]
    assert mask["c"][0].tolist() == [[1, 0, 0, 1]]
    assert mask["c"][1] == ()
    action = {"a": np.array([0]), "b": np.zeros((1, 1)), "c": (np.array([[0, 1]]), np.zeros((1, 1)))}
    env.step(action)

    class Flat(Masked):
        def _see(self):
            return np.zeros(2, np.float32), {MASK_KEY: np.ones(6)}

    with pytest.raises(EnvError, match=r"action_mask must have the structure of Dict\("):
        make_vector_env(lambda: Flat([0, 0, 0], space), 1).reset()


def test_the_toys_masks_are_legal_and_obeyed():
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
    env = SpacesEnv(SEEN, spaces.Discrete(3), mask="info")
    _, info = next(reset for reset in (env.reset(seed=seed) for seed in range(50)) if not reset[1][MASK_KEY].all())
    with pytest.raises(ValueError, match="illegal"):
        env.step(int(np.flatnonzero(info[MASK_KEY] == 0)[0]))
    with pytest.raises(ValueError, match="is not in"):
        env.step(3)
