"""Step 9 of 9: Adam (Kingma & Ba 2015) on one flat vector of parameters."""

from __future__ import annotations

import math

import numpy as np

BETA_MEAN, BETA_SQUARE = 0.9, 0.999


class Adam:
    """Running means of the gradient and of its square, and the step they make.

    Both means begin at 0 and are therefore too small by the factor 1 - betaᵗ after t steps, which is divided out. With
    `weight_decay` the parameters also shrink by that share of the learning rate, apart from the gradient (AdamW).
    """

    def __init__(self, parameters: np.ndarray, *, eps: float, weight_decay: float) -> None:
        self.parameters = parameters
        self.mean, self.square = np.zeros_like(parameters), np.zeros_like(parameters)
        self.steps = 0
        self._eps, self._weight_decay = eps, weight_decay
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
        if self._weight_decay:
            self.parameters *= 1 - learning_rate * self._weight_decay
        # step = rate · mean / (1 - beta₁ᵗ) / (sqrt(square / (1 - beta₂ᵗ)) + eps), with u = sqrt(1 - beta₂ᵗ) taken out of the root
        u = math.sqrt(1 - BETA_SQUARE**self.steps)
        np.sqrt(self.square, out=new)
        new += self._eps * u
        np.divide(self.mean, new, out=step)
        step *= learning_rate * u / (1 - BETA_MEAN**self.steps)
        self.parameters -= step
