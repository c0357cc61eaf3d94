"""Metrics of a rollout, against sums done by hand."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from inchworm.core.spaces import MASK_KEY
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.measures import forced_share, rollout_metrics
from inchworm.rollout.rollout import Rollout


def rollout(**changes: Any) -> Rollout:
    made = create_fake_rollout(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3), 2, 2, seed=0)
    quiet = np.zeros((2, 2), np.bool_)
    return dataclasses.replace(made, **{"terminated": quiet, "truncated": quiet, "valid": ~quiet, **changes})


def test_the_scale_is_the_largest_root_mean_square_of_a_feature_over_valid_rows() -> None:
    observations = np.array([[[3.0, 100.0], [0.0, 1.0]], [[4.0, 1.0], [0.0, 1.0]]], np.float32)
    valid = np.array([[False, True], [True, True]])
    assert rollout_metrics(rollout(observations=observations))["observation_scale"] == pytest.approx(np.sqrt((10_000 + 3) / 4))
    assert rollout_metrics(rollout(observations=observations, valid=valid))["observation_scale"] == pytest.approx(np.sqrt(16 / 3))


def test_the_share_of_truncated_ends() -> None:
    terminated, truncated = np.array([[True, False], [False, False]]), np.array([[False, True], [True, False]])
    assert rollout_metrics(rollout(terminated=terminated, truncated=truncated))["truncated_share"] == pytest.approx(2 / 3)
    assert "truncated_share" not in rollout_metrics(rollout()), "no episode ended"


def test_the_share_of_rows_without_a_choice() -> None:
    valid = np.ones((2, 2), np.bool_)
    mask = np.array([[[1, 0, 0], [1, 1, 0]], [[0, 0, 1], [1, 1, 1]]], np.int8)
    assert forced_share(mask, np.zeros((2, 2), np.int64), valid) == 0.5
    assert forced_share(mask, np.zeros((2, 2, 2), np.int64), valid) == 0.75, "two parts with one choice each have two entries"
    assert forced_share({"a": mask}, {"a": np.zeros((2, 2), np.int64), "b": np.zeros((2, 2, 1), np.float32)}, valid) == 0.0
    seen = {"observation": np.zeros((2, 2, 1), np.float32), MASK_KEY: mask}
    assert rollout_metrics(rollout(observations=seen))["forced_share"] == 0.5


def test_the_spread_of_the_memory_is_over_lanes_and_absent_without_memory() -> None:
    state = (np.array([[1.0, 0.0], [-1.0, 0.0]], np.float32),)
    assert rollout_metrics(rollout(cut_state=state))["memory_spread"] == 0.5  # standard deviations 1 and 0
    assert "memory_spread" not in rollout_metrics(rollout())
