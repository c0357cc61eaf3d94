"""Step 8 of 9: PPO's loss, term by term, as derived in `backends/numpy/loss`; JAX derives its gradients.

Every term is a sum over valid samples divided by one count, so that splitting a minibatch changes nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from inchworm.core.types import Evaluation, LossCoefficients

TERMS = ("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


def ppo_loss(evaluation: Evaluation, minibatch: Any, coefficients: LossCoefficients, count: Any) -> dict[str, Array]:
    """All terms as scalars under their metric names; `loss` is the one to minimise.

    `minibatch` has log_probs, advantages, returns, values and valid, all shaped as the evaluation. `count` is the number of valid
    samples of the whole minibatch, of which `minibatch` may be a part. The coefficients may be arrays; an entropy coefficient that is
    the number 0 leaves the entropy out of the gradient.
    """
    weight = minibatch.valid.astype(evaluation.values.dtype) / jnp.maximum(count, 1)
    log_ratio = evaluation.log_probs - minibatch.log_probs
    ratio = jnp.exp(log_ratio)
    change, constant = lax.stop_gradient(ratio) - 1, lax.stop_gradient(log_ratio)
    samples = [
        -clipped_surrogate(ratio, minibatch.advantages, coefficients.clip_coef),
        value_errors(evaluation, minibatch, coefficients),
        evaluation.entropy,
        change - constant,  # the k3 estimator: unbiased, never negative (Schulman 2020, "Approximating KL divergence")
        (jnp.abs(change) > coefficients.clip_coef).astype(weight.dtype),
    ]
    sums = (jnp.stack(samples) * weight).reshape(len(samples), -1).sum(-1)  # all at once: each sum would be an operation of its own
    policy_loss, value_loss, entropy, approx_kl, clip_fraction = sums
    loss = policy_loss + coefficients.vf_coef * value_loss
    ent_coef: Any = coefficients.ent_coef
    if isinstance(ent_coef, jax.Array) or ent_coef:
        loss = loss - ent_coef * entropy
    return dict(zip(TERMS, (loss, policy_loss, value_loss, entropy, approx_kl, clip_fraction)))


def clipped_surrogate(ratio: Array, advantages: Array, clip_coef: Any) -> Array:
    """The objective to maximise, per sample (Schulman et al. 2017, equation 7): the worse of the ratio and its clipped self.

    Where the clipped one is worse, it is a constant; everywhere else, also within the clip, the gradient is that of the ratio.
    """
    free = ratio * advantages
    held = lax.stop_gradient(jnp.clip(ratio, 1 - clip_coef, 1 + clip_coef) * advantages)
    return jnp.where(free <= held, free, held)


def value_errors(evaluation: Evaluation, minibatch: Any, coefficients: LossCoefficients) -> Array:
    """½ ((V - R) / scale)² per sample; with clipping, the worse of that and of V held within vf_clip_coef · scale of the old V."""
    scale = evaluation.value_scale
    errors = jnp.square((evaluation.values - minibatch.returns) / scale)
    if coefficients.clip_vloss:
        reach = coefficients.vf_clip_coef * scale
        moved = lax.stop_gradient(evaluation.values) - minibatch.values
        held = jnp.square((minibatch.values + jnp.clip(moved, -reach, reach) - minibatch.returns) / scale)
        # Where V is not held, both errors are one number, and the gradient is that of the first.
        errors = jnp.where((held > errors) & (jnp.abs(moved) > reach), held, errors)
    return 0.5 * errors


def normalize(advantages: Array, valid: Array, axes: tuple[int, ...] | None = None) -> Array:
    """Scale the valid samples to mean 0 and standard deviation 1 (n - 1); fewer than two have no deviation and stay as they are.

    The statistics are taken over `axes`, or over all. Without float64: a sample is subtracted first, so that equal advantages have a
    deviation of exactly 0, and squares are taken of numbers up to 1, so that the square of 1e30 is finite.
    """
    count = valid.sum(axes, keepdims=True, dtype=advantages.dtype)
    pivot = jnp.where(valid, advantages, -jnp.inf).max(axes, keepdims=True)
    shifted = jnp.where(valid, advantages - jnp.where(jnp.isfinite(pivot), pivot, 0), 0)
    centered = jnp.where(valid, shifted - shifted.sum(axes, keepdims=True) / jnp.maximum(count, 1), 0)
    largest = jnp.abs(centered).max(axes, keepdims=True)
    unit = jnp.where(largest > 0, largest, 1)
    std = unit * jnp.sqrt(jnp.square(centered / unit).sum(axes, keepdims=True) / jnp.maximum(count - 1, 1))
    return jnp.where(count > 1, centered / (std + 1e-8), advantages)
