"""D1: environments that violate their contract in one step of one lane."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import optree
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from faults.programme import Outcome, Work, procedure
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.collect.collector import RolloutCollector
from inchworm.config.sections import PolicyConfig
from inchworm.core.errors import InchwormError
from inchworm.core.seeding import episode_seed
from inchworm.env.source import make_vector_env
from inchworm.policy.file import fingerprint
from inchworm.policy.spec import PolicySpec

SEED, LANE, LANES, STEP = 7, 1, 3, 12
"""The fault is in lane 1 of 3, at step 12 of its first episode."""

Spoil = Callable[[Any, Any, Any, Any, Any], Any]


def _x(value: Any, key: str = "x") -> Spoil:
    return lambda o, r, e, c, i: ({**o, key: value}, r, e, c, i)


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
    "observation that is not a dict": (lambda o, r, e, c, i: (o["x"], r, e, c, i), ("dict", "array")),
    "discrete value too high": (_x(9, "level"), ("level", "9")),
    "discrete value too low": (_x(-1, "level"), ("level", "-1")),
    "discrete value as a float": (_x(1.0, "level"), ("level", "1.0")),
    "discrete value NaN": (_x(np.nan, "level"), ("level", "nan")),
    "discrete value in an array": (_x(np.array([1]), "level"), ("level", "[1]")),
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
"""Case -> (how a step changes, the words that its error must contain besides lane and step)."""

ACCEPTED: dict[str, Spoil] = {
    "float64 observation": lambda o, r, e, c, i: ({**o, "x": o["x"].astype(np.float64) + 0.25}, r, e, c, i),
    "both flags": lambda o, r, e, c, i: (o, r, True, True, i),
    "NaN in info": lambda o, r, e, c, i: (o, r, True, False, {"odd": float("nan"), "far": float("inf"), "fine": 2.0}),
    "reward as a NumPy number": lambda o, r, e, c, i: (o, np.float64(0.5), e, c, i),
}


class Spoiled(gym.Env[Any, Any]):
    """An environment that counts its steps and is wrong once."""

    last: Spoiled | None = None
    """The copy that went wrong, in this process."""

    def __init__(self, case: str) -> None:
        self.observation_space = spaces.Dict({"x": spaces.Box(-5.0, 5.0, (3,), np.float32), "level": spaces.Discrete(4)})
        self.action_space = spaces.Discrete(2)
        self._spoil = ACCEPTED[case] if case in ACCEPTED else CASES[case][0]
        self.steps = self.steps_after = 0
        self.wrong = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.steps, self.is_chosen = 0, seed == episode_seed(SEED, LANE, 0) or bool(options and options.get("chosen"))
        return self._seen(), {}

    def _seen(self) -> dict[str, Any]:
        return {"x": np.full(3, 0.01 * self.steps, np.float32), "level": self.steps % 4}

    def step(self, action: Any) -> Any:
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
    """A vector environment that is wrong once."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, case: str) -> None:
        self.num_envs, self.steps = LANES, 0
        self.single_observation_space, self.single_action_space = spaces.Box(-5.0, 5.0, (3,), np.float32), spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, LANES)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, LANES)
        self._case = BATCHED[case]

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return np.zeros((LANES, 3), np.float32), {}

    def step(self, actions: Any) -> Any:
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


@procedure("D1", full=1, test=1)
def wrong_steps(work: Work) -> Outcome:
    """Environments that violate their contract in one step of one lane, in process, in a worker, batched.

    Must: an error at that very step naming lane, step, key and value; weights, normalisers and earlier rollouts untouched.
    Every case, with the fault in the second rollout. In the reduced form only every sixth case also runs in a worker.
    """
    outcome = Outcome()
    jobs: list[tuple[str, int | str]] = [(case, workers) for case in CASES for workers in (0, 1)]
    jobs += [(case, "batched") for case in BATCHED] + [(case, workers) for case in ACCEPTED for workers in (0, 1)]
    jobs = [job for number, job in enumerate(jobs) if job[1] != 1 or not work.reduced or number % 6 == 0]
    for number in work.each(len(jobs)):
        case, layout = jobs[number]
        where = "batched" if layout == "batched" else "in a worker" if layout else "in process"
        wrong = _accepted(case, int(layout)) if case in ACCEPTED else _refused(case, layout)
        outcome.check(not wrong, f"{case}, {where}: {wrong}")
    outcome.figures = {
        "cases": f"{len(CASES)} that must be refused, {len(BATCHED)} of them or like them batched, {len(ACCEPTED)} that must not"
    }
    return outcome


def _collector(case: str, layout: int | str) -> Any:
    if layout == "batched":
        env = make_vector_env(SpoiledVector(case), seed=SEED)
    else:
        env = make_vector_env(functools.partial(Spoiled, case), LANES, int(layout), seed=SEED)
    spec = PolicySpec(env.observation_space, env.action_space, PolicyConfig(hidden_sizes=(4,), normalize_observations=True))
    return RolloutCollector(env, NumpyPolicy(spec), seed=SEED)


def _content(rollout: Any) -> list[bytes]:
    return [leaf.tobytes() for name in ("observations", "rewards", "actions") for leaf in optree.tree_leaves(rollout[name])]


def _refused(case: str, layout: int | str) -> str:
    """What is wrong with how a case is refused; empty if nothing."""
    words = BATCHED[case][2] if layout == "batched" else (f"lane {LANE}", *CASES[case][1])
    is_number = layout == "batched" and isinstance(BATCHED[case][1], float)
    collector = _collector(case, layout)
    try:
        with warnings.catch_warnings(action="ignore"):
            first = collector.collect(8)
            kept, before = _content(first), fingerprint(collector.policy.get_weights())
            try:
                collector.collect(8)
            except InchwormError as error:
                text = str(error)
            except Exception as error:
                return f"not an error of ours: {type(error).__name__}: {error}"
            else:
                return "not noticed"
    finally:
        collector.close()
    # Batched arrays are checked as a whole: an array of a wrong shape or type has no lane.
    words = (*words, f"step {STEP}") if layout != "batched" or is_number else words
    words = (*words, f"lane {LANE}") if is_number else words
    missing = [word for word in words if word not in text]
    if missing:
        return f"the error does not contain {missing}: {text[:300]}"
    if fingerprint(collector.policy.get_weights()) != before or _content(first) != kept:
        return "the policy or the first rollout has changed"
    return "" if collector.env_steps == (STEP - 1) * 3 else f"{collector.env_steps} steps were counted, not {(STEP - 1) * 3}"


def _accepted(case: str, layout: int) -> str:
    """What is wrong with how an unusual but valid step is handled; empty if nothing."""
    collector = _collector(case, layout)
    try:
        with warnings.catch_warnings(record=True, action="default") as caught:
            rollout = collector.collect(16)
    finally:
        collector.close()
    row, ended = STEP - 1, case in ("both flags", "NaN in info")
    flags = bool(rollout.terminated[row, LANE]), bool(rollout.truncated[row, LANE])
    if flags != (ended, False):
        return f"terminated and truncated are {flags}"
    if case == "float64 observation":
        casts = [str(warning.message) for warning in caught if "float64" in str(warning.message)]
        x = rollout.observations["x"]
        right = x.dtype == np.float32 and x[STEP, LANE, 0] == np.float32(0.01 * STEP) + np.float32(0.25)
        return "" if right and (layout or len(casts) == 1) else f"{len(casts)} warnings, value {x[STEP, LANE]}"
    if case == "NaN in info":
        infos = [dict(episode.info) for episode in rollout.episodes]
        return "" if infos == [{"fine": 2.0}] else f"the episodes' info is {infos}"
    return "" if np.isfinite(rollout.rewards).all() and rollout.rewards.shape == (16, LANES) else "a reward is not finite"
