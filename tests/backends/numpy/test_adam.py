"""Adam by hand, and beside torch's own over many steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from inchworm.backends.numpy.learner import Adam


def test_two_steps_by_hand():
    # Gradient 2, then -1; rate 0.1, eps 0. The first step is the rate itself: mean 0.2 / 0.1 = 2, square 0.004 / 0.001 = 4, 2 / sqrt 4 = 1.
    # Then mean 0.9 · 0.2 - 0.1 = 0.08, over 1 - 0.81 = 0.19: 0.42105; square 0.999 · 0.004 + 0.001 = 0.004996, over 0.001999: 2.49925.
    parameters = np.array([5.0])
    adam = Adam(parameters, eps=0.0, weight_decay=0.0)
    adam.step(np.array([2.0]), 0.1)
    assert parameters[0] == pytest.approx(4.9, abs=1e-12)
    adam.step(np.array([-1.0]), 0.1)
    assert adam.mean[0] == pytest.approx(0.08, abs=1e-12)
    assert adam.square[0] == pytest.approx(0.004996, abs=1e-12)
    assert parameters[0] == pytest.approx(4.9 - 0.1 * (0.08 / 0.19) / math.sqrt(0.004996 / 0.001999), abs=1e-12)
    assert adam.steps == 2


def test_epsilon_and_decay_by_hand():
    # The first step with gradient g is rate · g / (|g| + eps), after the parameter shrank by rate · decay: 5 · (1 - 0.1 · 0.5) = 4.75.
    parameters = np.array([5.0])
    Adam(parameters, eps=3.0, weight_decay=0.5).step(np.array([2.0]), 0.1)
    assert parameters[0] == pytest.approx(4.75 - 0.1 * 2 / 5, abs=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 1e-12)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("eps", [1e-5, 1e-8])
def test_fifty_steps_as_torch_takes_them(dtype, tolerance, decay, eps):
    rng = np.random.default_rng(0)
    parameters = rng.normal(size=20).astype(dtype)
    theirs = torch.from_numpy(parameters.copy()).requires_grad_()
    kind = torch.optim.AdamW if decay else torch.optim.Adam
    optimizer = kind([theirs], lr=1e-2, eps=eps, weight_decay=decay)
    ours = Adam(parameters, eps=eps, weight_decay=decay)
    for step in range(50):
        gradient = (rng.normal(size=20) * 10.0 ** rng.integers(-6, 3, 20)).astype(dtype)
        gradient[0] = 0  # a parameter that nothing pulls at
        before = gradient.copy()
        rate = 1e-2 * (1 - step / 60)  # as a schedule would
        optimizer.param_groups[0]["lr"] = rate
        theirs.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        ours.step(gradient, rate)
        np.testing.assert_array_equal(gradient, before)
        np.testing.assert_allclose(parameters, theirs.detach().numpy(), rtol=0, atol=tolerance)
    assert parameters.dtype == ours.mean.dtype == ours.square.dtype == dtype
    state = optimizer.state[theirs]
    np.testing.assert_allclose(ours.mean, state["exp_avg"].numpy(), rtol=10 * tolerance, atol=tolerance)
    np.testing.assert_allclose(ours.square, state["exp_avg_sq"].numpy(), rtol=10 * tolerance, atol=tolerance)
    assert ours.steps == 50


def test_scale_is_the_gradient_scaled():
    rng = np.random.default_rng(1)
    one, other = rng.normal(size=(1, 6)).repeat(2, 0)
    scaled, plain = Adam(one, eps=1e-5, weight_decay=0.0), Adam(other, eps=1e-5, weight_decay=0.0)
    for _ in range(5):
        gradient, scale = rng.normal(size=6), float(rng.uniform(0.01, 1))
        scaled.step(gradient, 0.1, scale=scale)
        plain.step(gradient * scale, 0.1)
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-14)
        np.testing.assert_allclose(scaled.square, plain.square, rtol=1e-13)


def test_a_rate_of_0_moves_the_moments_alone():
    parameters = np.ones(3)
    adam = Adam(parameters, eps=1e-5, weight_decay=0.3)
    adam.step(np.full(3, 2.0), 0.0)
    np.testing.assert_array_equal(parameters, 1.0)
    np.testing.assert_allclose(adam.mean, 0.2)
