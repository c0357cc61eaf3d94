"""Small NumPy policies in either precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from inchworm.backends.numpy.policy import NumpyPolicy, fresh_weights
from inchworm.config.sections import PolicyConfig
from inchworm.policy.spec import PolicySpec


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
