"""Which lanes opponents play, when they change, whose return is counted, and that all of it is restored."""

import copy

import numpy as np
import pytest
from gymnasium import spaces

from doubles.teams import LENGTH, Always, Counter, Teams
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.collect.opponents import OpponentVectorEnv, RandomActor, make_actor, team_lanes
from inchworm.config.sections import PolicyConfig, read_opponent
from inchworm.core.errors import ConfigError, EnvError, SpaceError
from inchworm.core.protocols import Actor, VectorEnv
from inchworm.core.seeding import make_stream
from inchworm.policy.spec import PolicySpec
from inchworm.run.checkpoint import TrainingCheckpointer


class Draws:
    """A source of three opponents, drawn uniformly; draws and results are recorded."""

    def __init__(self):
        self.actors = {"one": Always(1), "three": Always(3), "counter": Counter()}
        self.drawn, self.results = [], []

    def draw(self, copy, rng):
        name = sorted(self.actors)[int(rng.integers(3))]
        self.drawn.append((copy, name))
        return name

    def actor(self, name):
        return self.actors[name]

    def record(self, name, win):
        self.results.append((name, win))


def play(env, steps, action=2):
    """Play a constant action; record what was seen and what all lanes did."""
    shown = []
    for _ in range(steps):
        step = env.step(np.full(env.num_lanes, action))
        shown.append((env.inner.got.copy(), step.rewards.copy(), step.episode_starts.copy(), tuple(step.ended), env.playing))
    return shown


def same(one, other):
    return all(
        np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1]) and a[4] == b[4] and [e.info for e in a[3]] == [e.info for e in b[3]]
        for a, b in zip(one, other, strict=True)
    )


def test_team_lanes_are_halves_of_copies():
    # copies of 4 lanes: side 0 has lanes 0, 1 of each, side 1 lanes 2, 3
    assert team_lanes(3, 4, 0).tolist() == [0, 1, 4, 5, 8, 9]
    assert team_lanes(3, 4, [0, 1, 0]).tolist() == [0, 1, 6, 7, 8, 9]
    for width, sides in ((3, 0), (0, 0), (4, 2), (4, [0, 1]), (4, [[0, 1, 0]])):
        with pytest.raises(ConfigError):
            team_lanes(3, width, sides)


def test_it_is_a_vector_env_of_our_lanes():
    env = OpponentVectorEnv(Teams(4, 4, shares_state=True), Always(1), team_lanes(4, 4, [0, 1, 0, 1]))
    assert isinstance(env, VectorEnv)
    assert (env.num_lanes, env.lanes_per_copy, env.num_envs) == (8, 2, 4)
    assert env.exact
    assert list(env.inexact) == []
    step = env.reset()
    # (copy, agent) of our lanes: agents 0, 1 on side 0 and agents 2, 3 on side 1
    assert step.observations["seen"][:, :2].astype(int).tolist() == [[0, 0], [0, 1], [1, 2], [1, 3], [2, 0], [2, 1], [3, 2], [3, 3]]
    assert step.episode_starts.all()
    assert step.rewards.tolist() == [0.0] * 8
    assert step.global_state["world"].shape == (4, 1)  # once per copy
    assert step.global_state["first"].tolist() == [0, 2, 0, 2]  # which agent our first is: a critic must know its side
    assert env.global_state_space == spaces.Dict({"first": spaces.Discrete(4), "world": env.inner.global_state_space})


def test_each_lane_gets_its_own_players_action():
    env = OpponentVectorEnv(Teams(4, 4), Always(1), team_lanes(4, 4, [0, 1, 0, 1]))
    env.reset()
    step = env.step(np.arange(8) % 4)
    # ours are 0 1 | 2 3 | 0 1 | 2 3 in copies 0 to 3; theirs are 1
    assert env.inner.got.tolist() == [0, 1, 1, 1, 1, 1, 2, 3, 0, 1, 1, 1, 1, 1, 2, 3]
    assert step.rewards.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    env.step(np.zeros(8, int))
    step = env.step(np.zeros(8, int))
    assert step.valid.tolist() == [True, False, *[True] * 6]  # agent 1 of copy 0 died


def test_episodes_are_ours_with_our_teams_return():
    env = OpponentVectorEnv(Teams(2, 4, shares_state=True), Always(1), team_lanes(2, 4, [0, 1]))
    env.reset(seeds=[0, 3])  # both of length 5
    ended = [step[3] for step in play(env, LENGTH)][-1]
    assert [e.lane for e in ended] == [0, 1, 2, 3]
    assert [e.seed for e in ended] == [0, 0, 3, 3]
    # two lanes x 5 steps x action 2 = 20; all four would be 30
    assert [e.info for e in ended] == [{"win": 1.0, "team_return": 20.0}] * 4
    assert ended[2].final_observation["seen"].tolist() == [1, 2, 5]
    assert ended[2].final_global_state["world"].tolist() == [1]
    assert [int(e.final_global_state["first"]) for e in ended] == [0, 0, 2, 2]
    play(env, 3)
    env.reset(indices=[1], seeds=[3])
    ended = [e for step in play(env, LENGTH) for e in step[3]]
    # copy 0's second episode has the seed 1, so 6 steps, of which 3 + 5 > 6 have passed; copy 1's began anew: 5 steps
    assert [(e.lane, e.info["team_return"]) for e in ended] == [(0, 24.0), (1, 24.0), (2, 20.0), (3, 20.0)]


def test_opponents_change_at_resets_and_only_there():
    source = Draws()
    env = OpponentVectorEnv(Teams(6, 2), source, team_lanes(6, 2), seed=3, first_copy=100)
    env.reset()
    assert [copy for copy, _ in source.drawn] == [100, 101, 102, 103, 104, 105]
    before, changed = env.playing, 0
    for _, _, _, ended, playing in play(env, 60):
        over = {e.lane for e in ended}  # one of ours per copy
        assert all(playing[c] == before[c] for c in range(6) if c not in over)
        changed += sum(playing[c] != before[c] for c in over)
        before = playing
    assert changed > 10
    assert set(before) <= {"one", "three", "counter"}
    # 2 per step of ours beats 1, loses against 3
    assert {win for name, win in source.results if name == "one"} == {1.0}
    assert {w for n, w in source.results if n == "three"} == {0.0}
    # the draw is a function of (seed, copy, number of the draw)
    again = sorted(source.actors)[int(make_stream(3, "opponent", 103, 0).integers(3))]
    assert source.drawn[3] == (103, again)


def test_one_act_per_distinct_opponent_and_step():
    source = Draws()
    del source.actors["counter"]
    source.draw = lambda copy, rng: "one" if copy % 2 else "three"
    env = OpponentVectorEnv(Teams(4, 4), source, team_lanes(4, 4))
    env.reset()
    play(env, 7)
    one = source.actors["one"]
    assert one.calls == 7
    assert source.actors["three"].calls == 7
    assert one.lanes[0] == [[1, 2], [1, 3], [3, 2], [3, 3]]  # (copy, agent): the second half of the odd copies


def test_a_reset_with_seeds_for_all_gives_the_same_games_again():
    env = OpponentVectorEnv(Teams(4, 4), Draws(), team_lanes(4, 4), seed=1)
    games = []
    for _ in range(2):
        env.inner.episodes[:] = 0
        env.reset(seeds=[5, 6, 7, 8])
        games.append(play(env, 20))
    assert same(*games)
    env.inner.episodes[:] = 0
    env.reset()
    assert not same(games[0], play(env, 20))


@pytest.mark.parametrize("steps", [0, 1, 4, 13, 22])
def test_a_resumed_game_has_the_same_bits(steps, tmp_path):
    def make():
        return OpponentVectorEnv(Teams(5, 4), Draws(), team_lanes(5, 4, [0, 1, 0, 1, 1]), seed=9)

    env = make()
    env.reset()
    play(env, steps)
    state = {"env": env.state_dict()}
    expected = play(env, 25)
    TrainingCheckpointer(tmp_path).save(1, state)
    loaded = TrainingCheckpointer(tmp_path).load().state
    other = make()
    other.load_state_dict(loaded["env"])
    shown = other.reset(indices=())
    assert shown.observations["seen"].shape == (10, 3)
    assert same(expected, play(other, 25))


def test_memory_stays_with_its_lanes_when_groups_change():
    """One copy leaves and another joins the counter's group: the copies that stay keep their count."""
    source = Draws()
    order = {0: ["counter", "one"], 1: ["counter"] * 2, 2: ["one", "counter"]}
    source.draw = lambda copy, rng: order[copy].pop(0)
    env = OpponentVectorEnv(Teams(3, 2), source, team_lanes(3, 2), deterministic=True)
    env.reset(seeds=[0, 0, 0])
    play(env, 2)
    env.reset(indices=[0])
    env.reset(indices=[2])
    assert env.playing == ("one", "counter", "counter")
    env.step(np.zeros(3, int))
    # copy 1 is in its third step: 3; copy 2 in its first: 1; copy 0 meets one
    assert env.inner.got.tolist() == [0, 1, 0, 3, 0, 1]


def test_an_opponents_memory_is_reset_with_each_episode():
    env = OpponentVectorEnv(Teams(2, 2), Counter(), team_lanes(2, 2), deterministic=True)
    env.reset(seeds=[0, 1])  # of 5 and 6 steps
    theirs = [step[0][1::2].tolist() for step in play(env, 8, action=0)]
    # 1, 2, 3, 0, 1 in the first copy, then from 1 again; one step more in the second
    assert [one for one, _ in theirs] == [1, 2, 3, 0, 1, 1, 2, 3]
    assert [two for _, two in theirs] == [1, 2, 3, 0, 1, 2, 1, 2]


def test_a_source_that_remembers_is_saved_with_the_env():
    class Remembering(Draws):
        def state_dict(self):
            return {"results": len(self.results)}

        def load_state_dict(self, state):
            self.loaded = state["results"]

    env = OpponentVectorEnv(Teams(), Remembering(), team_lanes(4, 4))
    env.reset()
    play(env, 9)
    other = OpponentVectorEnv(Teams(), Remembering(), team_lanes(4, 4))
    other.load_state_dict(env.state_dict())
    assert other.opponent.loaded == len(env.opponent.results) > 0


@pytest.mark.parametrize(
    "lanes", [[], [0, 0, 4, 8, 12], [0, 4, 8], [4, 0, 8, 12], [0, 1, 4, 8, 12], [0, 4, 8, 16], list(range(16)), [[0, 4, 8, 12]]]
)
def test_lanes_that_are_not_a_team_are_rejected(lanes):
    with pytest.raises(ConfigError, match="equally many in each of 4 copies"):
        OpponentVectorEnv(Teams(), Always(1), lanes)


def test_bad_opponents_are_one_clear_line():
    lanes = team_lanes(4, 4)
    with pytest.raises(ConfigError, match="int is not an opponent"):
        OpponentVectorEnv(Teams(), 3, lanes)
    other = PolicySpec(spaces.Box(-1, 1, (7,), np.float32), spaces.Discrete(5), PolicyConfig())
    with pytest.raises(SpaceError, match="made for the observation space Box"):
        OpponentVectorEnv(Teams(), NumpyPolicy(other), lanes)
    fewer = PolicySpec(Teams.observation_space, spaces.Discrete(5), PolicyConfig())
    OpponentVectorEnv(Teams(), NumpyPolicy(fewer), lanes)
    wrong = OpponentVectorEnv(Teams(), Always(0.5), lanes)
    wrong.reset()
    with pytest.raises(SpaceError, match="actions of an opponent"):
        wrong.step(np.zeros(8, int))


def test_wrong_order_of_calls_and_other_games_are_rejected():
    env = OpponentVectorEnv(Teams(), Counter(), team_lanes(4, 4))
    with pytest.raises(EnvError, match="nothing to act on"):
        env.send(np.zeros(8, int))
    env.reset()
    env.send(np.zeros(8, int))
    with pytest.raises(EnvError, match="nothing to act on"):
        env.send(np.zeros(8, int))
    env.recv()
    with pytest.raises(SpaceError):
        env.send(np.zeros(16, int))
    state = env.state_dict()
    with pytest.raises(ConfigError, match="other lanes"):
        OpponentVectorEnv(Teams(), Counter(), team_lanes(4, 4, 1)).load_state_dict(copy.deepcopy(state))
    with pytest.raises(ConfigError, match="against Counter, but the opponent here is Always"):
        OpponentVectorEnv(Teams(), Always(1), team_lanes(4, 4)).load_state_dict(state)
    state["opponents"]["names"] = ["Counter"]
    with pytest.raises(ConfigError, match="play 1 env copies"):
        OpponentVectorEnv(Teams(), Counter(), team_lanes(4, 4)).load_state_dict(state)
    with pytest.raises(EnvError, match="lanes_per_copy"):
        OpponentVectorEnv(_without_teams(), Counter(), [0])


def _without_teams():
    env = Teams()
    del env.lanes_per_copy
    return env


def test_other_calls_are_forwarded():
    env = OpponentVectorEnv(Teams(), Counter(), team_lanes(4, 4))
    env.set_reset_options({"skill": 1}, [2])
    assert env.inner.options == {"options": {"skill": 1}, "indices": [2]}
    with env:
        pass
    assert env.inner.closed == 1
    env.inner.inexact = ("a clock",)
    assert not env.exact
    assert env.inexact == ("a clock",)


def test_choices_are_uniform_over_what_the_mask_allows():
    actor, lanes = RandomActor(spaces.Discrete(4, start=10)), 8000
    assert isinstance(actor, Actor)
    assert actor.initial_state(3) == ()
    mask = np.tile([1, 0, 1, 1], (lanes, 1))
    step = actor.act({"action_mask": mask}, (), np.zeros(lanes, bool), np.random.default_rng(0))
    counts = np.bincount(step.env_actions - 10, minlength=4)
    # a third of 8000 is 2667; the standard deviation is sqrt(8000 * 1/3 * 2/3) = 42
    assert counts[1] == 0
    assert np.abs(counts[[0, 2, 3]] - 2667).max() < 5 * 42
    assert np.allclose(step.log_probs, -np.log(3))
    assert step.log_probs.dtype == np.float32
    assert step.env_actions.dtype == np.int64


def test_numbers_are_uniform_within_bounds_and_normal_without():
    space = spaces.Dict(
        {"a": spaces.Box(np.array([-2.0, -np.inf]), np.array([4.0, np.inf]), (2,), np.float64), "b": spaces.MultiDiscrete([2, 3])}
    )
    step = RandomActor(space).act({}, (), np.zeros(9000, bool), np.random.default_rng(1))
    bounded, free = step.env_actions["a"].T
    assert -2 <= bounded.min() < -1.9
    assert 3.9 < bounded.max() <= 4
    assert abs(bounded.mean() - 1) < 0.1
    assert abs(free.mean()) < 0.05
    assert abs(free.std() - 1) < 0.05
    assert step.env_actions["b"].max(axis=0).tolist() == [1, 2]
    assert step.env_actions["a"].dtype == np.float64
    # density 1/6, a normal's, and 1/2 x 1/3
    expected = -np.log(6) - 0.5 * free**2 - 0.5 * np.log(2 * np.pi) - np.log(6)
    assert np.allclose(step.log_probs, expected, atol=1e-4)


def test_actors_by_name():
    assert isinstance(make_actor("random", Teams.action_space, "Any-v0"), RandomActor)
    assert read_opponent("heuristic:0.25") == ("heuristic", 0.25)
    assert read_opponent("heuristic") == ("heuristic", 1.0)
    for name, words in (("unknown", "unknown opponent"), ("heuristic", "Any-v0 has no heuristic")):
        with pytest.raises(ConfigError, match=words):
            make_actor(name, Teams.action_space, "Any-v0")
    for text in ("2", "x", "nan", "-0.1", ""):
        with pytest.raises(ConfigError, match="the skill must be from 0 to 1"):
            read_opponent(f"heuristic:{text}")
