"""Step 8 of 9: losses that users bring, called with the arguments that their signatures name."""

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
    """A custom loss function (step 8 of 9) with the name it is logged under and the arguments it asked for."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    """What it gets by keyword: keyword-only parameters, and with `**batch` everything else in `ARGUMENTS`."""

    def __call__(self, policy: Policy, minibatch: Minibatch, evaluation: Evaluation) -> Any:
        """Call the function with the arguments that it asked for."""
        known: dict[str, Any] = {"policy": policy, "minibatch": minibatch, "evaluation": evaluation, "obs": minibatch.observations}
        for name in (*self.arguments, *self.keywords):
            if name not in known:
                known[name] = getattr(minibatch if name in _OF_MINIBATCH else evaluation, name)
        return self.function(*[known[name] for name in self.arguments], **{name: known[name] for name in self.keywords})


def bind_custom_losses(functions: Sequence[Callable[..., Any]]) -> tuple[CustomLoss, ...]:
    """Find the name and arguments of each function; raise if an argument is unknown or two functions have the same name."""
    losses: dict[str, CustomLoss] = {}
    for function in functions:
        inner = getattr(function, "func", function)  # functools.partial
        name = getattr(inner, "__name__", type(inner).__name__)
        parameters = inspect.signature(function).parameters.values()
        asked = [parameter for parameter in parameters if parameter.default is parameter.empty]
        required = [p.name for p in asked if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        keywords = [p.name for p in asked if p.kind is p.KEYWORD_ONLY]
        for argument in (*required, *keywords):
            if argument not in ARGUMENTS:
                raise ConfigError(f"the custom loss {name} asks for {argument!r}; a loss may ask for {', '.join(ARGUMENTS)}")
        if name in losses:
            raise ConfigError(f"two custom losses are called {name}; give them different names, under which they are logged")
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            taken = {parameter.name for parameter in parameters}  # those with a default keep it
            keywords += [argument for argument in ARGUMENTS if argument not in taken]
        losses[name] = CustomLoss(name, function, tuple(required), tuple(keywords))
    return tuple(losses.values())
