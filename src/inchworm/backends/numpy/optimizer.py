"""Step 9 of 9 in NumPy: the optimisers of `ppo.optimizer`, each over all parameters as one vector."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from inchworm.backends.learner import BETA_MEAN, BETA_SQUARE, RMS_DECAY, check_moments, check_optimizer_state
from inchworm.config.sections import PPOConfig
from inchworm.core.errors import ConfigError

Views = Callable[[np.ndarray], dict[str, np.ndarray]]
"""A vector as views, by the names of the weights."""


class Optimizer(ABC):
    """Moves the parameters against a gradient; one without a state of its own only adds `step`.

    With `weight_decay` the parameters also shrink by that share of the learning rate, apart from the gradient.
    """

    name = ""

    def __init__(self, parameters: np.ndarray, *, eps: float, weight_decay: float) -> None:
        self.parameters = parameters
        self.steps = 0
        self._eps, self._weight_decay = eps, weight_decay

    def _decay(self, learning_rate: float) -> None:
        if self._weight_decay:
            self.parameters *= 1 - learning_rate * self._weight_decay

    @abstractmethod
    def step(self, gradient: np.ndarray, learning_rate: float, *, scale: float = 1.0) -> None:
        """Move the parameters against `scale` times the gradient."""

    def state_dict(self, views: Views) -> dict[str, Any]:  # noqa: ARG002
        """The state as plain data and arrays, by the names of the weights."""
        return {"optimizer": self.name, "weights": {}}

    def load_state_dict(self, state: Mapping[str, Any], views: Views) -> None:
        """Restore what `state_dict` returned."""
        check_optimizer_state(state, self.name, {name: part.shape for name, part in views(self.parameters).items()})


class Adam(Optimizer):
    """Running means of the gradient and of its square, and the step they make.

    Both means begin at 0 and are therefore too small by the factor 1 - betaᵗ after t steps, which is divided out (Kingma & Ba 2015).
    With `weight_decay` this is AdamW (Loshchilov & Hutter 2019).
    """

    def __init__(self, parameters: np.ndarray, *, eps: float, weight_decay: float) -> None:
        super().__init__(parameters, eps=eps, weight_decay=weight_decay)
        self.mean, self.square = np.zeros_like(parameters), np.zeros_like(parameters)
        self._scratch, self._step = np.empty_like(parameters), np.empty_like(parameters)

    def step(self, gradient: np.ndarray, learning_rate: float, *, scale: float = 1.0) -> None:
        """Move the parameters against `scale` times the gradient."""
        self.steps += 1
        new, step = self._scratch, self._step
        # mean = beta mean + (1 - beta) gradient, and the same for its square
        np.multiply(gradient, (1 - BETA_MEAN) * scale, out=new)
        self.mean *= BETA_MEAN
        self.mean += new
        np.multiply(gradient, gradient, out=new)
        new *= (1 - BETA_SQUARE) * scale * scale
        self.square *= BETA_SQUARE
        self.square += new
        self._decay(learning_rate)
        # step = rate · mean / (1 - beta₁ᵗ) / (sqrt(square / (1 - beta₂ᵗ)) + eps), with u = sqrt(1 - beta₂ᵗ) taken out of the root
        u = math.sqrt(1 - BETA_SQUARE**self.steps)
        np.sqrt(self.square, out=new)
        new += self._eps * u
        np.divide(self.mean, new, out=step)
        step *= learning_rate * u / (1 - BETA_MEAN**self.steps)
        self.parameters -= step

    def state_dict(self, views: Views) -> dict[str, Any]:
        """Steps and moments by the names of the weights: the form that every backend's Adam reads."""
        return {"step": self.steps, "mean": views(self.mean.copy()), "square": views(self.square.copy())}

    def load_state_dict(self, state: Mapping[str, Any], views: Views) -> None:
        """Restore what `state_dict` returned."""
        check_moments(state, {name: view.shape for name, view in views(self.mean).items()})
        self.steps = int(state["step"])
        for key, vector in (("mean", self.mean), ("square", self.square)):
            for name, part in views(vector).items():
                part[...] = state[key][name]


class RMSprop(Optimizer):
    """The gradient divided by the root of its running square (Tieleman & Hinton 2012), without momentum."""

    name = "rmsprop"

    def __init__(self, parameters: np.ndarray, *, eps: float, weight_decay: float) -> None:
        super().__init__(parameters, eps=eps, weight_decay=weight_decay)
        self.square = np.zeros_like(parameters)

    def step(self, gradient: np.ndarray, learning_rate: float, *, scale: float = 1.0) -> None:
        """Move the parameters against `scale` times the gradient."""
        self.steps += 1
        self.square *= RMS_DECAY
        self.square += (1 - RMS_DECAY) * scale * scale * gradient * gradient
        self._decay(learning_rate)
        self.parameters -= learning_rate * scale * gradient / (np.sqrt(self.square) + self._eps)

    def state_dict(self, views: Views) -> dict[str, Any]:
        """Steps and running squares, under the names that `torch.optim.RMSprop` has for them."""
        steps = np.asarray(self.steps, np.float32)
        weights = {name: {"step": steps, "square_avg": part} for name, part in views(self.square.copy()).items()}
        return {"optimizer": self.name, "weights": weights}

    def load_state_dict(self, state: Mapping[str, Any], views: Views) -> None:
        """Restore what `state_dict` returned."""
        parts = views(self.square)
        for name, entry in check_optimizer_state(state, self.name, {name: part.shape for name, part in parts.items()}).items():
            self.steps = int(entry["step"])
            parts[name][...] = entry["square_avg"]


class SGD(Optimizer):
    """Plain gradient descent, without momentum and without state."""

    name = "sgd"

    def step(self, gradient: np.ndarray, learning_rate: float, *, scale: float = 1.0) -> None:
        """Move the parameters against `scale` times the gradient."""
        self._decay(learning_rate)
        self.parameters -= learning_rate * scale * gradient


OPTIMIZERS: dict[str, type[Optimizer]] = {"adam": Adam, "adamw": Adam, "rmsprop": RMSprop, "sgd": SGD}
"""The optimisers of this backend. AdamW is Adam with weight decay."""


def make_optimizer(parameters: np.ndarray, config: PPOConfig) -> Optimizer:
    """The optimiser that a config names."""
    if config.optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"the numpy backend has no ppo.optimizer={config.optimizer}: use --backend torch, or one of {', '.join(OPTIMIZERS)}"
        )
    return OPTIMIZERS[config.optimizer](parameters, eps=config.adam_eps, weight_decay=config.weight_decay)
