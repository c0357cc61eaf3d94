"""Sampling, log-probs, entropies and their gradients by hand, by plain loops, numeric integration and finite differences."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from inchworm.backends.numpy import distributions
from inchworm.backends.numpy.distributions import ActionTerms
from inchworm.backends.torch import policy as torch_distributions
from inchworm.policy.layout import action_layout

NO_STD = np.zeros(0)


def test_masked_choices_are_never_sampled_in_10_000_draws():
    layout = action_layout(spaces.MultiDiscrete([3, 4]), "clip")
    outputs = np.tile(np.array([[9.0, 0, 0, 9.0, 9.0, 0, 0]], np.float32), (10_000, 1))  # the illegal ones would be the favourites
    mask = np.tile(np.array([[0, 1, 1, 0, 0, 1, 0]], bool), (10_000, 1))
    choices, _, _ = distributions.sample(layout, outputs, NO_STD, mask, np.random.default_rng(0))
    assert set(choices[:, 0]) == {1, 2}
    assert set(choices[:, 1]) == {2}
    greedy, _, _ = distributions.mode(layout, outputs, NO_STD, mask)
    assert set(greedy[:, 0]) == {1}
    assert set(greedy[:, 1]) == {2}


@pytest.mark.parametrize("legal", [[0, 0, 1], [1, 0, 0], [0, 1, 0]])
def test_the_edges_of_the_uniform_draw_never_reach_an_illegal_choice(legal):
    layout = action_layout(spaces.Discrete(3), "clip")
    outputs, mask = np.zeros((2, 3), np.float32), np.array([legal, legal], bool)

    class Edges:  # 0 and the largest number below 1 that a generator can give
        def random(self, shape):
            return np.array([[0.0], [1 - 2**-53]])

    choices, _, _ = distributions.sample(layout, outputs, NO_STD, mask, Edges())
    assert (choices[:, 0] == np.argmax(legal)).all()


SAMPLED = {
    "two choices": spaces.Discrete(2),
    "seventeen choices": spaces.Discrete(17),
    "no choice": spaces.Discrete(1),
    "several": spaces.MultiDiscrete([3, 2, 5]),
    "Gaussians": spaces.Box(-1, 1, (3,)),
    "hybrid": spaces.Tuple([spaces.Discrete(4), spaces.Box(-1, 1, (2,)), spaces.MultiBinary(2)]),
}


def plainly_sampled(layout, outputs, log_std, mask, rng):
    """`sample`, written plainly: for each lane and each group the first choice whose cumulative weight is above u · total."""
    uniforms = rng.random((len(outputs), len(layout.groups))) if layout.groups else None
    logits = distributions.mask_logits(outputs[:, : layout.num_logits], mask)
    choices = np.zeros((len(outputs), len(layout.groups)), np.int64)
    for lane in range(len(outputs)):
        for index, group in enumerate(layout.groups):
            cumulative = np.cumsum(np.exp(logits[lane, group] - logits[lane, group].max()))
            choices[lane, index] = np.argmax(cumulative > uniforms[lane, index] * np.float64(cumulative[-1]))
    means = outputs[:, layout.num_logits :]
    noise = rng.standard_normal(means.shape, np.float32) if layout.num_gaussians else 0
    return choices, (means + np.exp(log_std) * noise).astype(np.float32)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bounds", ["clip", "tanh"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-6), (np.float64, 1e-12)])
@pytest.mark.parametrize("space", SAMPLED.values(), ids=SAMPLED)
def test_one_pass_draws_what_the_plain_text_draws_and_knows_its_log_prob(space, dtype, tolerance, bounds, masked):
    layout = action_layout(space, bounds)
    rng = np.random.default_rng(5)
    outputs = rng.normal(0, 2, (200, layout.num_outputs)).astype(dtype)
    log_std = rng.uniform(-1, 0.5, layout.num_gaussians).astype(dtype)
    mask = rng.random((200, layout.num_logits)) < 0.6 if masked else None
    if mask is not None:
        mask[:, [group.start for group in layout.groups]] = True
    before = outputs.copy()
    streams = [np.random.default_rng(8), np.random.default_rng(8)]
    choices, gaussians, log_probs = distributions.sample(layout, outputs, log_std, mask, streams[0])
    expected = plainly_sampled(layout, outputs, log_std, mask, streams[1])
    np.testing.assert_array_equal(choices, expected[0])
    np.testing.assert_array_equal(gaussians, expected[1])
    assert streams[0].random() == streams[1].random()  # both streams have come equally far
    assert (log_probs.dtype, log_probs.shape) == (dtype, (200,))
    again, _ = distributions.log_prob_and_entropy(layout, outputs, log_std, mask, choices, gaussians)
    np.testing.assert_allclose(log_probs, again, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(outputs, before)  # read, not used up


def test_greedy_takes_the_most_likely_choice_and_the_mean():
    layout = action_layout(spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(3)]), "clip")
    outputs, log_std = np.array([[0.1, 0.9, 0.3, 5.0, -6.0]]), np.array([0.0, 0.5])
    choices, gaussians, log_probs = distributions.mode(layout, outputs, log_std, None)
    np.testing.assert_array_equal(choices, [[1]])
    np.testing.assert_array_equal(gaussians, [[5.0, -6.0]])
    # log p of the choice, and of two Gaussians at their means: -log(e^-0.8 + 1 + e^-0.6) - 0.5 - log 2 pi
    np.testing.assert_allclose(log_probs, -np.log(np.exp(-0.8) + 1 + np.exp(-0.6)) - 0.5 - np.log(2 * np.pi))


@pytest.mark.parametrize(("log_std", "tolerance"), [(-2.0, 1e-12), (-1.0, 1e-12), (0.0, 1e-5), (0.5, 1e-3), (1.0, 0.01), (2.0, 0.2)])
def test_the_quadrature_is_as_good_as_the_gaussian_is_narrow(log_std, tolerance):
    layout = action_layout(spaces.Box(-1, 1, (1,)), "tanh")
    nodes = np.linspace(-9, 9, 400_001)
    weights = np.exp(-0.5 * nodes**2) / np.exp(-0.5 * nodes**2).sum()
    for mean in (0.0, 0.5, 3.0):
        slope = distributions.log_tanh_slope(mean + np.exp(log_std) * nodes)
        exact = log_std + 0.5 * np.log(2 * np.pi * np.e) + (slope * weights).sum()
        arrays = (np.array([[mean]]), np.array([log_std]), None, np.zeros((1, 0), np.int64), np.zeros((1, 1)))
        found = distributions.log_prob_and_entropy(layout, *arrays)[1][0]
        assert found == pytest.approx(exact, abs=tolerance)


def test_actions_for_the_environment():
    bounds = (np.array([-1.0, 2.0], np.float32), np.array([1.0, 6.0], np.float32))
    clip, tanh = (action_layout(spaces.Box(*bounds), way) for way in ("clip", "tanh"))
    sampled = np.array([[0.5, 3.0], [9.0, -9.0]], np.float32)
    np.testing.assert_array_equal(distributions.to_env(clip, sampled), [[0.5, 3.0], [1.0, 2.0]])
    # tanh(0.5) = 0.462117 in -1 … 1; 2 + (tanh(3) + 1) * 2 = 2 + 1.995055 * 2; far out it is the bound itself.
    squashed = distributions.to_env(tanh, sampled)
    np.testing.assert_allclose(squashed, [[0.46211716, 5.9901095], [1.0, 2.0]], rtol=1e-6)
    far = distributions.to_env(tanh, np.array([[1e30, -1e30]], np.float32))
    np.testing.assert_array_equal(far, [[1.0, 2.0]])
    unbounded = action_layout(spaces.Box(-np.inf, np.inf, (2,)), "clip")
    np.testing.assert_array_equal(distributions.to_env(unbounded, np.array([[-1e20, 1e20]], np.float32)), np.float32([[-1e20, 1e20]]))


# Log-probs and entropies with their gradients
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
        """(log-probs, entropy), each [n], by torch, whose arrays are [n, …]."""
        arrays = (outputs.T, log_std, None if self.mask is None else self.mask.T, self.choices.T, self.gaussians.T)
        tensors = [None if array is None else torch.from_numpy(array.copy()) for array in arrays]
        return [part.numpy() for part in torch_distributions.log_prob_and_entropy(self.layout, *tensors)]

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
def test_gradients_are_differences(name, masked, entropy):
    # L = Σ log p · a + Σ H · b: its slope by any output or log std is (L(x + h) - L(x - h)) / 2h. None for b is b = 0.
    data, rng = Data(name, masked=masked), np.random.default_rng(3)
    a, b = rng.normal(size=N), rng.normal(size=N)
    given = [array.copy() for array in (data.outputs, a, b)]
    d_outputs, d_log_std = data.terms().backward(a, b if entropy else None)
    np.testing.assert_equal([data.outputs, a, b], given)  # they are only read
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
    # mean 1, std 2, action 4: z = 1.5; log p = -1.125 - ln 2 - ½ ln 2π; gradients z / std = 0.75 and z² - 1 = 1.25; H's slope by s is 1.
    layout = action_layout(spaces.Box(-9, 9, (1,)), "clip")
    terms = ActionTerms(layout, np.array([[1.0]]), np.log([2.0]), None, np.zeros((0, 1), np.int64), np.array([[4.0]]))
    assert terms.log_probs[0] == pytest.approx(-1.125 - math.log(2) - 0.5 * math.log(2 * math.pi), abs=1e-12)
    assert terms.entropy[0] == pytest.approx(math.log(2) + 0.5 * math.log(2 * math.pi * math.e), abs=1e-12)
    d_means, d_log_std = terms.backward(np.array([2.0]), np.array([5.0]))
    assert d_means[0, 0] == pytest.approx(2 * 0.75, abs=1e-12)
    assert d_log_std[0] == pytest.approx(2 * 1.25 + 5, abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_logits_far_apart_stay_finite(dtype):
    # exp(1000) overflows, but log p is 0 and -1000, with gradients (0, 0) and (-1, 1).
    layout = action_layout(spaces.Discrete(2), "clip")
    outputs = np.array([[1000.0, 1000.0], [0.0, 0.0]], dtype)
    terms = ActionTerms(layout, outputs, np.zeros(0, dtype), None, np.array([[0, 1]]), np.zeros((0, 2), dtype))
    np.testing.assert_allclose(terms.log_probs, [0, -1000])
    np.testing.assert_array_equal(terms.entropy, [0, 0])
    gradients, _ = terms.backward(np.ones(2, dtype), np.ones(2, dtype))
    assert gradients.dtype == dtype
    np.testing.assert_allclose(gradients, [[0, -1], [0, 1]], atol=1e-6)
