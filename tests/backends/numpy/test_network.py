"""Backpropagation compared with finite differences for every parameter, and the forward pass with one written plainly."""

import numpy as np
import pytest
from gymnasium import spaces

from doubles.learners import ACTIVATION_FUNCTIONS, plain_outputs
from inchworm.backends.numpy.network import ACTIVATIONS, KEPT_PASSES, FlatNetwork
from inchworm.config.sections import PolicyConfig
from inchworm.policy.spec import PolicySpec

STEP = 1e-5


def spec_of(hidden_sizes=(5,), activation="tanh", shared_trunk=False, action_space=None):
    config = PolicyConfig(hidden_sizes=hidden_sizes, activation=activation, shared_trunk=shared_trunk)
    return PolicySpec(spaces.Box(-1, 1, (3,)), action_space or spaces.Discrete(4), config)


def network_of(spec, seed=0, dtype=np.float64):
    network = FlatNetwork(spec, np.dtype(dtype))
    network.parameters[:] = np.random.default_rng(seed).normal(0, 0.7, network.parameters.shape)
    return network


@pytest.mark.parametrize("activation", list(ACTIVATION_FUNCTIONS))
@pytest.mark.parametrize("shared_trunk", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("hidden_sizes", [(), (5,), (4, 3, 5)], ids=["0", "1", "3"])
def test_every_parameters_slope_is_the_difference_it_makes(activation, shared_trunk, hidden_sizes):
    # L = Σ outputs · A + Σ values · b, for random A and b: its slope by any parameter is (L(w + h) - L(w - h)) / 2h.
    spec = spec_of(hidden_sizes, activation, shared_trunk)
    network, rng = network_of(spec), np.random.default_rng(1)
    inputs, by_outputs, by_values = rng.normal(size=(6, 3)), rng.normal(size=(4, 6)), rng.normal(size=6)
    both = network.over(6)
    outputs, values = both.forward(inputs)
    expected = plain_outputs(spec, network.weights, inputs)
    np.testing.assert_allclose(outputs.T, expected[0], rtol=0, atol=1e-13)
    np.testing.assert_allclose(values, expected[1], rtol=0, atol=1e-13)
    both.backward(by_outputs, by_values)
    for index in range(len(network.parameters)):
        sides = []
        for step in (STEP, -STEP):
            moved = network.parameters.copy()
            moved[index] += step
            there = plain_outputs(spec, network.views(moved), inputs)
            sides.append((there[0].T * by_outputs).sum() + (there[1] * by_values).sum())
        assert network.gradient[index] == pytest.approx((sides[0] - sides[1]) / (2 * STEP), abs=1e-8), index


@pytest.mark.parametrize("name", list(ACTIVATION_FUNCTIONS))
def test_activations_far_from_0_by_hand(name):
    # Far to the right: tanh is 1 and flat, all others are x with slope 1. Far to the left they are -1, 0, -1, -0.5 and 0, with slope 0
    # but for leaky relu's 0.01. At 0 those with a corner take the slope from the left, as torch does.
    expected = {
        "tanh": ([-1, 0, 1], [0, 1, 0]),
        "relu": ([0, 0, 50], [0, 0, 1]),
        "elu": ([-1, 0, 50], [0, 1, 1]),
        "leaky_relu": ([-0.5, 0, 50], [0.01, 0.01, 1]),
        "silu": ([0, 0, 50], [0, 0.5, 1]),
    }[name]
    for dtype in (np.float32, np.float64):
        z = np.array([-50.0, 0.0, 50.0], dtype)
        given = z.copy()
        y = np.empty_like(z) if ACTIVATIONS[name].keeps_input else z
        slope = np.empty_like(z)
        ACTIVATIONS[name].apply(z, y)
        ACTIVATIONS[name].derivative(z, y, slope)
        np.testing.assert_allclose(y, expected[0], atol=1e-6)
        np.testing.assert_allclose(slope, expected[1], atol=1e-6)
        assert (y is z) == (not ACTIVATIONS[name].keeps_input)
        if ACTIVATIONS[name].keeps_input:
            np.testing.assert_array_equal(z, given)


def test_parameters_and_gradients_are_views_of_one_vector_each():
    spec = spec_of((5,), action_space=spaces.Box(-1, 1, (2,)))
    network = network_of(spec)
    assert list(network.weights) == list(network.gradients) == list(spec.layers)
    for named, vector in ((network.weights, network.parameters), (network.gradients, network.gradient)):
        assert sum(view.size for view in named.values()) == vector.size
        for name, view in named.items():
            assert view.shape == spec.layers[name]
            assert np.shares_memory(view, vector)
        np.testing.assert_array_equal(np.concatenate([view.reshape(-1) for view in named.values()]), vector)
    given = {name: np.full(shape, index, np.float32) for index, (name, shape) in enumerate(spec.layers.items())}
    network.load(given | {"policy_version": np.array(3)})
    for name, array in given.items():
        np.testing.assert_array_equal(network.weights[name], array)
        assert not np.shares_memory(network.weights[name], array)


def test_a_pass_is_made_once_for_each_number_of_rows():
    network = network_of(spec_of((4, 4), "silu"))
    first = network.over(3)
    assert network.over(3) is first
    for rows in range(4, 4 + KEPT_PASSES):
        assert network.over(rows) is not first
    assert network.over(3) is not first  # the oldest made room
    assert len(network._passes) == KEPT_PASSES
    # Arrays are used again, and other rows in between change no bit.
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 3, 3))
    gradients = rng.normal(size=(4, 3)), rng.normal(size=3)
    results = []
    for between in (False, True):
        if between:
            network.over(3).forward(second)
            network.over(3).backward(*gradients)
        outputs, values = network.over(3).forward(first)
        network.over(3).backward(*gradients)
        results.append((outputs.copy(), values.copy(), network.gradient.copy()))
    for one, other in zip(*results):
        np.testing.assert_array_equal(one, other)
