"""Data from elsewhere as the fields of a rollout."""

import numpy as np
import optree
import pytest
from gymnasium import spaces

from inchworm.core.errors import RolloutError
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.rollout import Rollout

OBSERVATIONS = spaces.Dict(
    {"image": spaces.Box(0, 255, (3, 3, 1), np.uint8), "pair": spaces.Tuple([spaces.Discrete(4), spaces.Box(-1, 1)])}
)


def rollout() -> Rollout:
    return create_fake_rollout(OBSERVATIONS, spaces.MultiDiscrete([2, 3]), 12, 3, episode_length=4)


def test_another_byte_order_and_wider_numbers_from_elsewhere():
    data = rollout().to_dict()
    swapped = optree.tree_map(lambda leaf: leaf.astype(leaf.dtype.newbyteorder(">")), data["observations"])
    taken = Rollout.from_dict({**data, "observations": swapped})
    for mine, theirs in zip(optree.tree_leaves(taken.observations), optree.tree_leaves(data["observations"])):
        assert mine.dtype.isnative
        np.testing.assert_array_equal(mine, theirs)
    if np.dtype(np.longdouble).itemsize > 8:
        with pytest.raises(RolloutError, match="up to 64 bits"):
            Rollout.from_dict({**data, "rewards": data["rewards"].astype(np.longdouble)})
