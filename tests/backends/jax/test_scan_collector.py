"""Tests that a compiled scan collects what stepping by hand collects."""

from __future__ import annotations

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inchworm.backends.jax.native import JaxVectorEnv, begin_lanes, seed_words, step_lanes
from inchworm.backends.jax.policy import JaxPolicy
from inchworm.backends.jax.scan_collector import ScanCollector
from inchworm.backends.jax.worlds import make_jax_env
from inchworm.config.sections import EnvConfig, PolicyConfig
from inchworm.core.errors import BadNumberError, ConfigError
from inchworm.core.types import Minibatch
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.fields import check_fields

LANES = 4
CLOSE = {"rtol": 1e-5, "atol": 2e-6}  # another program rounds differently


def collector(steps: int = 10, kind: str = "mlp", id: str = "CartPole-v1", **changes) -> ScanCollector:
    env = make_jax_env(EnvConfig(id=id, num_envs=LANES, max_episode_steps=steps), seed=3)
    spec = PolicySpec(env.observation_space, env.action_space, PolicyConfig(kind=kind, hidden_sizes=(16,), memory_size=8, **changes))
    return ScanCollector(env, JaxPolicy(spec, seed=1), seed=3, sequence_length=4)


def by_hand(env, rollout):
    """The true successor of every row, rewards and flags, from stepping the recorded episodes one after another by their seeds."""
    steps, lanes = rollout.rewards.shape
    successors, rewards = np.zeros_like(rollout.observations), np.zeros((steps, lanes), np.float32)
    step, begin = jax.jit(lambda lanes, actions: step_lanes(env, lanes, actions)), jax.jit(lambda keys: begin_lanes(env, keys))
    for lane in range(lanes):
        episodes = iter([episode.seed for episode in rollout.episodes if episode.lane == lane])
        seed = next(episodes, None)
        if seed is None:
            continue
        now = begin(seed_words(np.array([seed])))
        for row in range(steps):
            np.testing.assert_allclose(rollout.observations[row, lane], now.observations[0], **CLOSE)
            now, outcome = step(now, jnp.asarray(rollout.actions[row, lane : lane + 1], jnp.int32))
            successors[row, lane], rewards[row, lane] = now.observations[0], outcome.rewards[0]
            assert rollout.terminated[row, lane] == outcome.terminated[0]
            assert rollout.truncated[row, lane] == outcome.truncated[0]
            if rollout.dones[row, lane]:
                seed = next(episodes, None)
                if seed is None:
                    successors[row + 1 :, lane] = np.nan
                    break
                now = begin(seed_words(np.array([seed])))
    return successors, rewards


def test_successors_flags_and_episodes_are_those_of_stepping_by_hand():
    made = collector(steps=25)
    rollout = made.collect(60)
    check_fields(rollout.to_dict())
    rollout.validate(made.vector_env.observation_space, made.vector_env.action_space)
    assert rollout.truncated.any()
    assert rollout.terminated.any()
    successors, rewards = by_hand(made.native, rollout)
    for (row, lane), seen in zip(rollout.cut_rows.tolist(), rollout.cut_observations):
        if np.isfinite(successors[row, lane]).all():
            np.testing.assert_allclose(seen, successors[row, lane], **CLOSE)
    known = np.isfinite(successors[..., 0])
    assert np.array_equal(rollout.rewards[known], rewards[known])
    truncated = {tuple(place) for place in np.argwhere(rollout.truncated).tolist()}
    assert truncated <= {tuple(place) for place in rollout.cut_rows.tolist()}
    assert len(rollout.episodes) == rollout.dones.sum() == made.episodes
    for lane in range(LANES):
        lengths = np.diff(np.flatnonzero(rollout.dones[:, lane]), prepend=-1).tolist()
        own = [episode for episode in rollout.episodes if episode.lane == lane]
        assert [episode.length for episode in own] == lengths
        assert [episode.episode_return for episode in own] == lengths  # 1 for each step
    assert np.array_equal(rollout.episode_starts[1:], rollout.dones[:-1])
    assert rollout.episode_starts[0].all()


def test_every_successor_is_kept_where_truncations_are_many():
    made = collector(steps=2)
    rollout = made.collect(40)  # more than there are slots
    successors, _ = by_hand(made.native, rollout)
    assert rollout.truncated.sum() == LANES * 20
    for (row, lane), seen in zip(rollout.cut_rows.tolist(), rollout.cut_observations):
        np.testing.assert_allclose(seen, successors[row, lane], **CLOSE)


@pytest.mark.parametrize("kind", ["mlp", "gru", "lstm"])
def test_ratios_are_1_after_collecting(kind):
    made = collector(kind=kind)
    for _ in range(2):
        rollout = made.collect(12)
        ratios = [ratios_of(made.follows, rollout, first, kind) for first in range(0, 12, 4)]
        assert np.abs(np.concatenate(ratios) - 1).max() < 5e-5


def ratios_of(policy, rollout, first, kind):
    """The ratios [4, B] of four rows, evaluated as a minibatch that begins with the recorded memory."""
    rows = slice(first, first + 4)
    fields = {name: getattr(rollout, name)[rows] for name in ("observations", "actions", "log_probs", "valid", "episode_starts")}
    zeros = np.zeros_like(fields["log_probs"])
    memory = {name: part[first // 4] for name, part in rollout.policy_state.items()} if kind != "mlp" else ()
    found = policy.evaluate(Minibatch(**fields, advantages=zeros, returns=zeros, values=zeros, policy_state=memory))
    return np.exp(np.asarray(found.log_probs) - fields["log_probs"])


def test_state_continues_bit_for_bit():
    one, two = collector(), collector()
    one.collect(7)
    two.load_state_dict(one.state_dict())
    first, second = one.collect(9), two.collect(9)
    for name in ("observations", "actions", "log_probs", "rewards", "cut_observations"):
        assert np.array_equal(getattr(first, name), getattr(second, name))
    assert first.episodes == second.episodes
    assert one.state_dict()["recent"] == two.state_dict()["recent"]


def test_the_number_of_lanes_changes_no_episode():
    whole = collector().collect(8)
    env = make_jax_env(EnvConfig(id="CartPole-v1", num_envs=2, max_episode_steps=10), seed=3, first_copy=2)
    part = ScanCollector(env, collector().follows, seed=3).collect(8)
    assert np.array_equal(whole.observations[0, 2:], part.observations[0])


def test_continuous_actions_are_clipped_for_the_environment_alone():
    made = collector(steps=50, id="Pendulum-v1", log_std_init=1.5)
    rollout = made.collect(60)
    assert rollout.actions.dtype == np.float32
    assert np.abs(rollout.actions).max() > 2.0  # as sampled
    rollout.validate(made.vector_env.observation_space)


def test_states_of_another_kind_are_refused():
    with pytest.raises(ConfigError, match="stepped from the host"):
        collector().load_state_dict({"env_steps": 0, "episodes": 0, "recent": [], "vector_env": {}})
    other = collector(id="Pendulum-v1").state_dict()
    made = collector(id="Pendulum-v1")
    made.collect(2)
    with pytest.raises(ConfigError, match=r"env\.num_envs"):
        collector().load_state_dict({**other, **made.state_dict()})


class Exploding:
    """A world whose reward is not a number in the third step of an episode."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    max_episode_steps = 5

    def reset(self, key):
        del key
        return jnp.zeros(2), jnp.zeros((), jnp.int32)

    def step(self, key, state, action):
        del key, action
        time = state + 1
        reward = jnp.where(time == 3, jnp.nan, 1.0).astype(jnp.float32)
        return jnp.full(2, time / 10, jnp.float32), time, reward, jnp.zeros((), bool), time >= 5


def test_a_number_that_is_not_finite_is_named_and_nothing_is_kept():
    env = JaxVectorEnv(Exploding(), 3)
    spec = PolicySpec(env.observation_space, env.action_space, PolicyConfig(hidden_sizes=(4,)))
    made = ScanCollector(env, JaxPolicy(spec))
    made.collect(2)
    with pytest.raises(BadNumberError, match="reward of lane 0 is not finite at step 3 of its episode"):
        made.collect(4)
    assert made.env_steps == 6
