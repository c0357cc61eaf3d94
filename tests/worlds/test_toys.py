"""Tests of worlds/toys.py: the tiny worlds have the answers that their docstrings promise."""

import numpy as np
import pytest
from gymnasium import spaces

from inchworm.env.check import check_env
from inchworm.worlds.toys import (
    ActionReward,
    ConstantReward,
    ContextualReward,
    Corridor,
    Counter,
    DelayedReward,
    ObservedReward,
    SpacesEnv,
    TruncatedForever,
)


def episode(env, seed, policy):
    observation, _ = env.reset(seed=seed)
    steps = []
    while True:
        action = policy(observation)
        observation, reward, terminated, truncated, _ = env.step(action)
        steps.append((reward, terminated, truncated))
        if terminated or truncated:
            return steps


@pytest.mark.parametrize(
    "toy", [ConstantReward, ObservedReward, ContextualReward, ActionReward, DelayedReward, TruncatedForever, Corridor, Counter]
)
def test_toys_pass_the_check(toy):
    report = check_env(toy)
    assert report.ok, str(report)


def test_rewards():
    assert episode(ConstantReward(), 0, lambda _: 0) == [(1.0, True, False)]
    assert episode(DelayedReward(), 0, lambda _: 0) == [(0.0, False, False), (1.0, True, False)]
    assert episode(TruncatedForever(3), 0, lambda _: 0) == [(1.0, False, False), (1.0, False, False), (1.0, False, True)]
    assert [episode(ActionReward(), 0, lambda _, a=action: a)[0][0] for action in (0, 1)] == [-1.0, 1.0]
    assert episode(Corridor(4), 0, lambda _: 1) == [(0.0, False, False)] * 3 + [(1.0, True, False)]
    assert len(episode(Corridor(4), 0, lambda _: 0)) == 40
    assert [reward for reward, *_ in episode(Counter(3), 0, lambda _: 0)] == [1.0, 2.0, 3.0]


def test_signs_are_seen_and_decide():
    signs = []
    for seed in range(20):
        env = ObservedReward()
        sign = float(env.reset(seed=seed)[0][0])
        signs.append(sign)
        assert env.step(0)[1] == sign
    assert set(signs) == {-1.0, 1.0}
    assert all(episode(ContextualReward(), seed, lambda o: int(o[0] > 0))[0][0] == 1.0 for seed in range(9))
    assert all(episode(ContextualReward(), seed, lambda o: int(o[0] < 0))[0][0] == -1.0 for seed in range(9))


def test_a_world_of_any_spaces_ends_in_both_ways_and_is_seeded():
    env = SpacesEnv(spaces.Box(-1, 1, (2,)), spaces.Discrete(2), 3)
    ends = {episode(env, seed, lambda _: 0)[-1][1:] for seed in range(20)}
    assert ends == {(True, False), (False, True)}
    assert np.array_equal(env.reset(seed=3)[0], SpacesEnv(spaces.Box(-1, 1, (2,)), spaces.Discrete(2), 3).reset(seed=3)[0])
    assert check_env(env).ok
