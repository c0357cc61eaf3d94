"""What the tests of both backends share: rollouts in which a policy acted, and its parameters as one vector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import optree
import pytest
import torch

from inchworm.backends.numpy.policy import encode_observations
from inchworm.core.spaces import MASK_KEY
from inchworm.policy.file import fingerprint
from inchworm.policy.layout import observation_layout
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.rollout import Rollout


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: on arrays this small, more of them only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def collect() -> Callable[..., Rollout]:
    def run(policy: Any, num_steps: int = 12, num_lanes: int = 3, *, seed: int = 0, episode_length: int = 5) -> Rollout:
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
        seen = encode_observations(observation_layout(spec.observation_space, convolutions=False), observations, 2)[..., 0]
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
def parameters() -> Callable[[Any], np.ndarray]:
    """All parameters of a policy as one vector."""
    return lambda policy: np.concatenate([policy.get_weights()[name].reshape(-1) for name in policy.spec.layers])
