"""How much of the policy's gradient is noise: its signal-to-noise ratio against the batch size."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from inchworm.backends.registry import compute_advantages, is_builtin, make_learner, make_policy
from inchworm.config.sections import PPOConfig, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Policy
from inchworm.rollout.rollout import Rollout, select_lanes

RATE = 1e4
"""Learning rate of the step that a gradient is read from; a large one leaves nothing of it to the rounding of the weights."""


@dataclass(frozen=True)
class GradientNoise:
    """Signal and noise of the policy's gradient, from the gradients of equal parts of a rollout (McCandlish et al. 2018)."""

    parts: int
    samples: int
    """Samples of each part."""
    signal: float
    """Squared norm of the true gradient; an estimate without bias, so that it may be below 0."""
    noise: float
    """Trace of the covariance of one sample's gradient."""
    snr_per_sample: float
    snr_se: float
    """Its standard error, by leaving out each part in turn."""

    @property
    def noise_scale(self) -> float:
        """The batch size at which signal and noise are equal; infinite where there is no signal."""
        return 1.0 / self.snr_per_sample if self.snr_per_sample > 0 else math.inf

    def snr(self, samples: float) -> float:
        """The signal-to-noise ratio of a batch, as powers."""
        return samples * self.snr_per_sample


def gradient_noise(policy: Policy, rollout: Rollout, config: TrainingConfig) -> GradientNoise:
    """The noise of the policy's gradient, from the gradients of single lanes of a rollout that the policy has collected.

    A gradient is read from what the learner of the policy's backend does in one step of plain gradient descent, so that any policy that can
    be trained can be measured. Advantages are those of the config, normalised over the whole rollout.
    """
    ppo = config.ppo
    plain = PPOConfig(
        optimizer="sgd",
        learning_rate=RATE,
        gamma=0.0,
        vf_coef=0.0,
        ent_coef=0.0,
        max_grad_norm=None,
        update_epochs=1,
        num_minibatches=1,
        rollout_steps=rollout.num_steps,
        normalize_advantages="off",
        sequence_length="auto" if ppo.sequence_length == "auto" else min(ppo.sequence_length, rollout.num_steps),
        freeze=ppo.freeze,
    )
    learned, before, version = _learnable(policy), policy.get_weights(), policy.policy_version
    estimates = compute_advantages(learned, rollout, ppo)
    advantages = estimates.advantages.astype(np.float64)  # [T, K]
    if ppo.normalize_advantages != "off":
        advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    # Without discount an advantage is the reward less the value, so these rewards make a learner find these advantages in any part.
    rollout = dataclasses.replace(rollout, rewards=(estimates.values + advantages).astype(rollout.rewards.dtype))
    run = config.run.replace(backend=getattr(learned, "backend", "torch"))
    learner: Any = make_learner(learned, config.replace(ppo=plain, run=run))

    def restore() -> None:
        learned.set_weights(before)
        learned.policy_version = version

    def moved(lane: int, factor: float) -> dict[str, np.ndarray]:
        """What a step on a lane takes from each weight."""
        restore()
        learner.learning_rate_scale = factor
        if "warm_up" in learner.update(select_lanes(rollout, [lane])):
            raise ConfigError("the policy's normalisers have seen no data, so it has no gradient yet; train it first")
        return {name: before[name].astype(np.float64) - weight for name, weight in learned.get_weights().items()}

    try:
        names = [name for name, difference in moved(0, 0.0).items() if not difference.any()]  # others are statistics, not learned
        steps = [moved(lane, 1.0) for lane in range(rollout.num_lanes)]
    finally:
        restore()
    parts = np.stack([np.concatenate([step[name].ravel() for name in names]) for step in steps]) / RATE  # [K, P]
    count, samples = len(parts), rollout.num_valid // len(parts)
    products = parts @ parts.T  # [K, K]: all that is needed of them

    def estimate(kept: np.ndarray) -> tuple[float, float]:
        """(signal, noise of one sample) of some parts."""
        inner = products[np.ix_(kept, kept)]
        mean_square = float(inner.mean())
        variance = (float(np.trace(inner)) - len(kept) * mean_square) / (len(kept) - 1)
        return mean_square - variance / len(kept), max(variance, np.finfo(np.float64).tiny) * samples

    signal, noise = estimate(np.arange(count))
    ratios = np.array([np.divide(*estimate(np.delete(np.arange(count), part))) for part in range(count)])
    error = math.sqrt((count - 1) * float(ratios.var()))
    return GradientNoise(count, samples, signal, noise, signal / noise, error)


def _learnable(policy: Policy) -> Policy:
    """A copy that a learner may change; a policy of the user's cannot be copied, and gets its weights back."""
    if not is_builtin(policy):
        return policy
    spec, backend = cast(Any, policy).spec, cast(Any, policy).backend
    return make_policy(spec, weights=policy.get_weights(), backend="torch" if backend == "numpy" and spec.memory is not None else backend)
