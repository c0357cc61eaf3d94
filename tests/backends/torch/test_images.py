"""Image policies: the same numbers however they are laid out in memory, split or scaled, learning or acting."""

from __future__ import annotations

import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces

from inchworm.backends.torch import network as module
from inchworm.backends.torch import policy as rows_module
from inchworm.backends.torch.learner import PPOOptimizer
from inchworm.backends.torch.network import Network, channels_together
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import PolicyConfig, PPOConfig
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
    slopes = torch.autograd.grad(sum(part.square().sum() for part in expected), list(network.parameters()))
    found = network(images)  # with gradients
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(sum(part.square().sum() for part in found), list(network.parameters())), slopes, rtol=1e-4, atol=1e-5
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
    assert channels_together(already).data_ptr() == already.data_ptr() or channels == 1  # of one channel nobody can tell


def test_images_are_read_a_few_at_once_where_nobody_learns(monkeypatch):
    policy = make_policy((3, 14, 12))
    images, sizes = draw((3, 14, 12), 7), []
    whole = policy.value(images[None].numpy())
    monkeypatch.setattr(module, "IMAGES_AT_ONCE", 3)
    policy.network.cnn["observation"]["0"].register_forward_hook(lambda _layer, inputs, _output: sizes.append(len(inputs[0])))
    torch.testing.assert_close(policy.value(images[None].numpy()), whole, rtol=1e-5, atol=1e-6)
    assert sizes == [3, 3, 1]
    policy.network(images)
    assert sizes == [3, 3, 1, 7]  # with gradients all together


class Counting(Network):
    """Remembers how many rows came at once."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def values(self, observations):
        leaves = optree.tree_leaves(observations)
        self.rows.append(len(leaves[0]))
        return sum(leaf.flatten(1).float().sum(1) for leaf in leaves)


def test_the_critic_reads_fewer_rows_at_once_the_larger_they_are(monkeypatch):
    monkeypatch.setattr(rows_module, "VALUE_CHUNK", 4)
    monkeypatch.setattr(rows_module, "VALUE_NUMBERS", 60)
    for size, expected in ((2, [4, 4, 2]), (20, [3, 3, 3, 1]), (100, [1] * 10)):  # 60 // 2 > 4; 60 // 20 = 3; never none
        spec = PolicySpec(spaces.Box(0, 9, (size,)), spaces.Discrete(2), PolicyConfig())
        policy = TorchPolicy(spec, network=Counting())
        values = policy.value(np.ones((5, 2, size), np.float32))
        assert policy.network.rows == expected
        assert torch.equal(values, torch.full((5, 2), float(size)))


def test_learning_from_images_twice_gives_the_same_bits():
    config = PPOConfig(minibatch_size=16, update_epochs=2)
    rollout = create_fake_rollout(spaces.Box(0, 255, (3, 14, 12), np.uint8), spaces.Discrete(3), 16, 4)
    results = []
    for _ in range(2):
        policy = make_policy((3, 14, 12))
        PPOOptimizer(policy, config, device="cpu", seed=1).update(rollout)
        results.append(policy.get_weights())
    assert all(np.array_equal(results[0][name], results[1][name]) for name in results[0])
    assert not np.array_equal(results[0]["cnn.observation.0.weight"], make_policy((3, 14, 12)).get_weights()["cnn.observation.0.weight"])


def test_acting_says_what_learning_says():
    policy = make_policy((3, 14, 12))
    images = draw((3, 14, 12), 8)
    step = policy.act(images.numpy(), (), np.ones(8, bool), np.random.default_rng(0))
    with torch.enable_grad():
        outputs, _ = policy.network(images)
    log_probs = torch.log_softmax(outputs, -1)[torch.arange(8), torch.from_numpy(np.array(step.actions)).long()]
    np.testing.assert_allclose(step.log_probs, log_probs.detach().numpy(), rtol=1e-5, atol=1e-6)
