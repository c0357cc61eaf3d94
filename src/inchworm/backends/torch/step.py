"""Steps 8 and 9 of 9 for one minibatch: evaluate, loss, gradient, step. No branch depends on the data, so that it can be compiled whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from inchworm.backends.custom_losses import CustomLoss
from inchworm.backends.numpy.loss import LossCoefficients
from inchworm.backends.torch.loss import normalize, ppo_loss
from inchworm.backends.torch.minibatches import micro_batches
from inchworm.config import PPOConfig
from inchworm.errors import ConfigError
from inchworm.protocols import Policy
from inchworm.types import Evaluation, Minibatch

Row = dict[str, Tensor]
"""What one minibatch step gave: scalars under their metric names, and the flags `bad` and `empty`."""


class MinibatchStep:
    """One optimiser step on one minibatch, or none at all where its loss or gradient is not finite."""

    def __init__(self, policy: Policy, config: PPOConfig, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._policy, self._config, self._parameters, self._optimizer = policy, config, list(parameters), optimizer
        # Our own Adam decides on the device whether to move (a select); of a foreign optimiser nothing is known, so the host decides.
        self._selects = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) and bool(optimizer.defaults.get("fused"))

    def __call__(self, minibatch: Minibatch, coefficients: LossCoefficients, losses: Sequence[CustomLoss]) -> Row:
        """Move the weights once and say what happened."""
        if self._config.normalize_advantages == "minibatch":
            minibatch = replaced(minibatch, advantages=normalize(minibatch.advantages, minibatch.valid))
        count = minibatch.valid.sum()
        self._optimizer.zero_grad(set_to_none=True)
        row: Row = {}
        for micro in micro_batches(minibatch, self._config.gradient_accumulation):
            for name, term in self._backward(micro, coefficients, losses, count).items():
                row[name] = row[name] + term.detach() if name in row else term.detach()
        for loss in losses:
            if f"gradient/{loss.name}" in row:
                row[f"grad_norm/{loss.name}"] = row.pop(f"gradient/{loss.name}").norm()
        row["grad_norm"] = self._clip()
        row["bad"] = ~torch.isfinite(row["loss"] + row["grad_norm"])
        row["empty"] = count == 0
        self._step_unless(row["bad"] | row["empty"])
        return row

    def _backward(self, micro: Minibatch, coefficients: LossCoefficients, losses: Sequence[CustomLoss], count: Tensor) -> Row:
        """Add the gradient of one micro-batch, whose terms are its share of the minibatch's."""
        evaluation = self._policy.evaluate(micro)
        terms = ppo_loss(evaluation, micro, coefficients, count)
        share = micro.valid.sum().to(evaluation.values.dtype) / count.clamp(min=1)
        custom = self._custom_terms(losses, micro, evaluation, share)
        for loss in losses:
            terms["loss"] = terms["loss"] + custom[f"loss/{loss.name}"]
        terms["loss"].backward()  # type: ignore[no-untyped-call]
        return terms | custom

    def _custom_terms(self, losses: Sequence[CustomLoss], micro: Minibatch, evaluation: Evaluation, share: Tensor) -> Row:
        """Each custom loss by name, with its own gradient as one vector; both add up over micro-batches, a norm would not."""
        terms: Row = {}
        for loss in losses:
            value = _scalar(loss, loss(self._policy, micro, evaluation)) * share
            terms[f"loss/{loss.name}"] = value
            if value.requires_grad:
                parts = torch.autograd.grad(value, self._parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
                terms[f"gradient/{loss.name}"] = torch.cat([part.flatten() for part in parts])
        return terms

    def _clip(self) -> Tensor:
        limit = self._config.max_grad_norm
        return nn.utils.clip_grad_norm_(self._parameters, float("inf") if limit is None else limit)

    def _step_unless(self, skip: Tensor) -> None:
        """Neither weights nor moments move on a bad minibatch."""
        if self._selects:
            self._optimizer.found_inf = skip.to(torch.float32)  # type: ignore[attr-defined]
            self._optimizer.step()
        elif not bool(skip):
            self._optimizer.step()


def replaced(minibatch: Minibatch, **changes: Any) -> Minibatch:
    """The minibatch with other values in some fields."""
    return Minibatch(**{**{field.name: getattr(minibatch, field.name) for field in fields(minibatch)}, **changes})


def _scalar(loss: CustomLoss, value: Any) -> Tensor:
    """What a custom loss returned, refused where it is no scalar tensor."""
    if not isinstance(value, Tensor) or value.shape != ():
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(f"the custom loss {loss.name} returned {found}; it must return a scalar tensor, such as a mean")
    return value
