"""The normalisers of a policy: which entries they scale, and their way to named weights and back."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from inchworm.config.sections import PolicyConfig
from inchworm.policy.spec import PolicySpec
from inchworm.policy.statistics import PolicyStatistics

SPACE = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-9, 9, (2,))})


def statistics_of(**options):
    return PolicyStatistics(PolicySpec(SPACE, spaces.Discrete(2), PolicyConfig(**options)))


def test_off_means_nothing():
    statistics = statistics_of()
    statistics.update(np.ones((2, 1, 4)), np.ones((2, 1)), np.ones((2, 1), bool))
    assert not statistics.pending
    assert statistics.to_weights() == {}
    assert (statistics.value_mean, statistics.value_std) == (0.0, 1.0)


def test_pending_until_the_first_rollout():
    for options in ({"normalize_observations": True}, {"normalize_values": True}):
        statistics = statistics_of(**options)
        assert statistics.pending
        statistics.update(np.ones((2, 1, 4)), np.ones((2, 1)), np.zeros((2, 1), bool))
        assert statistics.pending  # nobody was alive
        statistics.update(np.ones((2, 1, 4)), np.ones((2, 1)), np.ones((2, 1), bool))
        assert not statistics.pending


def test_centre_and_scale_by_hand():
    # b is 1 and 3: mean 2, variance 1; the one-hot entries of a stay as they are.
    statistics = statistics_of(normalize_observations=True, normalize_values=True)
    flat = np.array([[[1, 0, 1, 5]], [[0, 1, 3, 5]]], np.float32)
    statistics.update(flat, np.array([[2.0], [6.0]]), np.ones((2, 1), bool))
    np.testing.assert_allclose(statistics.center, [0, 0, 2, 5])
    np.testing.assert_allclose(statistics.inverse_std, [1, 1, 1, 1e4], rtol=1e-6)  # a constant: sqrt(0 + 1e-8) = 1e-4
    assert statistics.center.dtype == statistics.inverse_std.dtype == np.float32
    assert statistics.value_mean == 4.0
    np.testing.assert_allclose(statistics.value_std, np.sqrt(4 + 1e-8))


def test_to_named_weights_and_back():
    statistics, other = (statistics_of(normalize_observations=True, normalize_values=True) for _ in range(2))
    statistics.update(np.random.default_rng(0).normal(size=(5, 2, 4)), np.arange(10.0).reshape(5, 2), np.ones((5, 2), bool))
    named = statistics.to_weights()
    assert set(named) == {f"{kind}_normalizer.{name}" for kind in ("observation", "value") for name in ("mean", "var", "count")}
    other.from_weights(named)
    for name, value in other.to_weights().items():
        np.testing.assert_array_equal(value, named[name])
    named["observation_normalizer.mean"] += 1  # a copy
    assert (other.to_weights()["observation_normalizer.mean"] != named["observation_normalizer.mean"]).all()


def test_what_a_central_critic_reads_has_statistics_of_its_own():
    # The world's one number is 1 and 3: mean 2, variance 1. It counts once per copy, whoever lives there.
    shared = spaces.Box(-9, 9, (1,))
    config = PolicyConfig(normalize_observations=True, central_critic=True)
    statistics = PolicyStatistics(PolicySpec(SPACE, spaces.Discrete(2), config, global_state_space=shared, lanes_per_copy=2))
    assert statistics.pending
    world = np.array([[[1, 0, 1]], [[1, 0, 3]]], np.float32)  # [T, E, 3]: the place in the copy, as two entries, stays as it is
    statistics.update(np.ones((2, 2, 4), np.float32), np.ones((2, 2)), np.array([[True, True], [True, False]]), world)
    assert not statistics.pending
    np.testing.assert_allclose(statistics.global_center, [0, 0, 2])
    np.testing.assert_allclose(statistics.global_inverse_std, [1, 1, 1], rtol=1e-6)
    again = PolicyStatistics(PolicySpec(SPACE, spaces.Discrete(2), config, global_state_space=shared, lanes_per_copy=2))
    again.from_weights(statistics.to_weights())
    np.testing.assert_array_equal(again.global_center, statistics.global_center)
