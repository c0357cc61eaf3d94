"""Tests of env/native.py: CartPole on arrays has the bits of Gymnasium's environment."""

import numpy as np
import pytest
from helpers_env import assert_equal_steps, frozen, run

from inchworm.config import EnvConfig
from inchworm.env import native
from inchworm.env.native import NativeCartPole, native_pays
from inchworm.env.vector_env import make_vector_env
from inchworm.errors import EnvError


def slow(name="CartPole-v1", num_envs=8, **kwargs):
    limit = kwargs.pop("max_episode_steps", None)
    return make_vector_env(EnvConfig(id=name, num_envs=num_envs, native=False, max_episode_steps=limit), **kwargs)


@pytest.mark.parametrize("lanes", [1, 8, 17])
def test_random_play_is_bit_equal(lanes):
    steps = 4000 // lanes
    assert_equal_steps(run(slow(num_envs=lanes, seed=3), steps), run(NativeCartPole("CartPole-v1", lanes, seed=3), steps))


def balance(observations):
    """A policy that holds the pole up for hundreds of steps."""
    return (observations[:, 2] + 0.5 * observations[:, 3] + 0.02 * observations[:, 0] + 0.05 * observations[:, 1] > 0).astype(int)


@pytest.mark.parametrize(("name", "limit"), [("CartPole-v1", None), ("CartPole-v0", None), ("CartPole-v1", 90)])
def test_long_episodes_and_time_limits_are_bit_equal(name, limit):
    ours = NativeCartPole(name, 4, max_episode_steps=limit)
    theirs = slow(name, 4, max_episode_steps=limit)
    one, other = ours.reset(), theirs.reset()
    cut = 0
    for _ in range(700):
        actions = balance(other.observations)
        one, other = ours.step(actions), theirs.step(actions)
        assert_equal_steps([one], [other])
        cut += int(one.truncated.sum())
    assert cut >= 4  # limits were reached


def test_a_fall_on_the_last_step_of_the_limit_is_terminated():
    env = NativeCartPole("CartPole-v1", 1)
    env.reset()
    falls = next(turn for turn in range(1, 99) if env.step(np.array([0])).terminated[0])  # always pushed to the left
    for make in (NativeCartPole, slow):
        limited = make("CartPole-v1", 1, max_episode_steps=falls)
        limited.reset()
        for _ in range(falls):
            step = limited.step(np.array([0]))
        assert (bool(step.terminated[0]), bool(step.truncated[0])) == (True, False)


def test_resets_options_and_states_are_interchangeable_with_the_slow_one():
    ours, theirs = NativeCartPole("CartPole-v1", 4, seed=2), slow(num_envs=4, seed=2)
    rng = np.random.default_rng(0)
    for env in (ours, theirs):
        env.set_reset_options({"low": -0.2, "high": 0.2}, indices=[1, 3])
    assert_equal_steps([ours.reset()], [theirs.reset()])
    for turn in range(40):
        if turn == 9:
            assert_equal_steps([ours.reset(seeds=[5, 6], indices=[2, 0])], [theirs.reset(seeds=[5, 6], indices=[2, 0])])
        actions = rng.integers(0, 2, 4)
        assert_equal_steps([ours.step(actions)], [theirs.step(actions)])
    state, same = ours.state_dict(), theirs.state_dict()
    assert state["copies"] == same["copies"]
    fresh, other = NativeCartPole("CartPole-v1", 4), slow(num_envs=4)
    fresh.load_state_dict(same)
    other.load_state_dict(state)
    assert_equal_steps([frozen(fresh.reset(indices=()))], [frozen(other.reset(indices=()))])
    for _ in range(40):
        actions = rng.integers(0, 2, 4)
        assert_equal_steps([fresh.step(actions)], [other.step(actions)])


def test_a_replay_across_an_end_is_astray():
    env = NativeCartPole("CartPole-v1", 1, max_episode_steps=9)
    env.reset()
    for _ in range(5):
        env.step(np.array([0]))
    state = env.state_dict()
    with pytest.warns(UserWarning, match="lane 0 is not where it was saved"):
        NativeCartPole("CartPole-v1", 1, max_episode_steps=3).load_state_dict(state)


def test_wrong_actions_are_refused():
    env = NativeCartPole("CartPole-v1", 2)
    env.reset()
    for wrong in ([0, 2], [-1, 0]):
        with pytest.raises(EnvError, match="not all 0 or 1"):
            env.step(np.array(wrong))
        env.reset()


def test_it_is_not_used_where_the_bits_differ(monkeypatch):
    assert native_pays(EnvConfig())
    move = native._Dynamics.move

    def other_physics(self, actions, terminated):
        move(self, actions, terminated)
        self.state[0, 0] += 1e-6

    monkeypatch.setattr(native._Dynamics, "move", other_physics)
    native._is_bit_equal.cache_clear()
    try:
        assert not native_pays(EnvConfig())
    finally:
        native._is_bit_equal.cache_clear()


def test_it_is_not_used_where_episodes_end_otherwise(monkeypatch):
    monkeypatch.setattr(native._CartPoleEngine, "finish", lambda self: [(0, {})])
    native._is_bit_equal.cache_clear()
    try:
        assert not native_pays(EnvConfig())
    finally:
        native._is_bit_equal.cache_clear()
