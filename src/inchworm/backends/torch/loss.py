"""Step 8 of 9: PPO's loss, term by term, as derived in `backends/numpy/loss`; autograd derives its gradients.

Every term is a sum over valid samples divided by one count, so that splitting a minibatch changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inchworm.core.types import Evaluation, LossCoefficients, Minibatch

TERMS = ("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


def ppo_loss(evaluation: Evaluation, minibatch: Minibatch, coefficients: LossCoefficients, count: Tensor) -> dict[str, Tensor]:
    """All terms as scalars under their metric names; `loss` is the one to minimise.

    `count` is the number of valid samples of the whole minibatch, of which `minibatch` may be a part. The coefficients may be
    tensors; an entropy coefficient that is the number 0 leaves the entropy out of the gradient.
    """
    weight = (minibatch.valid.to(evaluation.values.dtype) / count.clamp(min=1)).flatten()  # [L · N]
    log_ratio = evaluation.log_probs - minibatch.log_probs
    ratio = log_ratio.exp()
    policy_loss = -weighted_sum(clipped_surrogate(ratio, minibatch.advantages, coefficients.clip_coef), weight)
    value_loss = weighted_sum(value_errors(evaluation, minibatch, coefficients), weight)
    entropy = weighted_sum(evaluation.entropy, weight)
    loss = policy_loss + coefficients.vf_coef * value_loss
    ent_coef: Any = coefficients.ent_coef
    if isinstance(ent_coef, Tensor) or ent_coef:
        loss = loss - ent_coef * entropy
    with torch.no_grad():
        change = ratio - 1
        approx_kl = weighted_sum(change - log_ratio, weight)
        clip_fraction = weighted_sum(change.abs() > coefficients.clip_coef, weight)
    return {
        "loss": loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": approx_kl,  # the k3 estimator: unbiased, never negative (Schulman 2020, "Approximating KL divergence")
        "clip_fraction": clip_fraction,
    }


def weighted_sum(samples: Tensor, weight: Tensor) -> Tensor:
    """The sum of samples [L, N] with weights [L · N], as one operation."""
    return torch.dot(samples.flatten().to(weight.dtype), weight)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_coef: Any) -> Tensor:
    """The objective to maximise, per sample (Schulman et al. 2017, equation 7): the worse of the ratio and its clipped self."""
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages)


def value_errors(evaluation: Evaluation, minibatch: Minibatch, coefficients: LossCoefficients) -> Tensor:
    """½ ((V - R) / scale)² per sample; with clipping, the worse of that and of V held within vf_clip_coef · scale of the old V."""
    scale = evaluation.value_scale
    errors = ((evaluation.values - minibatch.returns) / scale).square()
    if coefficients.clip_vloss:
        reach = coefficients.vf_clip_coef * scale
        held = minibatch.values + (evaluation.values - minibatch.values).clamp(-reach, reach)
        errors = torch.maximum(errors, ((held - minibatch.returns) / scale).square())
    halves: Tensor = 0.5 * errors
    return halves


def normalize(
    advantages: Tensor, valid: Tensor, dims: tuple[int, ...] | None = None, total: Callable[[Tensor], Tensor] = lambda part: part
) -> Tensor:
    """Scale the valid samples to mean 0 and standard deviation 1 (n - 1); fewer than two have no deviation and stay as they are.

    The statistics are taken over `dims`, or over all, and over all processes whose parts `total` adds up. In float64: equal advantages
    then have a deviation of exactly 0, and the square of 1e30 is finite.
    """
    over = tuple(range(valid.ndim)) if dims is None else dims
    count = total(valid.sum(over, keepdim=True))
    wide = torch.where(valid, advantages, 0).double()
    centered = (wide - total(wide.sum(over, keepdim=True)) / count.clamp(min=1)) * valid
    std = (total(centered.square().sum(over, keepdim=True)) / (count - 1).clamp(min=1)).sqrt()
    return torch.where(count > 1, (centered / (std + 1e-8)).to(advantages.dtype), advantages)
