"""Tests of env/foreign.py: vector envs of other libraries, with resets in the same step, true final observations and exact resume."""

import re
import sys
import types
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from doubles.crashing import World
from doubles.stepping import assert_equal_steps, assert_equal_trees, continue_run, frozen, random_actions, run
from doubles.toys import Counter
from inchworm.config.sections import EnvConfig, WrapperConfig
from inchworm.core.errors import EnvError, MissingExtraError
from inchworm.core.protocols import VectorEnv
from inchworm.core.seeding import derive_seed
from inchworm.core.spaces import mask_space, with_mask
from inchworm.core.tensor_file import flatten_tree, unflatten_tree
from inchworm.env.foreign import BatchedVectorEnv, EnvPoolWorld, Moved, lane_numbers, write_outcome
from inchworm.env.source import make_vector_env
from inchworm.env.step_arrays import allocate_rows
from inchworm.env.vector_env import NO_SEED


def cartpole():
    return gym.make("CartPole-v1", max_episode_steps=25)


def vector(*makers, kind=SyncVectorEnv, mode=AutoresetMode.DISABLED):
    return kind(makers or [cartpole] * 3, autoreset_mode=mode)


def adapted(*makers, kind=SyncVectorEnv, seed=7, **options):
    return make_vector_env(vector(*makers, kind=kind), seed=seed, **options)


def one_by_one(**options):
    """The same copies as `adapted`, stepped by our own vector env."""
    return make_vector_env(EnvConfig(id="CartPole-v1", num_envs=3, native=False, max_episode_steps=25), **options)


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_gymnasiums_vector_env_gives_the_steps_of_ours(kind):
    ours, theirs = one_by_one(seed=7, first_copy=2), adapted(kind=kind, first_copy=2)
    assert isinstance(theirs, VectorEnv)
    assert ours.exact
    assert theirs.exact
    steps = run(theirs, 80)
    assert_equal_steps(run(ours, 80), steps)
    ended = [episode for step in steps for episode in step.ended]
    assert len(ended) > 5
    assert all(np.abs(episode.final_observation).max() > 0.05 for episode in ended)  # no first state: those are within 0.05
    theirs.close()


def test_resets_seeds_and_options_are_the_copies_own():
    ours, theirs = one_by_one(seed=7), adapted()
    for env in (ours, theirs):
        env.set_reset_options({"low": -0.2, "high": 0.2}, indices=[1])
    assert_equal_steps([ours.reset()], [theirs.reset()])
    assert_equal_steps([ours.step(np.array([0, 1, 0]))], [theirs.step(np.array([0, 1, 0]))])
    assert_equal_steps([ours.reset([11, 12], [2, 1])], [theirs.reset([11, 12], [2, 1])])
    assert theirs.reset(indices=()).episode_starts.tolist() == [False, True, True]
    for env in (ours, theirs):
        env.set_reset_options(None)
    assert_equal_steps([ours.reset()], [theirs.reset()])


def test_resets_one_step_late_are_rejected_with_what_to_set():
    with pytest.raises(EnvError, match=r"NEXT_STEP resets one step late; .*autoreset_mode.*Disabled"):
        make_vector_env(vector(mode=AutoresetMode.NEXT_STEP))
    with pytest.raises(EnvError, match="or give its id"):
        make_vector_env(gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point"))


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_resets_in_the_same_step_keep_the_last_observation_and_its_info(kind):
    env = make_vector_env(vector(World, World, kind=kind, mode=AutoresetMode.SAME_STEP), seed=7)
    assert env.inexact[0].endswith("given seeds (make it with AutoresetMode.DISABLED): a resumed run starts new episodes")
    plain, rng, ends = [World(), World()], np.random.default_rng(0), 0
    seen = [world.reset(seed=derive_seed(7, "vector env") + lane)[0] for lane, world in enumerate(plain)]
    step = frozen(env.reset())
    for _ in range(40):
        actions = random_actions(env, step, rng)
        step = frozen(env.step(actions))
        finals = {ended.lane: ended for ended in step.ended}
        for lane, world in enumerate(plain):
            own = {name: part[lane] for name, part in actions.items()}
            seen[lane], reward, terminated, truncated, info = world.step(own)
            assert (step.rewards[lane], step.terminated[lane], step.truncated[lane]) == (np.float32(reward), terminated, truncated)
            assert (lane in finals) == (terminated or truncated)
            if lane in finals:
                assert_equal_trees(finals[lane].final_observation, seen[lane])
                assert dict(finals[lane].info) == {"left": 0.0} == {"left": info["left"]}
                seen[lane] = world.reset()[0]
                ends += 1
            assert_equal_trees({name: part[lane] for name, part in step.observations.items()}, seen[lane])
    assert ends > 5
    env.close()


class Streamed(gym.vector.VectorEnv):
    """Lanes that share one stream: an episode's first observation is the next number, its end comes after `lane + 2` steps."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012
    single_observation_space = spaces.Dict({"n": spaces.Box(0.0, 1e9, (1,), np.float32), "t": spaces.Tuple([spaces.Discrete(99)])})
    single_action_space = spaces.Discrete(2)
    num_envs = 2

    def __init__(self):
        self.seeds, self.drawn, self.n, self.t = [], 0, np.zeros((2, 1), np.float32), np.zeros(2, np.int64)

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        mask = np.ones(2, bool) if options is None else options["reset_mask"]
        for lane in mask.nonzero()[0]:
            self.drawn += 1
            self.n[lane], self.t[lane] = self.drawn, 0
        return {"n": self.n.copy(), "t": (self.t.copy(),)}, {}

    def step(self, actions):
        self.t += 1
        over = self.t == np.array([2, 3])
        info = {"score": self.t * 1.5, "_score": np.array([True, False]), "name": np.array(["a", "b"])}
        return {"n": self.n.copy(), "t": (self.t.copy(),)}, actions * 1.0, over, over, info


def test_a_shared_stream_is_seeded_once_and_its_episodes_have_no_seed():
    world = Streamed()
    env = make_vector_env(world, seed=5)
    env.reset()
    with pytest.warns(UserWarning, match="cannot be given seeds"):
        step = env.reset(seeds=[1, 2])
    assert world.seeds == [derive_seed(5, "vector env"), None]
    assert step.observations["n"].tolist() == [[3.0], [4.0]]
    step = env.step(np.array([1, 0]))
    assert (step.rewards.tolist(), step.ended) == ([1.0, 0.0], ())
    step = env.step(np.array([1, 0]))  # lane 0 ends: both flags mean terminated
    assert (step.terminated.tolist(), step.truncated.tolist()) == ([True, False], [False, False])
    assert step.observations["n"].tolist() == [[5.0], [4.0]]
    assert step.observations["t"][0].tolist() == [0, 2]
    (ended,) = step.ended
    assert (ended.lane, ended.seed, dict(ended.info)) == (0, NO_SEED, {"score": 3.0})
    assert (ended.final_observation["n"].tolist(), ended.final_observation["t"][0].tolist()) == ([3.0], 2)


def test_a_vector_env_that_resets_itself_must_keep_last_observations():
    world = Streamed()
    world.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    env = make_vector_env(world, seed=5)
    env.reset()
    env.step(np.array([1, 0]))
    with pytest.raises(EnvError, match=r"episode of lane 0 ended, but info has no 'final_obs'.*AutoresetMode\.DISABLED"):
        env.step(np.array([1, 0]))


def test_numbers_of_a_lane():
    info = {"a": np.array([1, 2]), "b": np.array([True, False]), "_a": np.array([False, True]), "x": "text", "m": np.zeros((2, 2))}
    assert lane_numbers(info, 0) == {"b": 1.0}
    assert lane_numbers(info, 1) == {"a": 2.0, "b": 0.0}
    assert lane_numbers({"a": np.array([1.0, np.nan]), "b": np.array([np.inf, 2.0])}, 0) == {"a": 1.0}
    assert lane_numbers([{"a": 1}, {"a": 2, "b": "text", "c": np.nan}], 1) == {"a": 2.0}


class Pool:
    """What EnvPool offers, around CartPoles: partial sends, answers in any order, resets one step late, one stream a lane."""

    def __init__(self, num_envs, env_seed, max_episode_steps=500, batch_size=None, **given):
        self.given = given
        self.config = {"num_envs": num_envs, "batch_size": batch_size or num_envs, "max_num_players": 1}
        self.envs = [gym.make("CartPole-v1", max_episode_steps=max_episode_steps) for _ in range(num_envs)]
        self.env_seed, self.fresh, self.queue, self.is_open = env_seed, [True] * num_envs, [], True
        self.single_observation_space, self.single_action_space = self.envs[0].observation_space, self.envs[0].action_space

    def reset(self, ids):
        for lane in ids:
            seed = self.env_seed[lane] if self.fresh[lane] else None
            self.fresh[lane] = False
            self.queue.append((lane, (*self.envs[lane].reset(seed=seed)[:1], 0.0, False, False)))
        observations, _, _, _, info = self.recv()
        return observations, info

    def send(self, actions, ids):
        self.queue += [(lane, self.envs[lane].step(int(action))[:4]) for action, lane in zip(actions, ids)]

    def recv(self):
        lanes, results = zip(*reversed(self.queue))
        self.queue = []
        columns = [np.array(column) for column in zip(*results)]
        return (*columns, {"env_id": np.array(lanes, np.int32), "elapsed": np.array(lanes) + 0.5, "players": {}})

    def close(self):
        self.is_open = False


@pytest.fixture
def envpool(monkeypatch):
    module = types.ModuleType("envpool")
    module.made = []

    def make(name, env_type, **kwargs):
        assert (name, env_type) == ("CartPole-v1", "gymnasium")
        module.made.append(Pool(**kwargs))
        return module.made[-1]

    module.make = make
    monkeypatch.setitem(sys.modules, "envpool", module)
    return module


def test_envpool_has_same_step_resets_and_a_stream_for_each_lane(envpool):
    config = EnvConfig(id="envpool:CartPole-v1", num_envs=3, num_workers=2, max_episode_steps=12, kwargs={"extra": 1})
    env = make_vector_env(config, seed=3, first_copy=4)
    (pool,) = envpool.made
    assert pool.env_seed == [derive_seed(3, "envpool", copy) for copy in (4, 5, 6)]
    assert pool.given == {"num_threads": 2, "extra": 1}
    worlds = [gym.make("CartPole-v1", max_episode_steps=12) for _ in range(3)]
    seen = [world.reset(seed=seed)[0] for world, seed in zip(worlds, pool.env_seed)]
    step = env.reset()
    ends = 0
    rng = np.random.default_rng(0)
    for _ in range(60):
        assert np.array_equal(step.observations, seen)
        actions = rng.integers(0, 2, 3)
        step = frozen(env.step(actions))
        finals = {ended.lane: ended for ended in step.ended}
        for lane, world in enumerate(worlds):
            seen[lane], _, terminated, truncated, _ = world.step(int(actions[lane]))
            assert (terminated or truncated) == (lane in finals)
            if lane in finals:
                assert np.array_equal(finals[lane].final_observation, seen[lane])
                assert dict(finals[lane].info) == {"elapsed": lane + 0.5}
                seen[lane] = world.reset()[0]
                ends += 1
    assert ends >= 15
    assert not env.exact
    assert env.inexact == ["EnvPool can neither save its episodes nor give one a seed: a resumed run starts new episodes"]
    again = make_vector_env(config, seed=3)
    with pytest.warns(UserWarning, match=r"lanes 0, 1, 2 could not be restored \(its state was not saved"):
        again.load_state_dict(env.state_dict())
    assert again.reset(indices=()).episode_starts.all()
    assert len(again.inexact) == 2
    env.close()
    assert not pool.is_open


def test_what_envpool_cannot_do_is_rejected(envpool):
    env = make_vector_env("envpool:CartPole-v1", 2)
    env.set_reset_options({"low": 0.0})
    with pytest.raises(EnvError, match="no reset options"):
        env.reset()
    with pytest.raises(EnvError, match="batch_size = num_envs"):
        EnvPoolWorld(Pool(4, [0] * 4, batch_size=2))
    for changes in ({"atari": True}, {"frame_stack": 2}, {"wrappers": (WrapperConfig(name="ClipReward"),)}):
        with pytest.raises(EnvError, match="are left to EnvPool"):
            make_vector_env(EnvConfig(id="envpool:CartPole-v1", **changes))


def test_without_envpool_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(MissingExtraError, match=r"pip install .inchworm\[envpool\]"):
        make_vector_env("envpool:CartPole-v1", 2)


def test_the_real_envpool_where_it_is_installed():
    envpool = pytest.importorskip("envpool")
    config = EnvConfig(id="envpool:CartPole-v1", num_envs=4, max_episode_steps=30)
    steps = run(make_vector_env(config), 100)
    assert_equal_steps(steps, run(make_vector_env(config), 100))
    assert sum(len(step.ended) for step in steps) > 10
    for step in steps[1:]:
        assert (step.rewards == 1.0).all()  # a step that only resets has reward 0: none is left
        assert np.abs(step.observations[step.episode_starts]).max(initial=0.0) <= 0.05
    handed = make_vector_env(envpool.make("CartPole-v1", env_type="gymnasium", num_envs=3))
    assert type(handed) is BatchedVectorEnv
    assert handed.reset().observations.shape == (3, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": np.ones(1, np.float32)}, r"rewards must be an array of real numbers of shape \(3,\).*float32 of shape \(1,\)"),
        ({"rewards": np.float32(1.0)}, r"rewards must be .*float32 of shape \(\)"),
        ({"rewards": np.ones(3, np.complex64)}, "rewards must be .*complex64"),
        ({"rewards": None}, "rewards must be .*NoneType"),
        ({"terminated": np.zeros(1, np.bool_)}, r"terminated must be an array of bool of shape \(3,\)"),
        ({"terminated": np.full(3, 0.5)}, "terminated must be .*float64"),
        ({"truncated": [False] * 3}, "truncated must be .*list"),
    ],
)
def test_results_without_one_value_per_lane_are_rejected(change, message):
    rows, _ = allocate_rows(spaces.Box(0, 1, (2,)), spaces.Discrete(2), 3, 3)
    moved = Moved(np.zeros((3, 2)), np.arange(3.0), np.array([True, False, False]), np.array([True, True, False]), {})
    write_outcome(moved, rows)
    assert rows.rewards.tolist() == [0.0, 1.0, 2.0]
    assert (rows.terminated.tolist(), rows.truncated.tolist()) == ([True, False, False], [False, True, False])  # both: terminated
    with pytest.raises(EnvError, match=message):
        write_outcome(moved._replace(**change), rows)


# ---- restoring copies that have their own seeds
class MaskedWorld(World):
    """Its mask is a part of the observation."""

    def __init__(self):
        super().__init__()
        self.observation_space = with_mask(self.observation_space, mask_space(self.action_space))

    def _observe(self):
        seen, info = super()._observe()
        return seen | info, {}


class Moody(Counter):
    """Its observations hold numbers that no seed governs."""

    moods = np.random.default_rng(0)

    def _observe(self):
        return super()._observe() + self.moods.random()


@pytest.mark.parametrize(
    ("kind", "steps"), [(SyncVectorEnv, 0), (SyncVectorEnv, 1), (SyncVectorEnv, 24), (SyncVectorEnv, 25), (AsyncVectorEnv, 67)]
)
def test_a_restored_state_continues_bit_identically(kind, steps):
    straight, fresh = adapted(kind=kind), adapted(kind=kind, seed=99)
    assert type(straight) is BatchedVectorEnv
    run(straight, steps, seed=1)
    state = straight.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh.load_state_dict(state)
    assert fresh.exact
    assert_equal_steps(continue_run(straight, 60, seed=2), continue_run(fresh, 60, seed=2))
    straight.close()
    fresh.close()


def test_episodes_of_all_lengths_are_restored_with_masks_and_options():
    straight, fresh = adapted(*[MaskedWorld] * 6), adapted(*[MaskedWorld] * 6)
    straight.set_reset_options({"bonus": 3.0}, indices=[1, 4])
    run(straight, 41, seed=1)
    straight.reset(indices=[2])  # an episode of no steps: it begins at the very end of the replay
    straight.set_reset_options({"bonus": -5.0}, indices=[4])  # not yet true for the running episode
    state = straight.state_dict()
    lengths = [copy["length"] for copy in state["copies"]]
    assert lengths[2] == 0
    assert len(set(lengths)) > 3  # else lanes would not have to wait for one another
    fresh.load_state_dict(state)
    assert fresh.exact
    assert_equal_steps(continue_run(straight, 50, seed=2), continue_run(fresh, 50, seed=2))


def test_a_state_of_gymnasiums_vector_env_can_be_loaded_into_ours():
    ours, theirs = one_by_one(seed=3), adapted(seed=3)
    run(theirs, 30, seed=1)
    ours.load_state_dict(theirs.state_dict())
    assert_equal_steps(continue_run(theirs, 40, seed=2), continue_run(ours, 40, seed=2))


def test_a_copy_that_is_not_restored_begins_a_new_episode_and_the_run_is_inexact_from_then_on():
    straight, fresh, again = (adapted(Counter, Moody, Counter) for _ in range(3))
    run(straight, 3)
    with pytest.warns(UserWarning, match=r"lane 1 could not be restored \(replaying .* different observation.*\); starting a new episode"):
        fresh.load_state_dict(straight.state_dict())
    step = fresh.reset(indices=())
    assert step.episode_starts.tolist() == [False, True, False]
    assert_equal_trees(step.observations[[0, 2]], straight.reset(indices=()).observations[[0, 2]])
    assert fresh.inexact == ["1 of 3 copies could not be restored at a resume and started new episodes"]
    assert not fresh.exact
    # Later checkpoints say so, once, however often the run is resumed.
    again.load_state_dict(fresh.state_dict())
    assert again.inexact == fresh.inexact
    assert straight.exact


def test_an_episode_that_ends_during_replay_is_not_restored_and_the_others_are():
    straight, fresh = (adapted(lambda: Counter(9), lambda length=length: Counter(length)) for length in (9, 3))
    run(straight, 7)
    with pytest.warns(UserWarning, match=r"lane 1 .*replaying its actions gave return and length \(3.0, 2\), but \(28.0, 7\) was saved"):
        fresh.load_state_dict(straight.state_dict())
    assert fresh.reset(indices=()).episode_starts.tolist() == [False, True]


def test_wrappers_whose_statistics_cross_episodes_are_named():
    plain = gym.wrappers.vector.RecordEpisodeStatistics(vector())
    assert make_vector_env(plain).exact
    around = gym.wrappers.vector.NormalizeReward(vector())
    inside = vector(lambda: gym.wrappers.NormalizeObservation(cartpole()))
    for env, words in (
        (around, "wrapper NormalizeReward is not saved.*policy.normalize_values=true"),
        (inside, "wrapper NormalizeObservation is not saved.*policy.normalize_observations=true"),
    ):
        (why,) = make_vector_env(env).inexact
        assert re.search(words, why)


# ---- restoring vector envs whose copies draw from one stream
class Kept(Streamed):
    """The same with get_state and set_state."""

    def get_state(self):
        return {"drawn": self.drawn, "n": self.n, "t": self.t}

    def set_state(self, state):
        self.drawn, self.n, self.t = state["drawn"], np.array(state["n"]), np.array(state["t"])


def through_a_file(state):
    arrays, structure = flatten_tree(state)
    return unflatten_tree({name: array.copy() for name, array in arrays.items()}, structure)


@pytest.mark.parametrize("make", [Kept, lambda: gym.wrappers.vector.RecordEpisodeStatistics(Kept())])
@pytest.mark.parametrize("steps", [0, 1, 37])
def test_a_vector_env_with_get_state_is_restored_by_it(make, steps):
    straight, fresh = make_vector_env(make(), seed=7), make_vector_env(make(), seed=99)
    assert straight.exact
    run(straight, steps, seed=1)
    state = through_a_file(straight.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh.load_state_dict(state)
    assert fresh.exact
    ours, theirs = continue_run(straight, 60, seed=2), continue_run(fresh, 60, seed=2)
    assert_equal_steps(ours, theirs)
    assert ours[0].episode_starts.all() == (steps == 0)
    with pytest.raises(EnvError, match="2 copies were saved by get_state, but"):
        make_vector_env(Streamed()).load_state_dict(state)


def test_a_vector_env_without_get_state_is_marked_inexact_and_starts_new_episodes():
    class Wrapped(gym.vector.VectorWrapper):
        """May have a state: nothing is known about it."""

    assert len(make_vector_env(Wrapped(Kept())).inexact) == 1
    env, fresh = make_vector_env(Streamed()), make_vector_env(Streamed())
    assert "Streamed has no get_state and set_state" in env.inexact[0]
    run(env, 5)
    with pytest.warns(UserWarning, match=r"lanes 0, 1 could not be restored \(its state was not saved.*starting new episodes"):
        fresh.load_state_dict(through_a_file(env.state_dict()))
    assert fresh.reset(indices=()).episode_starts.all()
    assert len(fresh.inexact) == 2
    again = make_vector_env(Streamed())
    with pytest.warns(UserWarning, match="could not be restored"):
        again.load_state_dict(through_a_file(fresh.state_dict()))
    assert again.inexact == fresh.inexact  # the run's history, restored with it
    unstarted = make_vector_env(Streamed())
    unstarted.load_state_dict(through_a_file(make_vector_env(Streamed()).state_dict()))  # nothing to restore
    with pytest.raises(EnvError, match="not been reset"):
        unstarted.step(np.zeros(2, np.int64))


def test_a_state_that_a_file_cannot_hold_is_reported():
    env = make_vector_env(type("Unsayable", (Kept,), {"get_state": lambda self: {"simulator": self}})())
    env.reset()
    with pytest.warns(UserWarning, match=r"get_state of Unsayable gave what a file cannot hold.*it cannot be restored"):
        env.state_dict()


def test_a_state_of_an_earlier_format_keeps_episode_counts_and_options():
    saved = {"episodes": [4, 2], "options": [None, {"low": -0.01}], "lengths": np.array([3, 0]), "strayed": [], "world": None}
    env = make_vector_env(Streamed())
    with pytest.warns(UserWarning, match="lanes 0, 1 could not be restored"):
        env.load_state_dict(saved)
    assert [(copy["episode"], copy["next_options"]) for copy in env.state_dict()["copies"]] == [(5, None), (3, {"low": -0.01})]
    assert env.reset(indices=()).episode_starts.all()
