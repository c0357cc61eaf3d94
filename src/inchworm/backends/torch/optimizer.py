"""Step 9 of 9: the optimisers of `ppo.optimizer`, and any `torch.optim.Optimizer` that the user brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inchworm.backends.learner import BETA_MEAN, BETA_SQUARE, RMS_DECAY, check_moments, check_optimizer_state
from inchworm.config.sections import PPOConfig
from inchworm.core.errors import ConfigError


class Adam:
    """Adam (Kingma & Ba 2015): the gradient and its running mean and square are one vector each, with one view per parameter.

    One norm, one scaling and one fused step then serve all parameters, which makes a step a fifth faster than `torch.optim.Adam`. With
    `weight_decay` the parameters also shrink by that share of the learning rate, apart from the gradient (AdamW). On a bad minibatch
    neither weights nor moments move.
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


class TorchOptimizer:
    """One or more `torch.optim` optimisers as one, with the methods of `Adam`.

    Without a `name` it is the user's own, which is used as it is and may also hold the parameters of a custom loss; its state is saved by
    the numbers of its parameters. With the `name` of a setting, the state is saved by the names of the weights, and `weight_decay` shrinks
    the weights as in `Adam`.
    """

    def __init__(
        self,
        parts: Sequence[torch.optim.Optimizer],
        parameters: Mapping[str, nn.Parameter],
        *,
        name: str | None = None,
        weight_decay: float = 0.0,
    ) -> None:
        self.parameters, self._parts, self._name, self._weight_decay = list(parameters.values()), parts, name, weight_decay
        self._weight_names = {id(parameter): weight for weight, parameter in parameters.items()}
        self._initial_rates = [float(group["lr"]) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        """The current groups of all parts: torch replaces them when a state is loaded."""
        return [group for part in self._parts for group in part.param_groups]

    def _labels(self, part: torch.optim.Optimizer) -> list[str]:
        """What the state of each of a part's parameters is saved under."""
        held = [parameter for group in part.param_groups for parameter in group["params"]]
        return [str(index) if self._name is None else self._weight_names[id(parameter)] for index, parameter in enumerate(held)]

    def scale_learning_rate(self, factor: float) -> None:
        """Set the learning rate of every group to `factor` times its initial one."""
        for group, initial in zip(self._groups(), self._initial_rates):
            group["lr"] = initial * factor

    def zero_grad(self) -> None:
        """Clear the gradients, also of parameters that no optimiser holds."""
        for part in self._parts:
            part.zero_grad(set_to_none=True)
        for parameter in self.parameters:
            parameter.grad = None

    def clip(self, limit: float | None) -> Tensor:
        """Scale the policy's gradient down to the norm `limit`, and return the norm that it had."""
        return nn.utils.clip_grad_norm_(self.parameters, float("inf") if limit is None else limit)

    def step(self, skip: Tensor) -> None:
        """Take a step unless `skip` is true, which the host has to read: `torch.optim` cannot skip a step on the device."""
        if bool(skip):
            return
        if self._weight_decay:
            kept = 1 - self._groups()[0]["lr"] * self._weight_decay  # the groups of a setting have one rate
            with torch.no_grad():
                for parameter in self.parameters:
                    parameter.mul_(kept)
        for part in self._parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """The state of every parameter, with arrays for tensors."""
        states: dict[str, Any] = {}
        for part in self._parts:
            labels = self._labels(part)
            for index, entry in part.state_dict()["state"].items():
                states[labels[index]] = {
                    key: value.detach().cpu().numpy().copy() if isinstance(value, Tensor) else value for key, value in entry.items()
                }
        return states if self._name is None else {"optimizer": self._name, "weights": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the groups and their options stay as they are."""
        shapes = {self._weight_names[id(parameter)]: tuple(parameter.shape) for parameter in self.parameters}
        states = state if self._name is None else check_optimizer_state(state, self._name, shapes)
        for part in self._parts:
            own = {
                index: {key: torch.from_numpy(np.array(v)) if isinstance(v, np.ndarray) else v for key, v in states[label].items()}
                for index, label in enumerate(self._labels(part))
                if label in states
            }
            part.load_state_dict({"state": own, "param_groups": part.state_dict()["param_groups"]})


def make_optimizer(parameters: Mapping[str, nn.Parameter], config: PPOConfig) -> Adam | TorchOptimizer:
    """The optimiser that a config names.

    Muon (Jordan 2024) is for matrices: AdamW takes all other parameters. Its steps are scaled to the size of AdamW's (Liu et al. 2025), so
    that one learning rate serves both.
    """
    rate, eps, every = config.learning_rate, config.adam_eps, list(parameters.values())
    if config.optimizer in ("adam", "adamw"):
        return Adam(parameters, learning_rate=rate, eps=eps, weight_decay=config.weight_decay)
    parts: list[torch.optim.Optimizer] = []
    if config.optimizer == "rmsprop":
        parts.append(torch.optim.RMSprop(every, lr=rate, alpha=RMS_DECAY, eps=eps))
    elif config.optimizer == "sgd":
        parts.append(torch.optim.SGD(every, lr=rate))
    else:
        matrices, others = ([p for p in every if (p.ndim == 2) == wanted] for wanted in (True, False))
        if matrices:
            parts.append(torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
        if others:
            parts.append(torch.optim.AdamW(others, lr=rate, betas=(BETA_MEAN, BETA_SQUARE), eps=eps, weight_decay=0.0))
    return TorchOptimizer(parts, parameters, name=config.optimizer, weight_decay=config.weight_decay)
