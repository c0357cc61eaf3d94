"""E1 to E5: is it right? Each formula beside an independent version of it, on many random cases.

Here is E1, the advantages; the loss (E2), whole updates (E3), sequences (E4) and laws (E5) are in modules of their own.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np

from faults import right_laws, right_loss, right_sequences, right_update  # noqa: F401 - they enter their procedures
from faults.programme import Outcome, Work, procedure

LAMBDAS = (0.0, 0.3, 0.5, 0.9, 0.95, 0.99, 1.0)
GAMMAS = (0.0, 0.5, 0.9, 0.99, 0.999, 1.0)
WIDE, NARROW = 1e-10, 5e-6


@dataclass(frozen=True)
class Case:
    """Random rows [T, B] in float64; every number of them is also a float32, so that both widths are given the same ones."""

    rewards: np.ndarray
    values: np.ndarray
    next_values: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    gamma: float
    gae_lambda: float

    def arrays(self, dtype: Any) -> tuple[np.ndarray, ...]:
        """What `compute_gae` takes, in this width."""
        floats = [array.astype(dtype) for array in (self.rewards, self.values, self.next_values)]
        return (*floats, self.terminated, self.truncated)


def random_case(rng: np.random.Generator) -> Case:
    """From one row up; ends of both kinds, together and on the boundary; few lanes and many, which take different ways."""
    shape = (int(rng.integers(1, 25)), int(rng.choice([1, 2, 3, 9])))  # [T, B]
    rewards, values, cuts = rng.standard_normal((3, *shape)).astype(np.float32).astype(np.float64)
    terminated, truncated = rng.random((2, *shape)) < rng.choice([0.0, 0.1, 0.5])
    if rng.random() < 0.5:  # an episode that ends exactly where the rollout does
        (terminated if rng.random() < 0.5 else truncated)[-1] = True
    next_values = np.concatenate([values[1:], cuts[-1:]])  # [T, B]
    next_values[truncated] = cuts[truncated]
    next_values[terminated] = 1e6  # nothing follows: whatever stands there must not be looked at
    return Case(rewards, values, next_values, terminated, truncated, float(rng.choice(GAMMAS)), float(rng.choice(LAMBDAS)))


def by_sum(case: Case) -> np.ndarray:
    """A_t = sum over k of (gamma lambda)^k delta_{t+k}, up to and including the row that ends the episode. No recursion."""
    following = np.where(case.terminated, 0.0, case.gamma * case.next_values)
    deltas, ends = case.rewards + following - case.values, case.terminated | case.truncated
    powers = (case.gamma * case.gae_lambda) ** np.arange(len(deltas))  # 0 ** 0 is 1
    result = np.zeros_like(deltas)
    for t, lane in np.ndindex(*deltas.shape):
        later = np.flatnonzero(ends[t:, lane])
        length = int(later[0]) + 1 if len(later) else len(deltas) - t
        result[t, lane] = (powers[:length] * deltas[t : t + length, lane]).sum()
    return result


def by_stable_baselines3(case: Case) -> np.ndarray:
    """Its RolloutBuffer on the same rows, filled as its collect_rollouts fills it: a truncated reward has gamma V(successor) added."""
    import torch
    from gymnasium import spaces
    from stable_baselines3.common.buffers import RolloutBuffer

    steps, lanes = case.rewards.shape
    box = spaces.Box(-1, 1, (1,))
    buffer = RolloutBuffer(steps, box, box, "cpu", case.gae_lambda, case.gamma, lanes)
    ends = case.terminated | case.truncated
    cut = case.truncated & ~case.terminated
    buffer.rewards[:] = case.rewards + np.where(cut, case.gamma * case.next_values, 0)
    buffer.values[:] = case.values
    buffer.episode_starts[1:] = ends[:-1]
    last = np.where(case.terminated[-1], 0, case.next_values[-1])
    buffer.compute_returns_and_advantage(torch.tensor(last, dtype=torch.float32), ends[-1])
    return buffer.advantages.astype(np.float64)


def ways() -> dict[str, tuple[Any, Any, float]]:
    """Every way to the advantages: (case in some width) -> array, that width, and how far from the sum it may be."""
    import torch

    from inchworm.backends.numpy import gae as numpy_gae
    from inchworm.backends.torch import gae as torch_gae

    def with_torch(function: Any) -> Any:
        return lambda *given: function(*map(torch.from_numpy, given[:5]), *given[5:]).numpy()

    found: dict[str, tuple[Any, Any, float]] = {}
    for width, dtype, limit in (("float64", np.float64, WIDE), ("float32", np.float32, NARROW)):
        found[f"NumPy, {width}"] = (numpy_gae.compute_gae, dtype, limit)
        found[f"torch, {width}"] = (with_torch(torch_gae.compute_gae), dtype, limit)
        found[f"torch on a device, {width}"] = (with_torch(torch_gae.gae_on_device), dtype, limit)
    return found


@procedure(
    "E1",
    title="Advantages beside the sum written out",
    must="float64 to 1e-10, float32 to 5e-6, and within 5e-6 of Stable-Baselines3",
    full=10_000,
    test=100,
)
def advantages(work: Work) -> Outcome:
    """Each case on NumPy and torch, in both widths, and in the peer's buffer."""
    outcome, worst = Outcome(), dict[str, float]()
    with_peer = importlib.util.find_spec("stable_baselines3") is not None
    functions = ways()
    for number in work.each():
        case = random_case(np.random.default_rng([work.seed, number]))
        expected = by_sum(case)
        largest = max(1.0, float(np.abs(expected).max()))
        errors: dict[str, tuple[float, float]] = {}
        for name, (function, dtype, limit) in functions.items():
            result = function(*case.arrays(dtype), case.gamma, case.gae_lambda)
            assert result.dtype == dtype, f"{name} answered in {result.dtype}"
            errors[name] = (float(np.abs(result - expected).max()) / largest, limit)
        if with_peer:
            errors["Stable-Baselines3"] = (float(np.abs(by_stable_baselines3(case) - expected).max()) / largest, NARROW)
        wrong = {name: error for name, (error, limit) in errors.items() if not error <= limit}
        outcome.check(not wrong, f"case {number}, {case.rewards.shape}, gamma {case.gamma}, lambda {case.gae_lambda}: {wrong}")
        worst = {name: max(error, worst.get(name, 0.0)) for name, (error, _) in errors.items()}
    outcome.figures |= {f"largest error, {name}": f"{error:.1e}" for name, error in worst.items()}
    outcome.notes.append("errors are relative to the largest advantage of the case where that is above 1")
    outcome.notes.append("JAX and TorchRL are not compared: neither is installed")
    if not with_peer:
        outcome.notes.append("Stable-Baselines3 is not installed, so it was not compared")
    return outcome
