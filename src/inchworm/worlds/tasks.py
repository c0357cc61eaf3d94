"""Small environments whose reset options are tasks, with distributions of them: CartPole with other physics, and goals in a plane."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from inchworm.env.registry import World
from inchworm.env.tasks import Task, TaskList


def read_options(options: Mapping[str, Any] | None, defaults: Mapping[str, float], what: str) -> dict[str, float]:
    """The numbers of a task, by name; an option that the environment does not know, or that is not a number, is an error."""
    given = dict(options or {})
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise ValueError(f"{what} does not know the option {unknown[0]!r}; a task sets {', '.join(defaults)}")
    wrong = [name for name, value in given.items() if type(value) not in (int, float) or not math.isfinite(value)]
    if wrong:
        raise ValueError(f"the option {wrong[0]}={given[wrong[0]]!r:.40} of {what} is not a number")
    return {**defaults, **{name: float(value) for name, value in given.items()}}


class PhysicsCartPole(gym.Env[np.ndarray, int]):
    """CartPole whose `length` (half of the pole), `masscart` and `force` are reset options; they are not observed.

    A negative force is that of a motor whose wires are exchanged. An episode is truncated after `limit` steps, 100 by default.
    """

    DEFAULTS = {"length": 0.5, "masscart": 1.0, "force": 10.0}  # noqa: RUF012

    def __init__(self, limit: int = 100) -> None:
        self._world: Any = CartPoleEnv()
        self.limit = limit
        self.observation_space, self.action_space = self._world.observation_space, self._world.action_space  # type: ignore[assignment]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode with the physics of the options."""
        task = read_options(options, self.DEFAULTS, "PhysicsCartPole")
        if task["length"] <= 0 or task["masscart"] <= 0 or task["force"] == 0:
            raise ValueError(f"length and masscart must be above 0, and force not 0; got {task}")
        world = self._world
        world.length, world.masscart, world.force_mag = task["length"], task["masscart"], task["force"]
        world.total_mass, world.polemass_length = world.masspole + world.masscart, world.masspole * world.length
        self.steps = 0
        observation, info = world.reset(seed=seed)
        return observation, info

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Push left (0) or right (1)."""
        observation, reward, fell, _, info = self._world.step(action)
        self.steps += 1
        return observation, float(reward), bool(fell), not fell and self.steps >= self.limit, info


def cartpole_tasks(count: int = 60, held_out: int = 20, seed: int = 0) -> TaskList:
    """Physics drawn at random: poles of half to twice the length, carts of half to twice the mass, motors of either direction."""
    rng = np.random.default_rng(seed)

    def draw(name: str) -> Task:
        length, masscart = (float(np.exp(rng.uniform(-math.log(2), math.log(2)))) for _ in range(2))
        force = float(rng.uniform(7.0, 13.0) * rng.choice([-1.0, 1.0]))
        return Task(name, {"length": round(0.5 * length, 4), "masscart": round(masscart, 4), "force": round(force, 3)})

    return TaskList([draw(f"physics-{n}") for n in range(count)], [draw(f"held-out-{n}") for n in range(held_out)])


class PointWorld(gym.Env[np.ndarray, np.ndarray]):
    """Move a point in the plane towards a goal that is not observed: `goal_x` and `goal_y` are reset options.

    The observation is the position, the action a velocity of at most 1 in each direction, of which a step takes a quarter. The reward is
    minus the distance to the goal. An episode has 16 steps.
    """

    DEFAULTS = {"goal_x": 1.0, "goal_y": 0.0}  # noqa: RUF012
    STEPS, SPEED = 16, 0.25

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-4.0, 4.0, (2,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin at the origin."""
        super().reset(seed=seed)
        task = read_options(options, self.DEFAULTS, "PointWorld")
        self.goal = np.array([task["goal_x"], task["goal_y"]])
        self.place, self.steps = np.zeros(2), 0
        return self.place.astype(np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move by a quarter of the velocity."""
        self.place = self.place + self.SPEED * np.clip(np.asarray(action, np.float64), -1.0, 1.0)
        self.steps += 1
        return self.place.astype(np.float32), -float(np.linalg.norm(self.place - self.goal)), False, self.steps >= self.STEPS, {}


def point_goals(count: int = 32, held_out: int = 16) -> TaskList:
    """Goals on a circle of radius 1.5 around the start; the held-out ones lie between those that are trained."""

    def goals(name: str, number: int, shift: float) -> Sequence[Task]:
        angles = [2 * math.pi * (place + shift) / number for place in range(number)]
        return [Task(f"{name}-{n}", {"goal_x": 1.5 * math.cos(a), "goal_y": 1.5 * math.sin(a)}) for n, a in enumerate(angles)]

    return TaskList(goals("goal", count, 0.0), goals("held-out", held_out, 0.25))


CARTPOLE = World(make_copy="inchworm.worlds.tasks:PhysicsCartPole")
POINT = World(make_copy="inchworm.worlds.tasks:PointWorld")
"""Both as `env/registry` knows them: `PhysicsCartPole-v0` and `PointWorld-v0`."""
