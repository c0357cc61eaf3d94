"""Tests of env/groups.py: groups have the copies, seeds and steps that one vector env has, and step while nobody waits."""

import sys
import time

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from doubles.stepping import frozen
from inchworm.config.sections import EnvConfig
from inchworm.core.errors import EnvError
from inchworm.env.groups import _shares, make_groups
from inchworm.env.source import InProcessVectorEnv, WorkerVectorEnv, make_vector_env
from inchworm.worlds.cartpole import NativeCartPole
from inchworm.worlds.toys import Counter

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module


class Sleepy(gym.Env):
    """A step takes 0.4 s."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        time.sleep(0.4)
        return np.zeros(1, np.float32), float(action), False, False, {}


@pytest.mark.parametrize(
    ("copies", "workers", "groups", "shares"),
    [
        (8, 2, 2, [(4, 0, 1), (4, 4, 1)]),
        (8, 1, 2, [(4, 0, 1), (4, 4, 1)]),  # at least one each
        (5, 3, 2, [(2, 0, 1), (3, 2, 2)]),
        (8, 0, 2, [(4, 0, 0), (4, 4, 0)]),
        (3, 3, 2, [(1, 0, 1), (2, 1, 2)]),
        (2, 2, 1, [(2, 0, 2)]),
    ],
)
def test_shares(copies, workers, groups, shares):
    assert _shares(copies, workers, groups) == shares


@pytest.mark.parametrize("workers", [0, 2])
def test_groups_step_as_one_vector_env_does(workers):
    config = EnvConfig(id="CartPole-v1", num_envs=5, native=False)
    whole = make_vector_env(config, num_workers=0, seed=4, first_copy=3)
    groups = make_groups(config, None, workers, 2, seed=4, first_copy=3)
    assert [group.num_lanes for group in groups] == [2, 3]
    assert all(isinstance(group, WorkerVectorEnv if workers else InProcessVectorEnv) for group in groups)
    rng = np.random.default_rng(0)
    one, parts = whole.reset(), [group.reset() for group in groups]
    ends = 0
    for _ in range(60):
        for name in ("observations", "rewards", "terminated", "truncated", "episode_starts"):
            assert np.array_equal(getattr(one, name), np.concatenate([getattr(part, name) for part in parts]))
        seeds = [ended.seed for part in parts for ended in part.ended]
        assert [ended.seed for ended in one.ended] == seeds
        ends += len(seeds)
        actions = rng.integers(0, 2, 5)
        one = frozen(whole.step(actions))
        for group, own in zip(groups, (actions[:2], actions[2:])):  # both are under way before one is awaited
            group.send(own)
        parts = [frozen(group.recv()) for group in groups]
    assert ends > 5
    for group in groups:
        group.close()


def test_a_group_steps_while_the_other_is_awaited_and_send_returns_at_once():
    first, second = make_groups(Sleepy, 2, 2, 2)
    first.reset(), second.reset()
    began = time.perf_counter()
    first.send(np.array([1]))
    second.send(np.array([0]))
    sent = time.perf_counter() - began
    assert (first.recv().rewards[0], second.recv().rewards[0]) == (1.0, 0.0)
    assert sent < 0.3
    assert time.perf_counter() - began < 0.75  # 0.8 one after another
    first.close(), second.close()


def test_one_group_is_what_make_vector_env_makes():
    (native,) = make_groups("CartPole-v1", 4)
    assert type(native) is NativeCartPole
    assert make_groups(native) == (native,)
    (single,) = make_groups(Counter())
    assert single.num_lanes == 1
    assert [type(group) for group in make_groups("CartPole-v1", groups=2)] == [NativeCartPole] * 2  # 4 and 4 by default
    assert [group.num_lanes for group in make_groups(Counter, groups=2)] == [4, 4]


def test_what_cannot_be_split_is_refused():
    for env in (Counter(), make_vector_env(Counter, 2)):
        with pytest.raises(EnvError, match=r"cannot be split into groups.*collect\.groups=1"):
            make_groups(env, groups=2)
    with pytest.raises(EnvError, match=r"2 groups need as many copies .* there are 1"):
        make_groups(Counter, 1, groups=2)


def test_a_group_that_cannot_be_made_closes_the_others():
    closed, made = [], []

    class Second(Counter):
        def __init__(self):
            made.append(1)
            if len(made) > 2:
                raise RuntimeError("no more")
            super().__init__()

        def close(self):
            closed.append(1)

    with pytest.raises(RuntimeError, match="no more"):
        make_groups(Second, 4, 0, 2)
    assert len(closed) == 2
