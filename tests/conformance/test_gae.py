"""GAE is the same on every backend: arithmetic by hand, a sum written out, and random cases with all combinations of flags."""

from itertools import product

import numpy as np
import pytest

from inchworm.backends.numpy import backend as numpy_backend
from inchworm.backends.torch import backend as torch_backend
from inchworm.config.sections import PPOConfig
from inchworm.rollout.rollout import Rollout


def run(backend, dtype, rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    floats = [backend.array(np.asarray(array, dtype)) for array in (rewards, values, next_values)]
    flags = [backend.array(np.asarray(array, bool)) for array in (terminated, truncated)]
    return backend.numpy(backend.compute_gae(*floats, *flags, gamma, gae_lambda))


def written_out(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """A_t = sum over k of (gamma lambda)^k delta_{t+k}, up to and including the row that ends the episode."""
    result = np.zeros(rewards.shape)
    for t, b in np.ndindex(*rewards.shape):
        for k, row in enumerate(range(t, len(rewards))):
            following = 0.0 if terminated[row, b] else gamma * next_values[row, b]
            result[t, b] += (gamma * gae_lambda) ** k * (rewards[row, b] + following - values[row, b])
            if terminated[row, b] or truncated[row, b]:
                break
    return result


def test_by_hand(gae_backend):
    # gamma 0.5, lambda 0.5; rows 0, 1 continue, row 1 is truncated in lane 1, row 2 is terminated in lane 0.
    # lane 0: delta = 1 + 0.5*4 - 2 = 1,  2 + 0.5*6 - 4 = 1,  3 - 6 = -3
    #         A_2 = -3,  A_1 = 1 + 0.25*-3 = 0.25,  A_0 = 1 + 0.25*0.25 = 1.0625
    # lane 1: delta = 1 + 0.5*4 - 2 = 1,  2 + 0.5*100 - 4 = 48 (V of the true successor), 3 + 0.5*2 - 6 = -2
    #         A_2 = -2,  A_1 = 48 (nothing passes the cut),  A_0 = 1 + 0.25*48 = 13
    rewards, values = np.array([[1, 1], [2, 2], [3, 3]]), np.array([[2, 2], [4, 4], [6, 6]])
    next_values = np.array([[4, 4], [6, 100], [-77, 2]])
    terminated, truncated = np.zeros((3, 2), bool), np.zeros((3, 2), bool)
    terminated[2, 0] = truncated[1, 1] = True
    found = run(gae_backend, np.float64, rewards, values, next_values, terminated, truncated, 0.5, 0.5)
    np.testing.assert_allclose(found, [[1.0625, 13], [0.25, 48], [-3, -2]], rtol=0, atol=1e-15)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 5e-6), (np.float64, 1e-10)])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
def test_equals_the_sum_written_out(gae_backend, dtype, tolerance, gae_lambda):
    rng = np.random.default_rng(7)
    for steps, lanes in [(1, 2), (4, 1), (11, 3)] * 4:  # few shapes, each of which JAX compiles once
        rewards, values, next_values = (rng.standard_normal((steps, lanes)).astype(dtype) for _ in range(3))
        terminated, truncated = rng.random((2, steps, lanes)) < 0.3
        found = run(gae_backend, dtype, rewards, values, next_values, terminated, truncated, 0.97, gae_lambda)
        expected = written_out(*(a.astype(np.float64) for a in (rewards, values, next_values)), terminated, truncated, 0.97, gae_lambda)
        assert found.dtype == dtype
        assert np.abs(found - expected).max() <= tolerance


def test_every_combination_of_flags_of_three_steps(gae_backend):
    rng = np.random.default_rng(3)
    combinations = np.array(list(product((False, True), repeat=6))).T  # [6, 64]: both flags of three rows, a lane each
    terminated, truncated = combinations[:3], combinations[3:]
    rewards, values, next_values = rng.standard_normal((3, 3, 64))
    found = run(gae_backend, np.float64, rewards, values, next_values, terminated, truncated, 0.9, 0.8)
    expected = written_out(rewards, values, next_values, terminated, truncated, 0.9, 0.8)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_nothing_after_a_terminated_row_is_read(gae_backend):
    # A = 1 - 0 = 1 in row 0; row 1: 1 + 0.5 * 2 = 2.
    found = run(gae_backend, np.float32, [[1], [1]], [[0], [0]], [[np.nan], [2]], [[1], [0]], [[0], [0]], 0.5, 1.0)
    np.testing.assert_array_equal(found, [[1], [2]])


def test_no_steps(gae_backend):
    nothing = np.zeros((0, 3))
    assert run(gae_backend, np.float32, nothing, nothing, nothing, nothing, nothing, 0.9, 0.9).shape == (0, 3)


class SumCritic:
    """V(observation) = the sum of its entries, plus the memory it is given, plus 100 where it forgets."""

    def value(self, observations, state, episode_starts):
        assert episode_starts.shape == observations.shape[:2]
        return observations.sum(-1) + state + 100.0 * episode_starts


@pytest.mark.parametrize("compute_advantages", [numpy_backend.compute_advantages, torch_backend.compute_advantages], ids=["numpy", "torch"])
def test_the_critic_gets_the_memory_of_the_first_row_and_of_each_cut(compute_advantages):
    # Two lanes, three rows: observations 1, 2, 4 and 3, 5, 7; row 1 of lane 0 is truncated before 8; the last rows continue with 16 and 9.
    # Memory is 10 and 1000 at the start, and 20, 30, 2000 at the cuts.
    flags = np.zeros((3, 2), bool)
    truncated, starts = flags.copy(), flags.copy()
    truncated[1, 0] = starts[2, 0] = True
    rollout = Rollout.from_dict(
        {
            "observations": np.array([[[1], [3]], [[2], [5]], [[4], [7]]], np.float32),
            "actions": np.zeros((3, 2), np.int64),
            "log_probs": np.zeros((3, 2), np.float32),
            "rewards": np.array([[1, 1], [2, 1], [3, 1]], np.float32),
            "terminated": flags,
            "truncated": truncated,
            "episode_starts": starts,
            "policy_state": np.array([[10, 1000]], np.float32),
            "cut_rows": [[1, 0], [2, 0], [2, 1]],
            "cut_observations": np.array([[8], [16], [9]], np.float32),
            "cut_state": np.array([20, 30, 2000], np.float32),
        }
    )
    found = compute_advantages(SumCritic(), rollout, PPOConfig(gamma=0.5, gae_lambda=0.5))
    np.testing.assert_array_equal(found.values, [[11, 1003], [12, 1005], [114, 1007]])  # 4 + 10 + 100 where an episode begins
    np.testing.assert_array_equal(found.next_values, [[12, 1005], [28, 1007], [46, 2009]])  # the next row, or the cut's
    # lane 0: delta = 1 + 6 - 11 = -4,  2 + 14 - 12 = 4,  3 + 23 - 114 = -88;  A_0 = -4 + 0.25 * 4, and nothing passes the cut
    # lane 1: delta = 1 + 502.5 - 1003 = -499.5,  1 + 503.5 - 1005 = -500.5,  1 + 1004.5 - 1007 = -1.5
    #         A_1 = -500.5 - 0.25 * 1.5 = -500.875,  A_0 = -499.5 - 0.25 * 500.875 = -624.71875
    np.testing.assert_array_equal(found.advantages, [[-3, -624.71875], [4, -500.875], [-88, -1.5]])
    np.testing.assert_array_equal(found.returns, found.advantages + found.values)
