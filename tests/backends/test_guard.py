"""What stops a run: bad minibatches are tested with each backend; here, weights that a good gradient has carried out of range."""

from __future__ import annotations

import numpy as np
import pytest

from inchworm.backends.learner import BadNumberGuard
from inchworm.core.errors import BadNumberError


def test_weights_out_of_range_stop_the_run() -> None:
    guard = BadNumberGuard(None)
    guard.check_weights({"w": np.ones(3, np.float32), "count": np.array(2**62)})
    with pytest.raises(BadNumberError, match="the weight w is not finite after this update"):
        guard.check_weights({"v": np.ones(1), "w": np.array([1.0, np.inf], np.float32)})
