"""E2: the PPO loss and its gradient compared with an independent implementation, from the rollout to every parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from faults.programme import Outcome, Work, procedure
from faults.right_worlds import BACKENDS, World, advantage_sum, learner_of, policy_of, random_rollout, random_world
from inchworm.backends.registry import learning_threads

NUDGE = 1e-30
KINK = 1e-4
"""Nearer than this to a kink float32 has no meaningful gradient; such cases are drawn again."""


@dataclass(frozen=True)
class Statistics:
    """The normalisers before the update, in float64; identities where they are off."""

    center: np.ndarray
    inverse_std: np.ndarray
    value_mean: float
    value_std: float


def statistics_of(weights: Mapping[str, np.ndarray], size: int) -> Statistics:
    """Read the statistics from a policy's weights."""
    center, inverse = np.zeros(size), np.ones(size)
    if "observation_normalizer.mean" in weights:
        # Stored as float64 but used as float32: every backend rounds the centre and the factor once.
        center = weights["observation_normalizer.mean"].astype(np.float32).astype(np.float64)
        inverse = (1 / np.sqrt(weights["observation_normalizer.var"].astype(np.float64) + 1e-8)).astype(np.float32).astype(np.float64)
    mean = float(weights.get("value_normalizer.mean", 0.0))
    std = float(np.sqrt(np.float64(weights["value_normalizer.var"]) + 1e-8)) if "value_normalizer.mean" in weights else 1.0
    return Statistics(center, inverse, mean, std)


def dense(weights: Mapping[str, Any], name: str, rows: Any, activation: str) -> Any:
    """A stack of dense layers and its head, [N, in] -> [N, out]."""
    index = 0
    while f"{name}.{index}.weight" in weights:
        rows = rows @ weights[f"{name}.{index}.weight"].T + weights[f"{name}.{index}.bias"]
        rows = np.tanh(rows) if activation == "tanh" else rows * (rows.real > 0)
        index += 1
    return rows if name == "trunk" else rows @ weights[f"{name}.head.weight"].T + weights[f"{name}.head.bias"]


class Independent:
    """Everything from the rollout to the loss, as one function of the weights."""

    def __init__(self, world: World, rollout: Any, start: Mapping[str, np.ndarray]) -> None:
        self.world = world
        observations = rollout.observations["observation"] if world.masked else rollout.observations
        self.statistics = statistics_of(start, world.spec.observations.size)
        self.rows = self._normalized(observations.reshape(-1, world.spec.observations.size))
        self.mask = rollout.observations["action_mask"].reshape(len(self.rows), -1).astype(bool) if world.masked else None
        self.actions = np.asarray(rollout.actions).reshape(len(self.rows), -1)
        self.old_log_probs = rollout.log_probs.reshape(-1).astype(np.float64)
        wide = {name: np.asarray(value, np.float64) for name, value in start.items()}
        cuts = rollout.cut_observations["observation"] if world.masked else rollout.cut_observations
        values = self._values(wide, self.rows).reshape(rollout.rewards.shape)  # [T, B]
        following = np.concatenate([values[1:], values[-1:]])
        following[tuple(rollout.cut_rows.T)] = self._values(wide, self._normalized(cuts))
        advantages = advantage_sum(rollout, values, following, world.config.gamma, world.config.gae_lambda)
        self.old_values, self.returns = values.reshape(-1), (advantages + values).reshape(-1)
        self.advantages = advantages.reshape(-1)
        if world.config.normalize_advantages != "off":
            self.advantages = (self.advantages - self.advantages.mean()) / (self.advantages.std(ddof=1) + 1e-8)

    def _normalized(self, rows: np.ndarray) -> np.ndarray:
        return np.clip((rows.astype(np.float64) - self.statistics.center) * self.statistics.inverse_std, *self.world.clip)

    def _values(self, weights: Mapping[str, Any], rows: Any) -> Any:
        features = dense(weights, "trunk", rows, self.world.spec.config.activation)
        normalized = dense(weights, "critic", features, self.world.spec.config.activation)[:, 0]
        return normalized * self.statistics.value_std + self.statistics.value_mean

    def terms(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """The loss and its parts at these weights."""
        config, outputs = self.world.config, self._outputs(weights)
        log_probs, entropy = self._distribution(weights, outputs)
        ratio = np.exp(log_probs - self.old_log_probs)
        clipped = _clip(ratio, 1 - config.clip_coef, 1 + config.clip_coef)
        policy_loss = -_minimum(ratio * self.advantages, clipped * self.advantages).mean()
        values = self._values(weights, self.rows)
        errors = ((values - self.returns) / self.statistics.value_std) ** 2
        if config.clip_vloss:
            reach = config.clip_coef * self.statistics.value_std
            held = self.old_values + _clip(values - self.old_values, -reach, reach)
            errors = -_minimum(-errors, -(((held - self.returns) / self.statistics.value_std) ** 2))
        value_loss = 0.5 * errors.mean()
        loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy.mean()
        return {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy.mean()}

    def _outputs(self, weights: Mapping[str, Any]) -> Any:
        return dense(
            weights, "actor", dense(weights, "trunk", self.rows, self.world.spec.config.activation), self.world.spec.config.activation
        )

    def _distribution(self, weights: Mapping[str, Any], outputs: Any) -> tuple[Any, Any]:
        """log pi(action) and entropy, each [N], summed over the parts of the action."""
        if not self.world.choices:
            log_std = weights["log_std"]
            off = (self.actions - outputs) / np.exp(log_std)
            log_probs = (-0.5 * off * off - log_std - 0.5 * np.log(2 * np.pi)).sum(1)
            return log_probs, (log_std + 0.5 + 0.5 * np.log(2 * np.pi)).sum() + 0 * log_probs
        log_probs = entropy = 0
        first = 0
        for part, size in enumerate(self.world.choices):
            logits = outputs[:, first : first + size]
            legal = np.ones(logits.shape, bool) if self.mask is None else self.mask[:, first : first + size]
            weight = np.where(legal, np.exp(logits - logits.real.max(1, keepdims=True)), 0)
            chances = weight / weight.sum(1, keepdims=True)  # an illegal choice has none
            logs = np.log(np.where(legal, chances, 1))
            log_probs = log_probs + logs[np.arange(len(logs)), self.actions[:, part].astype(int)]
            entropy = entropy - (chances * logs).sum(1)
            first += size
        return log_probs, entropy

    def near_a_kink(self, weights: Mapping[str, Any]) -> bool:
        """Whether float32 might take the other side of a kink somewhere."""
        config = self.world.config
        ratio = np.exp(self._distribution(weights, self._outputs(weights))[0] - self.old_log_probs)
        away = (self._values(weights, self.rows) - self.old_values) / self.statistics.value_std
        edges = [np.abs(np.abs(ratio - 1) - config.clip_coef)]
        if config.clip_vloss:
            edges.append(np.abs(np.abs(away) - config.clip_coef))
            held = self.old_values + np.clip(away, -config.clip_coef, config.clip_coef) * self.statistics.value_std
            values = self._values(weights, self.rows)
            tie = np.abs(np.abs(held - self.returns) - np.abs(values - self.returns)) / self.statistics.value_std
            edges.append(np.where(np.abs(away) > config.clip_coef, tie, 1.0))
        return bool(min(edge.min() for edge in edges) < KINK)

    def gradient(self, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The gradient of the loss by every parameter, one complex step each."""
        gradient = {name: np.zeros(weights[name].shape) for name in self.world.spec.layers}
        for name, part in gradient.items():
            for place in np.ndindex(*part.shape):
                moved = weights[name].astype(np.complex128)
                moved[place] += 1j * NUDGE
                part[place] = self.terms({**weights, name: moved})["loss"].imag / NUDGE
        return gradient


def _minimum(a: Any, b: Any) -> Any:
    return np.where(a.real <= b.real, a, b)


def _clip(x: Any, low: float, high: float) -> Any:
    return np.where(x.real < low, low, np.where(x.real > high, high, x))


LIMITS = {"float64": (1e-12, 1e-9), "float32": (1e-6, 1e-5)}
"""Of the value and of the gradient, relative to the largest where that is above 1."""


def compare(world: World, rollout: Any, backend: str, width: str) -> tuple[float, float, float] | None:
    """Errors of value and gradient, and of the independent gradient against a finite difference; None near a kink.

    Two learners take one and two steps on the whole rollout; the second step of the second learner is compared, because only there
    ratios and values differ from the old ones.
    """
    results: list[tuple[Any, Any]] = []
    for epochs in (1, 2):
        policy = policy_of(world, backend, width)
        start = policy.get_weights()
        learner = learner_of(policy, world.config.replace(update_epochs=epochs), backend)
        results.append((learner.update(rollout), policy.get_weights()))
    (first, between), (both, _) = results
    if backend == "numpy":
        found = {name: np.array(part) for name, part in learner._network.gradients.items()}
    else:
        found = {policy.public_name(name): part.grad.numpy().copy() for name, part in policy.named_parameters() if part.numel()}
    independent = Independent(world, rollout, start)
    # The parameters after the first step, with the value head as it was before the new statistics rescaled it.
    weights = {name: np.asarray(value, np.float64) for name, value in between.items()}
    old, new = (statistics_of(each, world.spec.observations.size) for each in (start, between))
    weights["critic.head.weight"] = weights["critic.head.weight"] * new.value_std / old.value_std
    weights["critic.head.bias"] = (weights["critic.head.bias"] * new.value_std + new.value_mean - old.value_mean) / old.value_std
    if independent.near_a_kink(weights):
        return None
    terms, gradient = independent.terms(weights), independent.gradient(weights)
    value_error = max(abs((2 * both[name] - first[name]) - float(term)) / max(1.0, abs(float(term))) for name, term in terms.items())
    largest = max(1.0, max(float(np.abs(part).max()) for part in gradient.values()))
    gradient_error = max(float(np.abs(found[name] - part).max()) for name, part in gradient.items()) / largest
    rng, step = np.random.default_rng(world.seed), 1e-6  # a central difference along one random line
    line = {name: rng.standard_normal(weights[name].shape) for name in gradient}
    ends = [independent.terms({**weights, **{n: weights[n] + sign * step * line[n] for n in line}})["loss"] for sign in (1, -1)]
    along = sum(float((gradient[name] * line[name]).sum()) for name in line)
    return value_error, gradient_error, abs(float(ends[0] - ends[1]) / (2 * step) - along) / max(1.0, abs(along))


@procedure("E2", full=400, test=5)
def loss_and_gradient(work: Work) -> Outcome:
    """PPO's loss and gradient compared with an independent version and finite differences.

    Must: value to 1e-12 and gradient to 1e-9 in float64; 1e-6 and 1e-5 in float32.
    Random worlds (Discrete, MultiDiscrete, Box; masks, normalisers, value clip, normalised advantages) on both backends.
    """
    outcome, worst, again = Outcome(), dict[str, float](), 0
    for number in work.each():
        found: dict[tuple[str, str], tuple[float, float, float]] = {}
        for attempt in range(1000):  # until the case is away from kinks on both backends
            world = random_world(np.random.default_rng([work.seed, number, attempt]), seed=number, one_minibatch=True)
            rollout = random_rollout(world)
            with learning_threads(1):
                pairs = [(key, compare(world, rollout, *key)) for key in product(BACKENDS, LIMITS)]
            found = {key: errors for key, errors in pairs if errors is not None}
            if len(found) == len(pairs):
                break
            again += 1
        for (backend, width), errors in found.items():
            limits = (*LIMITS[width], 1e-6)
            fine = all(error <= limit for error, limit in zip(errors, limits))
            outcome.check(fine, f"case {number}, {world.describe()}, {backend} {width}: value, gradient, line {errors}")
            for what, error in zip(("value", "gradient"), errors):
                key = f"largest error of the {what}, {backend} {width}"
                worst[key] = max(error, worst.get(key, 0.0))
    outcome.figures |= {name: f"{error:.1e}" for name, error in worst.items()}
    outcome.figures["cases drawn again, too near a kink of the clip"] = str(again)
    outcome.notes.append("TorchRL's ClipPPOLoss is not compared: it is not installed; JAX comes with its backend")
    outcome.notes.append("the gradient is that of `update`; the independent one uses complex steps, checked by a finite difference")
    return outcome
