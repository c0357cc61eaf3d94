"""Tests of env/restore.py: environments with get_state and set_state are restored without a replay."""

import sys
import warnings

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers

from doubles.crashing import World, kill
from doubles.stepping import assert_equal_steps, continue_run, random_actions, run
from doubles.toys import Counter
from inchworm.core.errors import EnvError, WorkerError, WorkerRestartWarning
from inchworm.core.seeding import restore_stream, stream_state
from inchworm.env.restore import KeepsState, find_state_keeper, pack_tree, unpack_tree
from inchworm.env.source import InProcessVectorEnv, WorkerVectorEnv

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module


class Keeper(World):
    """Keeps its state: place, what is left, and the stream."""

    def get_state(self):
        return {"place": self.place, "left": self.left, "stream": stream_state(self.np_random), "none": (None, 1.5, "a")}

    def set_state(self, state):
        assert state["none"] == (None, 1.5, "a")
        self.place, self.left = state["place"].copy(), state["left"]
        self.np_random = restore_stream(state["stream"])


def limited():
    return wrappers.TimeLimit(wrappers.OrderEnforcing(Keeper(8, 40)), 25)


LAYOUTS = [(0, False), (2, False), (1, True)]


def make(layout, factory=limited, **options):
    workers, helped = layout
    if workers == 0:
        return InProcessVectorEnv(factory, 3, seed=4, **options)
    return WorkerVectorEnv(factory, 3, workers, help_workers=helped, seed=4, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_is_restored_from_its_state_alone(layout):
    """No action is kept, so nothing could be replayed; the time limit continues to count, and the stream to draw."""
    with make(layout, max_replay_steps=0) as env:
        run(env, 70)
        saved = env.state_dict()
        expected = continue_run(env, 60)
        assert any(step.truncated.any() for step in expected)
        assert any(step.terminated.any() for step in expected)
    assert [copy["state"]["elapsed"] for copy in saved["copies"]] == [[copy["length"]] for copy in saved["copies"]]
    assert not any(copy["replayable"] for copy in saved["copies"] if copy["length"])
    for other in LAYOUTS if layout[0] == 0 else [layout]:
        with make(other, max_replay_steps=0) as env, warnings.catch_warnings():
            warnings.simplefilter("error")
            env.load_state_dict(saved)
            assert env.exact
            assert env._ledger.lengths.tolist() == [copy["length"] for copy in saved["copies"]]
            assert_equal_steps(continue_run(env, 60), expected)


def test_a_saved_state_is_a_copy():
    with make((0, False)) as env:
        run(env, 3)
        saved = env.state_dict()
        before = saved["copies"][0]["state"]["env"]["place"].copy(), saved["copies"][0]["observation"][0].copy()
        env._engine.copies[0].env.unwrapped.place += 1.0
        env.step(random_actions(env, env.reset(indices=()), np.random.default_rng(0)))
        np.testing.assert_array_equal(saved["copies"][0]["state"]["env"]["place"], before[0])
        np.testing.assert_array_equal(saved["copies"][0]["observation"][0], before[1])


def test_a_worker_that_dies_around_its_state_is_rebuilt_by_replay():
    with make((2, False)) as env, make((0, False)) as reference:
        for each in (env, reference):
            run(each, 30)
        kill(env, 1)
        with pytest.warns(WorkerRestartWarning):
            saved = env.state_dict()
        assert_same(saved, reference.state_dict())
        expected = continue_run(reference, 60)
    with make((2, False)) as env:
        kill(env, 0)
        with pytest.warns(WorkerRestartWarning):
            env.load_state_dict(saved)
        kill(env, 1)
        with pytest.warns(WorkerRestartWarning, match="replaying"):
            taken = continue_run(env, 60)
        assert_equal_steps(taken, expected)


def test_a_worker_whose_episodes_are_by_state_alone_cannot_be_rebuilt():
    with make((0, False), max_replay_steps=0) as env:
        run(env, 10)
        saved = env.state_dict()
    with make((2, False)) as env:
        env.load_state_dict(saved)
        kill(env, 0)
        with pytest.raises(WorkerError, match=r"cannot rebuild lane 0.*its episode had 10 steps"):
            continue_run(env, 1)


def assert_same(one, other):
    (first, firsts), (second, seconds) = pack_tree(one), pack_tree(other)
    assert first == second
    assert firsts == seconds


class Strange(Keeper):
    def get_state(self):
        return {"place": {1, 2}}


class Objects(Keeper):
    def get_state(self):
        return np.array([None, self])


@pytest.mark.parametrize(("kind", "words", "layout"), [(Strange, "place is set", (2, False)), (Objects, "not of numbers", (0, False))])
def test_a_state_that_no_file_can_hold_is_replayed_with_one_warning(kind, words, layout):
    with make(layout, kind) as env:
        run(env, 5)
        with pytest.warns(UserWarning, match=rf"get_state of {kind.__name__} gave.*{words}.*by replay instead") as seen:
            saved = env.state_dict()
        assert len(seen) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            env.state_dict()
        assert "state" not in saved["copies"][0]
        expected = continue_run(env, 60)
    with make(layout, kind) as env:
        env.load_state_dict(saved)
        assert_equal_steps(continue_run(env, 60), expected)


def test_which_layer_keeps_the_state():
    assert find_state_keeper(limited()) is not None
    assert find_state_keeper(Counter()) is None
    assert find_state_keeper(wrappers.TimeLimit(Counter(), 5)) is None  # no get_state
    stacked = wrappers.FrameStackObservation(Keeper(), 2)  # holds frames that the state does not
    assert find_state_keeper(stacked) is None

    class Whole(gym.Wrapper):
        def get_state(self):
            return {}

        def set_state(self, state):
            pass

    assert find_state_keeper(wrappers.TimeLimit(Whole(stacked), 5)) is not None

    class OtherMeaning(Keeper):
        def set_state(self, positions, velocities):
            pass

    assert isinstance(OtherMeaning(), KeepsState)
    assert find_state_keeper(OtherMeaning()) is None


def test_a_saved_state_needs_an_environment_with_set_state():
    with make((0, False)) as env:
        run(env, 2)
        saved = env.state_dict()
    with make((0, False), World) as env, pytest.raises(EnvError, match="has no get_state and set_state"):
        env.load_state_dict(saved)


def test_copies_that_have_not_been_reset_have_no_state():
    with make((2, False)) as env:
        saved = env.state_dict()
        assert all("state" not in copy for copy in saved["copies"])
        env.load_state_dict(saved)
        env.reset()


def test_a_tree_survives_a_message():
    tree = {"a": [np.arange(3, dtype=np.int16), np.zeros((0, 2))], "b": (float("inf"), None, "text", {"c": np.array(2.5)})}
    assert_same(unpack_tree(*pack_tree(tree)), tree)
    assert unpack_tree(*pack_tree(tree))["b"][0] == float("inf")
