"""Serves step 8 of 9: losses that people bring. A function gets what its parameters name; what it returns is the backend's to judge."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Policy
from inchworm.core.types import Evaluation, Minibatch

_OF_MINIBATCH = ("observations", "next_observations", "actions", "rewards", "terminated", "truncated", "advantages", "returns", "valid")
_OF_EVALUATION = ("values", "log_probs", "entropy")
ARGUMENTS = ("policy", "minibatch", "evaluation", "obs", *_OF_MINIBATCH, *_OF_EVALUATION)
"""What a loss may ask for by naming a parameter so; values, log-probs and entropy are the current policy's, with gradients."""


def _argument(name: str, policy: Policy, minibatch: Minibatch, evaluation: Evaluation) -> Any:
    whole = {"policy": policy, "minibatch": minibatch, "evaluation": evaluation, "obs": minibatch.observations}
    if name in whole:
        return whole[name]
    return getattr(minibatch if name in _OF_MINIBATCH else evaluation, name)


@dataclass(frozen=True)
class CustomLoss:
    """A loss function with the name it is logged under and the arguments it asked for."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]

    def __call__(self, policy: Policy, minibatch: Minibatch, evaluation: Evaluation) -> Any:
        """What the function says of a minibatch."""
        return self.function(*[_argument(name, policy, minibatch, evaluation) for name in self.arguments])


def bind_custom_losses(functions: Sequence[Callable[..., Any]]) -> tuple[CustomLoss, ...]:
    """The functions with their names and arguments, refused where an argument is not to be had."""
    losses = tuple(_bind(function) for function in functions)
    names = [loss.name for loss in losses]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two custom losses are called {name}; give them different names, which are what they are logged under")
    return losses


def needs_successors(losses: Sequence[CustomLoss]) -> bool:
    """Whether any loss asks for `next_observations`, which costs memory and is therefore made on demand."""
    return any("next_observations" in loss.arguments for loss in losses)


def _bind(function: Callable[..., Any]) -> CustomLoss:
    inner = getattr(function, "func", function)  # functools.partial
    name = getattr(inner, "__name__", type(inner).__name__)
    required = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    for argument in required:
        if argument not in ARGUMENTS:
            raise ConfigError(f"the custom loss {name} asks for {argument!r}; a loss may ask for {', '.join(ARGUMENTS)}")
    return CustomLoss(name, function, tuple(required))
