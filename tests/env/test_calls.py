"""Tests of env/episodes.py: methods called by name take effect at the next reset, in every copy, and are part of the episode."""

import sys

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest

from doubles.crashing import kill
from doubles.stepping import assert_equal_steps, continue_run, frozen
from inchworm import OpponentVectorEnv, RandomActor, team_lanes
from inchworm.core.errors import EnvError, WorkerRestartWarning
from inchworm.env.restore import CALLS, LEVEL, env_options, with_call
from inchworm.env.source import InProcessVectorEnv, WorkerVectorEnv, make_vector_env
from inchworm.worlds.toys import Sacrifice

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module


class Hard(gym.Env):
    """Shows (difficulty, speed, steps taken, options seen); an episode has 3 steps, and a step's reward is the difficulty."""

    observation_space = gym.spaces.Box(-100, 100, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.difficulty, self.speed = 1, 0.5

    def set_difficulty(self, level):
        if level > 9:
            raise ValueError(f"difficulty {level} is above 9")
        self.difficulty = level

    def set_speed(self, *, speed):
        self.speed = speed

    def report(self, factor=1):
        return {"difficulty": np.int64(self.difficulty * factor)}

    def shape(self):
        return object()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.now, self.options = 0, options
        return self._seen(), {}

    def step(self, action):
        self.now += 1
        return self._seen(), float(self.difficulty), self.now == 3, False, {}

    def _seen(self):
        return np.array([self.difficulty, self.speed, self.now, len(self.options or {})], np.float32)


def make():
    return gym.wrappers.TimeLimit(Hard(), 50)


def column(step, place=0):
    return step.observations[:, place].tolist()


def act(env, steps=1):
    for _ in range(steps):
        step = env.step(np.zeros(env.num_lanes, np.int64))
    return step


ENGINES = [
    lambda **options: InProcessVectorEnv(make, 4, **options),
    lambda **options: WorkerVectorEnv(make, 4, 2, **options),
    lambda **options: WorkerVectorEnv(make, 4, 1, help_workers=True, **options),
]


@pytest.fixture(params=ENGINES, ids=["local", "workers", "helped"])
def env(request):
    with request.param(seed=3) as env:
        yield env


def test_a_call_takes_effect_at_the_next_reset_of_the_chosen_copies(env):
    env.reset()
    act(env)
    env.call("set_difficulty", 5, indices=[0, 3])
    assert column(act(env)) == [1, 1, 1, 1], "nothing changes in a running episode"
    assert column(act(env)) == [5, 1, 1, 5], "the next episodes have begun"
    env.set_reset_options({"a": 1, "b": 2}, indices=[0])
    env.call("set_speed", speed=2.0)
    step = act(env, 3)
    assert column(step) == [5, 1, 1, 5], "options and other calls leave a call in place"
    assert column(step, 1) == [2, 2, 2, 2]
    assert column(step, 3) == [2, 0, 0, 0], "the environment sees the options without the calls"
    env.set_reset_options(None)
    env.call("set_difficulty", 2)
    step = env.reset()
    assert (column(step), column(step, 3)) == ([2] * 4, [0] * 4)

    check_reading(env)


def check_reading(env):
    """Methods that only read are called now and answer."""
    env.call("set_difficulty", 1)
    env.reset()
    env.call("set_difficulty", 4, indices=[2])
    env.reset(indices=[2])
    assert env.call("report", at_reset=False) == [{"difficulty": number} for number in (1, 1, 4, 1)]
    assert env.call("report", indices=[2, 0], at_reset=False, factor=10) == [{"difficulty": 40}, {"difficulty": 10}]
    assert (env.has_method("report"), env.has_method("missing")) == (True, False)


@pytest.mark.parametrize("make_env", ENGINES[:2], ids=["local", "workers"])
def test_a_wrong_call_is_one_line_and_changes_nothing(make_env):
    with make_env() as env:
        check_wrong_calls(env)


def check_wrong_calls(env):
    env.reset()
    with pytest.raises(EnvError, match=r"set_dificulty of Hard does not exist; did you mean set_difficulty\?"):
        env.call("set_dificulty", 2)
    with pytest.raises(EnvError, match="difficulty of Hard is not a method"):
        env.call("difficulty")
    with pytest.raises(EnvError, match="_seen of Hard is private"):
        env.call("_seen")
    with pytest.raises(EnvError, match="shape returned object"):
        env.call("shape", at_reset=False)
    with pytest.raises(EnvError, match="report raised TypeError"):
        env.call("report", at_reset=False, wrong=1)
    with pytest.raises(EnvError, match=r"must be plain data.*an argument\[0\] is ndarray"):
        env.call("set_difficulty", np.ones(2))
    with pytest.raises(EnvError, match="copies from 0 to 3"):
        env.call("set_difficulty", 2, indices=[4])
    assert column(act(env, 3)) == [1] * 4
    env.call("set_difficulty", 11, indices=[1])
    with pytest.raises(EnvError, match=r"lane 1.*set_difficulty raised ValueError: difficulty 11 is above 9"):
        env.reset()


def varied(env):
    """Calls and options that differ by copy, in the middle of episodes."""
    env.reset()
    env.call("set_difficulty", 3, indices=[0, 1])
    act(env, 4)
    env.call("set_difficulty", 7, indices=[1, 2])
    env.call("set_speed", speed=4.0, indices=[3])
    return env


def test_a_killed_worker_repeats_the_calls():
    with InProcessVectorEnv(make, 4, seed=3) as reference:
        expected = continue_run(varied(reference), 8)
    with WorkerVectorEnv(make, 4, 2, seed=3) as env:
        varied(env)
        kill(env, 0), kill(env, 1)
        with pytest.warns(WorkerRestartWarning):
            steps = continue_run(env, 8)
        assert_equal_steps(steps, expected)
    assert expected[0].observations[:, 0].tolist() == [3, 3, 1, 1], "the running episodes are those before the last calls"


@pytest.mark.parametrize("resumed", ENGINES[:2], ids=["local", "workers"])
def test_a_resumed_run_repeats_the_calls(resumed):
    with InProcessVectorEnv(make, 4, seed=3) as env, resumed(seed=3) as other:
        other.load_state_dict(varied(env).state_dict())
        assert_equal_steps(continue_run(other, 8), continue_run(env, 8))
        assert other.exact


def test_a_past_that_cannot_be_undone_is_reported():
    """The saved episodes had no calls, and no call can make these environments what they were."""
    with InProcessVectorEnv(make, 1, seed=3) as env, InProcessVectorEnv(make, 1, seed=3) as other:
        env.reset(), act(env)
        other.call("set_difficulty", 9)
        other.reset(), act(other)
        with pytest.warns(UserWarning, match="lane 0 could not be restored"):
            other.load_state_dict(env.state_dict())
        assert not other.exact


def test_a_call_through_opponents_reaches_the_environments():
    pytest.importorskip("pettingzoo")
    inner = make_vector_env(Sacrifice, num_envs=2)
    env = OpponentVectorEnv(inner, RandomActor(inner.action_space), team_lanes(2, inner.lanes_per_copy))
    assert env.has_method("state")
    assert not env.has_method("set_difficulty")
    env.reset()
    assert env.call("state", at_reset=False) == [[1, 0, 0, 0, 0, 0]] * 2  # after no step, one-hot of 5, and nobody died
    with pytest.raises(EnvError, match="set_difficulty of Sacrifice does not exist"):
        env.call("set_difficulty", 2)


def test_environments_that_move_as_one_name_what_to_change():
    with make_vector_env("CartPole-v1", num_envs=2) as env, pytest.raises(EnvError, match=r"env\.native=false, or pass a factory"):
        env.call("set_difficulty", 2)
    with make_vector_env(gym.vector.SyncVectorEnv([make], autoreset_mode="Disabled")) as env:
        with pytest.raises(EnvError, match="call it there"):
            env.call("set_difficulty", 2)
        env.set_reset_options({LEVEL: 3})
        assert column(env.reset(), 3) == [0]


def test_a_level_is_in_the_info_of_the_episodes_that_began_with_it():
    with make_vector_env(make, num_envs=2) as env:
        env.set_reset_options({LEVEL: 1})
        env.reset()
        env.set_reset_options({LEVEL: 2, "a": 1}, indices=[0])
        assert [dict(end.info) for end in act(env, 3).ended] == [{"curriculum_level": 1.0}] * 2
        after = frozen(act(env, 3))
        assert [dict(end.info) for end in after.ended] == [{"curriculum_level": 2.0}, {"curriculum_level": 1.0}]
        assert column(after, 3) == [1, 0]


def test_options_with_calls_by_hand():
    first = with_call(None, ["set_a", [1], {}])
    assert with_call({**first, "x": 1}, ["set_b", [], {"b": 2}])[CALLS] == [["set_a", [1], {}], ["set_b", [], {"b": 2}]]
    assert with_call(with_call(first, ["set_b", [2], {}]), ["set_a", [3], {}]) == {CALLS: [["set_b", [2], {}], ["set_a", [3], {}]]}
    assert env_options({"x": 1, **first, LEVEL: 3}) == {"x": 1}
    assert (env_options(first), env_options(None), env_options({})) == (None, None, {})
