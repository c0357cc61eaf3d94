"""Fake rollouts pass every check of real ones."""

import numpy as np
import pytest
from gymnasium import spaces

from inchworm.core.spaces import mask_space, with_mask
from inchworm.rollout.fake import create_fake_rollout

SPACES = {
    "box": spaces.Box(-2, 3, (2, 2), np.float32),
    "wide": spaces.Box(-np.inf, np.inf, (3,), np.float64),
    "half": spaces.Box(0, np.inf, (1,), np.float32),
    "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "discrete": spaces.Discrete(4, start=-2),
    "multi": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "binary": spaces.MultiBinary([2, 2]),
    "nested": spaces.Dict({"a": spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1)]), "b": spaces.MultiBinary(3)}),
}


@pytest.mark.parametrize("observations", SPACES)
def test_observations_and_actions_are_legal(observations):
    space, action_space = SPACES[observations], spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))])
    rollout = create_fake_rollout(space, action_space, 40, 3)
    rollout.validate(space, action_space)
    for t in range(0, 40, 13):
        one = rollout.observations
        value = {"a": tuple(leaf[t, 1] for leaf in one["a"]), "b": one["b"][t, 1]} if observations == "nested" else one[t, 1]
        assert space.contains(value)
    if observations != "wide":
        create_fake_rollout(SPACES["box"], space, 20, 2).validate(SPACES["box"], space)  # as an action space


def test_log_probs_are_those_of_the_draw():
    rollout = create_fake_rollout(SPACES["box"], spaces.Tuple([spaces.MultiDiscrete([2, 4]), spaces.Box(-1, 1, (2,))]), 5, 2)
    gauss = rollout.actions[1].astype(np.float64)
    # 1/2 * 1/4 for the choices, and two standard normal densities
    expected = -np.log(8) - 0.5 * (gauss**2).sum(-1) - np.log(2 * np.pi)
    np.testing.assert_allclose(rollout.log_probs, expected, rtol=1e-6)


def test_masks_are_all_true():
    action_space = spaces.Discrete(3)
    space = with_mask(SPACES["box"], mask_space(action_space))
    rollout = create_fake_rollout(space, action_space)
    assert rollout.observations["action_mask"].all()
    assert rollout.cut_observations["action_mask"].all()


def test_episodes():
    rollout = create_fake_rollout(SPACES["box"], SPACES["discrete"], 125, 8, episode_length=25)
    assert rollout.num_valid == 1000
    ended = rollout.terminated | rollout.truncated
    assert rollout.terminated.any()
    assert rollout.truncated.any()
    assert not (rollout.terminated & rollout.truncated).any()
    np.testing.assert_array_equal(rollout.episode_starts[1:], ended[:-1])  # what follows an end opens an episode
    assert np.flatnonzero(ended[:, 0]).tolist() == [24, 49, 74, 99, 124]
    first = next(episode for episode in rollout.episodes if episode.lane == 0)
    assert first.length == 25
    assert first.episode_return == pytest.approx(float(rollout.rewards[:25, 0].sum()))


def test_the_seed_decides():
    one, same, other = (create_fake_rollout(SPACES["box"], SPACES["discrete"], 9, 2, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.observations, same.observations)
    assert (one.observations != other.observations).any()
