"""Tests of env/check.py: what breaks training is found and explained, and sound environments pass."""

import functools
import itertools
import re
import sys
from importlib.util import find_spec

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces, wrappers

from doubles.toys import Counter, SpacesEnv
from inchworm.config.sections import EnvConfig, PPOConfig, RunConfig, TrainingConfig, WrapperConfig
from inchworm.core.errors import EnvError, SpaceError
from inchworm.core.types import CheckReport
from inchworm.env.check import check_env
from inchworm.env.source import make_vector_env
from inchworm.train.trainer import PPOTrainer
from inchworm.worlds.toys import DEATHS, JOINS, Comings, Sacrifice

needs_pettingzoo = pytest.mark.skipif(find_spec("pettingzoo") is None, reason="PettingZoo is not installed")


class World(gym.Env):
    """A sound world of five steps; the tests break it in one place each."""

    def __init__(self):
        self.observation_space = spaces.Box(-10, 10, (2,), np.float32)
        self.action_space = spaces.Discrete(3)

    def see(self):
        return self.np_random.normal(size=2).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.see(), {}

    def step(self, action):
        self.steps += 1
        return self.see(), 1.0, False, self.steps == 5, {}


def broken(base=World, **changes):
    return type("Broken", (base,), changes)


def only_problem(env, **kwargs):
    report = check_env(env, **kwargs)
    assert not report.ok
    assert len(report.problems) == 1, str(report)
    return report.problems[0]


@pytest.mark.parametrize("env", [World, World(), "CartPole-v1", EnvConfig(id="Pendulum-v1"), "doubles.toys:Corridor"])
def test_sound_worlds_pass(env):
    report = check_env(env)
    assert report.ok, str(report)
    assert str(report).startswith("the environment is ready for training")


@pytest.mark.parametrize("mask", ["key", "info", "action_masks", "get_action_mask"])
def test_sound_masks_pass(mask):
    actions = spaces.Dict(a=spaces.Discrete(3, start=1), b=spaces.MultiDiscrete([2, 3]), c=spaces.MultiBinary(2), d=spaces.Box(-1, 1, (2,)))
    report = check_env(lambda: SpacesEnv(spaces.Dict(x=spaces.Box(-1, 1, (2,))), actions, 4, mask))
    assert report.ok, str(report)


def sees(see):
    return broken(see=see)


def steps(result):
    return broken(step=lambda self, action: result(self))


def cannot(self):
    raise OSError("no display")


def counts_on(self):
    """State that crosses episodes."""
    self.total = getattr(self, "total", 0) + 1
    return np.full(2, self.total / 1000, np.float32)


class Resets(World):
    """Resets itself in `step`."""

    def see(self):
        return np.full(2, self.steps, np.float32)

    def step(self, action):
        self.steps = (self.steps + 1) % 5
        return self.see(), 1.0, self.steps == 0, False, {"final_observation": 1} if self.tells and self.steps == 0 else {}

    tells = False


def having(kind=World, **attributes):
    """An environment with some attributes changed."""
    env = kind()
    vars(env).update(attributes)
    return env


DIFFERENT = itertools.count(2)
CHANCE = np.random.default_rng(0)
SAME = "not deterministic: the same environment, reset with the same seed, gave"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (sees(lambda self: np.zeros(3, np.float32)), r"lane 0, step 0 .*observation has shape \(3,\), but its space has \(2,\)"),
        (sees(lambda self: np.zeros(2)), "comes as float64, but its space has float32"),
        (sees(lambda self: np.full(2, 11, np.float32)), r"observation at step 0 leaves its bounds: \[11. 11.\]"),
        (sees(lambda self: np.full(2, self.steps, np.float32) / (self.steps != 3)), "observation at step 3 .*not finite"),
        (sees(lambda self: self.np_random.nowhere), "AttributeError.*nowhere"),
        (sees(counts_on), "not deterministic"),
        (sees(lambda self: CHANCE.normal(size=2).astype(np.float32)), f"{SAME} different observations at step 0 .*self.np_random"),
        (steps(lambda self: (self.see(), CHANCE.random(), False, False, {})), f"{SAME} different rewards at step 1"),
        (steps(lambda self: (np.zeros(2, np.float32), 0.0, CHANCE.random() < 0.5, False, {})), f"{SAME} different .* at step"),
        (steps(lambda self: (self.see(), np.nan, False, False, {})), "the reward at step 1 is nan"),
        (steps(lambda self: 1 / 0), r"stepping raised ZeroDivisionError: division by zero at .*test_check.py:\d+"),
        (steps(lambda self: sys.exit(0)), "stepping raised SystemExit: 0 at "),
        (broken(reset=lambda self: World.reset(self)), "reset must accept the keywords seed and options"),
        (broken(reset=lambda self, seed=None: World.reset(self, seed=seed)), "reset must accept the keywords seed and options"),
        (broken(__init__=cannot), "making the environment raised OSError: no display"),
        (broken(close=cannot), "closing raised OSError: no display"),
        (broken(action_masks=lambda self: np.zeros(3, bool)), "no legal action"),
        (Resets, r"does step\(\) reset the environment\?"),
        (broken(Resets, tells=True), r"resets itself: info\['final_observation'\] at step 5"),
        (lambda: wrappers.Autoreset(World()), "true final observation"),
        (lambda: wrappers.NormalizeObservation(World()), "policy.normalize_observations"),
        (lambda: wrappers.NormalizeReward(World()), "policy.normalize_values"),
        (lambda: wrappers.TransformReward(World(), functools.partial(max, float(next(DIFFERENT)))), "not deterministic: a fresh copy"),
        ("CartPole-v11", "did you mean CartPole-v1"),
    ],
)
def test_what_would_break_training_is_named(env, words):
    with np.errstate(all="ignore"):
        assert re.search(words, only_problem(env))


class Mission(World):
    """Shows a text, as MiniGrid does."""

    def __init__(self):
        super().__init__()
        image = spaces.Box(0, 255, (7, 7, 3), np.uint8)
        self.observation_space = spaces.Dict(image=image, direction=spaces.Discrete(4), mission=spaces.Text(100))

    def see(self):
        return {"image": np.zeros((7, 7, 3), np.uint8), "direction": 1, "mission": "go to the green door"}


HERE = EnvConfig(num_workers=0)
SMALL = TrainingConfig(env=HERE, ppo=PPOConfig(rollout_steps=8), run=RunConfig(backend="numpy", total_timesteps=16))


def train(env):
    with PPOTrainer("mlp", env, SMALL) as trainer:
        trainer.train()


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (having(action_space=spaces.Box(0, 5, (2,), np.int32)), "has dtype int32; continuous actions need a float Box"),
        (having(sees(lambda self: np.zeros(0, np.float32)), observation_space=spaces.Box(-1, 1, (0,))), "nothing that a policy could read"),
        (Mission, r"Text spaces at mission .*name: FilterObservation, kwargs: {filter_keys: \[direction, image\]}.*FlatObsWrapper"),
        (having(action_space=spaces.Text(4)), "Text spaces are not supported"),
    ],
)
def test_spaces_are_refused_with_the_sentence_of_training(env, words):
    problem = only_problem(env)
    assert re.search(words, problem)
    with pytest.raises(SpaceError, match=re.escape(problem)):
        train(env)


def test_the_wrapper_that_is_named_helps():
    wrapper = WrapperConfig(name="FilterObservation", kwargs={"filter_keys": ["direction", "image"]})
    config = HERE.replace(id="env.test_check:Mission", wrappers=(wrapper,))
    assert check_env(config).ok
    train(config)


@needs_pettingzoo
def test_an_attribute_called_state_is_not_a_global_state():
    rps = "pettingzoo.classic.rps_v2:parallel_env"
    report = check_env(rps)
    assert report.ok, str(report)
    train(rps)
    with pytest.raises(EnvError, match=r"has no state\(\), so there is no global state"):
        make_vector_env(rps, 1, 0, global_state=True)


@needs_pettingzoo
@pytest.mark.parametrize("change", [{"state": lambda self: 1 / 0}, {"state": lambda self: np.array(["text"])}])
def test_a_state_that_cannot_be_read_matters_only_to_a_central_critic(change):
    env = type("Unreadable", (Sacrifice,), change)
    report = check_env(env)
    assert report.ok, str(report)
    assert report.notes[0].startswith("policy.central_critic=true cannot be used: ")
    train(env)
    with pytest.raises((EnvError, ZeroDivisionError)):
        make_vector_env(env, 1, 0, global_state=True).reset()


def test_notes():
    class Endless(World):
        def __init__(self):
            super().__init__()
            self.action_space = spaces.Box(-np.inf, np.inf, (1,))
            self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

        def see(self):
            return super().see() * 1000

        def step(self, action):
            return self.see(), 0.0, False, False, {}

    report = check_env(Endless, steps=20)
    assert report.ok
    text = str(report)
    assert "no episode ended within 20 random steps" in text
    assert "infinite bounds" in text
    assert "policy.normalize_observations=true" in text
    assert "no episode ended" not in str(check_env(lambda: wrappers.TimeLimit(Endless(), 99), steps=20))


@pytest.mark.parametrize("base", [Counter, pytest.param(Comings, marks=needs_pettingzoo)])
def test_a_given_environment_stays_open_and_a_made_one_is_closed(base):
    closed = []
    closes = broken(base, close=lambda self: closed.append(self))
    assert check_env(closes(), steps=3).ok
    assert closed == []
    assert check_env(closes, steps=3).ok
    assert len(closed) == 2  # the one that was checked, and the fresh copy


def test_reports_as_text():
    assert str(CheckReport()) == "the environment is ready for training"
    assert str(CheckReport(("bad",), ("hm",))) == "1 problem(s) would break or degrade training\nproblem: bad\nnote: hm"


# ---- PettingZoo environments
def plain(plan=None, **changes):
    """A team without a global state, with some methods replaced."""

    def state(self):
        raise NotImplementedError

    kind = broken(Comings, **{"state": state, **changes})
    return lambda: kind(DEATHS if plan is None else plan)


def staying(one, two):
    """The plan of two agents that are terminated after so many steps."""
    return [[(0, one, "terminated")], [(0, two, "terminated")]]


@needs_pettingzoo
def test_sound_teams_pass():
    report = check_env(plain([[(0, 5, "terminated")], [(0, 5, "truncated")]]))
    assert (report.ok, report.notes) == (True, ()), report
    report = check_env(lambda: Comings(DEATHS), steps=30)
    assert report.ok, report
    assert [note.partition(":")[0] for note in report.notes] == ["state() gives a global state", "agents leave before their episode ends"]
    assert any("agents join running episodes" in note for note in check_env(Comings(JOINS)).notes)
    assert check_env("inchworm.worlds.toys:comings", steps=4).ok
    assert check_env(Sacrifice).ok


def test_teams_of_mpe2():
    pytest.importorskip("mpe2")
    report = check_env("mpe2.simple_spread_v3:parallel_env", steps=60)
    assert report.ok, report
    report = check_env("mpe2.simple_adversary_v3:parallel_env", steps=60)
    assert report.ok, report
    assert any("adversary_0: Box(-inf, inf, (8,), float32)" in note and "padded to Box(-inf, inf, (10,)" in note for note in report.notes)


def of_a_clock(ticks):
    """Observations that are never the same again."""
    return lambda self, agents: {agent: np.full(3, next(ticks), np.float32) for agent in agents}


def of_a_copy():
    """Observations that depend on which copy it is."""
    copies = []

    def observations(self, agents):
        if self not in copies:
            copies.append(self)
        return {agent: np.full(3, copies.index(self), np.float32) for agent in agents}

    return observations


def nan_at_step_2(self, agents):
    return {agent: np.full(3, np.nan if (agent, self._now) == ("agent_1", 2) else 0, np.float32) for agent in agents}


def keeps_its_agents(self, actions):
    result = Comings.step(self, actions)
    self.agents = list(self.possible_agents)
    return result


def raises(self, actions=None):
    raise RuntimeError("never")


TEAM_FAULTS = [
    (
        lambda: plain(_observations=of_a_clock(itertools.count())),
        "the same environment, reset with the same seed, gave different observations",
    ),
    (lambda: plain(_observations=of_a_copy()), "a fresh copy, reset with the same seed, gave different observations at step 0"),
    (lambda: plain(staying(6, 6), _observations=nan_at_step_2), "observation of agent_1 at step 2 has values that are not finite"),
    (
        lambda: plain(staying(6, 3), observation_space=lambda self, agent: spaces.Box(0, 4, (3,), np.float32)),
        "observation of agent_0 at step 5 leaves its bounds",
    ),
    (lambda: plain(step=keeps_its_agents), "still in env.agents"),
    (lambda: plain(step=raises), "stepping raised RuntimeError: never"),
    (
        lambda: plain(state=lambda self: Comings.state(self) * (np.nan if self._now == 3 else 1)),
        "of the global state at step 3 has values that are not finite",
    ),
    (lambda: plain(reset=lambda self, seed=None: Comings.reset(self, seed)), "reset must accept the keywords seed and options"),
    (lambda: plain(close=raises), "closing raised RuntimeError: never"),
]


@needs_pettingzoo
@pytest.mark.parametrize(("make", "words"), TEAM_FAULTS)
def test_teams_that_would_break_training(make, words):
    report = check_env(make(), steps=30)
    assert any(words in problem for problem in report.problems), report


@needs_pettingzoo
def test_notes_on_teams():
    assert any("no episode ended within 5 random steps" in note for note in check_env(plain(staying(999, 999)), steps=5).notes)
    absent = check_env(plain([[(0, 9, "terminated")], [(8, 9, "terminated")]]), steps=5)
    assert any("agent_1 of possible_agents were never alive" in note for note in absent.notes)
