"""Custom losses (step 8 of 9). A loss function gets the arguments that its parameters name; the backend checks what it returns."""

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
"""The parameter names that a loss may have; values, log-probs and entropy are the current policy's, with gradients."""


@dataclass(frozen=True)
class CustomLoss:
    """A loss function with the name it is logged under and the arguments it asked for."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]

    def __call__(self, policy: Policy, minibatch: Minibatch, evaluation: Evaluation) -> Any:
        """Call the function with the arguments that it asked for."""
        known: dict[str, Any] = {"policy": policy, "minibatch": minibatch, "evaluation": evaluation, "obs": minibatch.observations}
        for name in self.arguments:
            if name not in known:
                known[name] = getattr(minibatch if name in _OF_MINIBATCH else evaluation, name)
        return self.function(*[known[name] for name in self.arguments])


def bind_custom_losses(functions: Sequence[Callable[..., Any]]) -> tuple[CustomLoss, ...]:
    """Find the name and arguments of each function; raise if an argument is unknown or two functions have the same name."""
    losses: dict[str, CustomLoss] = {}
    for function in functions:
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
        if name in losses:
            raise ConfigError(f"two custom losses are called {name}; give them different names, under which they are logged")
        losses[name] = CustomLoss(name, function, tuple(required))
    return tuple(losses.values())


def needs_successors(losses: Sequence[CustomLoss]) -> bool:
    """Whether a loss asks for `next_observations`, which are made on demand because they take memory."""
    return any("next_observations" in loss.arguments for loss in losses)
