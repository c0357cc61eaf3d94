"""Step 9 of 9 in JAX: the optimisers of `ppo.optimizer`, each over all trained parameters as one vector.

One vector means one norm, one scaling and one step for all parameters. Optax's optimisers work leaf by leaf, and their state would have to
be converted for the other backends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from inchworm.backends.learner import BETA_MEAN, BETA_SQUARE, RMS_DECAY, check_moments, check_optimizer_state
from inchworm.core.errors import ConfigError

KINDS = ("adam", "adamw", "rmsprop", "sgd")
"""The optimisers of this backend. AdamW is Adam with weight decay."""


class State(NamedTuple):
    """All weights that learn, and the state of their optimiser."""

    rows: Any
    """[R, P] the weights, then what the kind keeps: of Adam the running means of the gradient and of its square, of RMSprop the latter.
    One array, because XLA overwrites arrays in place, and its loop emitters make scalar code of loops that write where they read."""
    steps: Any
    """Steps taken so far, i32: a skipped one does not count."""


def check_kind(kind: str) -> None:
    """Refuse an optimiser that this backend does not have."""
    if kind not in KINDS:
        raise ConfigError(f"the jax backend has no ppo.optimizer={kind}: use --backend torch, or one of {', '.join(KINDS)}")


def first_state(kind: str, size: int, dtype: Any) -> State:
    """The state before the first step, as NumPy arrays; its weights are zeros."""
    return State(np.zeros(({"rmsprop": 2, "sgd": 1}.get(kind, 3), size), dtype), np.zeros((), np.int32))


def apply_gradient(kind: str, state: State, gradient: Array, rate: Any, eps: Any, weight_decay: Any = None) -> State:
    """The state after one step against a gradient [P].

    With `weight_decay` the weights also shrink by that share of the rate, apart from the gradient.
    """
    weights, *means = state.rows
    kept = weights if weight_decay is None else weights * (1 - rate * weight_decay)
    steps = state.steps + 1
    if kind == "sgd":
        return State((kept - rate * gradient)[None], steps)
    if kind == "rmsprop":
        square = RMS_DECAY * means[0] + (1 - RMS_DECAY) * gradient * gradient
        return State(jnp.stack([kept - rate * gradient / (jnp.sqrt(square) + eps), square]), steps)
    # Adam (Kingma & Ba 2015): both means begin at 0 and are too small by 1 - betaᵗ; expm1, because for t = 1 little is left of 1 - 0.999.
    mean = BETA_MEAN * means[0] + (1 - BETA_MEAN) * gradient
    square = BETA_SQUARE * means[1] + (1 - BETA_SQUARE) * gradient * gradient
    count = steps.astype(weights.dtype)
    mean_share, square_share = (-jnp.expm1(count * math.log(beta)) for beta in (BETA_MEAN, BETA_SQUARE))
    root = jnp.sqrt(square_share)
    return State(jnp.stack([kept - (rate * root / mean_share) * mean / (jnp.sqrt(square) + eps * root), mean, square]), steps)


def split_vector(vector: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """A vector of all trained parameters by their names."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    # In JAX one operation, because each slice of its own takes half a millisecond to trace.
    parts: Sequence[Any] = lax.split(vector, sizes) if isinstance(vector, Array) else np.split(vector, np.cumsum(sizes)[:-1])
    return {name: part.reshape(shape) for part, (name, shape) in zip(parts, shapes.items())}


def join_vector(parts: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    """Named arrays as one vector, in NumPy."""
    return np.concatenate([np.asarray(parts[name]).reshape(-1) for name in shapes] or [np.zeros(0, np.float32)])


def moments_to_dict(kind: str, state: State, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The optimiser's state as plain data and arrays by the names of the weights: the form that every backend reads."""
    rows, steps = np.array(state.rows), np.array(state.steps)
    if kind == "sgd":
        return {"optimizer": "sgd", "weights": {}}
    if kind == "rmsprop":
        taken = np.asarray(steps, np.float32)
        return {"optimizer": kind, "weights": {n: {"step": taken, "square_avg": p} for n, p in split_vector(rows[1], shapes).items()}}
    return {"step": int(steps), "mean": split_vector(rows[1], shapes), "square": split_vector(rows[2], shapes)}


def state_from_dict(kind: str, state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], dtype: Any) -> State:
    """What `moments_to_dict` returned, of this or another backend, with weights of 0; names and shapes must be those of the weights."""
    fresh = first_state(kind, sum(math.prod(shape) for shape in shapes.values()), dtype)
    if kind in ("sgd", "rmsprop"):
        found = check_optimizer_state(state, kind, shapes)
        if kind == "sgd" or not found:  # a weight that has had no gradient has no state
            return fresh
        squares = {name: found[name]["square_avg"] if name in found else np.zeros(shape, dtype) for name, shape in shapes.items()}
        fresh.rows[1] = join_vector(squares, shapes)
        return State(fresh.rows, np.asarray(next(iter(found.values()))["step"], np.int32))
    check_moments(state, shapes)
    fresh.rows[1:] = [join_vector(state[name], shapes) for name in ("mean", "square")]
    return State(fresh.rows, np.asarray(state["step"], np.int32))
