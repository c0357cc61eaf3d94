"""Tests of worlds/cartpole.py: CartPole on arrays has the bits of Gymnasium's environment."""

import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from doubles.stepping import assert_equal_steps, frozen, run
from inchworm.config.sections import EnvConfig
from inchworm.core.errors import EnvError
from inchworm.env.registry import vectorised
from inchworm.env.source import make_vector_env
from inchworm.env.step_arrays import allocate_rows
from inchworm.worlds import cartpole
from inchworm.worlds.cartpole import AllAtOnce, LaneByLane, NativeCartPole


def slow(name="CartPole-v1", num_envs=8, **kwargs):
    limit = kwargs.pop("max_episode_steps", None)
    return make_vector_env(EnvConfig(id=name, num_envs=num_envs, native=False, max_episode_steps=limit), **kwargs)


@pytest.mark.parametrize("lanes", [1, 8, 16, 17])
def test_random_play_is_bit_equal(lanes):
    steps = 2000 // lanes
    assert_equal_steps(run(slow(num_envs=lanes, seed=3), steps), run(NativeCartPole("CartPole-v1", lanes, seed=3), steps))


def balance(observations):
    """A policy that holds the pole up for hundreds of steps."""
    return (observations[:, 2] + 0.5 * observations[:, 3] + 0.02 * observations[:, 0] + 0.05 * observations[:, 1] > 0).astype(int)


@pytest.mark.filterwarnings("ignore:.*CartPole-v0 is out of date")
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
    with pytest.warns(UserWarning, match="lane 0 could not be restored"):
        NativeCartPole("CartPole-v1", 1, max_episode_steps=3).load_state_dict(state)


def test_wrong_actions_are_refused():
    env = NativeCartPole("CartPole-v1", 2)
    env.reset()
    for wrong in ([0, 2], [-1, 0]):
        with pytest.raises(EnvError, match="not all 0 or 1"):
            env.step(np.array(wrong))
        env.reset()


@pytest.fixture
def unchecked():
    """The comparison with Gymnasium is made afresh, and again after the test."""
    cartpole._is_bit_equal.cache_clear()
    yield
    cartpole._is_bit_equal.cache_clear()


@pytest.mark.parametrize(("lanes", "dynamics"), [(1, LaneByLane), (16, LaneByLane), (17, AllAtOnce)])
def test_it_is_not_used_where_the_bits_differ(monkeypatch, unchecked, lanes, dynamics):
    assert vectorised(EnvConfig(num_envs=lanes)) is cartpole.WORLD
    put = dynamics.put
    monkeypatch.setattr(dynamics, "put", lambda self, lane, state: put(self, lane, state * (1.0 + 2e-7)))
    cartpole._is_bit_equal.cache_clear()
    assert not vectorised(EnvConfig(num_envs=lanes))


def test_it_is_not_used_where_episodes_end_otherwise(monkeypatch, unchecked):
    monkeypatch.setattr(cartpole._CartPoleEngine, "finish", lambda self: [(0, {})])
    assert not vectorised(EnvConfig())


@pytest.mark.parametrize("dynamics", [LaneByLane, AllAtOnce])
def test_both_ways_have_the_bits_of_gymnasium_in_wild_states(dynamics):
    """One step from 500 random states, far out too: x, theta and both speeds as Gymnasium's own step makes them."""
    rng = np.random.default_rng(1)
    states = rng.normal(0.0, [2.0, 3.0, 0.15, 3.0], (500, 4))
    env = CartPoleEnv()
    rows, _ = allocate_rows(env.observation_space, env.action_space, 500, 500)
    moved = dynamics(env, rows)
    rows.actions[:] = rng.integers(0, 2, 500)
    for lane, state in enumerate(states):
        moved.put(lane, state)
    assert np.array_equal(rows.observations, states.astype(np.float32))
    fell = moved.move()
    for lane, state in enumerate(states):
        env.reset()
        env.state = state
        observation, _, terminated, _, _ = env.step(int(rows.actions[lane]))
        assert np.array_equal(rows.observations[lane], observation)
        assert terminated == (lane in fell)
    assert 100 < len(fell) < 400


def test_numpys_cosine_is_used_where_pythons_differs(monkeypatch):
    cartpole.trigonometry.cache_clear()
    monkeypatch.setattr(cartpole.math, "sin", lambda angle: np.nextafter(np.sin(angle), 9.0))
    try:
        cos, sin = cartpole.trigonometry()
        assert (cos(0.1), sin(0.1)) == (np.cos(0.1), np.sin(0.1))
        assert type(cos(0.1)) is type(sin(0.1)) is float
    finally:
        cartpole.trigonometry.cache_clear()


def test_time_limits_of_lanes_that_began_at_different_times():
    """Lane 0 is reset again after 2 steps: with a limit of 5, lane 1 is cut at step 5, lane 0 at 7, lane 1 again at 10."""
    env = NativeCartPole("CartPole-v1", 2, max_episode_steps=5)
    env.reset()
    cuts = []
    for turn in range(1, 13):
        step = env.step(np.array([turn % 2, turn % 2]))
        cuts += [(turn, int(lane)) for lane in step.truncated.nonzero()[0]]
        if turn == 2:
            env.reset(indices=[0])
    assert cuts == [(5, 1), (7, 0), (10, 1), (12, 0)]
