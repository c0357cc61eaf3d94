"""Tests of env/workers/helping.py: this process steps a share beside the workers; the same numbers, errors and replays as without."""

from __future__ import annotations

import os

import numpy as np
import pytest
from gymnasium import spaces

from doubles.toys import Counter
from inchworm.config.sections import EnvConfig
from inchworm.core.errors import ConfigError, EnvError, WorkerError
from inchworm.env.source import InProcessVectorEnv, WorkerVectorEnv, make_vector_env


def rows_of(env, steps=60, seed=3):
    """Everything that some random steps give, as bytes."""
    rng = np.random.default_rng(seed)
    step = env.reset()
    seen = [step.observations.tobytes()]
    for _ in range(steps):
        step = env.step(rng.integers(0, 2, env.num_lanes))
        ended = [(e.lane, e.seed, e.final_observation.tobytes()) for e in sorted(step.ended, key=lambda e: e.lane)]
        seen.append((step.observations.tobytes(), step.rewards.tobytes(), step.terminated.tobytes(), step.episode_starts.tobytes(), ended))
    return seen


@pytest.mark.parametrize(("copies", "workers"), [(2, 1), (5, 1), (5, 2), (4, 3)])
def test_the_numbers_are_those_of_one_process(copies, workers):
    config = EnvConfig(num_envs=copies, native=False)
    with make_vector_env(config, seed=7, num_workers=0) as alone:
        expected = rows_of(alone)
    with make_vector_env(config.replace(num_workers=workers, help_workers=True), seed=7) as helped:
        assert isinstance(helped, WorkerVectorEnv)
        assert len(helped._engine._local.copies) == copies - copies * workers // (workers + 1) >= 1  # a share of its own
        assert rows_of(helped) == expected


def test_a_saved_state_goes_from_one_kind_to_the_other():
    config = EnvConfig(num_envs=4, native=False)
    with make_vector_env(config.replace(num_workers=1, help_workers=True), seed=1) as helped:
        rows_of(helped, 25)
        saved = helped.state_dict()
        rest = [helped.step(np.ones(4, np.int64)).observations.copy() for _ in range(5)]
    for options in ({"num_workers": 0}, {"num_workers": 1, "help_workers": True}):
        with make_vector_env(config.replace(**options), seed=1) as other:
            other.load_state_dict(saved)
            other.reset(indices=())
            for expected in rest:
                np.testing.assert_array_equal(other.step(np.ones(4, np.int64)).observations, expected)


def test_options_and_single_resets_reach_both_sides():
    with WorkerVectorEnv(Counter, 4, 1, help_workers=True, seed=0) as env, InProcessVectorEnv(Counter, 4, seed=0) as alone:
        for vector_env in (env, alone):
            vector_env.reset()
            vector_env.set_reset_options({"start": 5}, indices=[1, 3])
        assert env.state_dict()["copies"] == alone.state_dict()["copies"]
        np.testing.assert_array_equal(env.reset(indices=[0, 3]).observations, alone.reset(indices=[0, 3]).observations)
        assert env._engine._local.copies[-1].next_options == {"start": 5}


class Breaks(Counter):
    """Raises in the step after `after` steps of its copy."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def step(self, action):
        self.after -= 1
        if self.after < 0:
            raise ZeroDivisionError("broken on purpose")
        return super().step(action)


def test_an_error_here_is_told_and_the_workers_stay_usable():
    made = []

    def make():
        made.append(1)
        return Breaks(3 if len(made) == 2 else 10**6)  # in a worker `made` is a copy of its own: only its second copy would break

    with WorkerVectorEnv(make, 3, 1, help_workers=True) as env:  # the worker has one copy, this process two
        env.reset()
        actions = np.zeros((3, *env.action_space.shape), env.action_space.dtype)
        for _ in range(3):
            env.step(actions)
        with pytest.raises(ZeroDivisionError, match="broken on purpose"):
            env.step(actions)
        env._engine._local.copies[1].env.after = 10**6
        env.reset()  # nothing of the last exchange is left over
        env.step(actions)


def test_an_error_in_a_worker_is_a_worker_error():
    with WorkerVectorEnv(lambda: Breaks(2), 2, 1, help_workers=True) as env:
        env._engine._local.copies[0].env.after = 10**6
        env.reset()
        actions = np.zeros((2, *env.action_space.shape), env.action_space.dtype)
        env.step(actions)
        env.step(actions)
        with pytest.raises(WorkerError, match="broken on purpose"):
            env.step(actions)


def test_copies_that_differ_are_refused():
    with pytest.raises(EnvError, match="all copies must be alike"):
        WorkerVectorEnv(_SpacesByProcess(), 2, 1, help_workers=True)


class _SpacesByProcess:
    """Makes another world in the process that made this than in any other."""

    def __init__(self):
        self.home = os.getpid()

    def __call__(self):
        env = Counter()
        if os.getpid() == self.home:
            env.observation_space = spaces.Box(-9, 9, (7,), np.float32)
        return env


def test_what_cannot_be_helped():
    with pytest.raises(EnvError, match=r"num_workers=2, beside the share of this process, must be from 1 to 1, because num_envs=2"):
        WorkerVectorEnv(Counter, 2, 2, help_workers=True)
    for workers in (0, 4):
        with pytest.raises(ConfigError, match=rf"env.help_workers needs 1 to 3 env.num_workers to help, not {workers}"):
            EnvConfig(num_envs=4, num_workers=workers, help_workers=True)
