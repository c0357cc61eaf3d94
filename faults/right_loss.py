"""E2: the PPO loss and its gradient compared with an independent implementation, from the rollout to every parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from faults.programme import Outcome, Work, procedure
from faults.right_worlds import World, learner_of, policy_of, random_rollout, random_world

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
    """Read from the policy's weights: mean, variance and count are there by name."""

    def scale(name: str) -> np.ndarray:
        var = np.asarray(weights[f"{name}.var"], np.float64)
        return np.sqrt(var + 1e-8)

    center, inverse = np.zeros(size), np.ones(size)
    if "observation_normalizer.mean" in weights:
        # They are kept wide but used as float32: the centre and the factor are rounded once, as every backend does.
        center = weights["observation_normalizer.mean"].astype(np.float32).astype(np.float64)
        inverse = (1 / scale("observation_normalizer")).astype(np.float32).astype(np.float64)
    mean = float(weights.get("value_normalizer.mean", 0.0))
    std = float(scale("value_normalizer")) if "value_normalizer.mean" in weights else 1.0
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
        self.statistics = statistics_of(start, world.observation_size)
        self.rows = self._normalized(observations.reshape(-1, world.observation_size))
        self.mask = rollout.observations["action_mask"].reshape(len(self.rows), -1).astype(bool) if world.masked else None
        self.actions = np.asarray(rollout.actions).reshape(len(self.rows), -1)
        self.old_log_probs = rollout.log_probs.reshape(-1).astype(np.float64)
        wide = {name: np.asarray(value, np.float64) for name, value in start.items()}
        cuts = rollout.cut_observations["observation"] if world.masked else rollout.cut_observations
        values = self._values(wide, self.rows).reshape(rollout.rewards.shape)  # [T, B]
        following = np.concatenate([values[1:], values[-1:]])
        following[tuple(rollout.cut_rows.T)] = self._values(wide, self._normalized(cuts))
        advantages = self._advantages(rollout, values, following)
        self.old_values, self.returns = values.reshape(-1), (advantages + values).reshape(-1)
        self.advantages = advantages.reshape(-1)
        if world.config.normalize_advantages != "off":
            self.advantages = (self.advantages - self.advantages.mean()) / (self.advantages.std(ddof=1) + 1e-8)

    def _normalized(self, rows: np.ndarray) -> np.ndarray:
        return np.clip((rows.astype(np.float64) - self.statistics.center) * self.statistics.inverse_std, *self.world.clip)

    def _values(self, weights: Mapping[str, Any], rows: Any) -> Any:
        features = dense(weights, "trunk", rows, self.world.activation)
        normalized = dense(weights, "critic", features, self.world.activation)[:, 0]
        return normalized * self.statistics.value_std + self.statistics.value_mean

    def _advantages(self, rollout: Any, values: np.ndarray, following: np.ndarray) -> np.ndarray:
        config, ends = self.world.config, rollout.terminated | rollout.truncated
        deltas = rollout.rewards + config.gamma * following * ~rollout.terminated - values
        result = np.zeros_like(values)
        for t, lane in np.ndindex(*values.shape):
            for k, row in enumerate(range(t, len(values))):
                result[t, lane] += (config.gamma * config.gae_lambda) ** k * deltas[row, lane]
                if ends[row, lane]:
                    break
        return result

    def terms(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """The loss and its parts at these weights."""
        config, outputs = self.world.config, self._outputs(weights)
        log_probs, entropy = self._distribution(weights, outputs)
        ratio = np.exp(log_probs - self.old_log_probs)
        clipped = _hold(ratio, 1 - config.clip_coef, 1 + config.clip_coef)
        policy_loss = -_least(ratio * self.advantages, clipped * self.advantages).mean()
        values = self._values(weights, self.rows)
        errors = ((values - self.returns) / self.statistics.value_std) ** 2
        if config.clip_vloss:
            reach = config.clip_coef * self.statistics.value_std
            held = self.old_values + _hold(values - self.old_values, -reach, reach)
            errors = -_least(-errors, -(((held - self.returns) / self.statistics.value_std) ** 2))
        value_loss = 0.5 * errors.mean()
        loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy.mean()
        return {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy.mean()}

    def _outputs(self, weights: Mapping[str, Any]) -> Any:
        return dense(weights, "actor", dense(weights, "trunk", self.rows, self.world.activation), self.world.activation)

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
        """The loss's slope by every parameter, one complex step each."""
        slopes = {}
        for name in self.world.spec.layers:
            slope = np.zeros(weights[name].shape)
            for place in np.ndindex(*slope.shape):
                moved = weights[name].astype(np.complex128)
                moved[place] += 1j * NUDGE
                slope[place] = self.terms({**weights, name: moved})["loss"].imag / NUDGE
            slopes[name] = slope
        return slopes


def _least(a: Any, b: Any) -> Any:
    return np.where(a.real <= b.real, a, b)


def _hold(x: Any, low: float, high: float) -> Any:
    return np.where(x.real < low, low, np.where(x.real > high, high, x))


LIMITS = {"float64": (1e-12, 1e-9), "float32": (1e-6, 1e-5)}
"""Of the value and of the gradient, relative to the largest where that is above 1."""


def before_popart(after: Mapping[str, np.ndarray], start: Mapping[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    """The parameters that the last step left, in float64: the value head as it was before the statistics moved, which rescaled it."""
    wide = {name: np.asarray(value, np.float64) for name, value in after.items()}
    old, new = statistics_of(start, size), statistics_of(after, size)
    wide["critic.head.weight"] = wide["critic.head.weight"] * new.value_std / old.value_std
    wide["critic.head.bias"] = (wide["critic.head.bias"] * new.value_std + new.value_mean - old.value_mean) / old.value_std
    return wide


def compare(world: World, rollout: Any, backend: str, width: str) -> tuple[float, float, float] | None:
    """How far value and gradient are from the independent ones, and the slope along a line from its difference; None near a kink.

    Two learners take one and two steps of the whole rollout: what the second does in its second step is looked at, because only
    there have ratios and values moved from the old ones.
    """
    results = []
    for epochs in (1, 2):
        policy = policy_of(world, backend, width)
        start = policy.get_weights()
        learner = learner_of(policy, world.config.replace(update_epochs=epochs), backend)
        results.append((learner.update(rollout), policy.get_weights(), gradient_of(learner, policy, backend)))
    (first, between, _), (both, _, found) = results
    independent = Independent(world, rollout, start)
    weights = before_popart(between, start, world.observation_size)
    if independent.near_a_kink(weights):
        return None
    terms, gradient = independent.terms(weights), independent.gradient(weights)
    value_error = max(abs((2 * both[name] - first[name]) - float(term)) / max(1.0, abs(float(term))) for name, term in terms.items())
    largest = max(1.0, max(float(np.abs(slope).max()) for slope in gradient.values()))
    gradient_error = max(float(np.abs(found[name] - slope).max()) for name, slope in gradient.items()) / largest
    return value_error, gradient_error, _line_error(independent, weights, gradient, world)


def gradient_of(learner: Any, policy: Any, backend: str) -> dict[str, np.ndarray]:
    """The gradient of the last step, by the weights' names."""
    if backend == "numpy":
        return {name: np.array(part) for name, part in learner._network.gradients.items()}
    return {policy.public_name(name): parameter.grad.numpy().copy() for name, parameter in policy.named_parameters() if parameter.numel()}


def _line_error(independent: Independent, weights: Mapping[str, Any], gradient: Mapping[str, np.ndarray], world: World) -> float:
    """The complex step compared with a central difference along one random line."""
    rng, step = np.random.default_rng(world.seed), 1e-6
    line = {name: rng.standard_normal(weights[name].shape) for name in gradient}
    ends = [independent.terms({**weights, **{n: weights[n] + sign * step * line[n] for n in line}})["loss"] for sign in (1, -1)]
    slope = sum(float((gradient[name] * line[name]).sum()) for name in line)
    return abs(float(ends[0] - ends[1]) / (2 * step) - slope) / max(1.0, abs(slope))


def _away_from_kinks(seed: int, number: int) -> tuple[World, dict[tuple[str, str], tuple[float, float, float]], int]:
    """A world, what `compare` found in it on every backend in every width, and how many worlds were passed over."""
    for attempt in range(1000):
        world = random_world(np.random.default_rng([seed, number, attempt]), seed=number, one_minibatch=True)
        rollout, found = random_rollout(world), {}
        for backend, width in ((b, w) for b in ("numpy", "torch") for w in LIMITS):
            errors = compare(world, rollout, backend, width)
            if errors is not None:
                found[backend, width] = errors
        if len(found) == 2 * len(LIMITS):
            return world, found, attempt
    raise RuntimeError("every world is near a kink")


@procedure("E2", full=400, test=5)
def loss_and_gradient(work: Work) -> Outcome:
    """PPO's loss and gradient compared with an independent version and finite differences.

    Must: value to 1e-12 and gradient to 1e-9 in float64; 1e-6 and 1e-5 in float32.
    Random worlds (Discrete, MultiDiscrete, Box; masks, normalisers, value clip, normalised advantages) on both backends.
    """
    from inchworm.backends.registry import learning_threads

    outcome, worst, again = Outcome(), dict[str, float](), 0
    for number in work.each():
        with learning_threads(1):
            world, found, attempts = _away_from_kinks(work.seed, number)
        again += attempts
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
    outcome.notes.append(
        "the gradient is that of `update` itself; the independent one is by a complex step per weight, checked by a difference"
    )
    return outcome
