"""The torch loss: gradients by hand, and where numbers are far out."""

import numpy as np
import torch

from inchworm.backends.torch.loss import TERMS, ppo_loss
from inchworm.core.types import Evaluation, LossCoefficients, Minibatch


def test_clipping_cuts_the_gradient_and_only_there():
    # A ratio of e² with A > 0 is flat; with A < 0, or at e^0.1, the gradient of -r A with respect to log r is -r A.
    log_probs = torch.tensor([[2.0, 2.0, 0.1]], dtype=torch.float64, requires_grad=True)
    row = torch.zeros(1, 3, dtype=torch.float64)
    names = ("observations", "actions", "log_probs", "returns", "values")
    advantages = torch.tensor([[1.0, -1.0, 1.0]], dtype=torch.float64)
    minibatch = Minibatch(**dict.fromkeys(names, row), advantages=advantages, valid=row == 0, episode_starts=row != 0)
    evaluation = Evaluation(log_probs, row, row, torch.ones(()))
    terms = ppo_loss(evaluation, minibatch, LossCoefficients(0.2, 0.5, 0.0, False, 0.2), torch.tensor(3))
    assert tuple(terms) == TERMS
    assert not terms["approx_kl"].requires_grad  # metrics carry no gradient
    assert not terms["clip_fraction"].requires_grad
    terms["loss"].backward()
    np.testing.assert_allclose(log_probs.grad.numpy(), [[0, np.exp(2) / 3, -np.exp(0.1) / 3]], rtol=1e-12)
