"""Tests of how a minibatch is split for a core's cache."""

from __future__ import annotations

import gymnasium as gym
import numpy as np

from inchworm.backends.jax import update as update_module
from inchworm.backends.jax.learner import JaxOptimizer
from inchworm.backends.jax.policy import JaxPolicy
from inchworm.config.sections import PolicyConfig, PPOConfig
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.fake import create_fake_rollout


def test_a_minibatch_split_for_the_cache_gives_the_same_update(monkeypatch):
    spec = PolicySpec(gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(2), PolicyConfig(hidden_sizes=(5,)))
    rollout = create_fake_rollout(spec.observation_space, spec.action_space, num_steps=12, num_lanes=4)
    config = PPOConfig(rollout_steps=12, update_epochs=2, num_minibatches=2, clip_vloss=True, ent_coef=0.01)
    found = []
    for numbers in (2**17, 13 * 8):  # 13 outputs of layers: whole, and in three parts of 8 rows
        monkeypatch.setattr(update_module, "CACHE_NUMBERS", numbers)
        policy = JaxPolicy(spec, seed=2)
        learner = JaxOptimizer(policy, config, seed=1)
        program = learner.program(12)
        monkeypatch.setattr(program, "key", (program.key, numbers))  # another program
        assert update_module.cached_rows(program) == numbers / 13
        found.append((learner.update(rollout), policy.get_weights()))
    (whole, weights), (parted, others) = found
    for name in ("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm"):
        np.testing.assert_allclose(whole[name], parted[name], rtol=1e-5, atol=1e-6)
    for name, value in weights.items():
        np.testing.assert_allclose(value, others[name], rtol=0, atol=1e-6)
    assert any(not np.array_equal(value, others[name]) for name, value in weights.items())  # sums of parts round differently
