"""Tests of env/gymnasium_copy.py and env/local.py through the in-process vector env: episodes, flags, errors."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from doubles.toys import Counter, watched
from inchworm.core.errors import EnvError
from inchworm.core.seeding import episode_seed
from inchworm.env.check import check_env
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
        ((SEEN, np.zeros(1), False, False, {}), "reward must be one real number"),
        ((SEEN, 0.0, None, False, {}), "terminated must be one bool"),
        ((SEEN, 0.0, False, 1, {}), "truncated must be one bool"),
        ((SEEN[:1], 0.0, True, False, {}), r"observation has shape \(1,\)"),
    ],
)
def test_broken_steps_name_lane_step_and_seed(result, words):
    with pytest.raises(EnvError, match=rf"lane 0, step 1 of episode 1 with seed {episode_seed(0, 0, 0)}: {words}"):
        step_once(result)


def test_the_four_values_of_an_old_step_are_named_behind_wrappers_of_gymnasium_too():
    class Old(Counter):
        def step(self, action):
            return super().step(action)[:4]

    env = make_vector_env(lambda: gym.wrappers.TimeLimit(Old(), 5), 1)
    env.reset()
    with pytest.raises(EnvError, match=r"lane 0, step 1 of episode 1 .*: step must return the 5 values"):
        env.step(np.array([0]))


def test_broken_resets_are_named():
    for first in (SEEN, (SEEN, None), (SEEN, {}, 1)):
        with pytest.raises(EnvError, match="reset must return"):
            step_once(first=first)
    with pytest.raises(EnvError, match=r"lane 0, step 0 .*observation has shape"):
        step_once(first=(SEEN[:1], {}))


class Failing(Counter):
    """Raises an error in the call named `where`, from a function of its own."""

    def __init__(self, where, error):
        super().__init__(length=2)
        self.where, self.error, self.resets = where, error, 0
        self.reach("init")

    def reach(self, where):
        if where == self.where:
            raise self.error

    def reset(self, **kwargs):
        self.resets += 1
        self.reach(("trial reset", "first reset", "reset")[self.resets - 1])
        return super().reset(**kwargs)

    def step(self, action):
        self.reach("step")
        return super().step(action)


@pytest.mark.parametrize("error", [(ZeroDivisionError, "boom\nbang"), (SystemExit, 0), (MemoryError, "")])
@pytest.mark.parametrize(
    ("where", "start"),
    [
        ("init", "lane 0: making the environment raised"),
        ("trial reset", "lane 0: reading its spaces and its first reset raised"),
        ("first reset", "lane 0, step 0 of episode 1 with seed {}: reset raised"),
        ("step", "lane 0, step 1 of episode 1 with seed {}: step raised"),
        ("reset", "lane 0, step 0 of episode 2 with seed {}: reset raised"),
    ],
)
def test_whatever_an_environment_raises_is_an_error_with_lane_episode_and_its_own_frames(where, start, error):
    kind, content = error
    error = kind(content)

    def play():
        with make_vector_env(lambda: Failing(where, error), 1) as env:
            env.reset()
            for _ in range(2):
                env.step(np.array([0]))

    with pytest.raises(EnvError) as caught:
        play()
    assert caught.value.__cause__ is error
    text = " ".join(str(error).split())
    first, *frames = str(caught.value).splitlines()
    seed = episode_seed(0, 0, int(where == "reset"))
    assert first == f"{start.format(seed)} {type(error).__name__}{f': {text}' if text else ''}"
    assert [frame.partition(" in ")[2] for frame in frames[-2:]] == ["__init__" if where == "init" else where.split()[-1], "reach"]
    assert all(frame.startswith(f"  at {__file__}:") for frame in frames)


def test_an_old_reset_gets_the_sentence_of_check_env():
    class Old(Counter):
        def reset(self):
            return super().reset()[0]

    class Wrong(Counter):
        def reset(self, *, seed=None, options=None):
            return len(None)

    (sentence,) = check_env(Old).problems
    for make in (Old, lambda: gym.wrappers.TimeLimit(Old(), 5)):
        with pytest.raises(EnvError, match="lane 0, before its first episode: ") as caught:
            make_vector_env(make, 1)
        assert str(caught.value).endswith(f": {sentence}")
    with pytest.raises(EnvError, match="reset raised TypeError: object of type 'NoneType'"):
        make_vector_env(Wrong, 1)


def test_after_an_error_a_full_reset_is_needed():
    env = make_vector_env(lambda: Scripted(ValueError("once"), (SEEN, 0.0, False, False, {})), 1)
    env.reset()
    with pytest.raises(EnvError, match="once"):
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
    with pytest.raises(EnvError, match="lane 2: making the environment raised StopIteration"):
        make_vector_env(lambda: next(copies), 4)
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
