"""Tests of env/vector_env.py: the contract of a vector env, in this process; what cannot be resumed exactly is found at the start."""

import functools
import gc
import os
import time
import warnings
import weakref

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from doubles.crashing import FickleTeam
from doubles.stepping import assert_equal_steps, continue_run, reset_and_step
from doubles.toys import Corridor, Counter, watched
from inchworm.config.sections import EnvConfig, TrainingConfig
from inchworm.core.errors import EnvError, SpaceError
from inchworm.core.seeding import episode_seed
from inchworm.env import vector_env
from inchworm.env.source import make_vector_env
from inchworm.env.vector_env import try_resume
from inchworm.train.resolve import resolve_env
from inchworm.worlds.toys import Comings


def counters(num_envs=3, length=4, **kwargs):
    return make_vector_env(lambda: Counter(length=length), num_envs, **kwargs)


def act(env, value=0):
    return env.step(np.full(env.num_lanes, value))


def test_a_part_of_the_lanes_is_reset():
    env = counters(seed=1)
    reset_and_step(env, 1)
    step = env.reset(seeds=[77], indices=[1])
    assert step.observations.tolist() == [[episode_seed(1, 0, 0), 1], [77, 0], [episode_seed(1, 2, 0), 1]]
    assert step.episode_starts.tolist() == [False, True, False]
    assert step.rewards.tolist() == [0, 0, 0]
    for _ in range(4):
        step = act(env)
    assert step.observations[1].tolist() == [episode_seed(1, 1, 2), 0]  # the episode after the given one has the derived seed again


def test_wrong_resets_are_rejected():
    env = counters()
    with pytest.raises(EnvError, match="the first reset must be of all 3 copies"):
        env.reset(indices=[0])
    for wrong, words in [
        ({"seeds": [1, 2]}, "2 seeds for 3 copies"),
        ({"seeds": [1, 2, -3]}, "seeds must be"),
        ({"indices": [0, 0, 1]}, "must be different copies"),
        ({"indices": [3]}, "from 0 to 2"),
    ]:
        with pytest.raises(EnvError, match=words):
            env.reset(**wrong)


def test_the_order_of_calls_is_kept():
    env = counters()
    actions = np.zeros(3, int)
    with pytest.raises(EnvError, match="call reset"):
        env.send(actions)
    env.reset()
    with pytest.raises(EnvError, match="no step has been sent"):
        env.recv()
    env.send(actions)
    for call in (lambda: env.send(actions), env.reset, env.state_dict, lambda: env.set_reset_options({}), lambda: env.load_state_dict({})):
        with pytest.raises(EnvError, match="sent and not received"):
            call()
    assert env.recv().observations[:, 1].tolist() == [1, 1, 1]
    env.close()
    for call in (lambda: env.send(actions), env.recv, env.reset, env.state_dict):
        with pytest.raises(EnvError, match="closed"):
            call()
    env.close()


def test_rejected_actions_change_nothing():
    env = counters()
    env.reset()
    with pytest.raises(SpaceError, match="shape"):
        env.step(np.zeros(2, int))
    assert act(env).observations[:, 1].tolist() == [1, 1, 1]


def test_a_context_manager_and_the_garbage_collector_close():
    door, open_envs = watched(Counter)
    with make_vector_env(door, 2) as env:
        assert len(open_envs) == 2
    assert not open_envs
    env = make_vector_env(door, 1)
    gone = weakref.ref(env)
    del env
    gc.collect()
    assert gone() is None
    assert not open_envs


def test_reset_options_are_given_at_the_next_reset():
    env = make_vector_env(lambda: Corridor(length=2), 2)
    env.reset()
    env.set_reset_options({"place": 1}, indices=[1])
    step = act(env, 1)
    assert step.observations.ravel().tolist() == [0.5, 0.5]  # nothing changes in a running episode
    step = act(env, 1)
    assert step.terminated.tolist() == [True, True]
    assert step.observations.ravel().tolist() == [0.0, 0.5]  # lane 1 begins at place 1
    assert [dict(ended.info) for ended in step.ended] == [{"place": 2.0, "success": 1.0}] * 2
    env.set_reset_options(None)
    assert env.reset().observations.ravel().tolist() == [0.0, 0.0]


def test_reset_options_are_plain_data():
    env = counters(1)
    env.set_reset_options({"a": (1, 2.5, None, {"b": [True, "x"]}), "c": np.float64(2.0)})
    assert env._ledger.next_options[0] == {"a": [1, 2.5, None, {"b": [True, "x"]}], "c": 2.0}
    for wrong in ({"a": np.ones(2)}, {"a": {1: 2}}, {"a": [object()]}):
        with pytest.raises(EnvError, match=r"reset options must be plain data.*a"):
            env.set_reset_options(wrong)


def test_an_environment_cannot_change_the_options_of_others():
    class Greedy(Counter):
        def reset(self, *, seed=None, options=None):
            if options:
                options["seen"].append(1)
                assert options["seen"] == [1]
            return super().reset(seed=seed, options=options)

    env = make_vector_env(Greedy, 2)
    env.set_reset_options({"seen": []})
    env.reset(), env.reset()


@pytest.mark.parametrize("steps", [0, 1, 3, 5, 130])
def test_a_state_is_restored_by_replay(steps):
    def make():
        return make_vector_env(lambda: gym.make("CartPole-v1", disable_env_checker=True), 3, seed=4)

    env, other = make(), make()
    env.set_reset_options({"low": -0.01, "high": 0.01}, indices=[2])
    env.reset(seeds=[9, 10, 11])
    continue_run(env, steps)
    env.set_reset_options({"low": -0.02, "high": 0.02}, indices=[0])
    other.load_state_dict(env.state_dict())
    assert_equal_steps(continue_run(env, 60, 1), continue_run(other, 60, 1))
    ours, theirs = env.state_dict(), other.state_dict()
    assert ours["copies"] == theirs["copies"]
    assert ours["actions"]["part0"].tolist() == theirs["actions"]["part0"].tolist()


def test_what_a_state_holds():
    env = counters(2, length=3, seed=3, first_copy=1)
    env.reset()
    for action in range(3):
        act(env, action)
    act(env, 2)
    env.reset(seeds=[5], indices=[1])
    state = env.state_dict()
    assert (state["seed"], state["first_copy"]) == (3, 1)
    first, second = state["copies"]
    assert first["observation_hash"] != second["observation_hash"]
    for copy in state["copies"]:
        del copy["observation_hash"]
    common = {"options": None, "next_options": None, "replayable": True}
    assert first == {"episode": 1, "seed": episode_seed(3, 1, 1), "length": 1, "episode_return": 1.0, **common}
    assert second == {"episode": 2, "seed": 5, "length": 0, "episode_return": 0.0, **common}
    assert state["actions"]["part0"].tolist() == [2]


def test_a_state_from_before_the_first_reset():
    state = counters().state_dict()
    env = counters(seed=99)
    env.load_state_dict(state)
    with pytest.raises(EnvError, match="have not been reset"):
        act(env)
    assert env.reset().observations[0, 0] == episode_seed(0, 0, 0)


def test_a_replay_with_a_different_result_is_reported_and_begins_a_new_episode():
    class Unsteady(Counter):
        drift = 0

        def _observe(self):
            return super()._observe() + Unsteady.drift * (self.episode == episode_seed(0, 1, 0))

    env = make_vector_env(Unsteady, 3)
    reset_and_step(env, 1)
    state = env.state_dict()
    Unsteady.drift = 1
    with pytest.warns(UserWarning, match="lane 1 could not be restored.*different observation") as caught:
        env.load_state_dict(state)
    assert len(caught) == 1
    step = env.reset(indices=())
    assert step.episode_starts.tolist() == [False, True, False]
    assert step.observations.tolist() == [[episode_seed(0, 0, 0), 1], [episode_seed(0, 1, 1), 0], [episode_seed(0, 2, 0), 1]]


@pytest.mark.parametrize("change", [{"episode_return": 5.0}, {"length": 3}])
def test_return_and_length_are_verified(change):
    env = counters(1, length=9)
    reset_and_step(env, 2)
    state = env.state_dict()
    state["copies"][0].update(change)
    if "length" in change:  # one action more than was taken
        state["actions"]["part0"] = np.zeros(3, int)
    with pytest.warns(UserWarning, match="lane 0 could not be restored"):
        env.load_state_dict(state)


def test_an_episode_that_ends_during_its_replay_is_not_restored():
    env = counters(1, length=3)
    reset_and_step(env, 2)
    state = env.state_dict()
    short = counters(1, length=2)
    with pytest.warns(UserWarning, match=r"replaying its actions gave return and length \(1.0, 1\), but \(3.0, 2\) was saved"):
        short.load_state_dict(state)
    step = short.reset(indices=())
    assert step.observations[0].tolist() == [episode_seed(0, 0, 1), 0]
    assert not step.terminated.any()
    assert not act(short).terminated.any()


def test_replay_is_bounded():
    env = counters(2, length=500, max_replay_steps=100)
    reset_and_step(env, 90)
    env.reset(indices=[1])
    for _ in range(20):
        act(env, 1)
    state = env.state_dict()
    assert [copy["replayable"] for copy in state["copies"]] == [False, True]
    assert state["actions"]["part0"].tolist() == [1] * 20
    with pytest.warns(UserWarning, match="lane 0 .*110 steps, more than collect.max_replay_steps"):
        env.load_state_dict(state)
    assert env.reset(indices=()).observations[:, 1].tolist() == [0, 20]


def test_states_of_other_numbers_of_copies_or_actions_are_rejected():
    state = counters(2).state_dict()
    with pytest.raises(EnvError, match=r"2 copies, here are 3; set env\.num_envs=2"):
        counters(3).load_state_dict(state)
    env = counters(1)
    reset_and_step(env, 1)
    state = env.state_dict()
    state["actions"]["part0"] = np.zeros(5, int)
    with pytest.raises(EnvError, match="need 1 actions"):
        env.load_state_dict(state)


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

    monkeypatch.setattr(vector_env, "_QUICK_TO_MAKE", 0.01)
    monkeypatch.setattr(vector_env, "_SECONDS", 0.02)
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
