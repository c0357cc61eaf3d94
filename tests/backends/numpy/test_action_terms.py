"""Log-probs and entropies with their slopes: against the reference formulas, and against differences of those."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gymnasium import spaces

from inchworm.backends.numpy import distributions
from inchworm.backends.numpy.distributions import ActionTerms
from inchworm.policy.layout import action_layout

BOX = spaces.Box(-1, 1, (2,))
SPACES = {
    "discrete": (spaces.Discrete(3), "clip"),
    "one choice": (spaces.Discrete(1), "clip"),
    "multi_discrete": (spaces.MultiDiscrete([2, 3, 4]), "clip"),
    "multi_binary": (spaces.MultiBinary(3), "clip"),
    "box_clip": (BOX, "clip"),
    "box_tanh": (BOX, "tanh"),
    "dict": (spaces.Dict({"z": spaces.Discrete(3), "a": BOX, "m": spaces.MultiBinary(2)}), "clip"),
    "tuple": (spaces.Tuple([spaces.Box(-1, 1, (1,)), spaces.MultiDiscrete([2, 3]), BOX, spaces.Discrete(2)]), "tanh"),
}
STEP, N = 1e-5, 6


class Data:
    """Random outputs, actions and masks for a space; every chosen action is legal."""

    def __init__(self, name, *, masked=False, seed=0):
        self.layout = action_layout(*SPACES[name])
        rng, layout = np.random.default_rng(seed), self.layout
        self.outputs = rng.normal(size=(layout.num_outputs, N))
        self.log_std = rng.normal(-0.3, 0.4, layout.num_gaussians)
        self.choices = np.array([rng.integers(0, size, N) for size in layout.group_sizes], np.int64).reshape(-1, N)
        self.gaussians = rng.normal(size=(layout.num_gaussians, N))
        self.mask = None
        if masked:
            self.mask = rng.random((layout.num_logits, N)) < 0.5
            for group, choice in zip(layout.groups, self.choices):
                self.mask[group][choice, np.arange(N)] = True

    def reference(self, outputs, log_std):
        """(log-probs, entropy), each [n], by `distributions`, whose arrays are [n, …]."""
        mask = None if self.mask is None else self.mask.T
        log_probs = distributions.log_prob(self.layout, outputs.T, log_std, mask, self.choices.T, self.gaussians.T)
        return log_probs, distributions.entropy(self.layout, outputs.T, log_std, mask)

    def terms(self, dtype=np.float64):
        arrays = (self.outputs.astype(dtype), self.log_std.astype(dtype), self.mask, self.choices, self.gaussians.astype(dtype))
        return ActionTerms(self.layout, *arrays)


def test_samples_whose_logits_are_far_apart_do_not_touch_each_other():
    # Each sample's own largest logit is taken off: with that of all, exp(-1000) = 0 would leave the second one nothing to divide by.
    outputs = np.array([[0.0, -1000.0], [1.0, -1001.0], [2.0, -1002.0]], np.float32)  # [3, n]
    choices = np.array([[0, 0]])
    terms = ActionTerms(action_layout(*SPACES["discrete"]), outputs, np.zeros(0), None, choices, np.zeros((0, 2)))
    total = 1 + math.exp(-1) + math.exp(-2)
    np.testing.assert_allclose(terms.log_probs, [-2 - math.log(total), -math.log(total)], rtol=1e-6)
    np.testing.assert_allclose(terms.entropy[0], terms.entropy[1], rtol=1e-6)
    assert np.isfinite(terms.backward(np.ones(2, np.float32), np.ones(2, np.float32))[0]).all()


CASES = [(name, masked) for name in SPACES for masked in (False, True) if not (masked and name.startswith("box"))]


@pytest.mark.parametrize(("name", "masked"), CASES, ids=str)
def test_forward_is_the_reference(name, masked):
    data = Data(name, masked=masked)
    expected = data.reference(data.outputs, data.log_std)
    for dtype, tolerance in ((np.float64, 1e-12), (np.float32, 1e-5)):
        terms = data.terms(dtype)
        assert terms.log_probs.dtype == terms.entropy.dtype == dtype
        np.testing.assert_allclose(terms.log_probs, expected[0], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(terms.entropy, expected[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("entropy", [True, False], ids=["with entropy", "without"])
@pytest.mark.parametrize(("name", "masked"), CASES, ids=str)
def test_slopes_are_differences(name, masked, entropy):
    # L = Σ log p · a + Σ H · b: its slope by any output or log std is (L(x + h) - L(x - h)) / 2h. None for b is b = 0.
    data, rng = Data(name, masked=masked), np.random.default_rng(3)
    a, b = rng.normal(size=N), rng.normal(size=N)
    d_outputs, d_log_std = data.terms().backward(a, b if entropy else None)
    assert d_outputs.shape == data.outputs.shape
    assert d_log_std.shape == data.log_std.shape

    def loss(outputs, log_std):
        log_probs, entropies = data.reference(outputs, log_std)
        return (log_probs * a).sum() + (entropies * b).sum() * entropy

    for found, which in ((d_outputs, 0), (d_log_std, 1)):
        for index in np.ndindex(found.shape):
            sides = []
            for step in (STEP, -STEP):
                given = [data.outputs.copy(), data.log_std.copy()]
                given[which][index] += step
                sides.append(loss(*given))
            assert found[index] == pytest.approx((sides[0] - sides[1]) / (2 * STEP), abs=2e-8), (which, index)
    if masked:
        np.testing.assert_array_equal(d_outputs[: data.layout.num_logits][~data.mask], 0.0)  # exactly, not nearly


def test_two_choices_by_hand():
    # Logits ln 3 and 0: p = (3/4, 1/4). Action 1: d log p / d l = (0 - 3/4, 1 - 1/4).
    # H = -(3/4 ln 3/4 + 1/4 ln 1/4) = 0.5623; dH/dl_0 = -3/4 (ln 3/4 + H) = -0.2060, dH/dl_1 = -1/4 (ln 1/4 + H) = 0.2060.
    layout = action_layout(spaces.Discrete(2), "clip")
    terms = ActionTerms(layout, np.array([[math.log(3)], [0.0]]), np.zeros(0), None, np.array([[1]]), np.zeros((0, 1)))
    assert terms.log_probs[0] == pytest.approx(math.log(1 / 4), abs=1e-12)
    assert terms.entropy[0] == pytest.approx(0.5623351446188083, abs=1e-12)
    by_log_probs, _ = terms.backward(np.ones(1), None)
    np.testing.assert_allclose(by_log_probs[:, 0], [-0.75, 0.75], atol=1e-12)
    both, _ = terms.backward(np.ones(1), np.ones(1))
    np.testing.assert_allclose((both - by_log_probs)[:, 0], [-0.20598980412527058, 0.20598980412527058], atol=1e-12)


def test_a_gaussian_by_hand():
    # mean 1, std 2, action 4: z = 1.5; log p = -1.125 - ln 2 - ½ ln 2π; slopes z / std = 0.75 and z² - 1 = 1.25; H's slope by s is 1.
    layout = action_layout(spaces.Box(-9, 9, (1,)), "clip")
    terms = ActionTerms(layout, np.array([[1.0]]), np.log([2.0]), None, np.zeros((0, 1), np.int64), np.array([[4.0]]))
    assert terms.log_probs[0] == pytest.approx(-1.125 - math.log(2) - 0.5 * math.log(2 * math.pi), abs=1e-12)
    assert terms.entropy[0] == pytest.approx(math.log(2) + 0.5 * math.log(2 * math.pi * math.e), abs=1e-12)
    d_means, d_log_std = terms.backward(np.array([2.0]), np.array([5.0]))
    assert d_means[0, 0] == pytest.approx(2 * 0.75, abs=1e-12)
    assert d_log_std[0] == pytest.approx(2 * 1.25 + 5, abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_logits_far_apart_stay_finite(dtype):
    # e^1000 is no number, but log p is: 0 and -1000, with slopes (0, 0) and (-1, 1).
    layout = action_layout(spaces.Discrete(2), "clip")
    outputs = np.array([[1000.0, 1000.0], [0.0, 0.0]], dtype)
    terms = ActionTerms(layout, outputs, np.zeros(0, dtype), None, np.array([[0, 1]]), np.zeros((0, 2), dtype))
    np.testing.assert_allclose(terms.log_probs, [0, -1000])
    np.testing.assert_array_equal(terms.entropy, [0, 0])
    slopes, _ = terms.backward(np.ones(2, dtype), np.ones(2, dtype))
    assert slopes.dtype == dtype
    np.testing.assert_allclose(slopes, [[0, -1], [0, 1]], atol=1e-6)


def test_the_outputs_are_only_read():
    data = Data("tuple", masked=True)
    before = data.outputs.copy()
    terms = data.terms()
    given = np.ones(N), np.ones(N)
    terms.backward(*given)
    np.testing.assert_array_equal(data.outputs, before)
    np.testing.assert_array_equal(given, np.ones((2, N)))
