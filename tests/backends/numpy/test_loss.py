"""What the conformance suite does not test of NumPy's loss: a clipped value whose sum is rounded."""

import numpy as np
import pytest

from inchworm.backends.numpy.loss import value_errors
from inchworm.core.types import Evaluation, LossCoefficients


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_value_within_reach_moves_however_its_sum_is_rounded(dtype):
    # V0 + (V - V0) is V only up to rounding, so the held error may be the larger one by a bit: the gradient still is (V - R) / s².
    rng = np.random.default_rng(0)
    values, returns = (rng.normal(0, spread, (1, 2000)).astype(dtype) for spread in (0.02, 1))  # V0 is far from V in units of V
    old = values + rng.uniform(-0.19, 0.19, values.shape).astype(dtype)
    held = old + (values - old)
    assert (np.square(held - returns) > np.square(values - returns)).sum() > 20  # it does happen
    evaluation = Evaluation(values, values, values, dtype(1))
    _, gradient = value_errors(evaluation, returns, old, LossCoefficients(0.2, 0.7, 0.3, True, 0.2))
    np.testing.assert_allclose(gradient, values - returns, rtol=1e-3, atol=1e-6)
