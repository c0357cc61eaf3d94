"""Serves step 8 of 9: the log-probs and entropies of a minibatch's actions, and how they move with the network's outputs.

The forward formulas are those of `distributions`; here they stand with their derivatives. Arrays are [rows, n], one row a
logit, a mean or a choice, one column a sample.

Categorical, with logits l and p = softmax(l). Since log p_k = l_k - log Σ exp(l),

    ∂ log p_a / ∂l_k = [k = a] - p_k
    H = -Σ p_k log p_k,   ∂H/∂l_k = -p_k (log p_k + H)

A masked logit is a constant and its p is exactly 0, so both slopes are 0 there of themselves.

Gaussian, with mean m, s = log of the standard deviation, z = (a - m) exp(-s), so that log p = -½ z² - s - ½ log 2π:

    ∂ log p / ∂m = z exp(-s),   ∂ log p / ∂s = z² - 1
    H = s + ½ log 2πe,          ∂H/∂s = 1

Squashed by tanh, log p loses log(1 - tanh²(a)), which no parameter moves. The entropy gains its expectation, a sum over
quadrature points x = m + exp(s) node; d/dx log(1 - tanh² x) = -2 tanh x, and x moves with m by 1 and with s by exp(s) node.
"""

from __future__ import annotations

import numpy as np

from inchworm.backends.numpy.distributions import HALF_LOG_2PI, MASKED_LOGIT, QUADRATURE_NODES, QUADRATURE_WEIGHTS, log_tanh_slope
from inchworm.policy.layout import ActionLayout


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
        self.entropy = -np.add.reduce(self._p * self._log_p, 0)

    def slopes(self, d_log_probs: np.ndarray, d_entropy: np.ndarray | None, into: np.ndarray) -> None:
        """∂L/∂logits [k, n] from ∂L/∂log p_a and ∂L/∂H, each [n]."""
        np.multiply(self._p, -d_log_probs, out=into)  # ([k = a] - p_k) ∂L/∂log p_a
        into.reshape(-1)[self._places] += d_log_probs
        if d_entropy is not None:
            into -= self._p * (self._log_p + self.entropy) * d_entropy


class _Gaussians:
    """The continuous dimensions of n samples, given their means [D, n] and log standard deviations [D]."""

    def __init__(self, layout: ActionLayout, means: np.ndarray, log_std: np.ndarray, values: np.ndarray) -> None:
        self._inverse_std = np.exp(-log_std)[:, None]  # [D, 1]
        self._z = (values - means) * self._inverse_std  # [D, n]
        self.log_probs = -0.5 * np.einsum("dn,dn->n", self._z, self._z) - (log_std.sum() + len(log_std) * HALF_LOG_2PI)
        self.entropy = np.full(means.shape[1], log_std.sum() + len(log_std) * (HALF_LOG_2PI + 0.5), means.dtype)
        self._points: np.ndarray | None = None
        if layout.bounds == "tanh":
            self.log_probs -= log_tanh_slope(values).sum(0)
            self._spread = np.exp(log_std)[:, None, None] * QUADRATURE_NODES.astype(means.dtype)  # [D, 1, nodes]
            self._points = means[..., None] + self._spread  # [D, n, nodes]
            self._weights = QUADRATURE_WEIGHTS.astype(means.dtype)
            self.entropy += (log_tanh_slope(self._points) @ self._weights).sum(0)

    def slopes(self, d_log_probs: np.ndarray, d_entropy: np.ndarray | None, into: np.ndarray) -> np.ndarray:
        """∂L/∂means [D, n] into an array, and ∂L/∂log_std [D] returned, from ∂L/∂log p and ∂L/∂H, each [n]."""
        np.multiply(self._z, self._inverse_std, out=into)  # z exp(-s) ∂L/∂log p
        into *= d_log_probs
        d_log_std: np.ndarray = (self._z * self._z) @ d_log_probs - d_log_probs.sum()  # (z² - 1) ∂L/∂log p, over samples
        if d_entropy is not None:
            d_log_std += d_entropy.sum()
            if self._points is not None:
                bend = -2 * np.tanh(self._points) * self._weights  # [D, n, nodes]
                into += bend.sum(-1) * d_entropy
                d_log_std += (bend * self._spread).sum(-1) @ d_entropy
        return d_log_std


class ActionTerms:
    """log pi(action) and entropy, each [n], summed over the parts of an action; and the way back from their slopes."""

    def __init__(
        self,
        layout: ActionLayout,
        outputs: np.ndarray,  # [C + D, n]
        log_std: np.ndarray,  # [D]
        mask: np.ndarray | None,  # [C, n]
        choices: np.ndarray,  # [G, n]
        gaussians: np.ndarray,  # [D, n]
    ) -> None:
        self._layout, self._num_outputs = layout, len(outputs)
        logits = outputs[: layout.num_logits]
        if mask is not None:
            logits = np.where(mask, logits, logits.dtype.type(MASKED_LOGIT))
        parts: list[_Choice | _Gaussians] = [_Choice(logits[group], choice) for group, choice in zip(layout.groups, choices)]
        if layout.num_gaussians:
            parts.append(_Gaussians(layout, outputs[layout.num_logits :], log_std, gaussians))
        self._parts = parts
        self.log_probs, self.entropy = parts[0].log_probs, parts[0].entropy
        for part in parts[1:]:
            self.log_probs, self.entropy = self.log_probs + part.log_probs, self.entropy + part.entropy

    def slopes(self, d_log_probs: np.ndarray, d_entropy: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """∂L/∂outputs [C + D, n] and ∂L/∂log_std [D], from ∂L/∂log_probs and ∂L/∂entropy (None where nothing weighs it), each [n]."""
        into = np.empty((self._num_outputs, len(d_log_probs)), d_log_probs.dtype)
        d_log_std = np.zeros(0, d_log_probs.dtype)
        for part, rows in zip(self._parts, (*self._layout.groups, slice(self._layout.num_logits, None))):
            if isinstance(part, _Gaussians):
                d_log_std = part.slopes(d_log_probs, d_entropy, into[rows])
            else:
                part.slopes(d_log_probs, d_entropy, into[rows])
        return into, d_log_std
