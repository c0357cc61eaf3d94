"""A policy whose probabilities and values are known numbers, for tests against closed forms."""

import math
from typing import Any

import numpy as np

from inchworm import NumpyPolicy, PolicyConfig, PolicySpec


def known_policy(env: Any, *, p: float = 0.3, slope: float = 0.0, offset: float = 0.0) -> NumpyPolicy:
    """Take action 1 with probability p, whatever is seen; the critic says slope * (first number seen) + offset."""
    policy = NumpyPolicy(PolicySpec(env.observation_space, env.action_space, PolicyConfig(hidden_sizes=(1,), activation="relu")))
    weights = {name: np.zeros_like(weight) for name, weight in policy.get_weights().items()}
    weights["actor.head.bias"][:] = 0.0, math.log(p / (1 - p))
    weights["critic.0.weight"][0, 0] = 1.0
    weights["critic.head.weight"][:], weights["critic.head.bias"][:] = slope, offset
    policy.set_weights(weights)
    return policy
