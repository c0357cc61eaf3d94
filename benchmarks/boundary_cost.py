"""What the checks at the boundary cost: shape, dtype and finiteness of every observation and reward, as a share of training time.

python benchmarks/boundary_cost.py          (a minute; the share is a ratio inside one run, so a busy machine matters little)

Training is profiled for each work. Beside it, in the same process, the checks alone are timed on the very values of a rollout: the
writer of a row as it is, and a writer that only copies; the collector's look at a whole step; and the learner's at a whole rollout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from rich.console import Console
from rich.table import Table

from inchworm import PPOTrainer
from inchworm.config.sections import EnvConfig, PolicyConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.core.spaces import zeros
from inchworm.env.values import make_writer
from inchworm.rollout.fields import check_finite


class Fake(gym.Env[Any, Any]):
    """An environment of given spaces whose step takes about as long as the real one."""

    def __init__(self, observation_space: Any, action_space: Any, seconds: float) -> None:
        self.observation_space, self.action_space, self._seconds = observation_space, action_space, seconds
        self._frames = [observation_space.sample() for _ in range(8)]
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:  # noqa: ARG002
        """Begin."""
        self._steps = 0
        return self._frames[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # noqa: ARG002
        """Wait as long as a step takes, busily: physics and emulators do not sleep."""
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            pass
        self._steps += 1
        return self._frames[self._steps % 8], 1.0, False, self._steps == 1000, {}


@dataclass(frozen=True)
class BoundaryWork:
    """One work: what trains, how, and for how long."""

    name: str
    env: str | Callable[[], Any]
    backend: str
    policy: PolicyConfig
    ppo: PPOConfig
    num_envs: int
    iterations: int


def _cheetah() -> Fake:
    return Fake(spaces.Box(-10.0, 10.0, (17,), np.float32), spaces.Box(-1.0, 1.0, (6,), np.float32), 60e-6)


def _breakout() -> Fake:
    return Fake(spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(4), 300e-6)


WORKS = (
    BoundaryWork(
        "CartPole, 8 lanes, NumPy", "CartPole-v1", "numpy", PolicyConfig(), PPOConfig(rollout_steps=128, num_minibatches=4), 8, 12
    ),
    BoundaryWork(
        "CartPole, 8 lanes, one env at a time, NumPy",
        lambda: gym.make("CartPole-v1"),
        "numpy",
        PolicyConfig(),
        PPOConfig(rollout_steps=128, num_minibatches=4),
        8,
        12,
    ),
    BoundaryWork(
        "like HalfCheetah, 8 lanes, NumPy",
        _cheetah,
        "numpy",
        PolicyConfig(),
        PPOConfig(rollout_steps=128, num_minibatches=4, update_epochs=10),
        8,
        4,
    ),
    BoundaryWork(
        "like Breakout, 8 lanes, torch",
        _breakout,
        "torch",
        PolicyConfig(kind="cnn"),
        PPOConfig(rollout_steps=32, num_minibatches=2, update_epochs=2),
        8,
        1,
    ),
)


@dataclass(frozen=True)
class Cost:
    """Of one work, per lane-step."""

    name: str
    step_seconds: float
    row_seconds: float
    look_seconds: float
    learn_seconds: float

    @property
    def share(self) -> float:
        """The checks' part of a step."""
        return (self.row_seconds + self.look_seconds + self.learn_seconds) / self.step_seconds


def best_of(function: Callable[[], Any], repeats: int = 7) -> float:
    """The least of some timings, each of enough calls to be measured."""
    function()
    calls = 1
    while True:
        began = time.perf_counter()
        for _ in range(calls):
            function()
        taken = time.perf_counter() - began
        if taken > 2e-3 or calls >= 10_000:
            break
        calls *= 4
    times = [taken / calls]
    for _ in range(repeats - 1):
        began = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - began) / calls)
    return min(times)


def measure(work: BoundaryWork) -> Cost:
    """Train for a while, then time the checks on what was collected."""
    config = TrainingConfig(
        env=EnvConfig(num_envs=work.num_envs, num_workers=0),
        policy=work.policy,
        ppo=work.ppo,
        run=RunConfig(backend=work.backend, device="cpu"),  # type: ignore[arg-type]
    )
    env = config.env if isinstance(work.env, str) else work.env
    with PPOTrainer(work.policy, env, config, num_envs=work.num_envs) as trainer:
        trainer.learn(trainer.collect_rollouts())  # first times are slow ones
        times = []
        for _ in range(work.iterations):
            began = time.perf_counter()
            rollout = trainer.collect_rollouts()
            trainer.learn(rollout)
            times.append(time.perf_counter() - began)
        step = trainer.env.step(rollout.actions[0])
        samples = rollout.num_valid
        row = _row_cost(trainer.env.observation_space, rollout) if not isinstance(work.env, str) else 0.0
        look = best_of(lambda: trainer.collector._check_finite(step, moved=1)) / work.num_envs
        learn = best_of(lambda: check_finite(rollout.to_dict())) / samples
    return Cost(work.name, min(times) / samples, row, look, learn)


def _row_cost(space: Any, rollout: Any) -> float:
    """A checked row less a copied one."""
    rows, value = zeros(space, (8,)), rollout.observations[0, 0].copy()
    write = make_writer(space)

    def copy_only() -> None:
        rows[3] = value

    return max(0.0, best_of(lambda: write(value, rows, 3)) - best_of(copy_only))


def table(costs: list[Cost]) -> Table:
    """What was measured, per step of one lane."""
    found = Table("work", "a step, µs", "row: shape, dtype, range, µs", "step: finite, µs", "rollout: finite, µs", "share")
    for cost in costs:
        parts = (cost.step_seconds, cost.row_seconds, cost.look_seconds, cost.learn_seconds)
        found.add_row(cost.name, *(f"{part * 1e6:.2f}" for part in parts), f"{cost.share:.2%}")
    return found


if __name__ == "__main__":
    Console(width=140).print(table([measure(work) for work in WORKS]))
