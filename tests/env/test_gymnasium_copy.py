"""Tests of env/gymnasium_copy.py and env/local.py through the in-process vector env: episodes, flags, errors."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from doubles.toys import Counter, watched
from inchworm.core.errors import EnvError
from inchworm.core.seeding import episode_seed
from inchworm.env.source import make_vector_env


class Scripted(gym.Env):
    """Returns the given results of `step`, one after another."""

    def __init__(self, *results, first=None):
        self.observation_space, self.action_space = spaces.Box(-9, 9, (2,), np.float32), spaces.Discrete(2)
        self.results, self.first, self.turn = results, first, 0

    def reset(self, *, seed=None, options=None):
        self.turn = 0
        return (np.zeros(2, np.float32), {}) if self.first is None else self.first

    def step(self, action):
        self.turn += 1
        result = self.results[self.turn - 1]
        if isinstance(result, BaseException):
            raise result
        return result


SEEN = np.ones(2, np.float32)


def step_once(*results, **kwargs):
    env = make_vector_env(lambda: Scripted(*results, **kwargs), 1)
    env.reset()
    return env.step(np.array([0]))


def test_episodes_are_reset_in_the_same_step_with_derived_seeds():
    env = make_vector_env(lambda: Counter(length=2), 2, seed=7)
    seeds = [[episode_seed(7, copy, episode) for episode in range(3)] for copy in range(2)]
    first = env.reset()
    assert first.observations.tolist() == [[seeds[0][0], 0], [seeds[1][0], 0]]
    assert (first.episode_starts.tolist(), first.rewards.tolist()) == ([True, True], [0, 0])
    middle = env.step(np.array([1, 2]))
    assert middle.observations.tolist() == [[seeds[0][0], 1], [seeds[1][0], 1]]
    assert (middle.rewards.tolist(), middle.episode_starts.any(), middle.ended) == ([1, 1], False, ())
    last = env.step(np.array([2, 2]))
    assert last.rewards.tolist() == [2, 2]
    assert (last.terminated.tolist(), last.truncated.tolist()) == ([True, True], [False, False])
    assert last.episode_starts.tolist() == [True, True]
    assert last.observations.tolist() == [[seeds[0][1], 0], [seeds[1][1], 0]]  # already the next episode
    for lane, ended in enumerate(last.ended):
        assert (ended.lane, ended.seed) == (lane, seeds[lane][0])
        assert ended.final_observation.tolist() == [seeds[lane][0], 2]  # the true last observation
    assert [dict(ended.info) for ended in last.ended] == [{"total": 3.0}, {"total": 4.0}]
    after = env.step(np.array([0, 0]))
    assert (after.terminated.any(), after.episode_starts.any(), after.ended) == (False, False, ())
    assert env.step(np.array([0, 0])).ended[0].final_observation.tolist() == [seeds[0][1], 2]
    assert last.ended[0].final_observation.tolist() == [seeds[0][0], 2]  # a copy, which later steps do not change


def test_truncation_is_reported_and_both_flags_mean_terminated():
    env = make_vector_env(lambda: Counter(length=1, truncate=True), 1)
    env.reset()
    step = env.step(np.array([0]))
    assert (step.terminated[0], step.truncated[0]) == (False, True)
    step = step_once((SEEN, 0.0, True, True, {}))
    assert (step.terminated[0], step.truncated[0]) == (True, False)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ((SEEN, 0.0, False, {}), "step must return the 5 values"),
        (None, "step must return the 5 values"),
        ((SEEN[:1], 0.0, False, False, {}), r"observation has shape \(1,\)"),
        ((None, 0.0, False, False, {}), "observation must be a NumPy array"),
        ((SEEN, np.zeros(1), False, False, {}), "reward must be one real number"),
        ((SEEN, None, False, False, {}), "reward must be one real number"),
        ((SEEN, 0.0, None, False, {}), "terminated must be one bool"),
        ((SEEN, 0.0, False, 1, {}), "truncated must be one bool"),
        ((SEEN[:1], 0.0, True, False, {}), r"observation has shape \(1,\)"),
    ],
)
def test_broken_steps_name_lane_step_and_seed(result, words):
    with pytest.raises(EnvError, match=rf"lane 0, step 1 of the episode with seed {episode_seed(0, 0, 0)}: {words}"):
        step_once(result)


def test_broken_resets_are_named():
    for first in (SEEN, (SEEN, None), (SEEN, {}, 1)):
        with pytest.raises(EnvError, match="reset must return"):
            step_once(first=first)
    with pytest.raises(EnvError, match=r"lane 0, step 0 .*observation has shape"):
        step_once(first=(SEEN[:1], {}))


def test_an_exception_of_the_environment_is_raised_with_a_note():
    with pytest.raises(ZeroDivisionError) as caught:
        step_once(ZeroDivisionError("boom"))
    assert caught.value.__notes__ == [f"in the environment of lane 0, step 1 of the episode with seed {episode_seed(0, 0, 0)}"]


def test_after_an_error_a_full_reset_is_needed():
    env = make_vector_env(lambda: Scripted(ValueError("once"), (SEEN, 0.0, False, False, {})), 1)
    env.reset()
    with pytest.raises(ValueError, match="once"):
        env.step(np.array([0]))
    with pytest.raises(EnvError, match="the last call failed"):
        env.step(np.array([0]))
    env.reset()


def test_a_factory_must_return_a_new_environment_of_the_same_kind():
    with pytest.raises(EnvError, match="the factory returned int"):
        make_vector_env(lambda: 7, 1)
    shared = Counter()
    with pytest.raises(EnvError, match="returned the same environment for two lanes; lane 1"):
        make_vector_env(lambda: shared, 2)
    with pytest.raises(EnvError, match="returned the same environment"):
        make_vector_env(lambda: gym.wrappers.TimeLimit(shared, 5), 2)
    kinds = iter([Counter, Scripted])
    with pytest.raises(EnvError, match="lane 1 has other spaces than lane 0"):
        make_vector_env(lambda: next(kinds)(), 2)


def test_what_was_made_is_closed_if_a_later_copy_fails():
    door, open_envs = watched(Counter)
    copies = iter([door(), door()])
    with pytest.raises(StopIteration) as caught:
        make_vector_env(lambda: next(copies), 4)
    assert caught.value.__notes__ == ["while lane 2 was made"]
    assert not open_envs


def test_errors_while_closing_are_warnings_and_all_are_closed():
    closed = []

    class Stubborn(Counter):
        def close(self):
            closed.append(1)
            raise OSError("the door is stuck")

    env = make_vector_env(Stubborn, 2)
    with pytest.warns(UserWarning, match="lane 0 failed to close: OSError: the door is stuck"):
        env.close()
    assert closed == [1, 1]
    env.close()  # twice is fine, and silent


def test_an_environment_may_reuse_its_observation_array():
    class Reuses(Counter):
        def reset(self, **kwargs):
            observation, info = super().reset(**kwargs)
            self.shared = observation
            return self.shared, info

        def step(self, action):
            observation, *rest = super().step(action)
            self.shared[:] = observation
            return self.shared, *rest

    env = make_vector_env(lambda: Reuses(length=2), 1)
    env.reset()
    env.step(np.array([0]))
    ended = env.step(np.array([0])).ended[0]
    assert ended.final_observation[1] == 2
