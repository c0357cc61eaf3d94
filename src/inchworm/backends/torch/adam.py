"""Step 9 of 9: Adam (Kingma & Ba 2015) over all parameters at once, which moves or stands still as a flag on the device says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inchworm.backends.numpy.learner import BETA_MEAN, BETA_SQUARE
from inchworm.core.errors import ConfigError, InchwormError


class Adam:
    """The built-in optimiser: the gradient and its running mean and square are one vector each, of which the parameters see parts.

    With `weight_decay` the parameters also shrink by that share of the learning rate, apart from the gradient (AdamW).
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
        """Steps taken so far: on the device, because a step that is left out does not count."""
        self._weights: list[Tensor] = [*self.parameters]
        self._gradients, self._means, self._squares = (self._parts(vector) for vector in (self.gradient, self.mean, self.square))
        for parameter, gradient in zip(self.parameters, self._gradients):
            parameter.grad = gradient  # where people look for it

    def put_gradient(self, parts: Sequence[Tensor], *, add: bool) -> None:
        """Take the gradient of every parameter, or add it to what is there."""
        vectors = [part.reshape(-1) for part in parts]
        if add:
            self.gradient += torch.cat(vectors)
        else:
            torch.cat(vectors, out=self.gradient)

    def clip(self, limit: float | None) -> Tensor:
        """The gradient's norm; above `limit` the gradient is scaled down to it."""
        norm: Tensor = torch.linalg.vector_norm(self.gradient)
        if limit is not None:
            self.gradient *= (limit / (norm + 1e-6)).clamp_(max=1.0)
        return norm

    def step(self, skip: Tensor) -> None:
        """Move every parameter against its gradient, or none and no moment where `skip` is true."""
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
        """Go on from what `state_dict` described; names and shapes must be these parameters'."""
        for key, parts in (("mean", self._means), ("square", self._squares)):
            differing = sorted(set(state[key]) ^ set(self.names))
            if differing:
                raise InchwormError(f"this optimiser state does not fit the policy: {differing} are only on one side")
            for name, part in zip(self.names, parts):
                if np.shape(state[key][name]) != tuple(part.shape):
                    shapes = f"{np.shape(state[key][name])}; the policy needs {tuple(part.shape)}"
                    raise InchwormError(f"the optimiser's {key} of {name} has shape {shapes}")
                part.copy_(torch.from_numpy(np.array(state[key][name])))
        self.steps.fill_(float(state["step"]))

    def _parts(self, vector: Tensor) -> list[Tensor]:
        return [part.view_as(parameter) for part, parameter in zip(torch.split(vector, self.sizes), self.parameters)]
