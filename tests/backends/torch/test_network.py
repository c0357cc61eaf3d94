"""The built-in network: images in any memory layout, split or scaled, and arrays as tensors."""

import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces

from inchworm.backends.torch import network as module
from inchworm.backends.torch.network import SpecNetwork, channels_together, to_tensor
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import PolicyConfig
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.fake import create_fake_rollout

FILTERS = ((4, 4, 2), (5, 3, 1))
SHAPES = {"channels first": (3, 14, 12), "channels last": (14, 12, 3), "one channel": (1, 14, 12), "one channel, last": (14, 12, 1)}


def make_policy(shape, filters=FILTERS, high=255, dtype=np.uint8):
    config = PolicyConfig(kind="cnn", cnn_filters=filters, cnn_features=6, hidden_sizes=())
    return TorchPolicy(PolicySpec(spaces.Box(0, high, shape, dtype), spaces.Discrete(3), config))


def draw(shape, count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (count, *shape)).astype(np.uint8))


def by_hand(network, images, scale, filters=FILTERS):
    """Scaled numbers, channels in front, convolutions with relu, a dense layer with relu, then both heads."""
    x = images.float() * scale
    x = x if images.shape[1] <= images.shape[3] else x.permute(0, 3, 1, 2).contiguous()
    stack = network.cnn["observation"]
    for index, (_, _, stride) in enumerate(filters):
        x = torch.relu(torch.nn.functional.conv2d(x, stack[str(index)].weight, stack[str(index)].bias, stride))
    x = torch.relu(x.flatten(1) @ stack["head"].weight.T + stack["head"].bias)
    heads = [x @ one["head"].weight.T + one["head"].bias for one in (network.actor, network.critic)]
    return heads[0], heads[1][:, 0]


@pytest.mark.parametrize("filters", [FILTERS, ()], ids=["convolutions", "none"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_numbers_and_gradients_are_those_of_plain_convolutions(shape, filters):
    network = make_policy(shape, filters).network
    images = draw(shape, 5)
    expected = by_hand(network, images, 1 / 255, filters)
    gradients = torch.autograd.grad(sum(part.square().sum() for part in expected), list(network.parameters()))
    found = network(images)  # with gradients
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(sum(part.square().sum() for part in found), list(network.parameters())), gradients, rtol=1e-4, atol=1e-5
    )
    with torch.no_grad():
        torch.testing.assert_close(network(images), tuple(part.detach() for part in expected), rtol=1e-5, atol=1e-6)


def test_floats_are_taken_as_they_are_and_not_written_to():
    policy = make_policy((3, 14, 12), high=1.0, dtype=np.float32)
    images = torch.rand(4, 3, 14, 12, generator=torch.Generator().manual_seed(0)) - 0.5
    before = images.clone()
    expected = by_hand(policy.network, images, 1.0)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            torch.testing.assert_close(policy.network(images), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(images, before)


@pytest.mark.parametrize("shape", [(1, 6, 5), (3, 6, 5)])
def test_channels_lie_together(shape):
    images = draw(shape, 2)
    found = channels_together(images)
    assert torch.equal(found, images)
    assert found.dtype == torch.uint8
    channels, height, width = shape
    assert found.stride() == (channels * height * width, 1, width * channels, channels)
    already = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert channels_together(already).data_ptr() == already.data_ptr() or channels == 1  # with one channel both layouts are the same


def test_images_are_read_a_few_at_once_without_gradients(monkeypatch):
    policy = make_policy((3, 14, 12))
    images, sizes = draw((3, 14, 12), 7), []
    whole = policy.value(images[None].numpy())
    monkeypatch.setattr(module, "IMAGES_AT_ONCE", 3)
    policy.network.cnn["observation"]["0"].register_forward_hook(lambda _layer, inputs, _output: sizes.append(len(inputs[0])))
    torch.testing.assert_close(policy.value(images[None].numpy()), whole, rtol=1e-5, atol=1e-6)
    assert sizes == [3, 3, 1]
    policy.network(images)
    assert sizes == [3, 3, 1, 7]  # with gradients all together


def test_an_image_next_to_numbers():
    space = spaces.Dict({"camera": spaces.Box(0, 255, (9, 8, 1), np.uint8), "speed": spaces.Box(-1, 1, (2,))})
    policy = TorchPolicy(
        PolicySpec(space, spaces.Discrete(2), PolicyConfig(kind="cnn", cnn_filters=((4, 3, 2),), cnn_features=6, hidden_sizes=(7,)))
    )
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (1, 2, 9, 8, 1)).astype(np.uint8)
    speed = rng.normal(size=(1, 2, 2)).astype(np.float32)
    base = policy.value({"camera": image, "speed": speed})
    assert (policy.value({"camera": 255 - image, "speed": speed}) != base).all()  # both are seen
    assert (policy.value({"camera": image, "speed": -speed}) != base).all()


def test_building_a_network_draws_no_random_numbers():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    SpecNetwork(make_policy((3, 14, 12)).spec)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_tensors_of_read_only_memory_are_copies():
    rollout = create_fake_rollout(spaces.Box(-1, 1, (2,)), spaces.Discrete(3), 3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where a tensor would write to read-only memory
        tensor = to_tensor(rollout.rewards, "cpu")
    before = rollout.rewards.copy()
    tensor.zero_()
    np.testing.assert_array_equal(rollout.rewards, before)
    assert to_tensor(np.array([2**40], np.uint64), "cpu").dtype == torch.int64  # torch supports few operations on unsigned integers
    assert to_tensor(tensor, "cpu") is tensor
