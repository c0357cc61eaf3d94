"""The NumPy policy as people use it: one observation in, one action out; weights in and out; frozen statistics."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from gymnasium import spaces

from doubles.learners import NUMPY
from inchworm.backends.numpy.policy import encode_mask, encode_observations
from inchworm.core.errors import InchwormError, SpaceError
from inchworm.policy.layout import action_layout, observation_layout


def test_predict_gives_an_action_of_the_space():
    policy = NUMPY.policy(spaces.Box(-1, 1, (2,)), spaces.Discrete(3, start=4))
    action = policy.predict([0.1, 0.2])
    assert type(action) is int
    assert action in (4, 5, 6)
    space = spaces.Box(-1, 1, (), np.float32)  # without axes the action still is an array
    action = NUMPY.policy(spaces.Box(-1, 1, (2,)), space).predict(np.zeros(2, np.float32))
    assert isinstance(action, np.ndarray)
    assert action in space


def test_predict_is_greedy_by_default():
    policy = NUMPY.policy(spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (1,)))
    assert {float(policy.predict(np.zeros(2, np.float32))[0]) for _ in range(5)} == {0.0}
    sampled = {float(policy.predict(np.zeros(2, np.float32), deterministic=False)[0]) for _ in range(5)}
    assert len(sampled) > 1
    same = [policy.predict(np.zeros(2), deterministic=False, rng=np.random.default_rng(7)) for _ in range(2)]
    np.testing.assert_array_equal(*same)


def test_predict_refuses_other_observations():
    policy = NUMPY.policy(spaces.Box(-1, 1, (2,)), spaces.Discrete(2))
    with pytest.raises(SpaceError, match=r"observation of shape \(2,\) for one observation, not \(3,\)"):
        policy.predict([0.0, 0.0, 0.0])
    policy = NUMPY.policy(spaces.Dict({"x": spaces.Box(-1, 1, (2,))}), spaces.Discrete(2))
    with pytest.raises(SpaceError, match="x is missing or wrong"):
        policy.predict({"y": np.zeros(2)})
    with pytest.raises(SpaceError, match="x is missing or wrong"):
        policy.predict({"x": "no numbers"})


def test_weights_that_do_not_fit_are_refused_by_name():
    policy = NUMPY.policy(spaces.Box(-1, 1, (2,)), spaces.Discrete(2))
    weights = policy.get_weights()
    with pytest.raises(InchwormError, match=r"actor\.head\.weight has shape"):
        policy.set_weights({**weights, "actor.head.weight": np.zeros((3, 4), np.float32)})
    with pytest.raises(InchwormError, match=r"missing critic\.head\.bias"):
        policy.set_weights({name: value for name, value in weights.items() if name != "critic.head.bias"})
    with pytest.raises(InchwormError, match="unknown extra"):
        policy.set_weights({**weights, "extra": np.zeros(1)})


def test_what_a_policy_did_stays_what_it_was_when_it_acts_again():
    """Callers keep steps: nothing that leaves the policy is written again, and the observation is only read."""
    for action_space in (spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)):
        policy = NUMPY.policy(spaces.Box(-1, 1, (2,)), action_space, normalize_observations=True)
        rng = np.random.default_rng(0)
        observations = rng.standard_normal((5, 2), np.float32)
        seen = observations.copy()
        first = policy.act(observations, (), np.ones(5, bool), rng)
        kept = [np.array(array) for array in (first.actions, first.env_actions, first.log_probs)]
        second = policy.act(observations, (), np.ones(5, bool), rng)
        assert (np.array(second.actions) != kept[0]).any()
        for array, before in zip((first.actions, first.env_actions, first.log_probs), kept):
            np.testing.assert_array_equal(array, before)
        np.testing.assert_array_equal(observations, seen)


def test_two_threads_may_act_with_one_policy():
    policy = NUMPY.policy(spaces.Box(-1, 1, (16,)), spaces.Box(-1, 1, (3,), np.float32), hidden_sizes=(64, 64))
    batches = [np.random.default_rng(seed).standard_normal((200, 16), np.float32) for seed in (1, 2)]

    def act(rows):
        return [policy.act(rows, (), (), np.random.default_rng(3)).log_probs.tobytes() for _ in range(50)]

    alone = [set(act(rows)) for rows in batches]
    with ThreadPoolExecutor(2) as pool:
        together = [set(found) for found in pool.map(act, batches)]
    assert together == alone
    assert [len(found) for found in alone] == [1, 1]


# Observations, masks and actions as flat arrays
def encode(space, tree, leading=1):
    return encode_observations(observation_layout(space), tree, leading)


def test_each_kind_by_hand():
    np.testing.assert_array_equal(encode(spaces.Discrete(3, start=5), np.array([5, 7])), [[1, 0, 0], [0, 0, 1]])
    np.testing.assert_array_equal(encode(spaces.MultiDiscrete([2, 3], start=[0, 1]), np.array([[1, 3]])), [[0, 1, 0, 0, 1]])
    np.testing.assert_array_equal(encode(spaces.MultiBinary(3), np.array([[1, 0, 1]], np.int8)), [[1, 0, 1]])
    np.testing.assert_array_equal(encode(spaces.Box(-9, 9, (2, 2)), np.array([[[1.0, 2], [3, 4]]], np.float32)), [[1, 2, 3, 4]])
    np.testing.assert_allclose(encode(spaces.Box(0, 255, (2,), np.uint8), np.array([[255, 51]], np.uint8)), [[1, 0.2]], rtol=1e-6)
    # Bytes of another range are not an image but numbers.
    np.testing.assert_array_equal(encode(spaces.Box(0, 9, (2,), np.uint8), np.array([[9, 3]], np.uint8)), [[9, 3]])


def test_parts_of_a_dict_stand_in_the_order_of_their_names_and_the_mask_is_left_out():
    space = spaces.Dict({"b": spaces.Box(-9, 9, (1,)), "action_mask": spaces.MultiBinary(2), "a": spaces.Discrete(2)})
    tree = {"b": np.array([[7.0]], np.float32), "a": np.array([1]), "action_mask": np.array([[1, 0]], np.int8)}
    np.testing.assert_array_equal(encode(space, tree), [[0, 1, 7]])


def test_masks_stand_in_the_order_of_the_logits():
    layout = action_layout(spaces.Dict({"z": spaces.Discrete(2), "b": spaces.Box(-1, 1, (1,)), "a": spaces.MultiBinary(1)}), "clip")
    mask = {"z": np.array([[0, 1]], np.int8), "a": np.array([[1, 0]], np.int8)}
    np.testing.assert_array_equal(encode_mask(layout, mask), [[True, False, False, True]])
