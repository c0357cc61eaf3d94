"""E2: PPO's loss and its gradient beside a version that shares no code with them, from the rollout to every parameter's slope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from faults.programme import Outcome, Work, procedure
from faults.right_independent import Independent, statistics_of
from faults.right_worlds import World, learner_of, policy_of, random_rollout, random_world

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
    """The complex step itself beside an ordinary central difference along one random line."""
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


@procedure(
    "E2",
    title="PPO's loss and gradient beside an independent version and finite differences",
    must="value to 1e-12 and gradient to 1e-9 in float64; 1e-6 and 1e-5 in float32",
    full=400,
    test=5,
)
def loss_and_gradient(work: Work) -> Outcome:
    """Random worlds (Discrete, MultiDiscrete, Box; masks, normalisers, value clip, normalised advantages) on both backends."""
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
