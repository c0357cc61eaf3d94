"""The torch loss: gradients by hand, and where numbers are far out."""

import numpy as np
import torch
from gymnasium import spaces

from doubles.learners import TORCH
from inchworm.backends.torch.loss import TERMS, normalize, ppo_loss
from inchworm.core.types import Evaluation, LossCoefficients, Minibatch


def test_clipping_cuts_the_gradient_and_only_there():
    # A ratio of e² with A > 0 is flat; with A < 0, or at e^0.1, the gradient of -r A with respect to log r is -r A.
    log_probs = torch.tensor([[2.0, 2.0, 0.1]], dtype=torch.float64, requires_grad=True)
    row = torch.zeros(1, 3, dtype=torch.float64)
    names = ("observations", "actions", "log_probs", "returns", "values")
    advantages = torch.tensor([[1.0, -1.0, 1.0]], dtype=torch.float64)
    minibatch = Minibatch(**dict.fromkeys(names, row), advantages=advantages, valid=row == 0, episode_starts=row != 0)
    evaluation = Evaluation(log_probs, row, row, torch.ones(()))
    terms = ppo_loss(evaluation, minibatch, LossCoefficients(0.2, 0.5, 0.0, False), torch.tensor(3))
    assert tuple(terms) == TERMS
    assert not terms["approx_kl"].requires_grad  # metrics carry no gradient
    assert not terms["clip_fraction"].requires_grad
    terms["loss"].backward()
    np.testing.assert_allclose(log_probs.grad.numpy(), [[0, np.exp(2) / 3, -np.exp(0.1) / 3]], rtol=1e-12)


def test_saturated_tanh_actions_have_finite_gradients():
    policy = TORCH.policy(action_space=spaces.Box(-1, 1, (2,)), action_bounds="tanh")
    row = torch.zeros(1, 16)
    given = dict.fromkeys(("log_probs", "advantages", "returns", "values"), row)
    actions = torch.full((1, 16, 2), 50.0)  # far out, where tanh has saturated
    evaluation = policy.evaluate(
        Minibatch(observations=torch.randn(1, 16, 3), actions=actions, **given, valid=row == 0, episode_starts=row != 0)
    )
    assert torch.isfinite(evaluation.log_probs).all()
    (evaluation.log_probs.sum() + evaluation.entropy.sum()).backward()
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None:
            assert torch.isfinite(parameter.grad).all(), name


def test_several_minibatches_are_normalised_at_once_and_each_for_itself():
    # [L, minibatches, N]: 1, 3 | 10, 30 | 7 alone, whose neighbour is padding.
    advantages = torch.tensor([[[1.0, 3.0], [10.0, 30.0], [7.0, 1e9]]])
    valid = torch.tensor([[[True, True], [True, True], [True, False]]])
    found = normalize(advantages, valid, dims=(0, 2))
    half = 0.5**0.5  # two samples a distance d apart: mean in the middle, std d / sqrt(2)
    torch.testing.assert_close(found[0, :2], torch.tensor([[-half, half], [-half, half]]))
    assert found[0, 2, 0] == 7.0
