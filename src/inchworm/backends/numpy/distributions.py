"""From a network's outputs to actions, log-probs and entropies (steps 4 and 8 of 9), with their gradients. The reference for every backend.

An action is some categorical choices and some Gaussian dimensions, independent given the observation: its log-prob and its
entropy are sums over these parts. All sampling in inchworm happens here, whatever framework ran the network, so that every
backend draws the same actions from the same stream.

A mask is [..., C], or [..., C + D] where agents lack dimensions: those are 0 and count neither in the log-prob nor in the entropy.
"""

from __future__ import annotations

import math

import numpy as np

from inchworm.policy.layout import ActionLayout

MASKED_LOGIT = -1e8
"""Instead of -inf: exp(-1e8) is exactly 0, while 0 * -1e8 is still finite."""

HALF_LOG_2PI = 0.5 * float(np.log(2 * np.pi))
QUADRATURE_NODES, QUADRATURE_WEIGHTS = np.polynomial.hermite_e.hermegauss(21)
QUADRATURE_WEIGHTS = QUADRATURE_WEIGHTS / QUADRATURE_WEIGHTS.sum()


def sample(
    layout: ActionLayout, outputs: np.ndarray, log_std: np.ndarray, mask: np.ndarray | None, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw choices [B, G] and Gaussian values [B, D] from outputs [B, C + D], with the log-probs [B] of what was drawn.

    One pass: the exponentials that a choice is drawn with are those of its log-prob, which `log_prob` would compute again.
    """
    rows, num_groups = len(outputs), len(layout.groups)
    if num_groups == 1 and not layout.num_gaussians:  # one choice and nothing else: no sum
        choice, log_probs = _draw_choice(mask_logits(outputs, mask).T.copy(), rng.random((rows, 1))[:, 0])
        return choice[:, None], outputs[:, layout.num_logits :], log_probs
    choices = np.empty((rows, num_groups), np.int64)
    log_probs = np.zeros(rows, outputs.dtype)
    if num_groups:
        uniforms = rng.random((rows, num_groups))  # [B, G]
        logits = mask_logits(outputs[:, : layout.num_logits], mask).T
        for index, group in enumerate(layout.groups):
            choices[:, index], log_p = _draw_choice(logits[group].copy(), uniforms[:, index])
            log_probs += log_p
    means = outputs[:, layout.num_logits :]
    if not layout.num_gaussians:
        return choices, means, log_probs
    noise = rng.standard_normal(means.shape, np.float32)
    gaussians = (means + np.exp(log_std) * noise).astype(np.float32, copy=False)  # as it is stored, also for a float64 policy
    has = own_dimensions(layout, mask)
    if has is not None:
        gaussians = np.where(has, gaussians, np.float32(0))
    log_probs += _gaussian_log_prob(layout, means, log_std, gaussians, has)
    return choices, gaussians, log_probs


def _draw_choice(logits: np.ndarray, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One choice [B] of each lane and its log-prob [B] from logits [C, B], which are overwritten.

    Choices are the first axis, so that every operation runs along the lanes, which are usually more.
    """
    logits -= np.maximum.reduce(logits)
    cumulative = np.add.accumulate(np.exp(logits))  # [C, B]
    total = cumulative[-1]
    # Inverse of the cumulative distribution. A masked choice adds nothing to it and can never be the first one above; the last
    # row is never below, because a uniform is less than 1.
    below = cumulative[:-1] <= uniforms * total  # [C - 1, B]
    choices = below[0].astype(np.int64) if len(below) == 1 else np.add.reduce(below, 0, np.int64)
    log_probs = logits[choices, np.arange(len(choices))]
    log_probs -= np.log(total)
    return choices, log_probs


def mode(
    layout: ActionLayout, outputs: np.ndarray, log_std: np.ndarray, mask: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The most likely choices [B, G] and the Gaussian means [B, D], with their log-probs [B]."""
    choices = np.empty((len(outputs), len(layout.groups)), np.int64)
    log_probs = np.zeros(len(outputs), outputs.dtype)
    logits = mask_logits(outputs[:, : layout.num_logits], mask)
    for index, group in enumerate(layout.groups):
        below = logits[:, group] - logits[:, group].max(-1, keepdims=True)  # the most likely one is at 0
        choices[:, index] = below.argmax(-1)
        log_probs -= np.log(np.exp(below).sum(-1))
    means, has = outputs[:, layout.num_logits :], own_dimensions(layout, mask)
    gaussians = means.astype(np.float32, copy=False) if has is None else np.where(has, means, 0).astype(np.float32, copy=False)
    if layout.num_gaussians:
        log_probs += _gaussian_log_prob(layout, means, log_std, gaussians, has)
    return choices, gaussians, log_probs


def mask_logits(logits: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Logits with a finite constant, and so probability 0, for every illegal choice."""
    return logits if mask is None else np.where(mask[..., : logits.shape[-1]], logits, logits.dtype.type(MASKED_LOGIT))


def own_dimensions(layout: ActionLayout, mask: np.ndarray | None) -> np.ndarray | None:
    """The dimensions [..., D] that agents have, if the mask tells; None if they have all."""
    return None if mask is None or mask.shape[-1] == layout.num_logits else mask[..., layout.num_logits :]


def _gaussian_log_prob(
    layout: ActionLayout, means: np.ndarray, log_std: np.ndarray, gaussians: np.ndarray, has: np.ndarray | None
) -> np.ndarray:
    """log pi [...] of Gaussian values [..., D], of the dimensions that agents have; with "tanh", of what they are squashed into."""
    gaussians = gaussians.astype(means.dtype, copy=False)
    standard = (gaussians - means) * np.exp(-log_std)
    total: np.ndarray = _sum_own(-0.5 * standard * standard - log_std - HALF_LOG_2PI, has)
    if layout.bounds == "tanh":
        total -= _sum_own(log_tanh_slope(gaussians), has)
    return total


def _sum_own(terms: np.ndarray, has: np.ndarray | None) -> np.ndarray:
    """The sum over dimensions [..., D], of those that the agent has."""
    total: np.ndarray = np.add.reduce(terms if has is None else np.where(has, terms, terms.dtype.type(0)), -1)
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


def log_prob_and_entropy(
    layout: ActionLayout, outputs: np.ndarray, log_std: np.ndarray, mask: np.ndarray | None, choices: np.ndarray, gaussians: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """log pi(action) and entropy, each [...], for outputs [..., C + D]."""
    leading = outputs.shape[:-1]

    def columns(array: np.ndarray) -> np.ndarray:
        """[..., k] -> [k, n]"""
        return array.reshape(math.prod(leading), array.shape[-1]).T

    gaussians = columns(gaussians.astype(outputs.dtype, copy=False))
    terms = ActionTerms(layout, columns(outputs), log_std, None if mask is None else columns(mask), columns(choices), gaussians)
    return terms.log_probs.reshape(leading), terms.entropy.reshape(leading)


class _Choice:
    """One categorical choice of n samples, given its logits [k, n]."""

    def __init__(self, logits: np.ndarray, choice: np.ndarray) -> None:
        shifted = logits - np.maximum.reduce(logits, 0)
        self._p = np.exp(shifted)  # [k, n]
        total = np.add.reduce(self._p, 0)
        self._p /= total
        self._log_p = np.subtract(shifted, np.log(total), out=shifted)
        self._places = choice * choice.size + np.arange(choice.size)  # of log p_a in the flat [k, n]
        self.log_probs = self._log_p.reshape(-1)[self._places]
        self.entropy = -np.add.reduce(self._p * self._log_p, 0)  # a masked choice has probability 0 and adds nothing

    def backward(self, d_log_probs: np.ndarray, d_entropy: np.ndarray | None, into: np.ndarray) -> None:
        """∂L/∂logits [k, n] from ∂L/∂log p_a and ∂L/∂H, each [n]."""
        np.multiply(self._p, -d_log_probs, out=into)  # ([k = a] - p_k) ∂L/∂log p_a
        into.reshape(-1)[self._places] += d_log_probs
        if d_entropy is not None:
            into -= self._p * (self._log_p + self.entropy) * d_entropy


class _Gaussians:
    """The continuous dimensions of n samples, given their means [D, n] and log standard deviations [D].

    Where agents lack dimensions, `has` [D, n] tells which count.
    """

    def __init__(self, layout: ActionLayout, means: np.ndarray, log_std: np.ndarray, values: np.ndarray, has: np.ndarray | None) -> None:
        self._inverse_std = np.exp(-log_std)[:, None]  # [D, 1]
        self._z = (values - means) * self._inverse_std  # [D, n]
        self._has = None if has is None else has.astype(means.dtype)
        if self._has is None:
            self.log_probs = -0.5 * np.einsum("dn,dn->n", self._z, self._z) - (log_std.sum() + len(log_std) * HALF_LOG_2PI)
            self.entropy = np.full(means.shape[1], log_std.sum() + len(log_std) * (HALF_LOG_2PI + 0.5), means.dtype)
        else:
            self._z *= self._has
            self.log_probs = -0.5 * np.einsum("dn,dn->n", self._z, self._z) - (log_std + HALF_LOG_2PI) @ self._has
            self.entropy = (log_std + (HALF_LOG_2PI + 0.5)) @ self._has
        self._points: np.ndarray | None = None
        if layout.bounds == "tanh":
            slopes = log_tanh_slope(values)
            self.log_probs -= slopes.sum(0) if self._has is None else (slopes * self._has).sum(0)
            self._spread = np.exp(log_std)[:, None, None] * QUADRATURE_NODES.astype(means.dtype)  # [D, 1, nodes]
            self._points = means[..., None] + self._spread  # [D, n, nodes]
            self._weights = QUADRATURE_WEIGHTS.astype(means.dtype)
            # H(tanh u) = H(u) + E[log |d tanh(u) / du|], the expectation by Gauss-Hermite quadrature.
            bent = log_tanh_slope(self._points) @ self._weights  # [D, n]
            self.entropy += bent.sum(0) if self._has is None else (bent * self._has).sum(0)

    def backward(self, d_log_probs: np.ndarray, d_entropy: np.ndarray | None, into: np.ndarray) -> np.ndarray:
        """∂L/∂means [D, n] into an array, and ∂L/∂log_std [D] returned, from ∂L/∂log p and ∂L/∂H, each [n]."""
        np.multiply(self._z, self._inverse_std, out=into)  # z exp(-s) ∂L/∂log p
        into *= d_log_probs
        has = self._has
        # (z² - 1) ∂L/∂log p, over samples
        d_log_std: np.ndarray = (self._z * self._z) @ d_log_probs - (d_log_probs.sum() if has is None else has @ d_log_probs)
        if d_entropy is not None:
            d_log_std += d_entropy.sum() if has is None else has @ d_entropy
            if self._points is not None:
                bend = -2 * np.tanh(self._points) * self._weights  # [D, n, nodes]
                bend = bend if has is None else bend * has[..., None]
                into += bend.sum(-1) * d_entropy
                d_log_std += (bend * self._spread).sum(-1) @ d_entropy
        return d_log_std


class ActionTerms:
    """log pi(action) and entropy, each [n], summed over the parts of an action; `backward` backpropagates through them."""

    def __init__(
        self,
        layout: ActionLayout,
        outputs: np.ndarray,  # [C + D, n]
        log_std: np.ndarray,  # [D]
        mask: np.ndarray | None,  # [C, n], or [C + D, n] where agents lack dimensions
        choices: np.ndarray,  # [G, n]
        gaussians: np.ndarray,  # [D, n]
    ) -> None:
        self._layout, self._num_outputs = layout, len(outputs)
        logits = outputs[: layout.num_logits]
        if mask is not None:
            logits = np.where(mask[: len(logits)], logits, logits.dtype.type(MASKED_LOGIT))
        parts: list[_Choice | _Gaussians] = [_Choice(logits[group], choice) for group, choice in zip(layout.groups, choices)]
        if layout.num_gaussians:
            has = None if mask is None or len(mask) == layout.num_logits else mask[layout.num_logits :]  # [D, n]
            parts.append(_Gaussians(layout, outputs[layout.num_logits :], log_std, gaussians, has))
        self._parts = parts
        self.log_probs, self.entropy = parts[0].log_probs, parts[0].entropy
        for part in parts[1:]:
            self.log_probs, self.entropy = self.log_probs + part.log_probs, self.entropy + part.entropy

    def backward(self, d_log_probs: np.ndarray, d_entropy: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """∂L/∂outputs [C + D, n] and ∂L/∂log_std [D], from ∂L/∂log_probs and ∂L/∂entropy (or None), each [n]."""
        into = np.empty((self._num_outputs, len(d_log_probs)), d_log_probs.dtype)
        d_log_std = np.zeros(0, d_log_probs.dtype)
        for part, rows in zip(self._parts, (*self._layout.groups, slice(self._layout.num_logits, None))):
            if isinstance(part, _Gaussians):
                d_log_std = part.backward(d_log_probs, d_entropy, into[rows])
            else:
                part.backward(d_log_probs, d_entropy, into[rows])
        return into, d_log_std
