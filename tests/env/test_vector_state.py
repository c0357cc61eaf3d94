"""Tests of env/vector_state.py: a vectorised world is brought back by its arrays, its numbers and its stream, or says why not."""

import warnings

import gymnasium as gym
import numpy as np
import pytest

from doubles.stepping import assert_equal_steps, frozen, random_actions, run
from doubles.vector import Brought, CartPoles, Drift, Forgetful, Hidden, Kept, Late, Shifted, Simulated, Unsayable, Unsettable, go_on
from inchworm.core.errors import EnvError
from inchworm.core.trees import flatten_tree, unflatten_tree
from inchworm.env.foreign import BatchedVectorEnv
from inchworm.env.source import make_vector_env
from inchworm.env.vector_state import VectorState

WORLDS = {
    "CartPole": lambda: CartPoles(4),
    "Drift": Drift,
    "late": Late,
    "kept": Kept,
    "wrapped and kept": lambda: Shifted(Kept()),
    "wrapped": lambda: Shifted(Drift()),
    "watched": lambda: gym.wrappers.vector.RecordEpisodeStatistics(Shifted(CartPoles(3))),
}


def through_a_file(state):
    arrays, structure = flatten_tree(state)
    return unflatten_tree({name: array.copy() for name, array in arrays.items()}, structure)


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("steps", [0, 1, 37])
def test_a_vectorised_world_goes_on_from_its_saved_state_with_the_same_bits(name, steps):
    straight, fresh = make_vector_env(WORLDS[name](), seed=7), make_vector_env(WORLDS[name](), seed=99)
    assert type(straight) is BatchedVectorEnv
    assert straight.inexact == []
    assert straight.exact
    run(straight, steps, seed=1)
    state = through_a_file(straight.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh.load_state_dict(state)
    assert fresh.exact
    ours, theirs = go_on(straight, 60, seed=2), go_on(fresh, 60, seed=2)
    assert_equal_steps(ours, theirs)
    assert ours[0].episode_starts.all() == (steps == 0)
    if steps == 37:
        assert sum(len(step.ended) for step in ours) > 2  # the stream was drawn from


@pytest.mark.parametrize("name", WORLDS)
def test_neither_the_test_at_the_start_nor_a_save_changes_a_bit(name):
    saved = make_vector_env(WORLDS[name](), seed=7)
    rng = np.random.default_rng(0)
    taken = [frozen(saved.reset())]
    for _ in range(50):
        saved.state_dict()
        taken.append(frozen(saved.step(random_actions(saved, taken[-1], rng))))
    assert_equal_steps(run(make_vector_env(WORLDS[name](), seed=7), 50), taken)
    world, bare = WORLDS[name](), WORLDS[name]()
    make_vector_env(world)
    assert world.reset(seed=3)[0].tobytes() == bare.reset(seed=3)[0].tobytes()  # nor does adapting it
    actions = np.ones(world.num_envs, np.int64)
    assert [part.tobytes() for part in world.step(actions)[:4]] == [part.tobytes() for part in bare.step(actions)[:4]]


def test_in_a_world_that_has_not_begun_there_is_nothing_to_bring_back():
    env = make_vector_env(Drift())
    env.load_state_dict(through_a_file(make_vector_env(Drift()).state_dict()))
    assert env.exact
    with pytest.raises(EnvError, match="not been reset"):
        env.step(np.zeros(2, np.int64))


class Broken(Drift):
    def step(self, actions):
        raise ZeroDivisionError("no % of this")


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (Hidden, "Hidden is not exactly resumable: brought back to a state, it went on in another way"),
        (
            Simulated,
            r"its simulator \(object\), old \(RandomState\) cannot be saved; keep what changes in arrays, numbers and self.np_random",
        ),
        (Brought, r"its simulator \(object\) cannot be saved"),
        (Forgetful, "Forgetful is not exactly resumable: brought back to a state, it went on in another way"),
        (Unsettable, "could not be tested: LookupError: no way back"),
        (Unsayable, "could not be tested: EnvError: get_state of Unsayable gave what a file cannot hold"),
        (Broken, "could not be tested: ZeroDivisionError: no % of this"),
    ],
)
def test_what_cannot_be_brought_back_says_why(world, words):
    env = make_vector_env(world())
    (why,) = env.inexact
    assert not env.exact
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(why)


def test_without_a_way_back_all_lanes_begin_fresh_episodes_and_later_states_say_so():
    env, fresh = make_vector_env(Simulated()), make_vector_env(Simulated())
    run(env, 5)
    state = through_a_file(env.state_dict())
    with pytest.warns(UserWarning, match="not exact: no lane came back at a resume, and all began fresh episodes"):
        fresh.load_state_dict(state)
    assert fresh.reset(indices=()).episode_starts.all()
    assert len(fresh.inexact) == 2
    exact = make_vector_env(Drift())
    exact.reset()
    with pytest.warns(UserWarning, match="where they stood was not saved"):
        exact.load_state_dict(state)
    assert not exact.exact
    again = make_vector_env(Drift())
    again.load_state_dict(through_a_file(exact.state_dict()))
    assert again.inexact == exact.inexact  # the run's history, brought back with it
    with pytest.raises(EnvError, match="are 2 copies, here are 4"):
        make_vector_env(CartPoles(4)).load_state_dict(state)


class Heavier(CartPoles):
    """Another world behind the same attributes."""

    def step(self, action):
        self.state[1] *= 1.001
        return super().step(action)


class Other(Drift):
    """Has fewer attributes, and one of another shape before its first reset."""

    def __init__(self):
        self.x = np.zeros(0)

    def reset(self, *, seed=None, options=None):
        self.x = np.zeros((2, 1))
        return self.x.copy(), {}

    def step(self, actions):
        return self.x.copy(), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool), {}


def test_another_world_than_the_saved_one_is_noticed():
    env = make_vector_env(CartPoles(3))
    run(env, 10)
    with pytest.warns(UserWarning, match="went on in another way"):
        make_vector_env(Heavier(3)).load_state_dict(env.state_dict())
    drift = make_vector_env(Drift())
    run(drift, 10)
    other = make_vector_env(Other())
    assert other.exact
    with pytest.warns(UserWarning, match="Other has no attribute"):
        other.load_state_dict(drift.state_dict())
    state = drift.state_dict()
    state["observations"] = [np.zeros((2, 3))]
    with pytest.warns(UserWarning, match="of other shapes"):
        make_vector_env(Drift()).load_state_dict(state)


def standing():
    world = Drift()
    state = VectorState(world)
    assert state.flaws == []
    state.warm_up()
    return world, state


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("step", {"plain": 1}),  # a method, no attribute of the object
        ("__class__", {"plain": "x"}),
        ("new", {"plain": 1}),
        ("square", {"plain": 1}),  # a function
        ("x", {"array": np.zeros((2, 2))}),
        ("x", {"array": np.zeros((2, 1), np.float32)}),
        ("x", {"plain": [1.0, 2.0]}),
        ("total", {"plain": "many"}),
        ("scale", {"number": np.zeros(3)}),
        ("trail", {"plain": {}}),
        ("_np_random", {"plain": None}),
        ("_np_random", {"plain": 7}),
        ("last", {"stream": {}}),
        ("notes", {"stream": {}}),
        ("x", {"code": "boom"}),
    ],
)
def test_what_a_file_says_neither_makes_attributes_nor_changes_their_kind(name, packed):
    world, state = standing()
    before, names = state.read(), sorted(vars(world))
    values, own = state.read()
    assert own == {}
    with pytest.raises(EnvError, match=r"has no attribute|the attribute .* is"):
        state.write([{**values, "total": {"plain": 1e6}, name: packed}, {}])
    assert sorted(vars(world)) == names
    assert repr(state.read()) == repr(before)  # all or nothing
    for layers in ([values], [values, values, {}], [values, {"state": {}}]):
        with pytest.raises(EnvError, match="other layers"):
            state.write(layers)


def test_damage_in_a_saved_world_is_no_crash():
    env = make_vector_env(Drift())
    run(env, 3)
    for damage in ({"parts": [], "glimpse": ""}, {"parts": [{"x": {"array": "text"}}], "glimpse": ""}, {"parts": [{"x": {}}]}, {}):
        state = env.state_dict()
        state["world"] = damage
        with pytest.warns(UserWarning, match="all began fresh episodes"):
            make_vector_env(Drift()).load_state_dict(state)
