"""Steps 8 and 9 of 9 for one minibatch: forward, loss, gradient by hand, clip, Adam. Read it top to bottom: it is all of PPO's update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inchworm.backends.custom_losses import CustomLoss
from inchworm.backends.numpy.action_terms import ActionTerms
from inchworm.backends.numpy.adam import Adam
from inchworm.backends.numpy.loss import LossCoefficients, normalize, surrogate_and_slope, value_errors_and_slope
from inchworm.backends.numpy.minibatches import Samples, as_minibatch, as_rows, micro_batches
from inchworm.backends.numpy.network import FlatNetwork
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.config import PPOConfig
from inchworm.errors import ConfigError
from inchworm.policy.spec import LOG_STD, TANH_LOG_STD_RANGE
from inchworm.types import Evaluation

Row = dict[str, float]
"""What one minibatch step gave, under metric names; and the flags `bad` and `empty`."""


OPINIONS = ("log_probs", "entropy", "values")
"""What a custom loss may give its slope by, each [L, N]; besides these, any weight by its name."""


@dataclass(frozen=True, slots=True)
class _View:
    """What the current weights say of some samples, each [n], and the way back from their actions."""

    said: Evaluation
    actions: ActionTerms


class MinibatchStep:
    """One optimiser step on one minibatch, or none at all where its loss or gradient is not finite."""

    def __init__(self, policy: NumpyPolicy, config: PPOConfig, network: FlatNetwork, adam: Adam) -> None:
        self._policy, self._config, self._network, self._adam = policy, config, network, adam
        self._log_std = network.weights.get(LOG_STD, np.zeros(0, network.parameters.dtype))
        self._squashes = policy.spec.config.action_bounds == "tanh"

    def __call__(self, samples: Samples, coefficients: LossCoefficients, learning_rate: float, losses: Sequence[CustomLoss]) -> Row:
        """Move the weights once and say what happened."""
        if self._config.normalize_advantages == "minibatch":
            samples.advantages[:] = normalize(samples.advantages, samples.valid)
        count = samples.count
        if self._config.gradient_accumulation == 1 and not losses:
            row, gradient = self._backward(samples, self._look(samples), coefficients, count), self._network.gradient
        else:
            row, gradient = self._add_up(samples, coefficients, count, losses)
        norm = math.sqrt(np.dot(gradient, gradient))
        row |= {"grad_norm": norm, "bad": float(not math.isfinite(row["loss"] + norm)), "empty": float(count == 0)}
        if not (row["bad"] or row["empty"]):
            limit = self._config.max_grad_norm
            self._adam.step(gradient, learning_rate, scale=1.0 if limit is None else min(1.0, limit / (norm + 1e-6)))
        return row

    def ratio_error(self, samples: Samples) -> float:
        """How far the probability ratios of valid samples are from 1."""
        error = np.abs(np.exp(self._look(samples).said.log_probs - samples.log_probs) - 1)
        worst = float(np.max(error if samples.valid is None else error * samples.valid))
        return worst if math.isfinite(worst) else float(np.finfo(error.dtype).max)

    def _look(self, samples: Samples) -> _View:
        """The way there: what the weights say of the samples."""
        outputs, normalized = self._network.over(len(samples.inputs)).forward(samples.inputs)
        log_std = np.clip(self._log_std, *TANH_LOG_STD_RANGE) if self._squashes else self._log_std
        actions = ActionTerms(self._policy.spec.actions, outputs, log_std, samples.mask, samples.choices, samples.gaussians)
        statistics = self._policy.statistics
        values = normalized * statistics.value_std + statistics.value_mean
        return _View(Evaluation(actions.log_probs, actions.entropy, values, values.dtype.type(statistics.value_std)), actions)

    def _backward(self, samples: Samples, view: _View, coefficients: LossCoefficients, count: int) -> Row:
        """Fill the network's gradient with that of PPO's loss over these samples, and say each term's share of them.

        Every term is a sum over valid samples divided by one count; so its slope by a sample is that sample's own, times `weight`.
        """
        c, said = coefficients, view.said
        share = said.values.dtype.type(1 / max(count, 1))
        log_ratio = said.log_probs - samples.log_probs  # [n], as all below
        ratio = np.exp(log_ratio)
        weight = np.full(len(ratio), share) if samples.valid is None else samples.valid * share
        surrogate, surrogate_slope = surrogate_and_slope(ratio, samples.advantages, c.clip_coef)
        errors, error_slope = value_errors_and_slope(said, samples, c)
        self._pull(
            samples,
            view,
            d_log_probs=-weight * surrogate_slope,
            d_entropy=-c.ent_coef * weight if c.ent_coef else None,
            d_values=c.vf_coef * weight * error_slope,
        )
        policy_loss = -float(np.dot(surrogate, weight))
        value_loss = float(np.dot(errors, weight))
        entropy = float(np.dot(said.entropy, weight))
        return {
            "loss": policy_loss + c.vf_coef * value_loss - c.ent_coef * entropy,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": float(np.dot(ratio - 1 - log_ratio, weight)),  # the k3 estimator: see `loss`
            "clip_fraction": float(np.dot(np.abs(ratio - 1) > c.clip_coef, weight)),
        }

    def _pull(self, samples: Samples, view: _View, *, d_log_probs: np.ndarray, d_entropy: np.ndarray | None, d_values: np.ndarray) -> None:
        """The way back: from slopes by log-prob, entropy and value, each [n], to the gradient of every parameter."""
        d_outputs, d_log_std = view.actions.slopes(d_log_probs, d_entropy)
        # V = std · output + mean, so the slope by the output is std times the slope by V.
        self._network.over(len(samples.inputs)).backward(d_outputs, d_values * self._policy.statistics.value_std)
        if len(self._log_std):
            if self._squashes:  # a log std that is held at its bound does not move
                low, high = TANH_LOG_STD_RANGE
                d_log_std = d_log_std * ((self._log_std >= low) & (self._log_std <= high))
            self._network.gradients[LOG_STD][:] = d_log_std

    def _add_up(self, samples: Samples, coefficients: LossCoefficients, count: int, losses: Sequence[CustomLoss]) -> tuple[Row, np.ndarray]:
        """The loss terms and the whole gradient, over micro-batches and custom losses: sums, because both are."""
        row: Row = {}
        total = np.zeros_like(self._network.gradient)
        customs = {loss.name: np.zeros_like(total) for loss in losses}
        for micro in micro_batches(samples, self._config.gradient_accumulation):
            view = self._look(micro)
            terms = self._backward(micro, view, coefficients, count)
            total += self._network.gradient
            for loss in losses:
                terms[f"loss/{loss.name}"], gradient = self._custom(loss, micro, view, micro.count / max(count, 1))
                terms["loss"] += terms[f"loss/{loss.name}"]
                customs[loss.name] += gradient
            row = {name: row.get(name, 0.0) + term for name, term in terms.items()}
        for name, gradient in customs.items():
            total += gradient
            row[f"grad_norm/{name}"] = math.sqrt(np.dot(gradient, gradient))
        return row, total

    def _custom(self, loss: CustomLoss, samples: Samples, view: _View, share: float) -> tuple[float, np.ndarray]:
        """A custom loss over these samples and its gradient by every parameter, both times `share`."""
        shaped = {name: as_rows(getattr(view.said, name), samples.length) for name in OPINIONS}
        said = Evaluation(**shaped, value_scale=view.said.value_scale)
        shape, dtype = said.values.shape, said.values.dtype
        value, slopes = _checked(loss, loss(self._policy, as_minibatch(samples), said), self._network, shape)
        by = [share * np.asarray(slopes.get(name, np.zeros(shape)), dtype).reshape(-1) for name in OPINIONS]
        self._pull(samples, view, d_log_probs=by[0], d_entropy=by[1], d_values=by[2])
        gradient = self._network.gradient.copy()
        parts = self._network.views(gradient)
        for name in slopes.keys() - set(OPINIONS):
            parts[name] += share * np.asarray(slopes[name], gradient.dtype)
        return share * value, gradient


def _checked(loss: CustomLoss, answer: Any, network: FlatNetwork, shape: tuple[int, ...]) -> tuple[float, Mapping[str, np.ndarray]]:
    """What a custom loss returned, refused where it is not its value with its slopes."""
    wanted = f"(value, gradients), gradients by {', '.join(OPINIONS)} {list(shape)} or by a weight's name; NumPy cannot derive them itself"
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping) and np.ndim(answer[0]) == 0):
        raise ConfigError(f"with --backend numpy the custom loss {loss.name} must return {wanted}; or use --backend torch")
    value, slopes = answer
    shapes = dict.fromkeys(OPINIONS, shape) | {name: view.shape for name, view in network.weights.items()}
    for name, slope in slopes.items():
        if name not in shapes:
            raise ConfigError(f"the custom loss {loss.name} gives a gradient by {name!r}; it may be by {', '.join(shapes)}")
        if np.shape(slope) != shapes[name]:
            raise ConfigError(f"the custom loss {loss.name} gives a gradient by {name} of shape {np.shape(slope)}, not {shapes[name]}")
    return float(value), slopes
