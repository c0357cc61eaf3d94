"""Step 8 of 9, as reference: PPO's loss, term by term, in the words of mathematics. Every backend is checked against this text.

For one sample with behaviour log-prob log b, advantage A, return R and the old value V0, where the current policy says
log p, entropy H and value V, and s is the value normaliser's standard deviation:

    ratio          r = p / b
    policy loss    -min(r A, clip(r, 1 - c, 1 + c) A)
    value loss     ½ ((V - R) / s)²                 or, clipped, the worse of that and of V held within c s of V0
    loss           policy loss + vf_coef · value loss - ent_coef · H

Each term is a sum over valid samples divided by one count, so that splitting a minibatch changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from inchworm.core.types import Array, Evaluation, Minibatch


class Targets(Protocol):
    """What the value loss reads of a minibatch."""

    @property
    def returns(self) -> Array:
        """What the critic should have said."""
        ...

    @property
    def values(self) -> Array:
        """What it said before the update."""
        ...


@dataclass(frozen=True, slots=True)
class LossCoefficients:
    """What weighs the terms in this update, after schedules."""

    clip_coef: float
    vf_coef: float
    ent_coef: float
    clip_vloss: bool


def ppo_loss(evaluation: Evaluation, minibatch: Minibatch, coefficients: LossCoefficients, count: int) -> dict[str, np.ndarray]:
    """All terms as scalars under their metric names; `loss` is the one to minimise.

    `count` is the number of valid samples of the whole minibatch, of which `minibatch` may be a part.
    """
    weight = minibatch.valid.astype(evaluation.values.dtype) / max(count, 1)  # [L, N]
    log_ratio = evaluation.log_probs - minibatch.log_probs
    ratio = np.exp(log_ratio)
    policy_loss = -(clipped_surrogate(ratio, minibatch.advantages, coefficients.clip_coef) * weight).sum()
    value_loss = (value_errors(evaluation, minibatch, coefficients) * weight).sum()
    entropy = (evaluation.entropy * weight).sum()
    return {
        "loss": policy_loss + coefficients.vf_coef * value_loss - coefficients.ent_coef * entropy,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        # KL(b || p) = E_b[-log r]. Since E_b[r - 1] = 0, adding r - 1 changes no expectation, and r - 1 - log r is never
        # negative: the k3 estimator (Schulman 2020, "Approximating KL divergence").
        "approx_kl": ((ratio - 1 - log_ratio) * weight).sum(),
        "clip_fraction": ((np.abs(ratio - 1) > coefficients.clip_coef) * weight).sum(),
    }


def clipped_surrogate(ratio: np.ndarray, advantages: np.ndarray, clip_coef: float) -> np.ndarray:
    """The objective to maximise, per sample (Schulman et al. 2017, equation 7): the worse of the ratio and its clipped self.

    Where moving further would look like a gain, the clipped side is chosen, which is flat: nothing is gained by it. Where
    the ratio has moved the wrong way, the unclipped side is chosen, and the way back stays open.
    """
    clipped = np.clip(ratio, 1 - clip_coef, 1 + clip_coef)
    result: np.ndarray = np.minimum(ratio * advantages, clipped * advantages)
    return result


def value_errors(evaluation: Evaluation, minibatch: Targets, coefficients: LossCoefficients) -> np.ndarray:
    """½ ((V - R) / s)² per sample; with clipping, the worse of that and of V held within clip_coef · s of the old V."""
    scale = evaluation.value_scale
    errors = np.square((evaluation.values - minibatch.returns) / scale)
    if coefficients.clip_vloss:
        reach = coefficients.clip_coef * scale
        held = minibatch.values + np.clip(evaluation.values - minibatch.values, -reach, reach)
        errors = np.maximum(errors, np.square((held - minibatch.returns) / scale))
    halves: np.ndarray = 0.5 * errors
    return halves


def surrogate_and_slope(ratio: np.ndarray, advantages: np.ndarray, clip_coef: float) -> tuple[np.ndarray, np.ndarray]:
    """`clipped_surrogate` and how it moves with log p: r A on the unclipped side, because d r / d log p = r; 0 on the flat side."""
    gain = ratio * advantages
    bound = np.minimum(np.maximum(ratio, 1 - clip_coef), 1 + clip_coef) * advantages
    return np.minimum(gain, bound), gain * (gain <= bound)  # within the clip both sides are the same number


def value_errors_and_slope(evaluation: Evaluation, minibatch: Targets, coefficients: LossCoefficients) -> tuple[np.ndarray, np.ndarray]:
    """`value_errors` and how they move with V: (V - R) / s²; with clipping, of the worse side, and V held by its clip does not move."""
    values, returns, scale = evaluation.values, minibatch.returns, evaluation.value_scale
    off = (values - returns) / scale
    if coefficients.clip_vloss:
        away, reach = values - minibatch.values, coefficients.clip_coef * scale
        held_off = (minibatch.values + np.clip(away, -reach, reach) - returns) / scale
        held_is_worse = np.square(held_off) > np.square(off)
        moves = ~held_is_worse | (np.abs(away) <= reach)
        off = np.where(held_is_worse, held_off, off)
        return 0.5 * off * off, moves * off / scale
    return 0.5 * off * off, off / scale


def normalize(advantages: np.ndarray, valid: np.ndarray | None = None) -> np.ndarray:
    """Mean 0 and standard deviation 1 (n - 1) over the valid samples; fewer than two have no deviation and stay as they are.

    In float64: equal advantages then have a deviation of exactly 0, and the square of 1e30 is a number.
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
