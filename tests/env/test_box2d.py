"""Tests of env/box2d.py: an episode of BipedalWalker follows from its seed and its actions, whatever its copy has played before."""

import gymnasium as gym
import numpy as np
import pytest

from inchworm.config.sections import EnvConfig
from inchworm.env.check import check_env
from inchworm.env.make import RecreatedWorld, make_env, make_from

pytest.importorskip("Box2D")


def play(env, seed, actions):
    seen = [env.reset(seed=seed)[0]]
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        seen.append(np.append(observation, reward))
        if terminated or truncated:
            break
    return [row.tobytes() for row in seen]


def after_others(env, seed):
    """An episode in a copy that has played three others."""
    rng = np.random.default_rng(seed)
    for other in range(3):
        play(env, 100 + other, rng.uniform(-1, 1, (80, 4)).astype(np.float32))
    actions = rng.uniform(-1, 1, (250, 4)).astype(np.float32)
    return play(env, seed, actions), actions


def test_a_used_walker_walks_as_a_fresh_one():
    config = EnvConfig(id="BipedalWalker-v3")
    mended, as_it_is = [], []
    for seed in range(3):
        used, actions = after_others(make_env(config), seed)
        fresh = play(gym.make(config.id), seed, actions)
        mended.append(used == fresh)
        as_it_is.append(after_others(gym.make(config.id), seed)[0] == fresh)
    assert all(mended)
    assert not all(as_it_is)  # else Gymnasium has mended it, and RecreatedWorld can go


def test_factories_are_mended_too_and_other_worlds_are_left_alone():
    made = make_from(lambda: gym.make("BipedalWalker-v3", hardcore=True), EnvConfig(id="BipedalWalker-v3"))
    assert isinstance(made, RecreatedWorld)
    assert not isinstance(make_env(EnvConfig(id="LunarLander-v3")), RecreatedWorld)


def test_check_env_finds_it_in_order():
    assert not [problem for problem in check_env("BipedalWalker-v3").problems if "deterministic" in problem]
