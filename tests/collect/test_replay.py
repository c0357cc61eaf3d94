"""Every number of a collected rollout, compared with plain Gymnasium: reset with the same seed, step with the same action."""

import gymnasium as gym
import numpy as np
import pytest

from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.collect.collector import RolloutCollector
from inchworm.config.sections import EnvConfig, PolicyConfig
from inchworm.core.seeding import episode_seed
from inchworm.env.source import make_vector_env
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
    with make_vector_env(config, seed=SEED) as vector_env:
        policy = NumpyPolicy(PolicySpec(vector_env.observation_space, vector_env.action_space, PolicyConfig()), seed=1)
        collector = RolloutCollector(vector_env, policy, seed=3)
        rollouts = [collector.collect(STEPS), collector.collect(STEPS)]  # episodes continue from one to the next
    ends = 0
    for lane in range(LANES):
        env = gym.make(config.id, max_episode_steps=config.max_episode_steps)
        episode = 0
        observation, _ = env.reset(seed=episode_seed(SEED, lane, episode))
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
                    assert seeds.pop(0) == episode_seed(SEED, lane, episode)
                    episode += 1
                    observation, _ = env.reset(seed=episode_seed(SEED, lane, episode))
            assert not seeds
        env.close()
    assert ends >= LANES
