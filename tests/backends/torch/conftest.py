"""Small torch policies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gymnasium import spaces

from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import PolicyConfig
from inchworm.policy.spec import PolicySpec


@pytest.fixture
def make_policy() -> Callable[..., TorchPolicy]:
    def make(
        observation_space: spaces.Space | None = None, action_space: spaces.Space | None = None, seed: int = 0, **options
    ) -> TorchPolicy:
        config = PolicyConfig(**{"hidden_sizes": (8,), **options})
        return TorchPolicy(PolicySpec(observation_space or spaces.Box(-2, 2, (3,)), action_space or spaces.Discrete(3), config), seed=seed)

    return make
