"""Log-probs and entropies of every kind of action are the same on every backend, and so is the way to and from flat arrays."""

import numpy as np
import pytest
from gymnasium import spaces

from inchworm.backends.numpy import distributions
from inchworm.backends.numpy import policy as encoding
from inchworm.core.spaces import build_tree, leaves, mask_sizes
from inchworm.policy.layout import action_layout, observation_layout

ROWS = 6


def numbers(case, dtype, seed=0):
    """Random outputs, log-stds, masks and legal actions for a case."""
    rng = np.random.default_rng(seed)
    layout = action_layout(case.action_space, case.bounds)
    outputs = (2 * rng.standard_normal((ROWS, layout.num_outputs))).astype(dtype)
    log_std = rng.uniform(-1, 0.5, layout.num_gaussians).astype(dtype)
    mask = encoding.encode_mask(layout, case.mask((ROWS,), rng)) if case.masked else None
    choices, gaussians, _ = distributions.sample(layout, outputs, log_std, mask, rng)
    return layout, outputs, log_std, mask, choices, gaussians.astype(dtype)


def by_definition(layout, outputs, log_std, mask, choices, gaussians):
    """log p and H from probabilities that are normalised by a sum over legal choices, and from the Gaussian density."""
    log_p, entropy = np.zeros(ROWS), np.zeros(ROWS)
    for row in range(ROWS):
        for index, group in enumerate(layout.groups):
            weights = np.exp(outputs[row, group].astype(np.float64))
            weights = weights if mask is None else weights * mask[row, group]
            p = weights / weights.sum()
            log_p[row] += np.log(p[choices[row, index]])
            entropy[row] -= sum(q * np.log(q) for q in p if q > 0)
        for mean, scale, value in zip(outputs[row, layout.num_logits :], np.exp(log_std.astype(np.float64)), gaussians[row]):
            density = np.exp(-0.5 * ((value - mean) / scale) ** 2) / (scale * np.sqrt(2 * np.pi))
            log_p[row] += np.log(density)
            entropy[row] += 0.5 * np.log(2 * np.pi * np.e * scale**2)
            if layout.bounds == "tanh":
                log_p[row] -= np.log(1 - np.tanh(float(value)) ** 2)
                grid = mean + scale * np.linspace(-8, 8, 20_001)  # E[log slope] by a fine sum over the density
                weight = np.exp(-0.5 * np.linspace(-8, 8, 20_001) ** 2)
                entropy[row] += (np.log1p(-(np.tanh(grid) ** 2) + 1e-300) * weight).sum() / weight.sum()
    return log_p, entropy


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 5e-5), (np.float64, 1e-10)])
def test_equals_the_definition(backend, case, dtype, tolerance):
    parts = numbers(case, dtype, seed=1)
    layout, *arrays = parts
    found = backend.log_prob_and_entropy(layout, *[None if array is None else backend.array(array) for array in arrays])
    log_p, entropy = by_definition(*parts)
    np.testing.assert_allclose(backend.numpy(found[0]), log_p, rtol=0, atol=tolerance)
    np.testing.assert_allclose(backend.numpy(found[1]), entropy, rtol=0, atol=2e-3 if case.bounds == "tanh" else tolerance)
    assert backend.numpy(found[0]).dtype == backend.numpy(found[1]).dtype == dtype


def test_saturated_tanh_stays_exact(backend):
    # log(1 - tanh(x)²) = log 4 - 2|x| for large |x|: at 30, where tanh is 1.0 in float64, it is 1.386294 - 60.
    layout = action_layout(spaces.Box(-1, 1, (1,)), "tanh")
    for value in (-30.0, -11.0, 11.0, 30.0, 300.0):
        for dtype in (np.float32, np.float64):
            arrays = [np.array([[value]], dtype), np.zeros(1, dtype), np.zeros((1, 0), np.int64), np.array([[value]], dtype)]
            outputs, log_std, choices, gaussians = (backend.array(array) for array in arrays)
            log_p, entropy = (backend.numpy(x)[0] for x in backend.log_prob_and_entropy(layout, outputs, log_std, None, choices, gaussians))
            slope = np.log(4) - 2 * abs(value) - 2 * np.log1p(np.exp(-2 * abs(value)))
            relative = 1e-6 if dtype == np.float32 else 1e-13
            assert log_p == pytest.approx(-0.5 * np.log(2 * np.pi) - slope, rel=relative)
            assert np.isfinite(entropy)
            # H = ½ log(2 pi e) + E[log slope], and E[-2|x|] = -2|mean| up to a tail of 1e-27.
            if abs(value) >= 30:
                assert entropy == pytest.approx(0.5 * np.log(2 * np.pi * np.e) + np.log(4) - 2 * abs(value), rel=1e-5)


def test_one_legal_choice_has_log_prob_0_and_entropy_0(backend, masked_case):
    layout, outputs, log_std, _, choices, gaussians = numbers(masked_case, np.float32)
    mask = np.zeros((ROWS, layout.num_logits), bool)
    for index, group in enumerate(layout.groups):
        mask[np.arange(ROWS), group.start + choices[:, index]] = True
    arrays = [backend.array(array) for array in (outputs, log_std, mask, choices, gaussians)]
    log_p, entropy = (backend.numpy(x) for x in backend.log_prob_and_entropy(layout, *arrays))
    means = np.zeros((ROWS, layout.num_logits + layout.num_gaussians), np.float32)
    means[:, layout.num_logits :] = outputs[:, layout.num_logits :]
    gaussian_only, _ = distributions.log_prob_and_entropy(layout, means, log_std, mask, choices, gaussians)
    np.testing.assert_allclose(log_p, gaussian_only, atol=1e-5)
    if not layout.num_gaussians:
        np.testing.assert_array_equal(log_p, 0)
        np.testing.assert_array_equal(entropy, 0)


def test_all_choices_masked_is_finite(backend, masked_case):
    layout, outputs, log_std, mask, choices, gaussians = numbers(masked_case, np.float32)
    arrays = [backend.array(array) for array in (outputs, log_std, np.zeros_like(mask), choices, gaussians)]
    for found in backend.log_prob_and_entropy(layout, *arrays):
        assert np.isfinite(backend.numpy(found)).all()


def test_encoding_equals_the_reference(backend, observation_space):
    layout = observation_layout(observation_space)
    observation_space.seed(3)
    samples = [observation_space.sample() for _ in range(4)]
    tree = build_tree(observation_space, lambda path, leaf: np.stack([_leaf(sample, path) for sample in samples]).astype(leaf.dtype))
    found = backend.numpy(backend.encoding.encode_observations(layout, backend.tree(tree), 1))
    expected = encoding.encode_observations(layout, tree, 1)
    assert found.dtype == np.float32
    assert found.shape == (4, layout.size)
    np.testing.assert_array_equal(found, expected)


def _leaf(tree, path):
    for key in path:
        tree = tree[key]
    return np.asarray(tree)


def test_actions_and_masks_survive_a_round_trip_through_flat_arrays(backend, case):
    layout, _, _, _, choices, gaussians = numbers(case, np.float32)
    tree = layout.unflatten(choices, gaussians, sampled=True)
    flat_choices, flat_gaussians = backend.encoding.flatten_actions(layout, backend.tree(tree), 1)
    np.testing.assert_array_equal(backend.numpy(flat_choices), choices)
    np.testing.assert_array_equal(backend.numpy(flat_gaussians), gaussians)
    if case.masked:
        masks = case.mask((ROWS,), np.random.default_rng(0))
        found = backend.numpy(backend.encoding.encode_mask(layout, backend.tree(masks), 1))
        assert found.dtype == bool
        assert found.shape == (ROWS, sum(sum(mask_sizes(leaf)) for _, leaf in leaves(case.action_space)))
        np.testing.assert_array_equal(found, encoding.encode_mask(layout, masks))
