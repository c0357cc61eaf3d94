"""What a step of collecting costs besides the environment: acting, and the collector's own work, in microseconds.

    python benchmarks/acting.py [--lanes 1,8,64] [--steps 128] [--repeats 60]

The environment is a stub that always shows the same rows, so that nothing of it is measured; its actions are CartPole's two
choices or HalfCheetah's six Gaussians. The policy is the usual 64x64 tanh network in NumPy. Each figure is the least of several
repeats, because whatever else runs on the machine only adds.
"""

# ruff: noqa: ARG002 - stubs take what their protocols say
from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.collect.collector import RolloutCollector
from inchworm.config.sections import PolicyConfig
from inchworm.core.types import EndedEpisode, EnvStep, PolicyStep, Tree
from inchworm.policy.spec import PolicySpec

WORLDS: dict[str, tuple[int, spaces.Space[Any]]] = {
    "two choices": (4, spaces.Discrete(2)),
    "six Gaussians": (17, spaces.Box(-1.0, 1.0, (6,), np.float32)),
}


class StillEnv:
    """A vector env whose every step shows the same rows; every `episode` steps one lane's episode ends, if that is not 0."""

    def __init__(self, num_lanes: int, width: int, action_space: spaces.Space[Any], episode: int = 0) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (width,), np.float32)
        self.action_space, self.num_lanes, self.episode, self.taken = action_space, num_lanes, episode, 0
        flags = [np.zeros(num_lanes, np.bool_) for _ in range(3)]
        rows = np.random.default_rng(0).standard_normal((num_lanes, width), np.float32)  # [B, width]
        arrays = (rows, np.ones(num_lanes, np.float32), *flags, np.ones(num_lanes, np.bool_))
        self.quiet = EnvStep(*arrays)
        self.loud = EnvStep(*arrays, ended=(EndedEpisode(0, 0, rows[0].copy(), {}),))

    def reset(self, seeds: Sequence[int] | None = None, indices: Sequence[int] | None = None) -> EnvStep:
        """The rows."""
        return self.quiet

    def send(self, actions: Tree) -> None:
        """Nothing moves."""

    def recv(self) -> EnvStep:
        """The rows again, now and then with the end of an episode of lane 0."""
        self.taken += 1
        ends = self.episode > 0 and self.taken % self.episode == 0
        self.quiet.truncated[0] = ends
        return self.loud if ends else self.quiet

    def step(self, actions: Tree) -> EnvStep:
        """`send`, then `recv`."""
        self.send(actions)
        return self.recv()

    def set_reset_options(self, options: Mapping[str, Any] | None, indices: Sequence[int] | None = None) -> None:
        """There are none."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to save."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing is held."""


class StillActor:
    """Always does what the policy did once: the collector's own cost is what remains."""

    def __init__(self, step: PolicyStep) -> None:
        self.step = step

    def initial_state(self, num_lanes: int) -> Tree:
        """No memory."""
        return ()

    def act(
        self, observations: Tree, state: Tree, episode_starts: Any, rng: np.random.Generator, *, deterministic: bool = False
    ) -> PolicyStep:
        """The same again."""
        return self.step


def least(run: Callable[[], Any], steps: int, repeats: int) -> float:
    """The least time of one step, in microseconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times) / steps * 1e6


def measure(world: str, num_lanes: int, steps: int, repeats: int) -> dict[str, float]:
    """Microseconds of one step of all lanes: act, the collector alone, both together, and an ended episode on top."""
    width, action_space = WORLDS[world]
    env = StillEnv(num_lanes, width, action_space)
    policy = NumpyPolicy(PolicySpec(env.observation_space, action_space, PolicyConfig()))
    rng, starts, rows = np.random.default_rng(0), np.zeros(num_lanes, np.bool_), env.quiet.observations

    def act() -> None:
        for _ in range(steps):
            policy.act(rows, (), starts, rng)

    still = StillActor(policy.act(rows, (), starts, rng))
    collector, whole = RolloutCollector(env, still), RolloutCollector(env, policy)
    ending = RolloutCollector(StillEnv(num_lanes, width, action_space, episode=4), still)
    figures = {
        "act": least(act, steps, repeats),
        "collector": least(lambda: collector.collect(steps), steps, repeats),
        "whole": least(lambda: whole.collect(steps), steps, repeats),
    }
    figures["ended episode"] = (least(lambda: ending.collect(steps), steps, repeats) - figures["collector"]) * 4
    return figures


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", default="1,8,64", help="numbers of lanes, with commas")
    parser.add_argument("--steps", type=int, default=128, help="steps of each rollout")
    parser.add_argument("--repeats", type=int, default=60, help="of which the least counts")
    options = parser.parse_args()
    print(f"{'µs a step':<16}{'lanes':>6}{'act':>9}{'collector':>11}{'whole':>9}{'ended episode':>15}")
    for world in WORLDS:
        for lanes in map(int, options.lanes.split(",")):
            figures = measure(world, lanes, options.steps, options.repeats)
            print(
                f"{world:<16}{lanes:>6}{figures['act']:>9.1f}{figures['collector']:>11.1f}{figures['whole']:>9.1f}"
                f"{figures['ended episode']:>15.1f}"
            )


if __name__ == "__main__":
    main()
