"""GAE against arithmetic by hand, a brute-force sum, its closed forms and Stable-Baselines3."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inchworm.backends.numpy.gae import FEW_LANES, compute_advantages, compute_gae, shift_values
from inchworm.config.sections import PPOConfig
from inchworm.rollout.rollout import Rollout, combine_rollouts


def column(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float64)[:, None]  # [T, 1]


def flags(*bits: int) -> np.ndarray:
    return np.array(bits, bool)[:, None]


def test_by_hand():
    # gamma 0.5, lambda 0.5, so gamma * lambda = 0.25.
    # delta_2 = 3 + 0.5 * 4 - 1 = 4          A_2 = 4
    # delta_1 = 2 + 0.5 * 1 - 2 = 0.5        A_1 = 0.5 + 0.25 * 4 = 1.5
    # delta_0 = 1 + 0.5 * 2 - 3 = -1         A_0 = -1 + 0.25 * 1.5 = -0.625
    advantages = compute_gae(column(1, 2, 3), column(3, 2, 1), column(2, 1, 4), flags(0, 0, 0), flags(0, 0, 0), 0.5, 0.5)
    np.testing.assert_array_equal(advantages, column(-0.625, 1.5, 4))


def test_termination_has_no_next_value_and_truncation_has_one():
    # The middle row ends. Terminated: delta_1 = 2 - 2 = 0; truncated with V(successor) = 8: delta_1 = 2 + 0.5 * 8 - 2 = 4.
    # A_1 = delta_1 in both cases, A_2 = 3 + 0.5 * 4 - 1 = 4 is not seen; A_0 = -1 + 0.25 * A_1.
    rewards, values, next_values, no = column(1, 2, 3), column(3, 2, 1), column(2, 8, 4), flags(0, 0, 0)
    np.testing.assert_array_equal(compute_gae(rewards, values, next_values, flags(0, 1, 0), no, 0.5, 0.5), column(-1, 0, 4))
    np.testing.assert_array_equal(compute_gae(rewards, values, next_values, no, flags(0, 1, 0), 0.5, 0.5), column(0, 4, 4))
    both = compute_gae(rewards, values, next_values, flags(0, 1, 0), flags(0, 1, 0), 0.5, 0.5)
    np.testing.assert_array_equal(both, column(-1, 0, 4))  # nothing follows a row that is terminated, truncated or not


def test_next_value_of_a_terminated_row_is_never_looked_at():
    advantages = compute_gae(column(1, 1), column(0, 0), column(np.nan, 2), flags(1, 0), flags(0, 0), 0.5, 1.0)
    np.testing.assert_array_equal(advantages, column(1, 2))


def test_shift_values_puts_the_cut_rows_in():
    values = np.arange(6.0).reshape(3, 2)  # [T, B]
    shifted = shift_values(values, np.array([[0, 1], [2, 0], [2, 1]], np.int32), np.array([70.0, 80.0, 90.0]))
    np.testing.assert_array_equal(shifted, [[2, 70], [4, 5], [80, 90]])
    assert values[0, 1] == 1  # the input is not written to


def brute_force(rewards, values, next_values, terminated, truncated, gamma, lam):
    """sum_k (gamma * lambda)^k delta_{t+k}, up to and including the row that ends the episode."""
    steps, lanes = rewards.shape
    out = np.zeros((steps, lanes))
    for lane in range(lanes):
        for start in range(steps):
            for k, t in enumerate(range(start, steps)):
                following = 0.0 if terminated[t, lane] else gamma * float(next_values[t, lane])
                out[start, lane] += (gamma * lam) ** k * (float(rewards[t, lane]) + following - float(values[t, lane]))
                if terminated[t, lane] or truncated[t, lane]:
                    break
    return out


@st.composite
def cases(draw):
    steps, lanes = draw(st.integers(0, 9)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ends = draw(st.sampled_from([0.0, 0.3, 0.9]))
    arrays = [rng.standard_normal((steps, lanes)) for _ in range(3)]
    both = [rng.random((steps, lanes)) < ends for _ in range(2)]
    unit = st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0])
    return (*arrays, *both, draw(unit), draw(unit))


@settings(max_examples=300, deadline=None)
@given(cases())
def test_equals_brute_force(case):
    expected = brute_force(*case)
    assert np.abs(compute_gae(*case) - expected).max(initial=0) <= 1e-10
    arrays = [array.astype(np.float32) for array in case[:3]]
    single = compute_gae(*arrays, *case[3:])
    assert single.dtype == np.float32
    scale = max(1.0, np.abs(expected).max(initial=0))
    assert np.abs(single - brute_force(*arrays, *case[3:])).max(initial=0) <= 5e-6 * scale


def random_case(steps=20, lanes=4, seed=0, ends=0.15):
    rng = np.random.default_rng(seed)
    rewards, values, next_values = (rng.standard_normal((steps, lanes)) for _ in range(3))
    terminated = rng.random((steps, lanes)) < ends
    truncated = (rng.random((steps, lanes)) < ends) & ~terminated
    return rewards, values, next_values, terminated, truncated


@pytest.mark.parametrize("steps", [1, 2, 12])
def test_many_lanes_have_the_bits_of_few(steps):
    # Above FEW_LANES the recursion runs row by row in NumPy, up to there with Python's numbers: a lane cannot tell which.
    case = random_case(steps, lanes=FEW_LANES + 3)
    together = compute_gae(*case, 0.9, 0.8)
    alone = [compute_gae(*[array[:, lane : lane + 1] for array in case], 0.9, 0.8) for lane in range(FEW_LANES + 3)]
    np.testing.assert_array_equal(together, np.concatenate(alone, 1))
    assert np.abs(together - brute_force(*case, 0.9, 0.8)).max() <= 1e-10


def test_lambda_0_is_td():
    rewards, values, next_values, terminated, truncated = random_case()
    td = rewards + 0.9 * next_values * ~terminated - values
    np.testing.assert_allclose(compute_gae(rewards, values, next_values, terminated, truncated, 0.9, 0.0), td, atol=1e-14)


def test_lambda_1_is_monte_carlo():
    # With consistent next values the deltas telescope: A_t + V_t = sum of discounted rewards + discounted value of the last successor.
    rewards, values, _, _, none = random_case(steps=6, lanes=1, ends=0.0)
    last = np.array([0.7])
    next_values = np.concatenate([values[1:], last[None]])
    advantages = compute_gae(rewards, values, next_values, none, none, 0.9, 1.0)
    ret = last[0]
    for t in reversed(range(6)):
        ret = rewards[t, 0] + 0.9 * ret
        assert advantages[t, 0] + values[t, 0] == pytest.approx(ret, abs=1e-12)


def test_other_episodes_are_bit_equal_when_one_changes():
    rewards, values, next_values, terminated, truncated = random_case(steps=12, lanes=2, ends=0.0)
    terminated[3, 0] = truncated[7, 0] = True  # lane 0 has the episodes 0..3, 4..7, 8..11
    before = compute_gae(rewards, values, next_values, terminated, truncated, 0.99, 0.95)
    changed = rewards.copy()
    changed[4:8, 0] += 100
    after = compute_gae(changed, values, next_values, terminated, truncated, 0.99, 0.95)
    same = np.ones((12, 2), bool)
    same[4:8, 0] = False
    np.testing.assert_array_equal(after[same], before[same])
    assert (after[~same] != before[~same]).all()


def rollout_and_values(seed: int, lanes: int):
    rng = np.random.default_rng(seed)
    shape = (10, lanes)
    terminated = rng.random(shape) < 0.2
    data = {
        "observations": rng.standard_normal((*shape, 3)).astype(np.float32),
        "actions": rng.integers(0, 2, shape),
        "log_probs": rng.standard_normal(shape).astype(np.float32),
        "rewards": rng.standard_normal(shape).astype(np.float32),
        "terminated": terminated,
        "truncated": (rng.random(shape) < 0.2) & ~terminated,
        "next_observations": rng.standard_normal((*shape, 3)).astype(np.float32),
    }
    return Rollout.from_dict(data)


def gae_of(rollout: Rollout) -> np.ndarray:
    critic = np.array([1.0, -2.0, 0.5], np.float32)
    # A sum over three entries in a fixed order: the value of an observation does not depend on its batch.
    values, cuts = (
        (array[..., 0] * critic[0] + array[..., 1] * critic[1] + array[..., 2] * critic[2])
        for array in (rollout.observations, rollout.cut_observations)
    )
    next_values = shift_values(values, rollout.cut_rows, cuts)
    return compute_gae(rollout.rewards, values, next_values, rollout.terminated, rollout.truncated, 0.99, 0.95)


def test_combine_then_gae_is_gae_then_combine():
    rollouts = [rollout_and_values(seed, lanes) for seed, lanes in ((1, 2), (2, 1), (3, 4))]
    np.testing.assert_array_equal(gae_of(combine_rollouts(rollouts)), np.concatenate([gae_of(r) for r in rollouts], axis=1))


class SumCritic:
    """V(observation) = the sum of its entries, plus the memory it is given, plus 100 where it forgets."""

    def value(self, observations, state, episode_starts):
        return observations.sum(-1) + state + np.float32(100) * episode_starts


def test_compute_advantages_asks_the_critic_once_for_rows_and_once_for_cut_rows():
    # One lane, three rows: observations 1, 2, 4; row 1 is truncated before 8, row 2 goes on to 16.
    # Memory is 10 at the start and 20, 30 at the cuts.
    rollout = Rollout.from_dict(
        {
            "observations": np.array([[[1.0]], [[2.0]], [[4.0]]], np.float32),
            "actions": np.zeros((3, 1), np.int64),
            "log_probs": np.zeros((3, 1), np.float32),
            "rewards": np.array([[1.0], [2.0], [3.0]], np.float32),
            "terminated": np.zeros((3, 1), bool),
            "truncated": flags(0, 1, 0),
            "episode_starts": flags(0, 0, 1),
            "policy_state": np.full((1, 1), 10, np.float32),
            "cut_rows": [[1, 0], [2, 0]],
            "cut_observations": np.array([[8.0], [16.0]], np.float32),
            "cut_state": np.array([20, 30], np.float32),
        }
    )
    result = compute_advantages(SumCritic(), rollout, PPOConfig(gamma=0.5, gae_lambda=0.5))
    np.testing.assert_array_equal(result.values, column(11, 12, 114))  # 4 + 10 + 100 where an episode begins
    np.testing.assert_array_equal(result.next_values, column(12, 28, 46))  # the next row; 8 + 20; 16 + 30
    # delta: 1 + 6 - 11 = -4; 2 + 14 - 12 = 4; 3 + 23 - 114 = -88.  A_0 = -4 + 0.25 * 4 = -3; the truncated row sees nothing after it
    np.testing.assert_array_equal(result.advantages, column(-3, 4, -88))
    np.testing.assert_array_equal(result.returns, column(8, 16, 26))


def test_no_steps_and_one_step():
    nothing, none = np.zeros((0, 3), np.float32), np.zeros((0, 3), bool)
    empty = compute_gae(nothing, nothing, nothing, none, none, 0.99, 0.95)
    assert empty.shape == (0, 3)
    assert empty.dtype == np.float32
    assert shift_values(nothing, np.zeros((0, 2), np.int32), np.zeros(0, np.float32)).shape == (0, 3)
    # 1 + 0.5 * 3 - 2 = 0.5
    np.testing.assert_array_equal(compute_gae(column(1), column(2), column(3), flags(0), flags(0), 0.5, 0.9), column(0.5))


def test_arguments_are_not_changed():
    case = random_case()
    copies = [array.copy() for array in case]
    compute_gae(*case, 0.99, 0.95)
    for array, copy in zip(case, copies):
        np.testing.assert_array_equal(array, copy)


def test_equals_stable_baselines3():
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    import torch
    from gymnasium import spaces

    steps, lanes = 64, 4
    rewards, values, _, terminated, _ = (array.astype(np.float32) for array in random_case(steps, lanes))
    terminated = terminated.astype(bool)
    peer = buffers.RolloutBuffer(steps, spaces.Box(-1, 1, (1,)), spaces.Discrete(2), "cpu", 0.95, 0.99, lanes)
    starts = np.concatenate([np.zeros((1, lanes), bool), terminated[:-1]])  # its flags say that an episode begins here
    for t in range(steps):
        row_values, log_probs = torch.from_numpy(values[t]), torch.zeros(lanes)
        peer.add(np.zeros((lanes, 1)), np.zeros((lanes, 1)), rewards[t], starts[t], row_values, log_probs)
    last = np.arange(lanes, dtype=np.float32)
    peer.compute_returns_and_advantage(torch.from_numpy(last), terminated[-1])
    cut_rows = np.array([(steps - 1, lane) for lane in range(lanes)], np.int32)
    ours = compute_gae(rewards, values, shift_values(values, cut_rows, last), terminated, np.zeros_like(terminated), 0.99, 0.95)
    np.testing.assert_allclose(ours, peer.advantages, atol=5e-6)
    np.testing.assert_allclose(ours + values, peer.returns, atol=5e-6)
