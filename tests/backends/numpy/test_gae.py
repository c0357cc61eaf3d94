"""What NumPy's GAE adds to the recursion, which the conformance suite tests: two ways to run it with the same bits, and cut rows."""

import numpy as np
import pytest

from inchworm.backends.numpy.gae import FEW_LANES, compute_gae, shift_values


def test_shift_values_puts_the_cut_rows_in():
    values = np.arange(6.0).reshape(3, 2)  # [T, B]
    shifted = shift_values(values, np.array([[0, 1], [2, 0], [2, 1]], np.int32), np.array([70.0, 80.0, 90.0]))
    np.testing.assert_array_equal(shifted, [[2, 70], [4, 5], [80, 90]])
    assert values[0, 1] == 1  # the input is not written to
    nothing = np.zeros((0, 3), np.float32)
    assert shift_values(nothing, np.zeros((0, 2), np.int32), np.zeros(0, np.float32)).shape == (0, 3)


@pytest.mark.parametrize("steps", [1, 2, 12])
def test_many_lanes_have_the_bits_of_few(steps):
    # Above FEW_LANES the recursion runs row by row in NumPy, up to there with Python's numbers: the bits are the same.
    rng, shape = np.random.default_rng(0), (steps, FEW_LANES + 3)
    terminated, truncated = rng.random((2, *shape)) < 0.15
    case = (*rng.standard_normal((3, *shape)), terminated, truncated)
    copies = [array.copy() for array in case]
    together = compute_gae(*case, 0.9, 0.8)
    alone = [compute_gae(*[array[:, lane : lane + 1] for array in case], 0.9, 0.8) for lane in range(FEW_LANES + 3)]
    np.testing.assert_array_equal(together, np.concatenate(alone, 1))
    for array, copy in zip(case, copies):  # arguments are only read
        np.testing.assert_array_equal(array, copy)
