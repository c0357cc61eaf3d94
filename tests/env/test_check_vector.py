"""Tests of env/check_vector.py: each defect of a vector env is found, and sound ones pass."""

import dataclasses
import re

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from inchworm.config.sections import EnvConfig
from inchworm.core.errors import EnvError
from inchworm.env.check import check_env
from inchworm.env.source import make_vector_env


def cartpole():
    return gym.make("CartPole-v1")


class Sound(SyncVectorEnv):
    """Three CartPoles; the tests break it in one place each."""

    def __init__(self, **options):
        super().__init__([cartpole] * 3, **{"autoreset_mode": AutoresetMode.DISABLED, **options})


class Drift(gym.vector.VectorEnv):
    """Lanes that walk at random, all from one stream, and end beyond 1; the tests break it in one place each."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012
    single_observation_space = spaces.Box(-9, 9, (2,), np.float32)
    single_action_space = spaces.Box(-0.2, 0.2, (2,), np.float32)
    num_envs = 4

    def __init__(self):
        self.x = np.zeros((4, 2), np.float32)

    def begin(self, count):
        return self.np_random.uniform(-0.1, 0.1, (count, 2))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        mask = np.ones(4, bool) if options is None else options["reset_mask"]
        self.x[mask] = self.begin(mask.sum())
        return self.x.copy(), {}

    def step(self, actions):
        self.x += actions + self.np_random.uniform(-0.2, 0.2, (4, 2))
        return self.x.copy(), self.x[:, 0].copy(), np.abs(self.x).max(axis=1) > 1, np.zeros(4, bool), {}


def broken(base=Sound, **changes):
    return type("Broken", (base,), changes)()


SOUND = {
    "sync": Sound,
    "one lane": lambda: SyncVectorEnv([cartpole], autoreset_mode=AutoresetMode.DISABLED),
    "async": lambda: AsyncVectorEnv([cartpole] * 2, autoreset_mode=AutoresetMode.DISABLED),
    "one stream": Drift,
    "native": lambda: make_vector_env("CartPole-v1", 4),
    "copies": lambda: make_vector_env(EnvConfig(id="Acrobot-v1", num_envs=2, max_episode_steps=30)),
    "teams": lambda: make_vector_env("Skirmish-v0", 2),
}


@pytest.mark.parametrize("make", SOUND.values(), ids=list(SOUND))
def test_sound_vector_envs_pass_and_stay_open(make):
    env = make()
    report = check_env(env, steps=120)
    assert report.ok, str(report)
    with make_vector_env(env) as trained:  # as training takes it
        trained.reset()


def test_what_a_factory_makes_is_checked_and_closed():
    made = []
    report = check_env(lambda: made.append(Sound()) or made[-1])
    assert report.ok, str(report)
    assert made[0].closed
    assert "give it to PPOTrainer itself" in report.notes[-1]
    with pytest.raises(EnvError, match=r"returned Sound, not a gymnasium\.Env; give a vector env itself to PPOTrainer"):
        make_vector_env(Sound, 2)


def test_a_late_autoreset_is_refused_with_the_sentence_of_training():
    (problem,) = check_env(Sound(autoreset_mode=AutoresetMode.NEXT_STEP)).problems
    with pytest.raises(EnvError, match=re.escape(problem)):
        make_vector_env(Sound(autoreset_mode=AutoresetMode.NEXT_STEP))
    assert check_env(Sound(autoreset_mode=AutoresetMode.SAME_STEP)).ok  # its infos hold the last observations


def resets_itself(self, actions):
    """The end is lost: a lane that ended shows its next episode."""
    observations, rewards, terminated, truncated, info = Sound.step(self, actions)
    over = terminated | truncated
    if over.any():
        first, _ = Sound.reset(self, options={"reset_mask": over})
        observations[over] = first[over]
    return observations, rewards, terminated, truncated, info


def drift_resets_itself(self, actions):
    _, rewards, terminated, truncated, info = Drift.step(self, actions)
    self.x[terminated] = self.begin(terminated.sum())
    return self.x.copy(), rewards, terminated, truncated, info


def tells_of_resets(self, actions):
    result = Sound.step(self, actions)
    over = result[2] | result[3]
    return (*result[:4], {"final_obs": result[0], "_final_obs": over} if over.any() else {})


def resets_late(self, actions):
    """A lane that ended begins again in its next step, also after it was reset."""
    result = [np.copy(part) for part in Sound.step(self, actions)[:4]]
    late = getattr(self, "over", np.zeros(3, bool))
    if late.any():
        result[0][late] = Sound.reset(self, options={"reset_mask": late})[0][late]
        result[2][late] = result[3][late] = False
    self.over = result[2] | result[3]
    return (*result, {})


def another_order(step, *places):
    def stepped(self, actions):
        result = list(step(self, actions))
        for place in places:
            result[place] = np.roll(result[place], 1, axis=0)
        return tuple(result)

    return stepped


def ignores_mask(self, *, seed=None, options=None):
    return Sound.reset(self, seed=seed)


def no_seed(self, *, seed=None, options=None):
    return Sound.reset(self, options=options)


def one_seed(self, *, seed=None, options=None):
    seeds = seed if not isinstance(seed, list) or None in seed else seed[:1] * 3
    return Sound.reset(self, seed=seeds, options=options)


def leaves_traces(self, *, seed=None, options=None):
    """Episodes whose actions were not those of the first play change all later ones."""
    observations, info = Sound.reset(self, seed=seed, options=options)
    if options is None:
        played, self.played = getattr(self, "played", []), []
        self.first = getattr(self, "first", None) or played
        self.changed = getattr(self, "changed", False) or played[:20] != self.first[:20]
        observations[:] += 0.01 * self.changed
    return observations, info


def records(self, actions):
    self.played.append(actions.tolist())
    return Sound.step(self, actions)


def writes_actions(self, actions):
    result = Drift.step(self, actions)
    actions *= 0
    return result


def alike(self, count):
    return np.tile(self.np_random.uniform(-0.1, 0.1, 2), (count, 1))


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (lambda: broken(step=resets_itself), r"final observations: the last observations of all \d+ episodes look like first ones"),
        (lambda: broken(Drift, step=drift_resets_itself), "final observations: .* does step.. reset the lane"),
        (lambda: broken(step=tells_of_resets), r"autoreset: info\['final_obs'\] at step \d+ .* although metadata"),
        (lambda: broken(step=resets_late), "autoreset: lane ., .*gave different .* a reset must begin the episode at once"),
        (lambda: broken(reset=no_seed), "seeding: .*gave different obs"),
        (lambda: broken(Drift, begin=lambda self, count: np.random.uniform(-0.1, 0.1, (count, 2))), "seeding: .*gave different obs"),  # noqa: NPY002
        (lambda: broken(reset=leaves_traces, step=records), "seeding: .*keep nothing of earlier episodes"),
        (lambda: broken(Drift, begin=alike), "seeding: all lanes begin with the same observation"),
        (lambda: broken(reset=one_seed), "order of lanes: another seed of lane 0 alone changed the observations of lane 1 at step 0"),
        (lambda: broken(step=another_order(Sound.step, 0)), "order of lanes: other actions of lane 0 alone changed the observations of"),
        (lambda: broken(step=another_order(Sound.step, 1, 2)), "step raised AssertionError: self._autoreset_envs"),  # Gymnasium notices
        (lambda: broken(Drift, step=another_order(Drift.step, 0, 1, 2)), "order of lanes: other actions of"),
        (lambda: broken(Drift, step=another_order(Drift.step, 1)), "order of lanes: other actions of lane 0 alone changed the rewards"),
        (lambda: broken(reset=ignores_mask), r"autoreset: reset with options\['reset_mask'\] of lane . changed lane"),
        (lambda: broken(Drift, step=writes_actions), "writes into the actions"),
        (lambda: broken(Drift, single_action_space=spaces.Box(0, 5, (2,), np.int32)), "continuous actions need a float Box"),
        (lambda: broken(Drift, single_observation_space=spaces.Box(-0.15, 0.15, (2,), np.float32)), "leaves its bounds"),
    ],
)
def test_a_defect_is_found(env, words):
    report = check_env(env(), steps=150)
    assert report.problems, "nothing was found"
    assert re.search(words, report.problems[0]), str(report)


def test_buffers_that_are_reused_are_named():
    report = check_env(Sound(copy=False))
    assert report.ok
    (note,) = report.notes
    assert note.startswith("buffers are reused: the observations that one call returned are overwritten by the next")
    rewards = np.zeros(4)

    def step(self, actions):
        observations, rewards[:], *rest = Drift.step(self, actions)
        return observations, rewards, *rest

    assert "the rewards that one call returned" in check_env(broken(Drift, step=step)).notes[0]


class Changed:
    """A `VectorEnv` of the contract whose steps are changed."""

    def __init__(self, change):
        self._inner, self._change = make_vector_env("CartPole-v1", 3), change

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def step(self, actions):
        return self._change(self._inner.step(actions))


def lost(step):
    ended = [dataclasses.replace(end, final_observation=step.observations[end.lane].copy()) for end in step.ended]
    return dataclasses.replace(step, ended=tuple(ended))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lost, "final observations: "),
        (lambda step: dataclasses.replace(step, ended=()), "are not those in `ended`"),
        (lambda step: dataclasses.replace(step, episode_starts=np.zeros(3, bool)), "episode_starts is false there"),
        (lambda step: dataclasses.replace(step, truncated=step.terminated), "terminated and truncated"),
        (lambda step: dataclasses.replace(step, rewards=step.rewards / 0), "the reward of lane 0 at step 1 is inf"),
        (lambda step: dataclasses.replace(step, observations=np.roll(step.observations, 1, axis=0)), "order of lanes"),
    ],
)
def test_the_contract_is_checked(change, words):
    with np.errstate(all="ignore"):
        report = check_env(Changed(change))
    assert report.problems
    assert re.search(words, report.problems[0]), str(report)
