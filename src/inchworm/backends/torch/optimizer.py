"""Step 9 of 9: what moves the weights along a gradient, the built-in Adam (Kingma & Ba 2015) or an optimiser that the user brings.

Both clip the gradient and take a step, or none where `skip` is true: on a bad minibatch neither weights nor moments move.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inchworm.backends.learner import BETA_MEAN, BETA_SQUARE, check_moments
from inchworm.core.errors import ConfigError


class Adam:
    """The built-in optimiser: the gradient and its running mean and square are one vector each, with one view per parameter.

    One norm, one scaling and one fused step then serve all parameters, which makes a step a fifth faster than `torch.optim.Adam`. With
    `weight_decay` the parameters also shrink by that share of the learning rate, apart from the gradient (AdamW).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, learning_rate: float, eps: float, weight_decay: float) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        dtypes = {parameter.dtype for parameter in self.parameters}
        if len(dtypes) != 1:
            found = ", ".join(sorted(str(dtype) for dtype in dtypes)) or "none"
            raise ConfigError(
                f"the policy's trainable parameters must be of one dtype, and these are {found}; cast the policy, or bring an optimizer"
            )
        self.learning_rate, self.eps, self.weight_decay = learning_rate, eps, weight_decay
        self.sizes = [parameter.numel() for parameter in self.parameters]
        like = self.parameters[0]
        self.gradient, self.mean, self.square = (torch.zeros(sum(self.sizes), dtype=like.dtype, device=like.device) for _ in range(3))
        self.steps = torch.zeros((), dtype=torch.float32, device=like.device)
        """Steps taken so far: on the device, because a skipped step does not count."""
        self._initial_rate = learning_rate
        self._weights: list[Tensor] = [*self.parameters]
        self._gradients, self._means, self._squares = (
            [part.view_as(parameter) for part, parameter in zip(torch.split(vector, self.sizes), self.parameters)]
            for vector in (self.gradient, self.mean, self.square)
        )
        self.zero_grad()

    def scale_learning_rate(self, factor: float) -> None:
        """Set the learning rate to `factor` times the initial one."""
        self.learning_rate = self._initial_rate * factor

    def zero_grad(self) -> None:
        """Clear the gradient. Every `parameter.grad` is a view of it again, even if it was replaced."""
        self.gradient.zero_()
        for parameter, gradient in zip(self.parameters, self._gradients):
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def clip(self, limit: float | None) -> Tensor:
        """Scale the gradient down to the norm `limit`, and return the norm that it had."""
        norm: Tensor = torch.linalg.vector_norm(self.gradient)
        if limit is not None:
            self.gradient *= (limit / (norm + 1e-6)).clamp_(max=1.0)
        return norm

    def step(self, skip: Tensor) -> None:
        """Move every parameter against its gradient, or leave parameters and moments alone where `skip` is true."""
        stays = skip.to(torch.float32)
        self.steps += 1 - stays
        kernel = torch._fused_adamw_ if self.weight_decay else torch._fused_adam_
        with torch.no_grad():
            kernel(
                self._weights,
                self._gradients,
                self._means,
                self._squares,
                [],
                [self.steps] * len(self.parameters),
                lr=self.learning_rate,
                beta1=BETA_MEAN,
                beta2=BETA_SQUARE,
                weight_decay=self.weight_decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                found_inf=stays,
            )

    def state_dict(self) -> dict[str, Any]:
        """Steps and moments as plain data, by the names of the weights: the form that every backend's Adam reads."""
        moments = {"mean": self._means, "square": self._squares}
        named = {key: {name: part.cpu().numpy().copy() for name, part in zip(self.names, parts)} for key, parts in moments.items()}
        return {"step": int(self.steps), **named}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; names and shapes must be those of these parameters."""
        check_moments(state, {name: tuple(parameter.shape) for name, parameter in zip(self.names, self.parameters)})
        for key, parts in (("mean", self._means), ("square", self._squares)):
            for name, part in zip(self.names, parts):
                part.copy_(torch.from_numpy(np.array(state[key][name])))
        self.steps.fill_(float(state["step"]))


class UserOptimizer:
    """Any `torch.optim.Optimizer`, with the methods of `Adam`. It may also hold the parameters of a custom loss."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self._optimizer, self.parameters = optimizer, list(parameters.values())
        self._initial_rates = [float(group["lr"]) for group in optimizer.param_groups]

    def scale_learning_rate(self, factor: float) -> None:
        """Set the learning rate of every group to `factor` times its initial one."""
        for group, initial in zip(self._optimizer.param_groups, self._initial_rates):
            group["lr"] = initial * factor

    def zero_grad(self) -> None:
        """Clear the gradients, also of parameters that the optimiser does not hold."""
        self._optimizer.zero_grad(set_to_none=True)
        for parameter in self.parameters:
            parameter.grad = None

    def clip(self, limit: float | None) -> Tensor:
        """Scale the policy's gradient down to the norm `limit`, and return the norm that it had."""
        return nn.utils.clip_grad_norm_(self.parameters, float("inf") if limit is None else limit)

    def step(self, skip: Tensor) -> None:
        """Take a step unless `skip` is true, which the host has to read: an optimiser of unknown kind cannot skip a step on the device."""
        if not bool(skip):
            self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """The state of every parameter, by its number, with arrays for tensors."""
        state = self._optimizer.state_dict()["state"]
        return {
            str(index): {name: value.detach().cpu().numpy().copy() if isinstance(value, Tensor) else value for name, value in entry.items()}
            for index, entry in state.items()
        }

    def load_state_dict(self, moments: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the groups and their options stay as they are."""
        groups = self._optimizer.state_dict()["param_groups"]
        state = {
            int(index): {
                name: torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value for name, value in entry.items()
            }
            for index, entry in moments.items()
        }
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
