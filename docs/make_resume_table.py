"""Measure which environments can be restored bit for bit, and write the table of docs/environments.md.

    python docs/make_resume_table.py                     # all of them, in a few minutes
    python docs/make_resume_table.py CartPole-v1 Ant-v5  # some, printed only

Copies play episodes with random actions. Their state is saved and loaded into new copies, and both continue with the same actions. A
copy is restored if all following observations, rewards and episode ends are bit-identical.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from inchworm.config.sections import EnvConfig
from inchworm.core.protocols import VectorEnv
from inchworm.core.spaces import map_tree, tree_leaves
from inchworm.core.types import EnvStep
from inchworm.env.source import make_vector_env
from inchworm.env.step_arrays import allocate_rows
from inchworm.env.values import put_legal_actions

PAGE = Path(__file__).parent / "environments.md"
BEGIN, END = "<!-- written by docs/make_resume_table.py -->\n", "<!-- end of what it wrote -->\n"

COPIES, SEEDS, STEPS, AFTER = 4, 5, 300, 100
SLOW = {"CarRacing-v3": 60}
"""Fewer steps for slow environments."""

KINDS = {
    "classic control": ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"),
    "toy text": ("FrozenLake-v1", "Taxi-v4", "CliffWalking-v1", "Blackjack-v1"),
    "Box2D": ("LunarLander-v3", "LunarLanderContinuous-v3", "BipedalWalker-v3", "BipedalWalkerHardcore-v3", "CarRacing-v3"),
    "MuJoCo": ("Hopper-v5", "HalfCheetah-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5"),
    "Atari": ("ALE/Breakout-v5", "ALE/Pong-v5"),
}

Make = Callable[[int], VectorEnv]
"""Makes the copies of an environment from a seed."""


def by_id(name: str) -> Make:
    """Make copies as training does, without a vectorised implementation."""
    atari: dict[str, Any] = {"atari": True, "frame_stack": 4} if name.startswith("ALE/") else {}
    config = EnvConfig(id=name, num_envs=COPIES, num_workers=0, native=False, **atari)
    return lambda seed: make_vector_env(config, seed=seed)


def as_gymnasium_makes_it(name: str) -> Make:
    """Make copies with `gymnasium.make` alone."""
    return lambda seed: make_vector_env(lambda: gym.make(name, disable_env_checker=True), COPIES, seed=seed)


def _trial(make: Make, seed: int, steps: int) -> np.ndarray:
    """Return whether each copy was restored, [B]."""
    rng = np.random.default_rng(seed)
    with make(seed) as used, make(seed) as fresh:  # type: ignore[attr-defined]
        rows, _ = allocate_rows(used.observation_space, used.action_space, COPIES, COPIES)
        seen = used.reset().observations
        for _ in range(steps):
            put_legal_actions(used.action_space, seen, rng, rows.actions, range(COPIES))
            used.step(map_tree(np.copy, rows.actions))
        fresh.load_state_dict(used.state_dict())
        same = _identical(used.reset(indices=()), fresh.reset(indices=()))
        for _ in range(AFTER):
            put_legal_actions(used.action_space, seen, rng, rows.actions, range(COPIES))
            same &= _identical(used.step(map_tree(np.copy, rows.actions)), fresh.step(map_tree(np.copy, rows.actions)))
    return same


def _identical(one: EnvStep, other: EnvStep) -> np.ndarray:
    """Return whether two steps are bit-identical, [B]."""
    trees = [(step.observations, step.rewards, step.terminated, step.truncated, step.episode_starts) for step in (one, other)]
    pairs = list(zip(*map(tree_leaves, trees)))
    return np.array([all(a[lane].tobytes() == b[lane].tobytes() for a, b in pairs) for lane in range(len(one.rewards))])


def table() -> str:
    """Return the table, one row for each environment."""
    rows = ["| | environment | copies restored |", "|---|---|---|"]
    for kind, names in KINDS.items():
        for name in names:
            rows.append(f"| {kind} | {name} | {_result(by_id(name), name)} |")
            if name == "BipedalWalker-v3":
                rows.append(f"| | as Gymnasium makes it, one world for all episodes | {_result(as_gymnasium_makes_it(name), name)} |")
            sys.stderr.write(rows[-1] + "\n")
    return "\n".join(rows) + "\n"


def _result(make: Make, name: str) -> str:
    restored = sum(int(_trial(make, seed, SLOW.get(name, STEPS)).sum()) for seed in range(SEEDS))
    return f"{restored} of {COPIES * SEEDS}"


def main(names: list[str]) -> None:
    """Print some rows, or write the whole table into the page."""
    warnings.simplefilter("ignore")  # copies that are not restored are counted
    for name in names:
        sys.stdout.write(f"{name}: {_result(by_id(name), name)}\n")
    if not names:
        made = table()
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(before + BEGIN + made + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
