"""Normalisers inside the policy: they move once an update, by that rollout alone, and values in reward units stay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces

from inchworm.backends.torch.gae import compute_advantages
from inchworm.backends.torch.learner import PPOOptimizer
from inchworm.config.sections import PPOConfig

BOTH = {"normalize_observations": True, "normalize_values": True}
CONFIG = PPOConfig(update_epochs=3, num_minibatches=4, learning_rate=1e-2)


def tensors(rollout):
    return rollout.map(lambda array: torch.from_numpy(array.astype(np.int64) if array.dtype == np.uint64 else np.array(array)))


def test_the_first_update_moves_statistics_only(make_policy, collect):
    policy = make_policy(**BOTH)
    learner, rollout = PPOOptimizer(policy, CONFIG, device="cpu"), collect(policy)
    before, values = policy.get_weights(), policy.value(rollout.observations)
    stats = learner.update(rollout)
    after = policy.get_weights()
    assert stats["warm_up"] == 1
    assert all(stats[name] == 0 for name in ("loss", "policy_loss", "grad_norm"))
    assert all(np.isfinite(list(stats.values())))
    for name in before:
        moved = name.startswith(("observation_normalizer", "value_normalizer", "critic.head", "policy_version"))
        assert np.array_equal(before[name], after[name]) != moved, name
    assert learner.updates == policy.policy_version == 1
    assert learner.optimizer.state_dict()["step"] == 0  # no optimiser step was made
    assert "warm_up" not in learner.update(collect(policy, seed=1))
    assert values.shape == (12, 3)


def test_statistics_are_those_of_all_data_and_move_once_an_update(make_policy, collect):
    policy = make_policy(**BOTH)
    learner = PPOOptimizer(policy, CONFIG, device="cpu")
    observations, returns = [], []
    for seed in range(3):
        rollout = collect(policy, seed=seed)
        alive = rollout.valid.copy()
        alive[:2, 1] = False
        rollout = replace(rollout, valid=alive)
        returns.append(compute_advantages(policy, tensors(rollout), CONFIG).returns.numpy()[alive])
        observations.append(rollout.observations[alive])
        learner.update(rollout)
        weights = policy.get_weights()
        seen, told = np.concatenate(observations).astype(np.float64), np.concatenate(returns).astype(np.float64)
        np.testing.assert_allclose(weights["observation_normalizer.mean"], seen.mean(0), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(weights["observation_normalizer.var"], seen.var(0), rtol=1e-9)
        np.testing.assert_allclose(weights["value_normalizer.mean"], told.mean(), rtol=1e-6)
        np.testing.assert_allclose(weights["value_normalizer.var"], told.var(), rtol=1e-6)
        assert weights["observation_normalizer.count"] == weights["value_normalizer.count"] == 34 * (seed + 1)


def test_statistics_stand_still_within_an_update(make_policy, collect):
    """Every minibatch of every epoch is seen with the statistics that acted: the first one's ratio is 1."""
    policy = make_policy(**BOTH)
    learner = PPOOptimizer(policy, CONFIG, device="cpu")
    learner.update(collect(policy))
    assert learner.update(collect(policy, seed=1))["ratio_error"] < 5e-5
    seen = []

    def spy(policy):
        seen.append(policy.get_weights()["observation_normalizer.mean"])
        return torch.zeros(())

    learner.update(collect(policy, seed=2), [spy])
    assert len(seen) == 12
    assert all(np.array_equal(mean, seen[0]) for mean in seen)
    assert (policy.get_weights()["observation_normalizer.mean"] != seen[0]).any()


def test_popart_keeps_values_when_statistics_move_far(make_policy, collect):
    policy = make_policy(**{**BOTH, "normalize_observations": False})
    learner, rollout = PPOOptimizer(policy, CONFIG, device="cpu"), collect(policy)
    before = policy.value(rollout.observations)
    shifted = replace(rollout, rewards=rollout.rewards * 50 + 1000)
    learner.update(shifted)  # the first update: weights stay but for the value head
    torch.testing.assert_close(policy.value(rollout.observations), before, rtol=1e-5, atol=1e-2 * 1e-3 * 1000)
    assert policy.statistics.value_mean > 100
    weights = policy.get_weights()
    policy.update_statistics(rollout, torch.zeros(12, 3))
    after = policy.value(rollout.observations)
    assert (policy.get_weights()["critic.head.weight"] != weights["critic.head.weight"]).any()
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-2)


def test_the_value_loss_is_in_normalised_units(make_policy, collect):
    policy = make_policy(**BOTH)
    learner = PPOOptimizer(policy, CONFIG, device="cpu")
    for seed in range(2):
        rollout = collect(policy, seed=seed)
        stats = learner.update(replace(rollout, rewards=rollout.rewards * 1000))
    assert 0 < stats["value_loss"] < 5  # it would be about 1e6 in reward units


def test_what_is_frozen(make_policy, collect):
    policy = make_policy(**BOTH)
    PPOOptimizer(policy, CONFIG, device="cpu").update(collect(policy))
    before = policy.get_weights()
    collect(policy, seed=5)
    policy.value(np.zeros((1, 4, 3), np.float32))
    policy.predict(np.zeros(3))
    for name, value in policy.get_weights().items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("space", [spaces.Discrete(4), spaces.Box(0, 255, (2,), np.uint8)], ids=["categories", "bytes"])
def test_observations_that_are_scaled_already_need_no_statistics(make_policy, collect, space):
    policy = make_policy(space, normalize_observations=True)
    learner = PPOOptimizer(policy, CONFIG, device="cpu")
    stats = learner.update(collect(policy))
    assert "warm_up" not in stats  # nothing to wait for
    assert not any(name.startswith("observation_normalizer") for name in policy.get_weights())


def test_images_with_a_normaliser(make_policy):
    from inchworm.rollout.fake import create_fake_rollout

    space = spaces.Dict({"image": spaces.Box(0, 255, (9, 8, 1), np.uint8), "speed": spaces.Box(-9, 9, (2,))})
    for observation_space in (space, space["image"]):
        policy = make_policy(observation_space, kind="cnn", cnn_filters=((4, 3, 2),), cnn_features=6, **BOTH)
        learner = PPOOptimizer(policy, CONFIG, device="cpu")
        rollout = create_fake_rollout(observation_space, policy.spec.action_space, 8, 2)
        assert learner.update(rollout)["warm_up"] == 1
        stats = learner.update(rollout)  # made-up log-probs, by nobody's weights: no warning of them
        assert all(np.isfinite(list(stats.values())))
