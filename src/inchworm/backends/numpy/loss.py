"""Step 8 of 9: PPO's loss and its gradients, term by term. The reference that every backend is checked against.

For one sample with behaviour log-prob log b, advantage A, return R and old value V0, where the current policy gives log p, entropy H
and value V, and s is the value normaliser's standard deviation:

    ratio          r = p / b
    policy loss    -min(r A, clip(r, 1 - c, 1 + c) A)
    value loss     ½ ((V - R) / s)²                 or, clipped, the worse of that and of V held within c_v s of V0
    loss           policy loss + vf_coef · value loss - ent_coef · H

Each term is a sum over valid samples divided by one count, so that splitting a minibatch changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from inchworm.core.types import Evaluation, LossCoefficients, Minibatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Samples as the learner reads them: [L, N] sequences laid flat, n = L · N."""

    inputs: np.ndarray  # [n, F] encoded and normalised observations
    choices: np.ndarray  # [G, n]
    gaussians: np.ndarray  # [D, n]
    mask: np.ndarray | None  # [C, n], or None where every choice is legal
    log_probs: np.ndarray  # [n] of the behaviour policy
    advantages: np.ndarray  # [n]
    returns: np.ndarray  # [n]
    values: np.ndarray  # [n] before the update
    valid: np.ndarray | None  # [n] bool, or None where every sample is valid
    length: int  # L
    minibatch: Callable[[], Minibatch]
    """The same samples as [L, N] sequences, for custom losses and for people; made on demand."""

    def part(self, chosen: slice | np.ndarray, minibatch: Callable[[], Minibatch]) -> Samples:
        """Some of the samples, which are `minibatch` as sequences; views where `chosen` is a slice."""
        return Samples(
            inputs=self.inputs[chosen],
            choices=self.choices[:, chosen],
            gaussians=self.gaussians[:, chosen],
            mask=None if self.mask is None else self.mask[:, chosen],
            log_probs=self.log_probs[chosen],
            advantages=self.advantages[chosen],
            returns=self.returns[chosen],
            values=self.values[chosen],
            valid=None if self.valid is None else self.valid[chosen],
            length=self.length,
            minibatch=minibatch,
        )

    @property
    def count(self) -> int:
        """The number of valid samples."""
        return len(self.returns) if self.valid is None else int(np.count_nonzero(self.valid))


class LossGradients(NamedTuple):
    """How a loss changes with what the policy gives for each sample, each [n]."""

    log_probs: np.ndarray
    entropy: np.ndarray | None
    """None where the loss does not depend on it."""
    values: np.ndarray


def ppo_loss(
    evaluation: Evaluation, samples: Samples, coefficients: LossCoefficients, count: int
) -> tuple[dict[str, float], LossGradients]:
    """All terms under their metric names, `loss` being the one to minimise, and the gradients of `loss`.

    `count` is the number of valid samples of the whole minibatch, of which `samples` may be a part. Every term is a weighted sum over
    samples, so its gradient at a sample is that sample's own, times the weight.
    """
    c = coefficients
    share = evaluation.values.dtype.type(1 / max(count, 1))
    log_ratio = evaluation.log_probs - samples.log_probs  # [n], as everything below
    ratio = np.exp(log_ratio)
    weight = np.full(len(ratio), share) if samples.valid is None else samples.valid * share
    surrogate, d_surrogate = clipped_surrogate(ratio, samples.advantages, c.clip_coef)
    errors, d_errors = value_errors(evaluation, samples.returns, samples.values, c)
    policy_loss = -float(np.dot(surrogate, weight))
    value_loss = float(np.dot(errors, weight))
    entropy = float(np.dot(evaluation.entropy, weight))
    terms = {
        "loss": policy_loss + c.vf_coef * value_loss - c.ent_coef * entropy,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        # KL(b || p) = E_b[-log r]. Since E_b[r - 1] = 0, adding r - 1 changes no expectation, and r - 1 - log r is never
        # negative: the k3 estimator (Schulman 2020, "Approximating KL divergence").
        "approx_kl": float(np.dot(ratio - 1 - log_ratio, weight)),
        "clip_fraction": float(np.dot(np.abs(ratio - 1) > c.clip_coef, weight)),
    }
    d_entropy = -c.ent_coef * weight if c.ent_coef else None
    return terms, LossGradients(-weight * d_surrogate, d_entropy, c.vf_coef * weight * d_errors)


def clipped_surrogate(ratio: np.ndarray, advantages: np.ndarray, clip_coef: float) -> tuple[np.ndarray, np.ndarray]:
    """The objective to maximise, per sample, and its gradient by log p (Schulman et al. 2017, equation 7).

    It is the worse of the ratio and its clipped self. Where moving further would look like a gain, the clipped side is chosen, which is
    flat. Where the ratio has moved the wrong way, the unclipped side is chosen: its gradient is r A, because d r / d log p = r.
    """
    gain = ratio * advantages
    bound = np.minimum(np.maximum(ratio, 1 - clip_coef), 1 + clip_coef) * advantages
    return np.minimum(gain, bound), gain * (gain <= bound)  # within the clip both sides are the same number


def value_errors(
    evaluation: Evaluation, returns: np.ndarray, old_values: np.ndarray, coefficients: LossCoefficients
) -> tuple[np.ndarray, np.ndarray]:
    """½ ((V - R) / s)² per sample, and its gradient by V: (V - R) / s².

    With clipping it is the worse of that and of V held within vf_clip_coef · s of the old V; where V is held, the gradient is 0.
    """
    values, scale = evaluation.values, evaluation.value_scale
    error = (values - returns) / scale
    if not coefficients.clip_vloss:
        return 0.5 * error * error, error / scale
    change, reach = values - old_values, coefficients.vf_clip_coef * scale
    held_error = (old_values + np.clip(change, -reach, reach) - returns) / scale
    held_is_worse = np.square(held_error) > np.square(error)
    moves = ~held_is_worse | (np.abs(change) <= reach)
    error = np.where(held_is_worse, held_error, error)
    return 0.5 * error * error, moves * error / scale


def normalize(advantages: np.ndarray, valid: np.ndarray | None = None) -> np.ndarray:
    """Scale the valid samples to mean 0 and standard deviation 1 (n - 1); fewer than two have no deviation and stay as they are.

    In float64: equal advantages then have a deviation of exactly 0, and the square of 1e30 is finite.
    """
    count = advantages.size if valid is None else int(np.count_nonzero(valid))
    if count < 2:
        return advantages
    wide = (advantages if valid is None else np.where(valid, advantages, 0)).astype(np.float64)
    wide -= wide.sum() / count
    if valid is not None:
        wide *= valid
    std = np.sqrt(np.square(wide).sum() / (count - 1))
    wide /= std + 1e-8
    return wide.astype(advantages.dtype)
