"""Tests of env/lockstep.py: Gymnasium's SyncVectorEnv and AsyncVectorEnv come back to where they stood, bit for bit."""

import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from doubles.stepping import assert_equal_steps, assert_equal_trees, run
from doubles.vector import Hybrid, Moody, go_on
from inchworm.config.sections import EnvConfig
from inchworm.env.foreign import LockstepVectorEnv
from inchworm.env.source import make_vector_env


def vector(maker=lambda: gym.make("CartPole-v1", max_episode_steps=25), copies=3, kind=SyncVectorEnv):
    return kind([maker] * copies, autoreset_mode=AutoresetMode.DISABLED)


def adapted(maker=lambda: gym.make("CartPole-v1", max_episode_steps=25), seed=7, kind=SyncVectorEnv, copies=3, **options):
    return make_vector_env(vector(maker, copies, kind), seed=seed, **options)


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("steps", [0, 1, 24, 25, 67])
def test_a_saved_state_is_gone_on_from_with_the_same_bits(kind, steps):
    straight, fresh = adapted(kind=kind), adapted(kind=kind, seed=99)
    assert type(straight) is LockstepVectorEnv
    run(straight, steps, seed=1)
    state = straight.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh.load_state_dict(state)
    assert fresh.exact
    assert fresh.inexact == []
    assert_equal_steps(go_on(straight, 60, seed=2), go_on(fresh, 60, seed=2))
    straight.close()
    fresh.close()


def test_copies_of_all_lengths_come_back_with_masks_options_and_streams_that_are_drawn_from_in_the_episode():
    straight, fresh = adapted(Hybrid, copies=6), adapted(Hybrid, copies=6)
    straight.set_reset_options({"shift": 3.0}, indices=[1, 4])
    run(straight, 41, seed=1)
    straight.reset(indices=[2])  # an episode of no steps: it begins at the very end of the replay
    straight.set_reset_options({"shift": -5.0}, indices=[4])  # not yet true for the running episode
    state = straight.state_dict()
    lengths = [copy["length"] for copy in state["copies"]]
    assert lengths[2] == 0
    assert len(set(lengths)) > 3  # else lanes would not have to wait for one another
    fresh.load_state_dict(state)
    assert fresh.exact
    assert_equal_steps(go_on(straight, 50, seed=2), go_on(fresh, 50, seed=2))


def test_the_state_is_that_of_the_copies_one_by_one():
    """The same ledger: a state of Gymnasium's vector env may even be loaded into ours."""
    theirs = adapted(seed=3)
    ours = make_vector_env(EnvConfig(id="CartPole-v1", num_envs=3, native=False, max_episode_steps=25), seed=3)
    run(theirs, 30, seed=1)
    ours.load_state_dict(theirs.state_dict())
    assert_equal_steps(go_on(theirs, 40, seed=2), go_on(ours, 40, seed=2))


def moody(kind=SyncVectorEnv, **options):
    env = kind([lambda: Moody(False), lambda: Moody(True), lambda: Moody(False)], autoreset_mode=AutoresetMode.DISABLED)
    return make_vector_env(env, seed=7, **options)


def test_a_copy_that_does_not_come_back_begins_anew_and_the_run_is_inexact_from_then_on():
    straight, fresh = moody(), moody()
    run(straight, 5)
    with pytest.warns(UserWarning, match="lane 1 is not where it was saved and begins a fresh episode: replay led to another observation"):
        fresh.load_state_dict(straight.state_dict())
    step = fresh.reset(indices=())
    assert step.episode_starts.tolist() == [False, True, False]
    assert_equal_trees(step.observations[[0, 2]], straight.reset(indices=()).observations[[0, 2]])
    assert fresh.inexact == ["1 of 3 copies did not come back at a resume and began fresh episodes"]
    assert not fresh.exact
    # It is said in what is saved from now on, and once, however often the run is resumed.
    again = moody()
    again.load_state_dict(fresh.state_dict())
    assert again.inexact == fresh.inexact
    assert straight.exact


def test_an_episode_that_ends_on_the_way_back_is_astray_and_the_others_are_not():
    def of(ends):
        env = SyncVectorEnv([lambda: Moody(False), lambda: Moody(False, ends)], autoreset_mode=AutoresetMode.DISABLED)
        return make_vector_env(env, seed=7)

    straight, fresh = of(ends=False), of(ends=True)
    run(straight, 7)
    with pytest.warns(UserWarning, match=r"lane 1 .* replay gave return and length \(2.0, 2\), but \(7.0, 7\) was saved"):
        fresh.load_state_dict(straight.state_dict())
    assert fresh.reset(indices=()).episode_starts.tolist() == [False, True]


def test_too_long_an_episode_is_not_kept():
    straight, fresh = adapted(max_replay_steps=4), adapted(max_replay_steps=4)
    straight.reset()
    for _ in range(3):
        straight.step(np.array([0, 1, 0]))
    straight.reset(indices=[1])
    for _ in range(3):
        straight.step(np.array([1, 0, 1]))
    with pytest.warns(UserWarning, match="had 6 steps, more than"):
        fresh.load_state_dict(straight.state_dict())
    assert fresh.reset(indices=()).episode_starts.tolist() == [True, False, True]
    assert fresh.inexact == ["2 of 3 copies did not come back at a resume and began fresh episodes"]


def test_wrappers_whose_statistics_cross_episodes_are_named():
    plain = gym.wrappers.vector.RecordEpisodeStatistics(vector())
    assert make_vector_env(plain).exact
    around = gym.wrappers.vector.NormalizeReward(vector())
    inside = vector(lambda: gym.wrappers.NormalizeObservation(gym.make("CartPole-v1")))
    for env, wrapper, field in (
        (around, "NormalizeReward", "normalize_values"),
        (inside, "NormalizeObservation", "normalize_observations"),
    ):
        (why,) = make_vector_env(env).inexact
        assert f"wrapper {wrapper} cross" in why
        assert f"policy.{field}=true" in why
