"""What the torch tests share: small policies, and rollouts whose log-probs are the policy's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces

from inchworm.backends.numpy.policy import encode_observations
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import PolicyConfig
from inchworm.policy.file import fingerprint
from inchworm.policy.layout import observation_layout
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.rollout import Rollout


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """A few numbers gain nothing from threads, and threads that wait for each other cost much."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_policy() -> Callable[..., TorchPolicy]:
    def make(
        observation_space: spaces.Space | None = None, action_space: spaces.Space | None = None, seed: int = 0, **options
    ) -> TorchPolicy:
        config = PolicyConfig(**{"hidden_sizes": (8,), **options})
        return TorchPolicy(PolicySpec(observation_space or spaces.Box(-2, 2, (3,)), action_space or spaces.Discrete(3), config), seed=seed)

    return make


def collect(
    policy, num_steps: int = 12, num_lanes: int = 3, *, seed: int = 0, spec: PolicySpec | None = None, episode_length: int = 5
) -> Rollout:
    """Random observations, the policy's own actions and log-probs on them, and rewards that depend on both."""
    spec = spec or policy.spec
    fake = create_fake_rollout(spec.observation_space, spec.action_space, num_steps, num_lanes, seed=seed, episode_length=episode_length)
    rng = np.random.default_rng(seed)
    rows = [
        policy.act(optree.tree_map(lambda leaf, t=t: leaf[t], fake.observations), (), fake.episode_starts[t], rng) for t in range(num_steps)
    ]
    actions = optree.tree_map(lambda *leaves: np.stack(leaves), *[row.actions for row in rows])
    seen = encode_observations(observation_layout(spec.observation_space, convolutions=False), fake.observations, 2)  # [T, B, F]
    first = optree.tree_leaves(actions)[0].reshape(num_steps, num_lanes, -1)[..., 0]
    data = fake.to_dict() | {
        "actions": actions,
        "log_probs": np.stack([row.log_probs for row in rows]),
        "rewards": (seen[..., 0] * first + rng.normal(0, 0.1, first.shape)).astype(np.float32),
        "policy_version": policy.policy_version,
        "weights_fingerprint": np.uint64(fingerprint(policy.get_weights())),
    }
    return Rollout.from_dict(data)


@pytest.fixture(name="collect")
def collect_fixture() -> Callable[..., Rollout]:
    return collect


@pytest.fixture
def parameters() -> Callable[[torch.nn.Module], np.ndarray]:
    """All parameters of a module as one vector."""
    return lambda module: torch.cat([p.detach().flatten() for p in module.parameters()]).numpy().copy()
