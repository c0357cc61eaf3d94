"""Every number of a collected rollout, compared with plain Gymnasium: reset with the same seed, step with the same action."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest

from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.collect.collector import RolloutCollector
from inchworm.config.sections import EnvConfig, PolicyConfig
from inchworm.core.seeding import derive_seed, episode_seed
from inchworm.env.source import make_vector_env
from inchworm.env.vector_env import NO_SEED
from inchworm.policy.spec import PolicySpec

SEED, LANES, STEPS = 7, 3, 150
WAYS = [
    EnvConfig(id="CartPole-v1", native=True, num_envs=LANES),
    EnvConfig(id="CartPole-v1", native=False, num_envs=LANES, num_workers=2),
    EnvConfig(id="Pendulum-v1", max_episode_steps=40, num_envs=LANES),  # only truncated; actions are clipped
    EnvConfig(id="MountainCarContinuous-v0", max_episode_steps=60, num_envs=LANES, num_workers=1),
    EnvConfig(id="Acrobot-v1", max_episode_steps=50, num_envs=LANES),
]


@pytest.mark.parametrize("config", WAYS, ids=[f"{way.id} {way.num_workers} workers" for way in WAYS])
def test_a_rollout_replayed_in_plain_gymnasium_has_no_mismatch(config):
    def make():
        return gym.make(config.id, max_episode_steps=config.max_episode_steps)

    compare(collected(config), make, lambda lane, episode: episode_seed(SEED, lane, episode))


def gymnasiums(make, mode):
    return gym.vector.SyncVectorEnv([make] * LANES, autoreset_mode=mode)


def stable_baselines(make, kind="DummyVecEnv", **options):
    return getattr(pytest.importorskip("stable_baselines3.common.vec_env"), kind)([make] * LANES, **options)


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize(
    "vectorise",
    [
        partial(gymnasiums, mode=gym.vector.AutoresetMode.SAME_STEP),
        stable_baselines,
        partial(stable_baselines, kind="SubprocVecEnv", start_method="fork"),
    ],
    ids=["gymnasium same step", "DummyVecEnv", "SubprocVecEnv"],
)
def test_so_has_one_of_a_vector_env_that_resets_itself(vectorise, id):
    def make():
        return gym.make(id, max_episode_steps=40)

    first = derive_seed(SEED, "vector env")  # of the first lane; each lane has one stream for all its episodes
    compare(collected(vectorise(make)), make, lambda lane, episode: None if episode else first + lane, recorded=False)


def collected(env):
    """Two rollouts, one after the other: episodes continue from one to the next."""
    with make_vector_env(env, seed=SEED) as vector_env:
        policy = NumpyPolicy(PolicySpec(vector_env.observation_space, vector_env.action_space, PolicyConfig()), seed=1)
        collector = RolloutCollector(vector_env, policy, seed=3)
        return [collector.collect(STEPS), collector.collect(STEPS)]


def compare(rollouts, make, seed_of, *, recorded=True):
    """Step each lane's actions in an environment of its own; `recorded` tells whether the records of episodes have seeds."""
    ends = 0
    for lane in range(LANES):
        env = make()
        episode = 0
        observation, _ = env.reset(seed=seed_of(lane, episode))
        for rollout in rollouts:
            cuts = {tuple(row): successor for row, successor in zip(rollout.cut_rows.tolist(), rollout.cut_observations)}
            seeds = [record.seed for record in rollout.episodes if record.lane == lane]
            for t in range(STEPS):
                np.testing.assert_array_equal(rollout.observations[t, lane], observation)
                action = rollout.actions[t, lane]
                if isinstance(env.action_space, gym.spaces.Box):
                    action = np.clip(action, env.action_space.low, env.action_space.high)
                observation, reward, terminated, truncated, _ = env.step(action)
                assert rollout.rewards[t, lane] == np.float32(reward)
                flags = (rollout.terminated[t, lane], rollout.truncated[t, lane])
                assert flags == (terminated, truncated and not terminated)
                if (t, lane) in cuts:
                    np.testing.assert_array_equal(cuts[t, lane], observation)  # the true successor, before any reset
                if terminated or truncated:
                    ends += 1
                    assert seeds.pop(0) == (seed_of(lane, episode) if recorded else NO_SEED)
                    episode += 1
                    observation, _ = env.reset(seed=seed_of(lane, episode))
            assert not seeds
        env.close()
    assert ends >= LANES
