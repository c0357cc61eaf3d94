"""The torch policy as people use it: acting, predicting, images, chunks, devices of its weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.backends.torch import policy as module
from inchworm.backends.torch.network import SpecNetwork
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import PolicyConfig
from inchworm.core.errors import InchwormError
from inchworm.core.protocols import Policy
from inchworm.policy.spec import PolicySpec

CNN = PolicyConfig(kind="cnn", cnn_filters=((4, 3, 2), (5, 2, 1)), cnn_features=6, hidden_sizes=(7,))


def test_it_keeps_the_policy_contract(make_policy):
    policy = make_policy()
    assert isinstance(policy, Policy)
    assert policy.initial_state(4) == ()
    assert policy.device == torch.device("cpu")


def test_predict(make_policy):
    policy = make_policy(action_space=spaces.Discrete(3, start=2))
    action = policy.predict(np.zeros(3))
    assert type(action) is int
    assert action in (2, 3, 4)
    sampled = {policy.predict(np.zeros(3), deterministic=False, rng=np.random.default_rng(seed)) for seed in range(20)}
    assert sampled == {2, 3, 4}
    assert policy.predict(np.zeros(3), deterministic=False) in (2, 3, 4)


def test_values_do_not_depend_on_the_chunks_they_are_made_in(make_policy, monkeypatch):
    policy = make_policy()
    observations = np.random.default_rng(0).normal(size=(5, 7, 3)).astype(np.float32)
    whole = policy.value(observations)
    monkeypatch.setattr(module, "VALUE_CHUNK", 4)
    torch.testing.assert_close(policy.value(observations), whole, rtol=0, atol=1e-6)
    assert policy.value(np.zeros((0, 3, 3), np.float32)).shape == (0, 3)
    assert not policy.value(observations).requires_grad


@pytest.mark.parametrize("shape", [(3, 9, 8), (9, 8, 3)], ids=["channels first", "channels last"])
def test_images_channels_first_or_last(shape):
    spec = PolicySpec(spaces.Box(0, 255, shape, np.uint8), spaces.Discrete(2), CNN)
    policy = TorchPolicy(spec)
    images = np.random.default_rng(0).integers(0, 256, (4, *shape)).astype(np.uint8)
    found = policy.value(images[None])[0]
    # The same by hand: channels to the front, bytes to 0 … 1, two convolutions with relu, a dense layer with relu, the critic.
    x = torch.from_numpy(images if shape[0] == 3 else images.transpose(0, 3, 1, 2).copy()).float() / 255
    weights = {name: torch.from_numpy(value) for name, value in policy.get_weights().items() if value.dtype == np.float32}
    for index, stride in ((0, 2), (1, 1)):
        weight, bias = weights[f"cnn.observation.{index}.weight"], weights[f"cnn.observation.{index}.bias"]
        x = torch.relu(torch.nn.functional.conv2d(x, weight, bias, stride))
    x = torch.relu(x.flatten(1) @ weights["cnn.observation.head.weight"].T + weights["cnn.observation.head.bias"])
    x = torch.tanh(x @ weights["critic.0.weight"].T + weights["critic.0.bias"])
    expected = (x @ weights["critic.head.weight"].T + weights["critic.head.bias"])[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_an_image_beside_numbers():
    space = spaces.Dict({"camera": spaces.Box(0, 255, (9, 8, 1), np.uint8), "speed": spaces.Box(-1, 1, (2,))})
    policy = TorchPolicy(PolicySpec(space, spaces.Discrete(2), CNN))
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (1, 2, 9, 8, 1)).astype(np.uint8)
    speed = rng.normal(size=(1, 2, 2)).astype(np.float32)
    base = policy.value({"camera": image, "speed": speed})
    assert (policy.value({"camera": 255 - image, "speed": speed}) != base).all()  # both are seen
    assert (policy.value({"camera": image, "speed": -speed}) != base).all()


def test_the_mask_is_no_input_of_the_network(make_policy):
    space = spaces.Dict({"x": spaces.Box(-1, 1, (2,)), "action_mask": spaces.MultiBinary(3)})
    policy = make_policy(space)
    x = np.random.default_rng(0).normal(size=(1, 2, 2)).astype(np.float32)
    masks = [np.array([[[1, 1, 1], [1, 0, 0]]], np.int8), np.array([[[0, 0, 1], [0, 1, 1]]], np.int8)]
    values = [policy.value({"x": x, "action_mask": mask}) for mask in masks]
    torch.testing.assert_close(*values, rtol=0, atol=0)


def test_weights_go_to_numpy_and_back(make_policy):
    policy = make_policy(action_space=spaces.Box(-1, 1, (2,)), normalize_observations=True, normalize_values=True)
    twin = NumpyPolicy(policy.spec, policy.get_weights())
    back = TorchPolicy(policy.spec, twin.get_weights(), seed=5)
    for name, value in policy.get_weights().items():
        np.testing.assert_array_equal(back.get_weights()[name], value)
    with pytest.raises(InchwormError, match="missing"):
        back.set_weights({})


def test_building_a_network_draws_no_random_numbers(make_policy):
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    SpecNetwork(make_policy().spec)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_acting_draws_from_the_given_stream_only(make_policy):
    policy = make_policy()
    before = torch.random.get_rng_state()
    streams = [np.random.default_rng(1), np.random.default_rng(1)]
    steps = [policy.act(np.zeros((5, 3), np.float32), (), np.ones(5, bool), stream) for stream in streams]
    np.testing.assert_array_equal(steps[0].actions, steps[1].actions)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_log_std_is_bounded_under_tanh(make_policy):
    policy = make_policy(action_space=spaces.Box(-1, 1, (1,)), action_bounds="tanh", log_std_init=4.0)
    twin = NumpyPolicy(policy.spec, policy.get_weights())
    for one in (policy, twin):
        draws = one.act(np.zeros((4000, 3), np.float32), (), np.ones(4000, bool), np.random.default_rng(0)).actions
        assert draws.std() == pytest.approx(np.exp(2.0), rel=0.05)  # not e^4
