"""Differentiable log-probs and entropies (step 8 of 9), formula for formula as in `backends/numpy/distributions`."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from inchworm.backends.numpy.distributions import HALF_LOG_2PI, MASKED_LOGIT, QUADRATURE_NODES, QUADRATURE_WEIGHTS
from inchworm.policy.layout import ActionLayout


def log_prob_and_entropy(
    layout: ActionLayout, outputs: Tensor, log_std: Tensor, mask: Tensor | None, choices: Tensor, gaussians: Tensor
) -> tuple[Tensor, Tensor]:
    """log pi(action) and entropy, each [...], for outputs [..., C + D]; a mask is [..., C], or [..., C + D] if agents lack dimensions."""
    log_probs, entropies = [], []
    logits = outputs[..., : layout.num_logits]
    has = None if mask is None or mask.shape[-1] == layout.num_logits else mask[..., layout.num_logits :]  # [..., D]
    if mask is not None and layout.num_logits:
        logits = torch.where(mask[..., : layout.num_logits], logits, MASKED_LOGIT)
    for index, group in enumerate(layout.groups):
        log_p = torch.log_softmax(logits[..., group], dim=-1)
        # nll_loss gathers the log-prob of each choice; its backward pass is faster than that of `gather`.
        picked = torch.nn.functional.nll_loss(log_p.reshape(-1, log_p.shape[-1]), choices[..., index].reshape(-1), reduction="none")
        log_probs.append(-picked.reshape(choices.shape[:-1]))
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    if layout.num_gaussians:
        means, values = outputs[..., layout.num_logits :], gaussians.to(outputs.dtype)
        standard = (values - means) * torch.exp(-log_std)
        log_prob = _sum_own(-0.5 * standard * standard - log_std - HALF_LOG_2PI, has)
        entropy = _sum_own(log_std + (HALF_LOG_2PI + 0.5), has).expand(log_prob.shape)
        if layout.bounds == "tanh":
            log_prob = log_prob - _sum_own(log_tanh_slope(values), has)
            nodes, weights = (
                torch.as_tensor(array, dtype=means.dtype, device=means.device) for array in (QUADRATURE_NODES, QUADRATURE_WEIGHTS)
            )
            points = means.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * nodes  # [..., D, nodes]
            bent = log_tanh_slope(points) * weights
            entropy = entropy + (bent.sum((-2, -1)) if has is None else _sum_own(bent.sum(-1), has))
        log_probs.append(log_prob)
        entropies.append(entropy)
    return _total(log_probs), _total(entropies)


def sample(
    layout: ActionLayout, outputs: Tensor, log_std: Tensor, mask: Tensor | None, uniforms: Tensor, normals: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Choices [B, G] and Gaussian values [B, D] from outputs [B, C + D] and random numbers [B, G] and [B, D], with log-probs [B]."""
    logits = outputs[:, : layout.num_logits]
    if mask is not None and layout.num_logits:
        logits = torch.where(mask[:, : layout.num_logits], logits, MASKED_LOGIT)
    choices, log_probs = [], []
    for index, group in enumerate(layout.groups):
        log_p = torch.log_softmax(logits[:, group].t(), 0)  # [K, B]: over few choices of many lanes, in a third of the time
        cumulative = log_p.exp().cumsum(0)
        # Inverse of the cumulative distribution: a masked choice adds nothing to it and is never the first one above.
        choice = (cumulative[:-1] <= uniforms[:, index] * cumulative[-1]).sum(0)
        choices.append(choice[:, None])
        log_probs.append(log_p.gather(0, choice[None])[0])
    means = outputs[:, layout.num_logits :]
    gaussians = means
    if layout.num_gaussians:
        gaussians = means + log_std.exp() * normals
        standard = (gaussians - means) * torch.exp(-log_std)
        log_prob = (-0.5 * standard * standard - log_std - HALF_LOG_2PI).sum(-1)
        log_probs.append(log_prob - log_tanh_slope(gaussians).sum(-1) if layout.bounds == "tanh" else log_prob)
    chosen = (
        choices[0] if len(choices) == 1 else torch.cat(choices, -1) if choices else outputs.new_empty((len(outputs), 0), dtype=torch.int64)
    )
    return chosen, gaussians, _total(log_probs)


def to_env(layout: ActionLayout, gaussians: Tensor) -> Tensor:
    """Gaussian values [B, D] as the environment gets them: clipped into the bounds, or squashed into them."""
    low, high = (torch.from_numpy(np.array(bound)).to(gaussians.device) for bound in (layout.low, layout.high))
    if layout.bounds == "tanh":
        gaussians = low + (torch.tanh(gaussians) + 1) * (0.5 * (high - low))
    return torch.minimum(torch.maximum(gaussians, low), high)


def _sum_own(terms: Tensor, has: Tensor | None) -> Tensor:
    """The sum over dimensions [..., D], of those that the agent has."""
    return (terms if has is None else torch.where(has, terms, 0.0)).sum(-1)


def _total(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def log_tanh_slope(x: Tensor) -> Tensor:
    """log(1 - tanh(x)²), exact where tanh has saturated."""
    return 2 * (math.log(2) - x - torch.nn.functional.softplus(-2 * x, threshold=40.0))  # the default threshold is too coarse for float64
