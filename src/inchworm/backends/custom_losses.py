"""Step 8 of 9: losses that users bring, called with the arguments that their signatures name."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from inchworm.core.errors import ConfigError, describe_error
from inchworm.core.protocols import Policy
from inchworm.core.types import Evaluation, Minibatch

_OF_MINIBATCH = ("observations", "next_observations", "actions", "rewards", "terminated", "truncated", "advantages", "returns", "valid")
_OF_EVALUATION = ("values", "log_probs", "entropy")
ARGUMENTS = ("policy", "minibatch", "evaluation", "obs", *_OF_MINIBATCH, *_OF_EVALUATION)
"""The parameter names that a loss may have; values, log-probs and entropy are the current policy's, with gradients."""


@dataclass(frozen=True)
class Loss:
    """A custom loss with a weight, which may change over the run, and the name under which it is logged."""

    function: Callable[..., Any]
    weight: float | Callable[[float], float] = 1.0
    """A number, or a function of the run's progress from 0 to 1; the loss and its gradient are multiplied by it."""
    name: str | None = None
    """The function's or the class's by default."""


@dataclass(frozen=True)
class CustomLoss:
    """A custom loss function (step 8 of 9) with the name it is logged under and the arguments it asked for."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    """What it gets by keyword: keyword-only parameters, and with `**batch` everything else in `ARGUMENTS`."""
    schedule: float | Callable[[float], float] = 1.0
    weight: float = 1.0
    """The value of `schedule` in the running update."""

    @property
    def owner(self) -> Any:
        """The function or object itself, which may hold parameters and state."""
        return getattr(self.function, "func", self.function)  # functools.partial

    def at(self, progress: float | None) -> CustomLoss:
        """The loss with the weight that it has at this progress of the run; None if the run's length is not known."""
        if callable(self.schedule) and progress is None:
            raise ConfigError(f"the weight of the custom loss {self.name} needs the run's length: give the optimizer total_timesteps=…")
        try:
            weight = float(self.schedule(progress or 0.0) if callable(self.schedule) else self.schedule)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the weight of the custom loss {self.name} is not a number: {describe_error(error)}") from error
        if not math.isfinite(weight):
            raise ConfigError(f"the weight of the custom loss {self.name} is {weight}; it must be a finite number")
        return dataclasses.replace(self, weight=weight)

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
    if not isinstance(functions, Iterable):
        raise ConfigError(f"custom losses are given as a list, such as [loss], not {functions!r:.80}")
    for given in functions:
        weighted = given if isinstance(given, Loss) else Loss(given)
        function = weighted.function
        if not callable(function):
            raise ConfigError(f"a custom loss is a function or an object that can be called, not {function!r:.80}")
        inner = getattr(function, "func", function)  # functools.partial
        own_name = getattr(inner, "name", None)
        class_name: str = getattr(inner, "__name__", type(inner).__name__)
        name = weighted.name or (own_name if isinstance(own_name, str) else class_name)
        parameters = inspect.signature(
            getattr(function, "forward", function)
        ).parameters.values()  # a torch.nn.Module's `__call__` takes all
        asked = [parameter for parameter in parameters if parameter.default is parameter.empty]
        required = [p.name for p in asked if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        keywords = [p.name for p in asked if p.kind is p.KEYWORD_ONLY]
        for argument in (*required, *keywords):
            if argument not in ARGUMENTS:
                raise ConfigError(f"the custom loss {name} asks for {argument!r}; a loss may ask for {', '.join(ARGUMENTS)}")
        if name in losses:
            raise ConfigError(
                f"two custom losses are called {name}; give them different names, under which they are logged: Loss(function, name=…)"
            )
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            taken = {parameter.name for parameter in parameters}  # those with a default keep it
            keywords += [argument for argument in ARGUMENTS if argument not in taken]
        losses[name] = CustomLoss(name, function, tuple(required), tuple(keywords), weighted.weight)
    return tuple(losses.values())


def no_gradient(name: str) -> ConfigError:
    """The error for a loss that cannot change anything."""
    return ConfigError(
        f"the custom loss {name} has no gradient: its value depends on no parameter; compute it from values, log_probs, entropy or the "
        "policy, and change rewards in on_rollout"
    )
