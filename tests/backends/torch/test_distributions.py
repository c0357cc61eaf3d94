"""The torch distributions: other libraries' densities, and gradients that stay finite and are 0 where masked."""

from __future__ import annotations

import torch
from gymnasium import spaces

from inchworm.backends.torch.distributions import log_prob_and_entropy, log_tanh_slope
from inchworm.policy.layout import action_layout


def test_against_torch_distributions():
    torch.manual_seed(0)
    layout = action_layout(spaces.Tuple([spaces.Discrete(4), spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (2,))]), "clip")
    outputs, log_std = torch.randn(5, layout.num_outputs, dtype=torch.float64), torch.tensor([-0.3, 0.2], dtype=torch.float64)
    choices, gaussians = torch.stack([torch.randint(n, (5,)) for n in (4, 2, 3)], -1), torch.randn(5, 2, dtype=torch.float64)
    parts = [torch.distributions.Categorical(logits=outputs[:, group]) for group in layout.groups]
    normal = torch.distributions.Normal(outputs[:, 9:], log_std.exp())
    log_p, entropy = log_prob_and_entropy(layout, outputs, log_std, None, choices, gaussians)
    expected = sum(part.log_prob(choices[:, index]) for index, part in enumerate(parts)) + normal.log_prob(gaussians).sum(-1)
    torch.testing.assert_close(log_p, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, sum(part.entropy() for part in parts) + normal.entropy().sum(-1), rtol=0, atol=1e-12)


def test_tanh_against_a_transformed_distribution():
    torch.manual_seed(0)
    layout = action_layout(spaces.Box(-1, 1, (3,)), "tanh")
    means, log_std = torch.randn(6, 3, dtype=torch.float64), torch.tensor([-0.5, 0.0, 0.3], dtype=torch.float64)
    normal = torch.distributions.Normal(means, log_std.exp())
    squashed = torch.distributions.TransformedDistribution(normal, torch.distributions.TanhTransform())
    u = normal.sample()
    log_p, _ = log_prob_and_entropy(layout, means, log_std, None, torch.zeros(6, 0, dtype=torch.long), u)
    torch.testing.assert_close(log_p, squashed.log_prob(u.tanh()).sum(-1), rtol=0, atol=1e-9)


def test_the_slope_of_tanh_has_finite_gradients_everywhere():
    x = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4], requires_grad=True)
    log_tanh_slope(x).sum().backward()
    # d/dx log(1 - tanh²x) = -2 tanh x
    torch.testing.assert_close(x.grad, -2 * torch.tanh(x.detach()))


def test_masked_logits_get_no_gradient():
    layout = action_layout(spaces.MultiDiscrete([3, 2]), "clip")
    outputs = torch.randn(4, 5, requires_grad=True)
    mask = torch.tensor([[True, False, True, False, True]] * 3 + [[False, True, False, True, False]])  # the last row: one legal choice each
    choices = torch.tensor([[0, 1], [2, 1], [0, 1], [1, 0]])
    log_p, entropy = log_prob_and_entropy(layout, outputs, torch.zeros(0), mask, choices, torch.zeros(4, 0))
    (log_p.sum() + entropy.sum()).backward()
    assert torch.isfinite(outputs.grad).all()
    assert (outputs.grad[~mask] == 0).all()
    assert (outputs.grad[:3, [0, 2]] != 0).all()
    assert (outputs.grad[3] == 0).all()  # nothing to choose, nothing to learn
    assert log_p[3] == 0
    assert entropy[3] == 0
