"""Steps 8 and 9 of 9 for one minibatch: evaluate, loss, gradient, step. No branch depends on the data, so that it can be compiled whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from inchworm.backends.custom_losses import CustomLoss
from inchworm.backends.numpy.loss import LossCoefficients
from inchworm.backends.torch.adam import Adam
from inchworm.backends.torch.loss import loss_slopes, ppo_loss
from inchworm.backends.torch.minibatches import micro_batches
from inchworm.config import PPOConfig
from inchworm.errors import ConfigError
from inchworm.protocols import Policy
from inchworm.types import Evaluation, Minibatch

Row = dict[str, Tensor]
"""What one minibatch step gave: scalars under their metric names, and the flags `bad` and `empty`."""


class MinibatchStep(ABC):
    """One optimiser step on one minibatch, or none at all where its loss or gradient is not finite."""

    def __init__(self, policy: Policy, config: PPOConfig, parameters: Sequence[nn.Parameter]) -> None:
        self._policy, self._config, self._parameters = policy, config, list(parameters)

    def __call__(self, minibatch: Minibatch, coefficients: LossCoefficients, losses: Sequence[CustomLoss]) -> Row:
        """Move the weights once and say what happened."""
        count = minibatch.valid.sum()
        row: Row = {}
        for micro in micro_batches(minibatch, self._config.gradient_accumulation):
            terms = self._backward(self._forward(micro), micro, coefficients, losses, count, add=bool(row))
            row = {name: row[name] + term.detach() if row else term.detach() for name, term in terms.items()}
        for loss in losses:
            if f"gradient/{loss.name}" in row:
                row[f"grad_norm/{loss.name}"] = row.pop(f"gradient/{loss.name}").norm()
        row["grad_norm"] = self._clip()
        row["bad"] = (row["loss"] + row["grad_norm"]).isfinite().logical_not_()
        row["empty"] = count == 0
        self._move_unless(row["bad"] | row["empty"])
        return row

    def _forward(self, micro: Minibatch) -> Evaluation:
        return self._policy.evaluate(micro)

    @abstractmethod
    def _backward(
        self,
        evaluation: Evaluation,
        micro: Minibatch,
        coefficients: LossCoefficients,
        losses: Sequence[CustomLoss],
        count: Tensor,
        *,
        add: bool,
    ) -> Row:
        """The loss terms of one micro-batch, which are its share of the minibatch's; their gradient replaces the old one or adds to it."""

    @abstractmethod
    def _clip(self) -> Tensor:
        """The norm of the whole gradient, which is then no longer than the config allows."""

    @abstractmethod
    def _move_unless(self, skip: Tensor) -> None:
        """Neither weights nor moments move on a bad minibatch."""

    def _terms(
        self, evaluation: Evaluation, micro: Minibatch, coefficients: LossCoefficients, losses: Sequence[CustomLoss], count: Tensor
    ) -> Row:
        terms = ppo_loss(evaluation, micro, coefficients, count)
        if not losses:
            return terms
        share = micro.valid.sum().to(evaluation.values.dtype) / count.clamp(min=1)
        custom = self._custom_terms(losses, micro, evaluation, share)
        for loss in losses:
            terms["loss"] = terms["loss"] + custom[f"loss/{loss.name}"]
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


class OwnStep(MinibatchStep):
    """With the built-in Adam, which decides on the device whether to move: nothing waits for the host."""

    def __init__(self, policy: Policy, config: PPOConfig, adam: Adam) -> None:
        super().__init__(policy, config, adam.parameters)
        self._adam = adam

    def _backward(
        self,
        evaluation: Evaluation,
        micro: Minibatch,
        coefficients: LossCoefficients,
        losses: Sequence[CustomLoss],
        count: Tensor,
        *,
        add: bool,
    ) -> Row:
        if losses:
            terms = self._terms(evaluation, micro, coefficients, losses, count)
            outputs, slopes = [terms["loss"]], None
        else:  # PPO's own loss is derived by hand as far as the policy's outputs, by autograd from there
            with torch.no_grad():
                terms = self._terms(evaluation, micro, coefficients, losses, count)
            outputs, slopes = map(list, zip(*loss_slopes(evaluation, micro, coefficients, count)))
        parts = torch.autograd.grad(outputs, self._parameters, slopes, allow_unused=True, materialize_grads=True)
        self._adam.put_gradient(parts, add=add)
        return terms

    def _clip(self) -> Tensor:
        return self._adam.clip(self._config.max_grad_norm)

    def _move_unless(self, skip: Tensor) -> None:
        self._adam.step(skip)


class ForeignStep(MinibatchStep):
    """With an optimiser that somebody brings: of it nothing is known, so the host decides. It may hold parameters of a loss, too."""

    def __init__(self, policy: Policy, config: PPOConfig, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        super().__init__(policy, config, parameters)
        self._optimizer = optimizer

    def _backward(
        self,
        evaluation: Evaluation,
        micro: Minibatch,
        coefficients: LossCoefficients,
        losses: Sequence[CustomLoss],
        count: Tensor,
        *,
        add: bool,
    ) -> Row:
        if not add:
            self._optimizer.zero_grad(set_to_none=True)
        terms = self._terms(evaluation, micro, coefficients, losses, count)
        terms["loss"].backward()  # type: ignore[no-untyped-call]
        return terms

    def _clip(self) -> Tensor:
        limit = self._config.max_grad_norm
        return nn.utils.clip_grad_norm_(self._parameters, float("inf") if limit is None else limit)

    def _move_unless(self, skip: Tensor) -> None:
        if not bool(skip):
            self._optimizer.step()


def _scalar(loss: CustomLoss, value: Any) -> Tensor:
    """What a custom loss returned, refused where it is no scalar tensor."""
    if not isinstance(value, Tensor) or value.shape != ():
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(f"the custom loss {loss.name} returned {found}; it must return a scalar tensor, such as a mean")
    return value
