"""Serves D1: worlds that are right until one step of one lane, and wrong there in one way. Each way says what an error must name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from inchworm.core.seeding import episode_seed

SEED, LANE, LANES, STEP = 7, 1, 3, 12
"""The fault is in lane 1 of 3, at step 12 of its first episode."""

Result = tuple[Any, Any, Any, Any, Any]
Spoil = Callable[[Any, Any, Any, Any, Any], Any]


def _x(value: Any) -> Spoil:
    return lambda o, r, e, c, i: ({**o, "x": value}, r, e, c, i)


def _level(value: Any) -> Spoil:
    return lambda o, r, e, c, i: ({**o, "level": value}, r, e, c, i)


def _reward(value: Any) -> Spoil:
    return lambda o, r, e, c, i: (o, value, e, c, i)


def _with(number: float) -> np.ndarray:
    return np.array([0.0, number, 0.0], np.float32)


CASES: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "observation NaN": (_x(_with(np.nan)), ("'x'", "nan")),
    "observation +inf": (_x(_with(np.inf)), ("'x'", "inf")),
    "observation -inf": (_x(_with(-np.inf)), ("'x'", "-inf")),
    "observation beyond float32": (_x(np.array([0.0, 1e300, 0.0])), ("'x'", "inf")),
    "observation NaN as the episode ends": (lambda o, r, e, c, i: ({**o, "x": _with(np.nan)}, r, True, False, i), ("'x'", "nan")),
    "observation of another shape": (_x(np.zeros(4, np.float32)), ("x ", "(4,)", "0.")),
    "observation that broadcasts": (_x(np.ones(1, np.float32)), ("x ", "(1,)", "1.")),
    "observation as one number": (_x(np.float32(3.5)), ("x ", "()", "3.5")),
    "observation with an axis more": (_x(np.ones((3, 1), np.float32)), ("x ", "(3, 1)", "1.")),
    "observation of integers": (_x(np.array([5, 6, 7])), ("x ", "int64", "5")),
    "observation of complex numbers": (_x(np.array([1j, 0, 0])), ("x ", "complex128", "1.j")),
    "observation of objects": (_x(np.array([None, 1, 2], object)), ("x ", "object", "None")),
    "observation of text": (_x(np.array(["a", "b", "c"])), ("x ", "<U1", "'a'")),
    "observation None": (_x(None), ("x ", "None")),
    "observation as a list": (_x([0.0, 1.0, 2.0]), ("x ", "list", "[0.0, 1.0, 2.0]")),
    "observation without a key": (lambda o, r, e, c, i: ({"x": o["x"]}, r, e, c, i), ("keys", "level")),
    "observation with a key too many": (lambda o, r, e, c, i: ({**o, "y": 1}, r, e, c, i), ("keys", "'y'")),
    "observation that is no dict": (lambda o, r, e, c, i: (o["x"], r, e, c, i), ("dict", "array")),
    "discrete value too high": (_level(9), ("level", "9")),
    "discrete value too low": (_level(-1), ("level", "-1")),
    "discrete value as a float": (_level(1.0), ("level", "1.0")),
    "discrete value NaN": (_level(np.nan), ("level", "nan")),
    "discrete value in an array": (_level(np.array([1])), ("level", "[1]")),
    "reward NaN": (_reward(float("nan")), ("reward", "nan")),
    "reward +inf": (_reward(float("inf")), ("reward", "inf")),
    "reward -inf": (_reward(np.float32(-np.inf)), ("reward", "-inf")),
    "reward beyond float32": (_reward(1e300), ("reward", "inf")),
    "reward beyond every float": (_reward(10**400), ("reward", "1000")),
    "reward of shape (1,)": (_reward(np.array([1.5])), ("reward", "1.5")),
    "reward as a list": (_reward([1.0]), ("reward", "[1.0]")),
    "reward None": (_reward(None), ("reward", "None")),
    "reward as text": (_reward("1.0"), ("reward", "'1.0'")),
    "reward complex": (_reward(1 + 2j), ("reward", "(1+2j)")),
    "terminated as 1": (lambda o, r, e, c, i: (o, r, 1, c, i), ("terminated", "int")),
    "terminated None": (lambda o, r, e, c, i: (o, r, None, c, i), ("terminated", "None")),
    "truncated of shape (1,)": (lambda o, r, e, c, i: (o, r, e, np.array([True]), i), ("truncated", "[ True]")),
    "info None as the episode ends": (lambda o, r, e, c, i: (o, r, True, c, None), ("info", "None")),
    "four values": (lambda o, r, e, c, i: (o, r, e, i), ("5 values",)),
}
"""Case -> (what becomes of a step, the words that its error must hold besides lane and step)."""

HARMLESS: dict[str, Spoil] = {
    "float64 observation": lambda o, r, e, c, i: ({**o, "x": o["x"].astype(np.float64) + 0.25}, r, e, c, i),
    "both flags": lambda o, r, e, c, i: (o, r, True, True, i),
    "NaN in info": lambda o, r, e, c, i: (o, r, True, False, {"odd": float("nan"), "far": float("inf"), "fine": 2.0}),
    "reward as a NumPy number": lambda o, r, e, c, i: (o, np.float64(0.5), e, c, i),
}


class Spoiled(gym.Env[Any, Any]):
    """Counts its steps, and is wrong once."""

    last: Spoiled | None = None
    """The copy that went wrong, in this process."""

    def __init__(self, case: str) -> None:
        self.observation_space = spaces.Dict({"x": spaces.Box(-5.0, 5.0, (3,), np.float32), "level": spaces.Discrete(4)})
        self.action_space = spaces.Discrete(2)
        self._spoil = HARMLESS[case] if case in HARMLESS else CASES[case][0]
        self.steps = self.steps_after = 0
        self.wrong = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin."""
        super().reset(seed=seed, options=options)
        self.steps, self.is_chosen = 0, seed == episode_seed(SEED, LANE, 0) or bool(options and options.get("chosen"))
        return self._seen(), {}

    def _seen(self) -> dict[str, Any]:
        return {"x": np.full(3, 0.01 * self.steps, np.float32), "level": self.steps % 4}

    def step(self, action: Any) -> Any:
        """One step."""
        self.steps += 1
        self.steps_after += self.wrong
        result = (self._seen(), 1.0, False, self.steps == 50, {})
        if self.is_chosen and self.steps == STEP:
            self.wrong, Spoiled.last = True, self
            return self._spoil(*result)
        return result


BATCHED: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "observation NaN": ("observations", np.nan, ("observation", "nan")),
    "observation +inf": ("observations", np.inf, ("observation", "inf")),
    "observation of another shape": ("observations", np.zeros((LANES, 4), np.float32), ("observations", "(3, 4)")),
    "observation that broadcasts": ("observations", np.zeros((LANES, 1), np.float32), ("observations", "(3, 1)")),
    "observation of complex numbers": ("observations", np.zeros((LANES, 3), complex), ("observations", "complex128")),
    "observation None": ("observations", None, ("observations",)),
    "observation of objects": ("observations", np.full((LANES, 3), None), ("observations", "object")),
    "reward NaN": ("rewards", np.nan, ("reward", "nan")),
    "reward -inf": ("rewards", -np.inf, ("reward", "-inf")),
    "reward of shape (1,)": ("rewards", np.ones(1), ("reward", "(1,)")),
    "reward of shape ()": ("rewards", np.float32(1), ("reward", "()")),
    "reward with an axis more": ("rewards", np.ones((LANES, 1)), ("reward", "(3, 1)")),
    "reward None": ("rewards", None, ("reward",)),
    "reward complex": ("rewards", np.ones(LANES, complex), ("reward", "complex128")),
    "reward of text": ("rewards", np.array(["1", "1", "1"]), ("reward", "<U1")),
    "terminated of shape (1,)": ("terminated", np.zeros(1, bool), ("terminated", "(1,)")),
    "terminated of floats": ("terminated", np.full(LANES, 0.5), ("terminated", "float64")),
    "truncated None": ("truncated", None, ("truncated",)),
}
"""The same for a vector env that hands over arrays: case -> (which array, a number in lane 1 of it or another array, words)."""


class SpoiledVector(gym.vector.VectorEnv[Any, Any, Any]):
    """All lanes at once, in arrays; wrong once."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, case: str) -> None:
        self.num_envs, self.steps = LANES, 0
        self.single_observation_space, self.single_action_space = spaces.Box(-5.0, 5.0, (3,), np.float32), spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, LANES)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, LANES)
        self._case = BATCHED[case]

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin."""
        super().reset(seed=seed, options=options)
        return np.zeros((LANES, 3), np.float32), {}

    def step(self, actions: Any) -> Any:
        """One step."""
        self.steps += 1
        parts: dict[str, Any] = {
            "observations": np.full((LANES, 3), 0.01 * self.steps, np.float32),
            "rewards": np.ones(LANES),
            "terminated": np.zeros(LANES, bool),
            "truncated": np.zeros(LANES, bool),
        }
        name, value, _ = self._case
        if self.steps == STEP and isinstance(value, float):
            parts[name][LANE] = value
        elif self.steps == STEP:
            parts[name] = value
        return *parts.values(), {}
