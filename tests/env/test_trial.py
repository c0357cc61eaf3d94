"""Tests of env/rehearsal.py and of its use by train/resolve.py: an environment that cannot be resumed exactly is known at the start."""

import time
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from inchworm.config.sections import EnvConfig, TrainingConfig
from inchworm.env import trial as rehearsal
from inchworm.env.source import make_vector_env
from inchworm.env.trial import try_resume
from inchworm.env.vector_env import LaneVectorEnv
from inchworm.train.resolve import resolve_env


class Walk(gym.Env):
    """A random walk. What makes it inexact is in subclasses."""

    observation_space = spaces.Box(-1e9, 1e9, (1,), np.float64)
    action_space = spaces.Discrete(2)
    made = closed = 0

    def __init__(self):
        type(self).made += 1
        self.setup()

    def setup(self):
        pass

    def noise(self):
        return self.np_random.normal()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = np.zeros(1) + self.np_random.normal(), 0
        return self.x.copy(), {}

    def step(self, action):
        self.t += 1
        self.x = self.x + action + self.noise()
        return self.x.copy(), 1.0, bool(self.np_random.random() < 0.02), False, {}

    def close(self):
        type(self).closed += 1


class OwnStream(Walk):
    """Draws from a stream that the seed does not govern."""

    stream = np.random.default_rng(0)

    def noise(self):
        return self.stream.normal()


class Tired(Walk):
    """Keeps something from one episode to the next: the same seed leads elsewhere in a copy that has played before."""

    def setup(self):
        self.steps = 0

    def noise(self):
        self.steps += 1
        return self.np_random.normal() + (0.001 if self.steps > 20 else 0.0)


class Born(Walk):
    """Is another world each time it is made."""

    births = 0

    def setup(self):
        Born.births += 1
        self.wind = 0.1 * Born.births

    def noise(self):
        return self.wind


class Later(Walk):
    """Its randomness begins only after some steps of an episode, after those that are replayed."""

    def noise(self):
        return OwnStream.stream.normal() if self.t > 16 else 0.0


class Raises(Walk):
    def step(self, action):
        raise RuntimeError("the motor is on fire: 100 %")


class NotClosing(Walk):
    def close(self):
        raise OSError("it will not close")


def one(make):
    return lambda: make_vector_env(make, 1)


def test_a_function_of_seed_and_actions_passes():
    assert try_resume(one(Walk), "Walk") is None
    assert try_resume(one(Walk), "Walk", once=True) is None
    for name in ("Acrobot-v1", "Taxi-v4", "Blackjack-v1"):
        assert try_resume(lambda name=name: make_vector_env(EnvConfig(id=name, num_envs=1)), name) is None


@pytest.mark.parametrize(("make", "once"), [(OwnStream, False), (OwnStream, True), (Tired, False), (Tired, True), (Born, False)])
def test_what_is_none_is_found(make, once):
    why = try_resume(one(make), "own:make")
    assert (
        "own:make is not exactly resumable, because it is not a function of seed and actions: replaying an episode gave a different result"
        in why
    )
    if once:
        assert try_resume(one(make), "own:make", once=True) == why


def test_what_shows_only_after_the_episode_was_brought_back_is_found_too():
    why = try_resume(one(Later), "Later")
    assert "a restored episode differs 1 steps later" in why


def test_it_never_raises_and_closes_what_it_made():
    why = try_resume(one(Raises), "Raises")
    assert why == "whether Raises is exactly resumable could not be tested: RuntimeError: the motor is on fire: 100 %"
    assert "no such thing" in try_resume(one(lambda: [][0]), "x").replace("list index out of range", "no such thing")
    for make in (Walk, Raises, OwnStream):
        make.made = make.closed = 0
        try_resume(one(make), "x")
        assert make.made == make.closed > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said: what there is to say is the answer
        assert try_resume(one(NotClosing), "x") is None


def test_slow_environments_are_made_once_and_take_few_steps(monkeypatch):
    steps = []

    class Slow(Walk):
        def setup(self):
            time.sleep(0.02)

        def step(self, action):
            steps.append(1)
            time.sleep(0.005)
            return super().step(action)

    monkeypatch.setattr(rehearsal, "_QUICK_TO_MAKE", 0.01)
    monkeypatch.setattr(rehearsal, "_SECONDS", 0.02)
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
    assert isinstance(env, LaneVectorEnv)
    (why,) = env.inexact
    assert "is not exactly resumable" in why
    assert not env.exact
    Walk.made = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolved(Walk).exact
        assert Walk.made == 4  # two that train, two to rehearse with
        assert resolved(OwnStream, rehearse=False).exact  # nobody asked
        assert resolved(OwnStream(), num_envs=1).exact  # handed over: it cannot be copied
        assert resolved("CartPole-v1").exact
        assert resolved("Acrobot-v1", frame_stack=2, max_episode_steps=9).exact


def test_proven_environments_are_not_rehearsed(monkeypatch):
    def never(*_, **__):
        raise AssertionError("there was nothing to try")

    monkeypatch.setattr("inchworm.train.resolve.try_resume", never)
    resolved("CartPole-v1")
    with pytest.raises(AssertionError, match="nothing to try"):
        resolved("CartPole-v1", native=False)


def test_what_was_to_stay_in_workers_is_tried_in_one():
    class Dies(Walk):
        def step(self, action):
            import os

            os._exit(3)

    env = resolved(Dies, num_workers=1)
    (why,) = env.inexact
    assert "could not be tested: WorkerError" in why
    env.close()


def test_ctrl_c_is_obeyed_and_closes_all():
    class Pressed(Walk):
        made = closed = 0

        def step(self, action):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolved(Pressed)
    assert Pressed.made == Pressed.closed == 3  # two that would have trained, one to rehearse with


def test_a_team_is_tried_like_any_environment():
    from inchworm.worlds import toys

    class RandomState(toys.Comings):
        drawn = np.random.default_rng(0)

        def state(self):
            return super().state() + self.drawn.random()

    class OtherLater(toys.Comings):
        """Deterministic except for which agents are present in later episodes."""

        resets = 0

        def reset(self, seed=None, options=None):
            self.resets += 1
            self.plan = [list(stays) for stays in (toys.JOINS if self.resets > 3 else toys.DEATHS)]
            return super().reset(seed, options)

    for kind, shared, flawed in (
        (toys.Comings, True, False),
        (toys.Comings, False, False),
        (RandomState, True, True),
        (OtherLater, False, True),
    ):
        why = try_resume(lambda kind=kind, shared=shared: make_vector_env(kind, 1, 0, global_state=shared), "it")
        assert (why is not None) == flawed, (kind, why)
