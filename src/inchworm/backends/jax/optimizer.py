"""Step 9 of 9 in JAX: the optimisers of `ppo.optimizer`, each over all trained parameters as one vector.

One vector means one norm, one scaling and one step for all parameters. Optax's optimisers work leaf by leaf, and their state would have to
be converted for the other backends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from inchworm.backends.learner import BETA_MEAN, BETA_SQUARE, RMS_DECAY, check_moments, check_optimizer_state
from inchworm.core.errors import ConfigError

KINDS = ("adam", "adamw", "rmsprop", "sgd")
"""The optimisers of this backend. AdamW is Adam with weight decay."""


class Moments(NamedTuple):
    """The state of an optimiser; what a kind does not need is empty."""

    mean: Any
    """[P] running mean of the gradient, of Adam."""
    square: Any
    """[P] running mean of its square, of Adam and RMSprop."""
    steps: Any
    """Steps taken so far: a skipped one does not count."""


def check_kind(kind: str) -> None:
    """Refuse an optimiser that this backend does not have."""
    if kind not in KINDS:
        raise ConfigError(f"the jax backend has no ppo.optimizer={kind}: use --backend torch, or one of {', '.join(KINDS)}")


def first_moments(kind: str, size: int, dtype: Any) -> Moments:
    """The state before the first step, as NumPy arrays."""
    widths = {"rmsprop": (0, size), "sgd": (0, 0)}.get(kind, (size, size))
    return Moments(np.zeros(widths[0], dtype), np.zeros(widths[1], dtype), np.zeros((), np.int32))


def apply_gradient(
    kind: str, weights: Array, moments: Moments, gradient: Array, rate: Any, eps: Any, weight_decay: Any = None
) -> tuple[Array, Moments]:
    """The weights [P] and the state after one step against a gradient [P].

    With `weight_decay` the weights also shrink by that share of the rate, apart from the gradient.
    """
    mean, square, steps = moments
    kept = weights if weight_decay is None else weights * (1 - rate * weight_decay)
    steps = steps + 1
    if kind == "sgd":
        return kept - rate * gradient, Moments(mean, square, steps)
    if kind == "rmsprop":
        square = RMS_DECAY * square + (1 - RMS_DECAY) * gradient * gradient
        return kept - rate * gradient / (jnp.sqrt(square) + eps), Moments(mean, square, steps)
    # Adam (Kingma & Ba 2015): both means begin at 0 and are too small by 1 - betaᵗ; expm1, because for t = 1 little is left of 1 - 0.999.
    mean = BETA_MEAN * mean + (1 - BETA_MEAN) * gradient
    square = BETA_SQUARE * square + (1 - BETA_SQUARE) * gradient * gradient
    count = steps.astype(weights.dtype)
    mean_share, square_share = (-jnp.expm1(count * math.log(beta)) for beta in (BETA_MEAN, BETA_SQUARE))
    root = jnp.sqrt(square_share)
    return kept - (rate * root / mean_share) * mean / (jnp.sqrt(square) + eps * root), Moments(mean, square, steps)


def split_vector(vector: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """A vector of all trained parameters by their names."""
    parts, start = {}, 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape)
        parts[name] = vector[start:stop].reshape(shape)
        start = stop
    return parts


def join_vector(parts: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    """Named arrays as one vector, in NumPy."""
    return np.concatenate([np.asarray(parts[name]).reshape(-1) for name in shapes] or [np.zeros(0, np.float32)])


def moments_to_dict(kind: str, moments: Moments, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The state as plain data and arrays by the names of the weights: the form that every backend reads."""
    mean, square, steps = (np.array(part) for part in moments)
    if kind == "sgd":
        return {"optimizer": "sgd", "weights": {}}
    if kind == "rmsprop":
        taken = np.asarray(steps, np.float32)
        return {"optimizer": kind, "weights": {n: {"step": taken, "square_avg": p} for n, p in split_vector(square, shapes).items()}}
    return {"step": int(steps), "mean": split_vector(mean, shapes), "square": split_vector(square, shapes)}


def moments_from_dict(kind: str, state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], dtype: Any) -> Moments:
    """What `moments_to_dict` returned, of this or another backend, as arrays; names and shapes must be those of the weights."""
    fresh = first_moments(kind, sum(math.prod(shape) for shape in shapes.values()), dtype)
    if kind in ("sgd", "rmsprop"):
        found = check_optimizer_state(state, kind, shapes)
        if kind == "sgd" or not found:  # a weight that has had no gradient has no state
            return fresh
        squares = {name: found[name]["square_avg"] if name in found else np.zeros(shape, dtype) for name, shape in shapes.items()}
        steps = next(iter(found.values()))["step"]
        return Moments(fresh.mean, join_vector(squares, shapes).astype(dtype), np.asarray(steps, np.int32))
    check_moments(state, shapes)
    mean, square = (join_vector(state[name], shapes).astype(dtype) for name in ("mean", "square"))
    return Moments(mean, square, np.asarray(state["step"], np.int32))
