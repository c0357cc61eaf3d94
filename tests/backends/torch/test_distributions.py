"""The torch distributions: gradients that stay finite and are 0 where masked."""

import torch
from gymnasium import spaces

from inchworm.backends.torch.policy import log_prob_and_entropy, log_tanh_slope
from inchworm.policy.layout import action_layout


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
