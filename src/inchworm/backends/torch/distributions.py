"""Serves step 8 of 9: differentiable log-probs and entropies, formula for formula as in `backends/numpy/distributions`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inchworm.backends.numpy.distributions import HALF_LOG_2PI, MASKED_LOGIT, QUADRATURE_NODES, QUADRATURE_WEIGHTS
from inchworm.policy.layout import ActionLayout


def log_prob_and_entropy(
    layout: ActionLayout, outputs: Tensor, log_std: Tensor, mask: Tensor | None, choices: Tensor, gaussians: Tensor
) -> tuple[Tensor, Tensor]:
    """log pi(action) and entropy, each [...], for outputs [..., C + D]."""
    log_probs, entropies = [], []
    logits = outputs[..., : layout.num_logits]
    if mask is not None:
        logits = torch.where(mask, logits, MASKED_LOGIT)
    for index, group in enumerate(layout.groups):
        log_p = torch.log_softmax(logits[..., group], dim=-1)
        log_probs.append(_chosen(log_p, choices[..., index]))
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    if layout.num_gaussians:
        log_prob, entropy = _gaussian(layout, outputs[..., layout.num_logits :], log_std, gaussians)
        log_probs.append(log_prob)
        entropies.append(entropy)
    return _total(log_probs), _total(entropies)


def _chosen(log_p: Tensor, choices: Tensor) -> Tensor:
    """log_p [..., n] at choices [...]. What other people call a loss is this gather with a fast way back; that of `gather` is slow."""
    picked = torch.nn.functional.nll_loss(log_p.reshape(-1, log_p.shape[-1]), choices.reshape(-1), reduction="none")
    return -picked.reshape(choices.shape)


def _total(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _gaussian(layout: ActionLayout, means: Tensor, log_std: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    values = values.to(means.dtype)
    standard = (values - means) * torch.exp(-log_std)
    log_prob = (-0.5 * standard * standard - log_std - HALF_LOG_2PI).sum(-1)
    entropy = (log_std + (HALF_LOG_2PI + 0.5)).sum(-1).expand(log_prob.shape)
    if layout.bounds == "tanh":
        log_prob = log_prob - log_tanh_slope(values).sum(-1)
        nodes, weights = (
            torch.as_tensor(array, dtype=means.dtype, device=means.device) for array in (QUADRATURE_NODES, QUADRATURE_WEIGHTS)
        )
        points = means.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * nodes  # [..., D, nodes]
        entropy = entropy + (log_tanh_slope(points) * weights).sum((-2, -1))
    return log_prob, entropy


def log_tanh_slope(x: Tensor) -> Tensor:
    """log(1 - tanh(x)²), exact where tanh has saturated."""
    return 2 * (math.log(2) - x - torch.nn.functional.softplus(-2 * x, threshold=40.0))  # the default's cut is seen in float64
