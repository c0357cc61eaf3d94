"""Tests that the JAX-native worlds have the dynamics of Gymnasium's."""

from __future__ import annotations

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inchworm.backends.jax.native import begin_lanes, derive_seeds, seed_words
from inchworm.backends.jax.worlds import WORLDS, Timed, make_world
from inchworm.config.sections import EnvConfig


def set_state(env: gym.Env, id: str, values: np.ndarray) -> None:
    env.reset(seed=0)
    env.unwrapped.state = tuple(map(float, values)) if id == "MountainCar-v0" else np.array(values, np.float64)


@pytest.mark.parametrize("id", WORLDS)
def test_an_episode_of_random_actions_equals_gymnasiums(id):
    theirs = gym.make(id)
    with jax.enable_x64(True):
        ours = make_world(EnvConfig(id=id))
        assert ours.observation_space == theirs.observation_space
        assert ours.action_space == theirs.action_space
        assert ours.max_episode_steps == theirs.spec.max_episode_steps
        _, state = ours.reset(jax.random.key(3))
        set_state(theirs, id, np.array(state.values))
        step, over, rng = jax.jit(ours.step), False, np.random.default_rng(1)
        while not over:
            if isinstance(theirs.action_space, gym.spaces.Box):
                action = rng.uniform(-2, 2, 1).astype(np.float32)
            else:
                action = int(rng.integers(theirs.action_space.n))
            observation, state, reward, terminated, truncated = step(None, state, jnp.asarray(action))
            seen, expected, *flags, _ = theirs.step(action)
            np.testing.assert_allclose(observation, seen, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(reward, expected, rtol=1e-6, atol=1e-6)
            assert [bool(terminated), bool(truncated)] == flags
            over = any(flags)


@pytest.mark.parametrize("id", WORLDS)
def test_each_step_in_float32_equals_gymnasiums_from_the_same_state(id):
    theirs, ours = gym.make(id).unwrapped, make_world(EnvConfig(id=id))
    step, rng = jax.jit(ours.step), np.random.default_rng(1)
    _, state = ours.reset(jax.random.key(4))
    for _ in range(30):
        values = np.array(state.values, np.float64)
        set_state(theirs, id, values)
        is_box = isinstance(theirs.action_space, gym.spaces.Box)
        action = rng.uniform(-2, 2, 1).astype(np.float32) if is_box else int(rng.integers(theirs.action_space.n))
        observation, state, reward, _, _ = step(None, Timed(tuple(jnp.asarray(values, jnp.float32)), state.time), jnp.asarray(action))
        seen, expected, *_ = theirs.step(action)
        np.testing.assert_allclose(observation, seen, rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(reward, expected, rtol=2e-6, atol=1e-6)


def test_the_first_states_have_gymnasiums_distribution():
    worlds = {"CartPole-v1": (-0.05, 0.05), "Acrobot-v1": None, "MountainCar-v0": (-0.6, -0.4)}
    for id, bounds in worlds.items():
        seen = np.asarray(begin_lanes(make_world(EnvConfig(id=id)), jnp.asarray(seed_words(np.arange(2000)))).observations)
        if bounds is not None:
            assert bounds[0] <= seen[:, 0].min() < bounds[0] + 0.01
            assert bounds[1] >= seen[:, 0].max() > bounds[1] - 0.01
        assert len(np.unique(seen[:, 0])) > 1900  # every seed another


def test_seeds_are_the_same_in_numpy_and_jax_and_hardly_collide():
    lanes, episodes = (part.reshape(-1).astype(np.uint32) for part in np.meshgrid(np.arange(200), np.arange(50)))
    run = np.array([123], np.uint32)
    found = derive_seeds(run, lanes, episodes)
    assert np.array_equal(found, derive_seeds(jnp.asarray(run), jnp.asarray(lanes), jnp.asarray(episodes)))
    assert len(np.unique(found)) > 9_995
    assert found.max() < 2**31
    assert not np.array_equal(found, derive_seeds(run + 1, lanes, episodes))
