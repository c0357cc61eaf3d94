"""Tests of env/pettingzoo_copy.py: agents are adjacent lanes, and may leave and join while an episode runs; or they take turns,
one move a step and one valid lane in each copy."""

import functools
import importlib
import itertools
import re
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pettingzoo")
from doubles.crashing import FickleTeam
from doubles.stepping import assert_equal_steps, continue_run, frozen, run
from doubles.turns import Stones
from inchworm import check_env
from inchworm.core.errors import EnvError, MissingExtraError, SpaceError
from inchworm.core.padding import DIMENSIONS_KEY
from inchworm.core.spaces import MASK_KEY
from inchworm.env.lane_spaces import nothing_seen
from inchworm.env.pettingzoo_copy import as_team, is_team_env
from inchworm.env.source import make_vector_env
from inchworm.worlds.toys import DEATHS, JOINS, Comings


def team_env(plan=DEATHS, copies=1, *, global_state=False, **kwargs):
    return make_vector_env(lambda: Comings(plan, **kwargs), copies, global_state=global_state)


def actions_of(env, choice=0):
    return np.full(env.num_lanes, choice, np.int64)


def walk(env, steps):
    """Steps with action 0, each as an EnvStep."""
    return [frozen(env.step(actions_of(env))) for _ in range(steps)]


def column(shown, name):
    return [getattr(step, name).astype(int).tolist() for step in shown]


def changed(base=Comings, **methods):
    """A kind of team with some methods replaced; without arguments, its agents follow DEATHS."""
    return type("Changed", (base,), methods)


def constant(value):
    """An attribute that cannot be set."""
    return property(lambda _: value, lambda *_: None)


def test_the_possible_agents_are_adjacent_lanes():
    env = team_env(copies=4)
    assert (env.num_lanes, env.num_envs, env.lanes_per_copy) == (12, 4, 3)
    assert env.observation_space == spaces.Box(-np.inf, np.inf, (3,), np.float32)
    assert env.action_space == spaces.Discrete(3)
    assert env.global_state_space is None
    step = env.reset()
    assert step.observations[:, 0].tolist() == [0, 1, 2] * 4  # the agent's place
    assert len(set(step.observations[:, 2].tolist())) == 4  # the luck of four seeds, shared by a copy's lanes
    assert step.valid.all()
    assert step.episode_starts.all()


def test_a_death_without_a_global_state_is_the_end_for_its_lane():
    """The second of three dies in step 2 of 6; the third is truncated at the end, the first terminated."""
    env = team_env()
    env.reset()
    shown = walk(env, 7)
    assert column(shown, "terminated") == [[0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert column(shown, "truncated") == [[0, 0, 0]] * 5 + [[0, 0, 1]] + [[0, 0, 0]]
    assert column(shown, "valid") == [[1, 1, 1], [1, 0, 1], [1, 0, 1], [1, 0, 1], [1, 0, 1], [1, 1, 1], [1, 1, 1]]
    assert column(shown, "episode_starts") == [[0, 0, 0]] * 5 + [[1, 1, 1]] + [[0, 0, 0]]
    assert column(shown, "rewards")[:3] == [[1, 11, 21], [2, 12, 22], [3, 0, 23]]
    assert [len(entry.ended) for entry in shown] == [0, 0, 0, 0, 0, 3, 0]  # not at the death
    assert shown[1].observations[1, :2].tolist() == [1, 2]  # its last observation, once
    assert [entry.observations[1].tolist() for entry in shown[2:5]] == [[0, 0, 0]] * 3
    ended = shown[5].ended
    # returns: 1 + … + 6 = 21, 11 + 12 = 23, 21 + … + 26 = 141
    assert [entry.info for entry in ended] == [{"steps": end, "place": lane, "team_return": 185} for lane, end in enumerate((6, 2, 6))]
    assert [entry.final_observation[:2].tolist() for entry in ended] == [[0, 6], [0, 0], [2, 6]]
    assert {entry.seed for entry in ended} == {ended[0].seed}


def test_a_death_with_a_global_state_ends_nothing_before_the_game_does():
    env = team_env(global_state=True, pension=0.5)
    first = env.reset()
    assert env.global_state_space == spaces.Box(-np.inf, np.inf, (3,), np.float32)
    assert first.global_state[0, :2].tolist() == [0, 3]
    shown = walk(env, 6)
    assert column(shown, "terminated") == [[0, 0, 0]] * 6
    assert column(shown, "truncated") == [[0, 0, 0]] * 5 + [[1, 1, 1]]  # one that lived was cut off, so the game was
    assert column(shown, "valid") == [[1, 1, 1], [1, 0, 1], [1, 0, 1], [1, 0, 1], [1, 0, 1], [1, 1, 1]]
    assert [entry.rewards[1] for entry in shown] == [11, 12, 0.5, 0.5, 0.5, 0.5]  # what the dead get stays
    assert [entry.global_state[0, :2].tolist() for entry in shown] == [[1, 3], [2, 2], [3, 2], [4, 2], [5, 2], [0, 3]]
    assert [entry.final_global_state[:2].tolist() for entry in shown[5].ended] == [[6, 0]] * 3  # before the reset
    assert shown[5].ended[0].info["team_return"] == 185 + 4 * 0.5


def test_an_agent_that_joins_begins_its_own_episode():
    """The second joins after 2 steps, the third leaves after 1, is back after 3 and dies after 4; all is over after 5."""
    env = team_env(JOINS)
    first = env.reset()
    assert first.valid.tolist() == [True, False, True]
    assert first.episode_starts.all()
    shown = walk(env, 5)
    assert column(shown, "valid") == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0], [1, 0, 1]]
    assert column(shown, "episode_starts") == [[0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0], [1, 1, 1]]
    assert column(shown, "truncated") == [[0, 0, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert column(shown, "terminated") == [[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1], [1, 1, 1]]
    assert shown[0].observations[2, :2].tolist() == [2, 1]  # where it was cut off: its true successor
    assert shown[1].observations[2].tolist() == [0, 0, 0]
    assert shown[1].observations[1, :2].tolist() == [1, 2]
    assert shown[2].observations[2, :2].tolist() == [2, 3]
    env.reset()
    walk(env, 2)
    assert env.reset(indices=()).episode_starts.tolist() == [False, True, False]  # the second has just joined


def test_every_way_that_two_agents_can_come_and_go():
    """All plans of two agents over 3 steps, and what the rules say of each step, with and without a global state."""
    stays = [(first, last, flag) for first in range(3) for last in range(first + 1, 4) for flag in ("terminated", "truncated")]
    tried = 0
    for one, two, shared in itertools.product(stays, stays, (False, True)):
        if min(one[0], two[0]) > 0 or max(min(one[1], two[1]), 0) < max(one[0], two[0]):
            continue  # no agent at the start, or a gap without agents
        tried += 1
        with team_env([[one], [two]], global_state=shared) as env:
            assert env.reset().valid.tolist() == [one[0] == 0, two[0] == 0]
            end = max(one[1], two[1])
            shown = walk(env, end)
        cut = any(stay[1] == end and stay[2] == "truncated" for stay in (one, two))
        for now, entry in enumerate(shown, 1):
            over = now == end
            for lane, (first, last, flag) in enumerate((one, two)):
                case = (one, two, shared, now, lane)
                assert entry.valid[lane] == (first == 0 if over else first <= now < last), case
                assert entry.episode_starts[lane] == (over or 0 < first == now), case
                assert entry.rewards[lane] == (10 * lane + now if first < now <= last else 0), case
                if shared:
                    expected = (over and not cut, over and cut)
                elif now == last:
                    expected = (flag == "terminated", flag == "truncated")
                else:
                    expected = (over, False)  # a lane that left before has no successor
                assert (entry.terminated[lane], entry.truncated[lane]) == expected, case
            assert [e.lane for e in entry.ended] == ([0, 1] if over else [])
    # begins at 0: 6 stays, at 1: 4, at 2: 2. Both at 0: 36 pairs; one at 1: 2 x 6 x 4; one at 2, the other till 2 or 3: 2 x 4 x 2
    assert tried == 2 * (36 + 48 + 16)


def test_both_flags_mean_terminated_and_a_time_limit_truncates_all():
    def step(self, actions):
        observations, rewards, terminations, truncations, infos = Comings.step(self, actions)
        return observations, rewards, terminations, {agent: truncations[agent] or terminations[agent] for agent in truncations}, infos

    with make_vector_env(changed(step=step), 1) as env:
        env.reset()
        shown = walk(env, 6)
    assert shown[5].terminated.tolist() == [True, True, False]
    assert shown[5].truncated.tolist() == [False, False, True]
    with make_vector_env(lambda: as_team(Comings(DEATHS), 4), 1) as env:
        env.reset()
        shown = walk(env, 5)
    assert column(shown, "truncated") == [[0, 0, 0]] * 3 + [[1, 0, 1], [0, 0, 0]]
    assert column(shown, "terminated") == [[0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert [e.final_observation[:2].tolist() for e in shown[3].ended] == [[0, 4], [0, 0], [2, 4]]
    assert shown[4].rewards.tolist() == [1, 11, 21]  # a new episode


@pytest.mark.parametrize("source", ["key", "info", "method"])
def test_masks_of_each_agent(source):
    env = team_env(masks=source)
    step = env.reset()
    assert isinstance(env.observation_space, spaces.Dict)
    key = "seen" if source == "key" else "observation"
    assert sorted(env.observation_space.spaces) == sorted([key, MASK_KEY])
    masks = []
    for _ in range(6):
        masks.append(np.array(step.observations[MASK_KEY]))
        step = env.step(actions_of(env))
    # agent b may not do (steps + b) % 3; the second is dead from 2 steps on, and then everything is allowed
    for taken, mask in enumerate(masks):
        for lane in range(3):
            allowed = [1, 1, 1] if lane == 1 and taken >= 2 else [int(choice != (taken + lane) % 3) for choice in range(3)]
            assert mask[lane].tolist() == allowed, (taken, lane)
    finals = [entry.final_observation[MASK_KEY].tolist() for entry in step.ended]
    assert finals == [[1, 1, 1], [1, 1, 1], [1, 1, 0]]  # terminated, dead, truncated: (6 + 2) % 3 = 2


def test_a_mask_that_is_missing_or_forbids_everything():
    missing = changed(step=lambda self, actions: (*Comings.step(self, actions)[:4], {}))
    nothing = changed(_mask=lambda self, agent: np.zeros(3, bool) if self._now else Comings._mask(self, agent))
    for kind, words in ((missing, "action_mask missing"), (nothing, "leaves no legal action")):
        with make_vector_env(lambda kind=kind: kind(DEATHS, masks="info"), 1) as env:
            env.reset()
            with pytest.raises(EnvError, match=rf"agent 'agent_0' \(lane 0\), step 1 of episode 1 .*{words}"):
                env.step(actions_of(env))


@pytest.mark.parametrize("global_state", [False, True])
@pytest.mark.parametrize("plan", [DEATHS, JOINS])
def test_a_restored_team_continues_bit_identically(plan, global_state):
    env = team_env(plan, 3, global_state=global_state)
    env.reset()
    for taken in range(9):
        state = env.state_dict()
        with team_env(plan, 3, global_state=global_state) as other:
            other.load_state_dict(state)
            assert other.exact, taken
            assert_equal_steps(continue_run(other, 4, taken), continue_run(env, 4, taken))
        env.load_state_dict(state)
        env.step(actions_of(env, taken % 3))


def test_a_resume_notices_that_other_agents_are_present(tmp_path):
    env = make_vector_env(lambda: FickleTeam(tmp_path / "made"), 1)
    env.reset()
    walk(env, 3)
    with make_vector_env(lambda: FickleTeam(tmp_path / "made"), 1) as other:
        with pytest.warns(UserWarning, match="lane 0 could not be restored"):
            other.load_state_dict(env.state_dict())
        assert not other.exact


def test_reset_options_reach_the_environment():
    env = team_env(copies=2)
    env.set_reset_options({"luck": 5}, [1])
    luck = env.reset().observations[:, 2]
    assert (luck[:3] < 1).all()
    assert (luck[3:] >= 5).all()


# ---- spaces
class Spaces(Comings):
    """Two agents with spaces of their own."""

    def __init__(self, observations, actions):
        super().__init__([[(0, 3, "terminated")], [(0, 2, "terminated")]])
        self.kinds, self.received = (observations, actions), []

    def observation_space(self, agent):
        return self.kinds[0][self.possible_agents.index(agent)]

    def action_space(self, agent):
        return self.kinds[1][self.possible_agents.index(agent)]

    def _observations(self, agents):
        for agent in self.possible_agents:
            self.observation_space(agent).seed(0)
        return {agent: self.observation_space(agent).sample() for agent in agents}

    def step(self, actions):
        self.received.append(dict(actions))
        return super().step(dict.fromkeys(actions, 0))


BOX, CHOICE = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)


def test_spaces_of_different_kinds_are_rejected():
    for observations, actions, words in (
        ((BOX, spaces.Dict({"a": BOX})), (CHOICE, CHOICE), "the observation spaces of agent_0 and agent_1"),
        ((BOX, BOX), (CHOICE, spaces.MultiDiscrete([3])), r"the action spaces of agent_0 and agent_1 .*Discrete\(3\) and MultiDiscrete"),
    ):
        with pytest.raises(SpaceError, match=words):
            make_vector_env(lambda kinds=(observations, actions): Spaces(*kinds), 1)


def test_lanes_are_as_large_as_the_largest_agent_and_each_gets_its_own_part():
    world = Spaces((BOX, spaces.Box(1, 2, (3,), np.float32)), (CHOICE, spaces.Discrete(5)))
    env = make_vector_env(world)
    bounds = np.array([-1, -1, 1], np.float32), np.array([2, 2, 2], np.float32)
    assert env.observation_space == spaces.Dict({"observation": spaces.Box(*bounds, dtype=np.float32), MASK_KEY: spaces.MultiBinary(5)})
    assert env.action_space == spaces.Discrete(5)
    assert env.agents == ("agent_0", "agent_1")
    assert [own.action_space.n for own in env.agent_spaces] == [3, 5]
    seen = env.reset().observations
    assert seen["observation"][0, 2] == 1  # zero is not in the space of the larger agent: the nearest number
    assert seen[MASK_KEY].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    step = env.step(np.array([2, 4]))
    assert world.received[0] == {"agent_0": 2, "agent_1": 4}
    step = env.step(np.array([0, 0]))  # agent_1 is dead from here on
    assert (step.valid.tolist(), step.observations["observation"][0, 2]) == ([True, False], 1)
    step = env.step(np.array([0, 4]))
    assert step.ended[0].final_observation["observation"][2] == 1
    assert step.ended[0].final_observation[MASK_KEY].tolist() == [1, 1, 1, 0, 0]
    with pytest.raises(EnvError, match=r"agent 'agent_0' \(lane 0\).*action is not in Discrete\(3\).*obey action_mask"):
        env.step(np.array([3, 4]))


def test_parts_that_an_agent_lacks_are_not_sent():
    arm = spaces.Dict({"grip": spaces.Box(-1, 1, (1,), np.float32), "mode": spaces.MultiDiscrete([2, 2])})
    legs = spaces.Dict({"grip": spaces.Box(-9, 9, (2,), np.float32), "walk": spaces.Discrete(3, start=1)})
    world = Spaces((BOX, BOX), (arm, legs))
    env = make_vector_env(world)
    seen = env.reset().observations
    assert seen[DIMENSIONS_KEY].tolist() == [[1, 0], [1, 1]]
    assert seen[MASK_KEY]["mode"].tolist() == [[1, 1, 1, 1], [1, 0, 1, 0]]
    assert seen[MASK_KEY]["walk"].tolist() == [[1, 0, 0], [1, 1, 1]]
    env.step({"grip": np.full((2, 2), 5, np.float32), "mode": np.array([[1, 0], [0, 0]]), "walk": np.array([1, 3])})
    arms, legs = world.received[0].values()
    assert {key: np.asarray(value).tolist() for key, value in arms.items()} == {"grip": [1], "mode": [1, 0]}
    assert {key: np.asarray(value).tolist() for key, value in legs.items()} == {"grip": [5, 5], "walk": 3}


def test_masks_of_the_environment_join_those_of_the_padding():
    def action_masks(self, agent):
        return np.array([0, 1, 1] if agent == "agent_0" else [1, 0, 0, 0, 1])

    world = type("Masked", (Spaces,), {"action_masks": action_masks})((BOX, BOX), (CHOICE, spaces.Discrete(5)))
    env = make_vector_env(world)
    assert env.reset().observations[MASK_KEY].tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]
    assert [own.observation_space[MASK_KEY].n for own in env.agent_spaces] == [3, 5]


def test_workers_know_the_agents_and_give_the_same_steps():
    pytest.importorskip("mpe2")
    name = "mpe2.simple_speaker_listener_v4:parallel_env"
    with make_vector_env(name, 2, 0, seed=3) as here, make_vector_env(name, 2, 2, seed=3) as there:
        assert here.agents == there.agents == ("speaker_0", "listener_0")
        assert here.agent_spaces == there.agent_spaces
        assert_equal_steps(run(here, 30), run(there, 30))


def test_bounds_may_differ_and_each_agent_gets_actions_within_its_own():
    wide, narrow = spaces.Box(-2, 3, (1,), np.float32), spaces.Box(-1, 5, (1,), np.float32)
    world = Spaces((BOX, spaces.Box(-3, 0.5, (2,), np.float32)), (wide, narrow))
    env = make_vector_env(world)
    assert env.observation_space == spaces.Box(-3, 1, (2,), np.float32)
    assert env.action_space == spaces.Box(-2, 5, (1,), np.float32)
    env.reset()
    env.step(np.array([[5], [-2]], np.float32))
    assert {agent: action.tolist() for agent, action in world.received[0].items()} == {"agent_0": [3], "agent_1": [-1]}


def test_bounds_of_parts_and_observations_of_dead_agents():
    fixed = spaces.Tuple([spaces.Discrete(2, start=3), spaces.Box(2, 4, (2,), np.int8)])
    kinds = [spaces.Dict({"a": spaces.Box(low, 9, (1,), np.float32), "b": fixed}) for low in (1, 2)]
    world = Spaces(kinds, kinds)
    env = make_vector_env(world)
    env.reset()
    low = {"a": np.ones((2, 1), np.float32), "b": (np.full(2, 3), np.full((2, 2), 2, np.int8))}
    for _ in range(3):
        step = env.step(low)
    got = world.received[0]
    assert (got["agent_0"]["a"].tolist(), got["agent_1"]["a"].tolist()) == ([1], [2])
    assert got["agent_1"]["b"][0] == 3
    final = step.ended[1].final_observation  # of the one that was dead: nothing, as near as its space allows
    assert (final["a"].tolist(), final["b"][0].tolist(), final["b"][1].tolist()) == ([1], 3, [2, 2])
    more = spaces.Dict({"m": spaces.MultiDiscrete([2, 3], start=[0, 4]), "n": spaces.MultiBinary(2), MASK_KEY: spaces.MultiBinary(2)})
    assert {key: value.tolist() for key, value in nothing_seen(more).items()} == {"m": [0, 4], "n": [0, 0], MASK_KEY: [1, 1]}


# ---- what breaks the contract
def broken(change, plan=DEATHS, steps=1):
    """The message about an environment whose step's five dicts `change` has changed, in place or by returning others."""

    def step(self, actions):
        result = tuple(dict(part) for part in Comings.step(self, actions))
        return (change(self, result) or result) if self._now == steps else result

    with make_vector_env(lambda: changed(step=step)(plan), 1) as env:
        env.reset(seeds=[7])
        walk(env, steps - 1)
        with pytest.raises(EnvError) as caught:
            env.step(actions_of(env))
    return str(caught.value)


def setting(part, agent, value):
    return lambda _, result: result[part].update({agent: value})


def without(part, agent):
    def change(_, result):
        del result[part][agent]

    return change


def with_agents(*agents):
    return lambda world, _: setattr(world, "agents", list(agents))


ALL = ("agent_0", "agent_1", "agent_2")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _, result: result[:4], "lanes 0 to 2, step 1 of episode 1 with seed 7: step must return the 5 dicts"),
        (lambda _, result: (None, *result[1:]), "must return the 5 dicts"),
        (without(0, "agent_1"), "agent 'agent_1' (lane 1), step 1 of episode 1 with seed 7: observations lack the agent"),
        (without(1, "agent_2"), "agent 'agent_2' (lane 2), step 1 of episode 1 with seed 7: rewards lack the agent"),
        (without(2, "agent_0"), "terminations lack the agent"),
        (without(3, "agent_0"), "truncations lack the agent"),
        (setting(1, "agent_1", float("nan")), "agent 'agent_1' (lane 1), step 1 of episode 1 with seed 7: reward is nan"),
        (setting(1, "agent_1", "much"), "reward must be one real number"),
        (setting(1, "ghost", 1.0), "rewards name 'ghost', which is not in possible_agents"),
        (setting(2, "agent_1", 1), "terminations must be one bool"),
        (
            setting(0, "agent_2", np.zeros(2, np.float32)),
            "agent 'agent_2' (lane 2), step 1 of episode 1 with seed 7: observation has shape (2,)",
        ),
        (setting(2, "agent_1", True), "it is terminated or truncated and still in env.agents"),
        (
            with_agents("agent_0", "agent_2"),
            "agent 'agent_1' (lane 1), step 1 of episode 1 with seed 7: it left env.agents and is neither",
        ),
        (with_agents(), "agent 'agent_0' (lane 0), step 1 of episode 1 with seed 7: it left env.agents and is neither"),
        (with_agents(*ALL, "ghost"), "env.agents names 'ghost', which is not in possible_agents"),
        (with_agents(*ALL, "agent_0"), "env.agents names an agent twice"),
    ],
)
def test_what_breaks_the_contract_is_named(change, words):
    assert words in broken(change)


def test_a_joining_agent_needs_an_observation_and_a_dead_one_a_finite_reward():
    words = "agent 'agent_1' (lane 1), step 2 of episode 1 with seed 7: observations lack the agent"
    assert words in broken(without(0, "agent_1"), JOINS, 2)
    assert "reward is inf" in broken(setting(1, "agent_1", float("inf")), steps=4)


def test_infos_may_be_missing_but_not_be_anything_else():
    with make_vector_env(changed(step=lambda self, actions: (*Comings.step(self, actions)[:4], {})), 1) as env:
        env.reset()
        assert [entry.info for entry in walk(env, 6)[5].ended] == [{"team_return": 185}] * 3
    assert "info must be a dict" in broken(setting(4, "agent_1", 3), steps=2)
    assert "info must be a dict" in broken(setting(4, "agent_0", 3), steps=6)


def test_reset_returns_two_dicts_and_leaves_agents():
    def empty(self, seed=None, options=None):
        result = Comings.reset(self, seed, options)
        self.agents = []
        return result

    odd = changed(reset=lambda self, seed=None, options=None: Comings.reset(self, seed, options)[0])
    for kind, words in ((changed(reset=empty), "after reset env.agents is empty"), (odd, r"return the dicts \(observations, infos\)")):
        with pytest.raises(EnvError, match=words):
            make_vector_env(kind, 1).reset()


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ({"possible_agents": constant([])}, "has no possible_agents"),
        ({"possible_agents": constant(["a", "a"])}, "names an agent twice"),
        ({"observation_space": lambda self, agent: 3}, "must return a space; got int"),
    ],
)
def test_agents_and_their_spaces_must_be_declared(methods, words):
    with pytest.raises(EnvError, match=words):
        make_vector_env(changed(**methods), 1)


# ---- global state
def test_the_global_state_is_what_state_returns():
    def no_state(self):
        raise NotImplementedError

    no_space = {"state_space": constant(None)}
    with pytest.raises(EnvError, match=r"has no state\(\), so there is no global state"):
        make_vector_env(changed(state=no_state), 1, global_state=True)
    with pytest.raises(EnvError, match=r"must return an array of numbers"):
        make_vector_env(changed(state=lambda self: "here", **no_space), 1, global_state=True)
    env = make_vector_env(changed(state=lambda self: np.array([self._now, 7]), **no_space), 2, global_state=True)  # whole numbers
    assert env.global_state_space == spaces.Box(-np.inf, np.inf, (2,), np.float32)
    assert env.reset().global_state.tolist() == [[0, 7], [0, 7]]
    env = make_vector_env(changed(state=lambda self: Comings.state(self)[: 3 - self._now]), 1, global_state=True)
    env.reset(seeds=[7])
    with pytest.raises(EnvError, match=re.escape("step 1 of episode 1 with seed 7: global state has shape (2,), but its space has (3,)")):
        env.step(actions_of(env))


def test_an_environment_of_one_agent_has_no_global_state():
    for env in ("CartPole-v1", lambda: gym.make("CartPole-v1"), gym.make_vec("CartPole-v1", 2)):
        with pytest.raises(EnvError, match="no global state"):
            make_vector_env(env, 2, global_state=True)
    with pytest.raises(EnvError, match="was made without a global state"):
        make_vector_env(team_env(), global_state=True)
    shared = team_env(global_state=True)
    assert make_vector_env(shared, global_state=True) is shared


# ---- where PettingZoo's environments come from
def test_an_instance_is_one_copy_and_all_copies_have_as_many_agents():
    env = make_vector_env(Comings(DEATHS))
    assert (env.num_lanes, env.num_envs) == (3, 1)
    with pytest.raises(EnvError, match="num_envs=2"):
        make_vector_env(Comings(DEATHS), 2)
    plans = iter([DEATHS, DEATHS[:2]])
    with pytest.raises(EnvError, match="lane 2 has other spaces than lane 0"):
        make_vector_env(lambda: Comings(next(plans)), 2)


def test_aec_environments_that_are_updated_once_per_cycle_go_through_pettingzoos_converter():
    spread = pytest.importorskip("mpe2.simple_spread_v3")
    with (
        make_vector_env(lambda: spread.env(N=2, max_cycles=4), 1) as aec,
        make_vector_env(lambda: spread.parallel_env(N=2, max_cycles=4), 1) as env,
    ):
        assert_equal_steps(run(aec, 5), run(env, 5))
        assert not aec.turn_based


def test_without_pettingzoo_the_extra_is_named(monkeypatch, tmp_path):
    (tmp_path / "my_zoo.py").write_text("import pettingzoo\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "pettingzoo", None)  # as if it were not there
    for name in ("my_zoo:make", "pettingzoo:ParallelEnv"):
        with pytest.raises(MissingExtraError, match=r'needs PettingZoo; type: pip install "inchworm\[marl\]"'):
            make_vector_env(name, 1)
    monkeypatch.setattr("inchworm.worlds.toys", None)  # the module without PettingZoo takes its place until the end of the test
    monkeypatch.delitem(sys.modules, "inchworm.worlds.toys")
    toys = importlib.import_module("inchworm.worlds.toys")
    assert toys.MemoryCorridor(3).length == 3  # one agent needs no extra
    with pytest.raises(MissingExtraError, match="need PettingZoo"):
        toys.comings()
    assert not is_team_env(object())


GAME = functools.partial(Stones, 5, 3, out=2, seeded=True)


def steps_of(env, count):
    """Some steps in which one stone is taken each time."""
    return [frozen(env.reset()), *(frozen(env.step(np.zeros(env.num_lanes, np.int64))) for _ in range(count))]


def test_one_lane_is_valid_in_every_step_and_rewards_come_with_the_turn():
    with make_vector_env(functools.partial(Stones, 3), 1, 0) as env:
        assert env.turn_based
        steps = steps_of(env, 4)
    assert [step.valid.tolist() for step in steps] == [[True, False], [False, True], [True, False], [True, False], [False, True]]
    assert [step.rewards.tolist() for step in steps[1:]] == [[0, 0.25], [0.25, 0], [1.0, -1.0], [0, 0.25]]
    assert [step.terminated.tolist() for step in steps[1:]] == [[False] * 2, [False] * 2, [True] * 2, [False] * 2]
    # both lanes are marked when an episode begins, and the second player's again at its first turn
    assert [step.episode_starts.tolist() for step in steps] == [[True, True], [False, True], [False, False], [True, True], [False, True]]
    assert [(ended.lane, ended.info["win"], ended.info["team_return"]) for ended in steps[3].ended] == [(0, 1.0, 0.5), (1, 0.0, 0.5)]


def test_a_waiting_lane_shows_what_its_agent_saw_last():
    with make_vector_env(functools.partial(Stones, 9), 1, 0) as env:
        shown = [step.observations["observation"][:, 0].tolist() for step in steps_of(env, 3)]
    assert shown == [[9, 0], [9, 8], [7, 8], [7, 6]]


def test_a_draw_is_half_a_win_and_more_than_two_players_have_none():
    class Even(Stones):
        def step(self, action):
            super().step(action)
            self.rewards = dict.fromkeys(self.rewards, 0.0)
            self._cumulative_rewards = dict.fromkeys(self._cumulative_rewards, 0.0)

    with make_vector_env(functools.partial(Even, 1), 1, 0) as env:
        assert [ended.info["win"] for ended in steps_of(env, 1)[1].ended] == [0.5, 0.5]
    with make_vector_env(functools.partial(Stones, 1, 3), 1, 0) as env:
        assert [set(ended.info) for ended in steps_of(env, 1)[1].ended] == [{"team_return"}] * 3


def test_a_limit_truncates_every_agent_at_what_it_sees_then():
    with make_vector_env(lambda: as_team(Stones(9), 3), 1, 0) as env:
        step = steps_of(env, 3)[-1]
    assert step.truncated.tolist() == [True, True]
    assert not step.terminated.any()
    assert [ended.final_observation["observation"].tolist() for ended in step.ended] == [[6, 9, 0], [6, 9, 1]]
    assert [ended.valid for ended in step.ended] == [True, True]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers):
    with make_vector_env(GAME, 3, 0, seed=3) as env, make_vector_env(GAME, 3, workers, seed=3) as other:
        assert other.turn_based
        assert_equal_steps(run(env, 40), run(other, 40))


def test_copies_are_restored_in_the_middle_of_a_game():
    with make_vector_env(GAME, 2, 0, seed=3) as env, make_vector_env(GAME, 2, 0, seed=9) as other:
        run(env, 12)
        other.load_state_dict(env.state_dict())
        assert not other.inexact
        assert_equal_steps(continue_run(env, 25), continue_run(other, 25))


def test_the_checker_says_that_agents_take_turns():
    report = check_env(GAME)
    assert report.ok, report
    assert "agents take turns: a lane is valid when its agent moves" in report.notes


def test_what_is_not_possible_is_refused_in_one_line():
    with pytest.raises(EnvError, match=r"take turns, which a central critic does not support; set policy\.central_critic=false"):
        make_vector_env(GAME, 1, 0, global_state=True)

    class Stays(Stones):
        def _was_dead_step(self, action):
            pass

    with make_vector_env(functools.partial(Stays, 1), 1, 0) as env, pytest.raises(EnvError, match=r"must remove it from env\.agents"):
        steps_of(env, 1)

    class NotFinite(Stones):
        def step(self, action):
            super().step(action)
            self._cumulative_rewards = dict.fromkeys(self._cumulative_rewards, np.nan)

    with (
        make_vector_env(functools.partial(NotFinite, 9), 1, 0) as env,
        pytest.raises(EnvError, match=r"'player_1' \(lane 1\).*reward is nan"),
    ):
        steps_of(env, 1)
