"""Actions, log-probs and entropies from a network's outputs (steps 4 and 8 of 9), formula for formula as in `backends/numpy`.

Random numbers are arguments, so that one call can draw those of a whole rollout.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from inchworm.backends.numpy.distributions import HALF_LOG_2PI, MASKED_LOGIT, QUADRATURE_NODES, QUADRATURE_WEIGHTS
from inchworm.policy.layout import ActionLayout


def sample(
    layout: ActionLayout, outputs: Array, log_std: Array, mask: Array | None, uniforms: Array, normals: Array
) -> tuple[Array, Array, Array]:
    """Choices [..., G] i32 and Gaussian values [..., D] f32 from outputs [..., C + D], and the log-probs [...] of what was drawn.

    `uniforms` [..., G] are from 0 to 1, without 1; `normals` [..., D] are standard normal.
    """
    logits, picks = mask_logits(layout, outputs, mask), []
    for index, group in enumerate(layout.groups):
        shifted = logits[..., group] - logits[..., group].max(-1, keepdims=True)
        cumulative = jnp.cumsum(jnp.exp(shifted), -1)
        # Inverse of the cumulative distribution: a masked choice adds nothing to it and can never be the first one above.
        below = cumulative[..., :-1] <= uniforms[..., index, None] * cumulative[..., -1:]
        picks.append(below.sum(-1, dtype=jnp.int32))
    choices = jnp.stack(picks, -1) if picks else jnp.zeros((*outputs.shape[:-1], 0), jnp.int32)
    gaussians = (outputs[..., layout.num_logits :] + jnp.exp(log_std) * normals).astype(jnp.float32)  # as it is stored
    has = own_dimensions(layout, mask)
    gaussians = gaussians if has is None else jnp.where(has, gaussians, 0)
    return choices, gaussians, log_prob(layout, outputs, log_std, mask, choices, gaussians)


def most_likely(layout: ActionLayout, outputs: Array, mask: Array | None) -> tuple[Array, Array]:
    """The most likely choices [..., G] i32 and the Gaussian means [..., D] f32."""
    logits = mask_logits(layout, outputs, mask)
    picks = [logits[..., group].argmax(-1).astype(jnp.int32) for group in layout.groups]
    choices = jnp.stack(picks, -1) if picks else jnp.zeros((*outputs.shape[:-1], 0), jnp.int32)
    means, has = outputs[..., layout.num_logits :].astype(jnp.float32), own_dimensions(layout, mask)
    return choices, means if has is None else jnp.where(has, means, 0)


def env_action(layout: ActionLayout, gaussians: Array) -> Array:
    """Gaussian values [..., D] as the environment gets them: clipped into the bounds, or squashed into them."""
    low, high = (jnp.asarray(bound, gaussians.dtype) for bound in (layout.low, layout.high))
    if layout.bounds == "tanh":
        gaussians = low + (jnp.tanh(gaussians) + 1) * (0.5 * (high - low))
    return jnp.minimum(jnp.maximum(gaussians, low), high)


def mask_logits(layout: ActionLayout, outputs: Array, mask: Array | None) -> Array:
    """The logits [..., C] with a finite constant, and so probability 0, for every illegal choice."""
    logits = outputs[..., : layout.num_logits]
    return logits if mask is None or not layout.num_logits else jnp.where(mask[..., : layout.num_logits], logits, MASKED_LOGIT)


def own_dimensions(layout: ActionLayout, mask: Array | None) -> Array | None:
    """The dimensions [..., D] that agents have, if the mask tells; None if they have all."""
    return None if mask is None or mask.shape[-1] == layout.num_logits else mask[..., layout.num_logits :]


def log_prob(layout: ActionLayout, outputs: Array, log_std: Array, mask: Array | None, choices: Array, gaussians: Array) -> Array:
    """log pi(action) [...] for outputs [..., C + D]."""
    logits, parts = mask_logits(layout, outputs, mask), []
    for index, group in enumerate(layout.groups):
        parts.append(_chosen(jax.nn.log_softmax(logits[..., group]), choices[..., index]))
    if layout.num_gaussians:
        parts.append(_gaussian_log_prob(layout, outputs[..., layout.num_logits :], log_std, gaussians, own_dimensions(layout, mask)))
    return sum(parts[1:], parts[0])


def log_prob_and_entropy(
    layout: ActionLayout, outputs: Array, log_std: Array, mask: Array | None, choices: Array, gaussians: Array
) -> tuple[Array, Array]:
    """log pi(action) and entropy, each [...], for outputs [..., C + D]; a mask is [..., C], or [..., C + D] if agents lack dimensions."""
    logits, log_probs, entropies = mask_logits(layout, outputs, mask), [], []
    for index, group in enumerate(layout.groups):
        log_p = jax.nn.log_softmax(logits[..., group])
        log_probs.append(_chosen(log_p, choices[..., index]))
        entropies.append(-(jnp.exp(log_p) * log_p).sum(-1))
    if layout.num_gaussians:
        means, has = outputs[..., layout.num_logits :], own_dimensions(layout, mask)
        log_probs.append(_gaussian_log_prob(layout, means, log_std, gaussians, has))
        entropies.append(_gaussian_entropy(layout, means, log_std, has))
    return sum(log_probs[1:], log_probs[0]), sum(entropies[1:], entropies[0])


def _chosen(log_p: Array, choice: Array) -> Array:
    """The log-prob [...] of one choice [...] among [..., k]; a sum, because the gradient of a gather is a scatter, which is slow."""
    return jnp.where(choice[..., None] == jnp.arange(log_p.shape[-1]), log_p, 0).sum(-1)


def _gaussian_log_prob(layout: ActionLayout, means: Array, log_std: Array, gaussians: Array, has: Array | None) -> Array:
    """log pi [...] of Gaussian values [..., D], of the dimensions that agents have; with "tanh", of what they are squashed into."""
    values = gaussians.astype(means.dtype)
    standard = (values - means) * jnp.exp(-log_std)
    total = _sum_own(-0.5 * standard * standard - log_std - HALF_LOG_2PI, has)
    return total - _sum_own(log_tanh_slope(values), has) if layout.bounds == "tanh" else total


def _gaussian_entropy(layout: ActionLayout, means: Array, log_std: Array, has: Array | None) -> Array:
    """The entropy [...] of the dimensions that agents have; under tanh by Gauss-Hermite quadrature."""
    terms = jnp.broadcast_to(log_std + (HALF_LOG_2PI + 0.5), means.shape)
    if layout.bounds == "tanh":
        nodes, weights = (jnp.asarray(array, means.dtype) for array in (QUADRATURE_NODES, QUADRATURE_WEIGHTS))
        points = means[..., None] + jnp.exp(log_std)[:, None] * nodes  # [..., D, nodes]
        terms = terms + (log_tanh_slope(points) * weights).sum(-1)
    return _sum_own(terms, has)


def _sum_own(terms: Array, has: Array | None) -> Array:
    """The sum over dimensions [..., D], of those that the agent has."""
    return (terms if has is None else jnp.where(has, terms, 0)).sum(-1)


def log_tanh_slope(x: Array) -> Array:
    """log(1 - tanh(x)²), exact where tanh has saturated."""
    return 2 * (math.log(2) - x - jax.nn.softplus(-2 * x))
