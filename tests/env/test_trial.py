"""Tests of env/trial.py and of its use by train/resolve.py: an environment that cannot be resumed exactly is found at the start."""

import functools
import os
import time
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from doubles.crashing import FickleTeam
from inchworm.config.sections import EnvConfig, TrainingConfig
from inchworm.env import trial
from inchworm.env.source import make_vector_env
from inchworm.env.trial import try_resume
from inchworm.train.resolve import resolve_env
from inchworm.worlds.toys import Comings


class Walk(gym.Env):
    """A random walk; subclasses make it inexact."""

    observation_space = spaces.Box(-1e9, 1e9, (1,), np.float64)
    action_space = spaces.Discrete(2)
    made = closed = 0

    def __init__(self):
        type(self).made += 1
        self.number, self.steps = self.made, 0

    def noise(self):
        return self.np_random.normal()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = np.zeros(1) + self.np_random.normal(), 0
        return self.x.copy(), {}

    def step(self, action):
        self.t, self.steps = self.t + 1, self.steps + 1
        self.x = self.x + action + self.noise()
        return self.x.copy(), 1.0, bool(self.np_random.random() < 0.02), False, {}

    def close(self):
        type(self).closed += 1


def walking(name, noise):
    return type(name, (Walk,), {"noise": noise})


STREAM = np.random.default_rng(0)
OwnStream = walking("OwnStream", lambda self: STREAM.normal())  # the seed does not govern it
Tired = walking("Tired", lambda self: self.np_random.normal() + 0.001 * (self.steps > 20))  # it has played earlier episodes
Born = walking("Born", lambda self: 0.1 * self.number)  # another world each time it is made
Later = walking("Later", lambda self: STREAM.normal() if self.t > 16 else 0.0)  # after the steps that are replayed


class Raises(Walk):
    def step(self, action):
        raise RuntimeError("the motor is on fire: 100 %")


def one(make):
    return lambda: make_vector_env(make, 1)


def test_a_function_of_seed_and_actions_passes():
    assert try_resume(one(Walk), "Walk") is None
    assert try_resume(one(Walk), "Walk", once=True) is None
    for name in ("Acrobot-v1", "Taxi-v4", "Blackjack-v1"):
        assert try_resume(lambda name=name: make_vector_env(EnvConfig(id=name, num_envs=1)), name) is None


@pytest.mark.parametrize(("make", "once"), [(OwnStream, False), (OwnStream, True), (Tired, False), (Tired, True), (Born, False)])
def test_what_is_not_deterministic_is_found(make, once):
    why = try_resume(one(make), "own:make")
    assert "own:make is not exactly resumable, because it is not a function of seed and actions: replaying an episode gave a d" in why
    if once:
        assert try_resume(one(make), "own:make", once=True) == why


def test_a_difference_after_the_replayed_steps_is_found_too():
    why = try_resume(one(Later), "Later")
    assert "a restored episode differs 1 steps later" in why


def test_it_never_raises_and_closes_what_it_made():
    why = try_resume(one(Raises), "Raises")
    assert why.startswith("whether Raises is exactly resumable could not be tested: EnvError: lane 0, step 1 of episode 1 with seed ")
    assert why.endswith(": step raised RuntimeError: the motor is on fire: 100 %")
    assert "list index out of range" in try_resume(one(lambda: [][0]), "x")
    for make in (Walk, Raises, OwnStream):
        make.made = make.closed = 0
        try_resume(one(make), "x")
        assert make.made == make.closed > 0
    not_closing = type("NotClosing", (Walk,), {"close": lambda self: [][0]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the answer holds all that there is to report
        assert try_resume(one(not_closing), "x") is None


def test_slow_environments_are_made_once_and_take_few_steps(monkeypatch):
    steps = []

    class Slow(Walk):
        def __init__(self):
            super().__init__()
            time.sleep(0.02)

        def step(self, action):
            steps.append(1)
            time.sleep(0.005)
            return super().step(action)

    monkeypatch.setattr(trial, "_QUICK_TO_MAKE", 0.01)
    monkeypatch.setattr(trial, "_SECONDS", 0.02)
    Slow.made = 0
    assert try_resume(one(Slow), "Slow") is None
    assert Slow.made == 1
    # Three plays of 5 ms steps within 20 ms each (at most 5 steps), and two of them again.
    assert 3 <= len(steps) <= 25


def resolved(env, *, rehearse=True, **changes):
    given = {"id": env} if isinstance(env, str) else {}
    config = TrainingConfig(env=EnvConfig(**{"num_envs": 2, "num_workers": 0, **given, **changes}))
    return resolve_env(env, config, rehearse=rehearse)


def test_the_trainers_environments_are_marked():
    env = resolved(OwnStream)
    (why,) = env.inexact
    assert "is not exactly resumable" in why
    assert not env.exact
    Walk.made = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolved(Walk).exact
        assert Walk.made == 4  # two that train, two for the trial
        assert resolved(OwnStream, rehearse=False).exact  # not tried
        assert resolved(OwnStream(), num_envs=1).exact  # an instance cannot be copied
        assert resolved("CartPole-v1").exact
        assert resolved("Acrobot-v1", frame_stack=2, max_episode_steps=9).exact


def test_proven_environments_are_not_tried(monkeypatch):
    monkeypatch.setattr("inchworm.train.resolve.try_resume", lambda *_, **__: "tried")
    assert resolved("CartPole-v1").exact
    assert resolved("CartPole-v1", native=False).inexact == ["tried"]


def test_environments_for_workers_are_tried_in_a_worker():
    env = resolved(type("Dies", (Walk,), {"step": lambda self, action: os._exit(3)}), num_workers=1)
    (why,) = env.inexact
    assert "could not be tested: WorkerError" in why
    env.close()


def test_ctrl_c_stops_the_trial_and_closes_all():
    class Pressed(Walk):
        made = closed = 0

        def step(self, action):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolved(Pressed)
    assert Pressed.made == Pressed.closed == 3  # two that would have trained, one for the trial


def test_a_team_is_tried_like_any_environment(tmp_path):
    pytest.importorskip("pettingzoo")

    class RandomState(Comings):
        def state(self):
            return super().state() + STREAM.random()

    fickle = functools.partial(FickleTeam, tmp_path / "made")
    for make, shared, flawed in ((Comings, True, False), (Comings, False, False), (RandomState, True, True), (fickle, False, True)):
        why = try_resume(lambda make=make, shared=shared: make_vector_env(make, 1, 0, global_state=shared), "it")
        assert (why is not None) == flawed, (make, why)
