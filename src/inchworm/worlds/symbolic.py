"""Symbolic discovery: build an expression step by step, as a tree in prefix order, and be rewarded by how well it fits data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from inchworm.core.spaces import MASK_KEY
from inchworm.env.registry import World
from inchworm.env.tasks import Task, TaskList

Columns = np.ndarray


@dataclass(frozen=True, slots=True)
class Law:
    """A target: a function of some variables, each drawn uniformly from a range."""

    function: Callable[..., Columns]
    ranges: tuple[tuple[float, float], ...]


LAWS: dict[str, Law] = {
    "ideal_gas": Law(lambda n, t, v: 8.314 * n * t / v, ((1, 5), (200, 400), (1, 10))),
    "kinetic_energy": Law(lambda m, v: 0.5 * m * v**2, ((1, 5), (-3, 3))),
    "gravitation": Law(lambda m, n, r: 6.674 * m * n / r**2, ((1, 5), (1, 5), (1, 4))),
    "pendulum": Law(lambda l, g: 2 * np.pi * np.sqrt(l / g), ((0.1, 3), (1, 25))),  # noqa: E741
    "lenses": Law(lambda a, b: a * b / (a + b), ((1, 5), (1, 5))),
    "lorentz_factor": Law(lambda v: 1 / np.sqrt(1 - v**2), ((0, 0.95),)),
    "projectile": Law(lambda v, a, g: v**2 * np.sin(2 * a) / g, ((1, 10), (0.1, 1.4), (1, 25))),
    "cubic": Law(lambda x: x**3 + x**2 + x, ((-2, 2),)),
}
"""Target laws by name, several of them from physics. A law is found if the expression is right up to a constant factor."""

_FUNCTIONS: dict[str, tuple[int, Callable[..., Columns]]] = {
    "+": (2, np.add),
    "-": (2, np.subtract),
    "*": (2, np.multiply),
    "/": (2, np.divide),
    "sqrt": (1, np.sqrt),
    "sin": (1, np.sin),
}
VARIABLES = 3
TOKENS = (*_FUNCTIONS, "1", *(f"x{place}" for place in range(VARIABLES)))
_ARITY = np.array([_FUNCTIONS[token][0] if token in _FUNCTIONS else 0 for token in TOKENS])


class SymbolicDiscovery(gym.Env[Any, int]):
    """Each action adds a token of an expression in prefix order; the mask allows those with which it can be completed in `max_length`.

    The reward is 0 until the expression is complete, then 1 / (1 + e), where e is the root mean square error after fitting one factor, in
    standard deviations of the data; 0 if a value is not finite. The reset option `law` is a name of `LAWS`; `inputs` (a list of points)
    and `outputs` are data of your own. The last info has `is_success` (e below 1e-6) and `error`. `best_expression` is the best so far.
    """

    def __init__(self, law: str = "kinetic_energy", max_length: int = 11, points: int = 40) -> None:
        if max_length < 1:
            raise ValueError(f"max_length={max_length} must be 1 or more")
        self._default, self.max_length, self._points = law, max_length, points
        self.action_space = spaces.Discrete(len(TOKENS))  # type: ignore[assignment]
        seen = spaces.Box(0.0, 1.0, (max_length * len(TOKENS) + 2,), np.float32)
        self.observation_space = spaces.Dict({"observation": seen, MASK_KEY: spaces.MultiBinary(len(TOKENS))})
        self._task: Any = None
        self._best = (-1.0, "")
        self._scores: dict[tuple[int, ...], tuple[float, float]] = {}  # of expressions that were built before
        self._load({"law": law})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an empty expression."""
        super().reset(seed=seed)
        self._load(options or {"law": self._default})
        self.tokens: list[int] = []
        self.missing = 1  # places in the tree that are still empty
        return self._seen(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Add a token."""
        if not self._legal()[int(action)]:
            raise ValueError(f"the token {TOKENS[int(action)]} is not allowed after {[TOKENS[token] for token in self.tokens]}")
        self.tokens.append(int(action))
        self.missing += int(_ARITY[int(action)]) - 1
        if self.missing:
            return self._seen(), 0.0, False, False, {}
        key = tuple(self.tokens)
        if key not in self._scores:
            self._scores[key] = self._score()
        reward, error = self._scores[key]
        if reward > self._best[0]:
            self._best = (reward, to_text(self.tokens))
        return self._seen(), reward, True, False, {"is_success": float(error < 1e-6), "error": min(error, 1e6)}

    def best_expression(self) -> list[Any]:
        """[reward, expression] of the best one that this copy has built for the current law."""
        return list(self._best)

    def _load(self, options: Mapping[str, Any]) -> None:
        """Load the data of a task, unless it is the current one."""
        if options == self._task:
            return
        unknown = sorted(set(options) - {"law", "inputs", "outputs"})
        if unknown or ("law" in options) == ("inputs" in options) or ("inputs" in options) != ("outputs" in options):
            raise ValueError(f"a task of symbolic discovery is a law, or inputs and outputs; got {', '.join(options) or 'nothing'}")
        if "law" in options:
            if options["law"] not in LAWS:
                raise ValueError(f"there is no law {options['law']!r:.40}; use {', '.join(LAWS)}")
            law, rng = LAWS[options["law"]], np.random.default_rng(0)
            inputs = np.stack([rng.uniform(low, high, self._points) for low, high in law.ranges])  # [variables, points]
            outputs = law.function(*inputs)
        else:
            inputs, outputs = np.array(options["inputs"], float).T, np.array(options["outputs"], float)
        if inputs.ndim != 2 or not 1 <= len(inputs) <= VARIABLES or outputs.shape != inputs.shape[1:] or outputs.std() == 0:
            raise ValueError(f"inputs must be points of 1 to {VARIABLES} numbers, and outputs one number for each, not all equal")
        self._inputs, self._outputs = inputs, outputs
        self._task, self._best, self._scores = dict(options), (-1.0, ""), {}

    def _legal(self) -> np.ndarray:
        """Which tokens [n] leave an expression that can be completed: the empty places need a token each."""
        after = len(self.tokens) + self.missing + _ARITY
        known = np.arange(len(TOKENS)) < len(TOKENS) - VARIABLES + len(self._inputs)
        return (after <= self.max_length) & known

    def _seen(self) -> Any:
        row = np.zeros(self.max_length * len(TOKENS) + 2, np.float32)
        for place, token in enumerate(self.tokens):
            row[place * len(TOKENS) + token] = 1.0
        row[-2:] = len(self.tokens) / self.max_length, self.missing / self.max_length
        mask = self._legal() if self.missing else np.ones(len(TOKENS), np.bool_)
        return {"observation": row, MASK_KEY: mask.astype(np.int8)}

    def _score(self) -> tuple[float, float]:
        """(reward, error) of the expression."""
        with np.errstate(all="ignore"):
            values = np.broadcast_to(evaluate(self.tokens, self._inputs), self._outputs.shape)
            square = values @ values
            if not np.isfinite(values).all() or not np.isfinite(square) or square == 0:
                return 0.0, np.inf
            factor = (values @ self._outputs) / square
            error = float(np.sqrt(np.mean((self._outputs - factor * values) ** 2)) / self._outputs.std())
        return 1.0 / (1.0 + error), error


def evaluate(tokens: Sequence[int], inputs: np.ndarray) -> np.ndarray:
    """The values [points] of an expression in prefix order at inputs [variables, points]."""
    stack: list[Any] = []
    for token in reversed(tokens):
        name = TOKENS[token]
        if name in _FUNCTIONS:
            count, function = _FUNCTIONS[name]
            stack.append(function(*[stack.pop() for _ in range(count)]))
        else:
            stack.append(np.ones(inputs.shape[1]) if name == "1" else inputs[int(name[1:])])
    result: np.ndarray = stack[0]
    return result


def to_text(tokens: Sequence[int]) -> str:
    """An expression as it is usually written."""
    stack: list[str] = []
    for token in reversed(tokens):
        name = TOKENS[token]
        if name not in _FUNCTIONS:
            stack.append(name)
        elif _FUNCTIONS[name][0] == 1:
            stack.append(f"{name}({stack.pop()})")
        else:
            one, other = stack.pop(), stack.pop()
            stack.append(f"({one} {name} {other})")
    return stack[0]


def target_laws(held_out: Sequence[str] = ("lenses", "projectile")) -> TaskList:
    """All laws as tasks, with some held out."""
    tasks = {name: Task(name, {"law": name}) for name in LAWS}
    return TaskList([task for name, task in tasks.items() if name not in held_out], [tasks[name] for name in held_out])


WORLD = World(make_copy="inchworm.worlds.symbolic:SymbolicDiscovery")
"""Symbolic discovery as `env/registry` knows it: `Symbolic-v0`."""
