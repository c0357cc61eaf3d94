"""What the NumPy tests of learning share: small policies in either precision, and rollouts that a policy acted in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import optree
import pytest
from gymnasium import spaces

from inchworm.backends.numpy.policy import NumpyPolicy, encode_observations, fresh_weights
from inchworm.config.sections import PolicyConfig
from inchworm.core.spaces import MASK_KEY
from inchworm.policy.file import fingerprint
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.rollout import Rollout


@pytest.fixture
def make_policy() -> Callable[..., NumpyPolicy]:
    def make(
        observation_space: spaces.Space | None = None,
        action_space: spaces.Space | None = None,
        *,
        dtype: Any = np.float32,
        random: bool = False,
        **options: Any,
    ) -> NumpyPolicy:
        """With fresh weights, or with `random` ones that no activation and no head leaves near 0."""
        config = PolicyConfig(**{"hidden_sizes": (8,), **options})
        spec = PolicySpec(observation_space or spaces.Box(-2, 2, (3,)), action_space or spaces.Discrete(3), config)
        weights, rng = fresh_weights(spec, 0), np.random.default_rng(7)
        for name, shape in spec.layers.items():
            weights[name] = (rng.normal(0, 0.5, shape) if random else weights[name]).astype(dtype)
        return NumpyPolicy(spec, weights)

    return make


@pytest.fixture
def collect() -> Callable[..., Rollout]:
    def run(policy: NumpyPolicy, num_steps: int = 12, num_lanes: int = 3, *, seed: int = 0, episode_length: int = 5) -> Rollout:
        """Random observations and masks, the policy's own actions and log-probs on them, and rewards that depend on both."""
        spec, rng = policy.spec, np.random.default_rng(seed)
        fake = create_fake_rollout(
            spec.observation_space, spec.action_space, num_steps, num_lanes, seed=seed, episode_length=episode_length
        )
        observations = dict(fake.observations) if isinstance(fake.observations, dict) else fake.observations
        if spec.observations.has_mask:
            observations[MASK_KEY] = optree.tree_map(lambda leaf: some_legal(leaf, rng), observations[MASK_KEY])
        rows = optree.tree_map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), observations)
        step = policy.act(rows, (), np.zeros(num_steps * num_lanes, bool), rng)
        unflat = lambda leaf: np.array(leaf).reshape(num_steps, num_lanes, *leaf.shape[1:])  # noqa: E731
        actions = optree.tree_map(unflat, step.actions)
        seen = encode_observations(spec.observations, observations, 2)[..., 0]
        first = optree.tree_leaves(actions)[0].reshape(num_steps, num_lanes, -1)[..., 0]
        return replace(
            fake,
            observations=observations,
            actions=actions,
            log_probs=unflat(step.log_probs).astype(np.float32),
            rewards=(seen * first + rng.normal(0, 0.1, first.shape)).astype(np.float32),
            policy_version=np.full(num_lanes, policy.policy_version, np.int32),
            weights_fingerprint=np.full(num_lanes, fingerprint(policy.get_weights()), np.uint64),
        )

    return run


def some_legal(mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Every second choice stays legal, so that each group of two or more keeps one; of the others about half are."""
    legal = rng.random(mask.shape) < 0.5
    legal[..., ::2] = True
    return legal.astype(mask.dtype)


@pytest.fixture
def parameters() -> Callable[[NumpyPolicy], np.ndarray]:
    """All parameters of a policy as one vector."""
    return lambda policy: np.concatenate([policy.get_weights()[name].reshape(-1) for name in policy.spec.layers])
