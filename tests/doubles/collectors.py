"""Groups of collectors with small policies, and iterations in which something other than a learner changes the weights."""

from typing import Any

import numpy as np

from doubles.stepping import assert_equal_rollouts
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.collect.group import CollectorGroup
from inchworm.collect.host import CollectorEnvs, LocalEngine
from inchworm.config.sections import PolicyConfig
from inchworm.env.source import make_vector_env
from inchworm.policy.spec import VERSION, PolicySpec
from inchworm.rollout.rollout import Rollout

STEPS = 24


def policy(env: Any = "CartPole-v1", **config: Any) -> NumpyPolicy:
    made = make_vector_env(env, 1)
    return NumpyPolicy(PolicySpec(made.observation_space, made.action_space, PolicyConfig(hidden_sizes=(8,), **config)), seed=3)


def local(env: Any, acting: NumpyPolicy, *, num_envs: int = 4, seed: int = 0, **options: Any) -> CollectorGroup:
    return CollectorGroup(CollectorEnvs.of(env, num_envs, seed=seed), acting, LocalEngine(), seed=seed, **options)


def learn(acting: NumpyPolicy) -> None:
    """What stands for an update: other weights, and the next version."""
    weights = acting.get_weights()
    weights["actor.head.bias"] = weights["actor.head.bias"] + np.float32(0.1)
    weights[VERSION] = weights[VERSION] + 1
    acting.set_weights(weights)


def iterations(collectors: Any, acting: NumpyPolicy, count: int, steps: int = STEPS) -> list[Rollout]:
    """Rollouts, with an update after each."""
    found = []
    for _ in range(count):
        found.append(collectors.collect(steps))
        learn(acting)
    return found


def assert_equal(ours: list[Rollout], theirs: list[Rollout]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert_equal_rollouts(one, other)
