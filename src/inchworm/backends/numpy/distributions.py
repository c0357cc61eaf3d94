"""Serves step 4 of 9: from a network's outputs to actions, log-probs and entropies. The reference for every backend.

An action is some categorical choices and some Gaussian dimensions, independent given the observation: its log-prob and its
entropy are sums over these parts. All sampling in inchworm happens here, whatever framework ran the network, so that every
backend draws the same actions from the same stream.
"""

from __future__ import annotations

import numpy as np

from inchworm.policy.layout import ActionLayout

MASKED_LOGIT = -1e8
"""Instead of -inf: exp(-1e8) is exactly 0, while 0 * -1e8 is still a number."""

HALF_LOG_2PI = 0.5 * float(np.log(2 * np.pi))
QUADRATURE_NODES, QUADRATURE_WEIGHTS = np.polynomial.hermite_e.hermegauss(21)
QUADRATURE_WEIGHTS = QUADRATURE_WEIGHTS / QUADRATURE_WEIGHTS.sum()


def sample(
    layout: ActionLayout, outputs: np.ndarray, log_std: np.ndarray, mask: np.ndarray | None, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw choices [B, G] and Gaussian values [B, D] from outputs [B, C + D]."""
    rows = len(outputs)
    choices = np.zeros((rows, len(layout.group_sizes)), np.int64)
    if layout.group_sizes:
        uniforms = rng.random((rows, len(layout.group_sizes)))  # [B, G]
        logits = mask_logits(outputs[:, : layout.num_logits], mask)
        for index, group in enumerate(layout.groups):
            weights = np.exp(logits[:, group] - logits[:, group].max(-1, keepdims=True))
            cumulative = weights.cumsum(-1)
            # Inverse of the cumulative distribution. A masked choice adds nothing to it and can never be the first one above.
            choices[:, index] = (cumulative <= uniforms[:, index, None] * cumulative[:, -1:].astype(np.float64)).sum(-1)
    means = outputs[:, layout.num_logits :]
    if not layout.num_gaussians:
        return choices, means
    noise = rng.standard_normal(means.shape, np.float32)
    return choices, (means + np.exp(log_std) * noise).astype(np.float32, copy=False)  # as it is stored, also by a float64 policy


def mode(layout: ActionLayout, outputs: np.ndarray, mask: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The most likely choices [B, G] and the Gaussian means [B, D]."""
    logits = mask_logits(outputs[:, : layout.num_logits], mask)
    picks = [logits[:, group].argmax(-1) for group in layout.groups]
    choices = np.stack(picks, -1) if picks else np.zeros((len(outputs), 0), np.int64)
    return choices, outputs[:, layout.num_logits :].astype(np.float32, copy=False)


def mask_logits(logits: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Logits with every illegal choice at a finite constant that leaves it no probability."""
    return logits if mask is None else np.where(mask, logits, logits.dtype.type(MASKED_LOGIT))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """log p over the last axis, without overflow."""
    shifted = logits - logits.max(-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def log_prob(
    layout: ActionLayout, outputs: np.ndarray, log_std: np.ndarray, mask: np.ndarray | None, choices: np.ndarray, gaussians: np.ndarray
) -> np.ndarray:
    """log pi(action) [...] for outputs [..., C + D]."""
    total = np.zeros(outputs.shape[:-1], outputs.dtype)
    logits = mask_logits(outputs[..., : layout.num_logits], mask)
    for index, group in enumerate(layout.groups):
        log_p = log_softmax(logits[..., group]).reshape(-1, layout.group_sizes[index])
        total += log_p[np.arange(len(log_p)), choices[..., index].reshape(-1)].reshape(total.shape)
    if layout.num_gaussians:
        means, gaussians = outputs[..., layout.num_logits :], gaussians.astype(outputs.dtype, copy=False)
        standard = (gaussians - means) * np.exp(-log_std)
        total += (-0.5 * standard * standard - log_std - HALF_LOG_2PI).sum(-1)
        if layout.bounds == "tanh":
            total -= log_tanh_slope(gaussians).sum(-1)
    return total


def entropy(layout: ActionLayout, outputs: np.ndarray, log_std: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """The entropy [...] of the action distribution; a masked choice has probability 0 and adds nothing."""
    total = np.zeros(outputs.shape[:-1], outputs.dtype)
    logits = mask_logits(outputs[..., : layout.num_logits], mask)
    for group in layout.groups:
        log_p = log_softmax(logits[..., group])
        total -= (np.exp(log_p) * log_p).sum(-1)
    if layout.num_gaussians:
        total += (log_std + (HALF_LOG_2PI + 0.5)).sum(-1)
        if layout.bounds == "tanh":
            # H(tanh u) = H(u) + E[log |d tanh(u) / du|], the expectation by Gauss-Hermite quadrature.
            means = outputs[..., layout.num_logits :, None]
            points = means + np.exp(log_std)[:, None] * QUADRATURE_NODES.astype(outputs.dtype)  # [..., D, nodes]
            total += (log_tanh_slope(points) * QUADRATURE_WEIGHTS.astype(outputs.dtype)).sum((-2, -1))
    return total


def log_tanh_slope(x: np.ndarray) -> np.ndarray:
    """log(1 - tanh(x)²), exact where tanh has saturated: 2 (log 2 - x - softplus(-2x))."""
    result: np.ndarray = 2 * (np.log(x.dtype.type(2)) - x - np.logaddexp(x.dtype.type(0), -2 * x))
    return result


def to_env(layout: ActionLayout, gaussians: np.ndarray) -> np.ndarray:
    """Gaussian values [..., D] as the environment gets them: clipped into the bounds, or squashed into them."""
    if layout.bounds == "tanh":
        gaussians = layout.low + (np.tanh(gaussians) + 1) * (0.5 * (layout.high - layout.low))
    bounded: np.ndarray = np.minimum(np.maximum(gaussians, layout.low), layout.high)
    return bounded
