"""What torch's GAE adds to the recursion, which the conformance suite tests: the critic with its memory, and other devices."""

from __future__ import annotations

import numpy as np
import torch

from inchworm.backends.torch import gae
from inchworm.backends.torch.backend import compute_advantages
from inchworm.config.sections import PPOConfig
from inchworm.rollout.rollout import Rollout


class SumCritic:
    """V(observation) = the sum of its entries, plus the memory it is given, plus 100 where it forgets."""

    def value(self, observations, state, episode_starts):
        assert episode_starts.dtype == torch.bool
        assert episode_starts.shape == observations.shape[:2]
        return observations.sum(-1) + state + 100.0 * episode_starts


def test_the_critic_gets_the_memory_of_the_first_row_and_of_each_cut():
    # Two lanes, three rows: observations 1, 2, 4 and 3, 5, 7; row 1 of lane 0 is truncated before 8; the ends go on to 16 and 9.
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


def test_where_numpy_cannot_see_the_memory_the_recursion_runs_with_tensors(monkeypatch):
    given = [torch.zeros((3, 2), device="meta") for _ in range(5)]
    assert gae.compute_gae(*given[:3], given[3].bool(), given[4].bool(), 0.9, 0.8).device.type == "meta"
    monkeypatch.setattr(gae, "gae_on_device", lambda *arguments: arguments)
    assert all(one is other for one, other in zip(gae.compute_gae(*given, 0.9, 0.8), (*given, 0.9, 0.8), strict=True))
