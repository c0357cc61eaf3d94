"""A maze with one reward, at its goal. The `difficulty` of an episode sets how far from the goal it begins, for curricula."""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from inchworm.env.registry import World

_MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))
"""Up, right, down, left, as (row, column)."""

Cell = tuple[int, int]


class Maze(gym.Env[np.ndarray, int]):
    """Walk to the goal of a fixed maze of `size` x `size` cells: reward 1 there, 0 elsewhere, and the episode ends.

    There is one way between any two cells. With the reset option `difficulty` (or `set_difficulty`) at d, an episode begins in a random
    cell whose way to the goal is between (d - 2) / `levels` and d / `levels` of the longest; the default is the highest difficulty,
    `levels`. An episode is truncated after three times the longest way. The observation is the row and the column, one-hot, and which of
    the four moves are open; the last info has `is_success`.
    """

    def __init__(self, size: int = 9, layout: int = 0, levels: int = 8) -> None:
        if size < 2 or levels < 1:
            raise ValueError(f"a maze needs size=2 or more and levels=1 or more, not size={size} and levels={levels}")
        self.size, self.levels, self.level = size, levels, levels
        self.open = _carve(size, np.random.default_rng(layout))
        ways = self._distances((0, 0))
        self.goal = max(ways, key=lambda cell: (ways[cell], cell))
        self.distances = self._distances(self.goal)
        self.longest = max(self.distances.values())
        self.limit = 3 * self.longest
        self.observation_space = spaces.Box(0.0, 1.0, (2 * size + 4,), np.float32)
        self.action_space = spaces.Discrete(4)  # type: ignore[assignment]

    def set_difficulty(self, level: int) -> None:
        """Set the difficulty of the episodes whose reset options have none."""
        self.level = self._checked(level)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin in a cell of the episode's difficulty."""
        super().reset(seed=seed)
        level = self._checked((options or {}).get("difficulty", self.level))
        least, most = ((level + shift) * self.longest / self.levels for shift in (-2, 0))
        starts = sorted(cell for cell, way in self.distances.items() if max(0, least) < way <= max(1, most))
        self.cell, self.steps = starts[int(self.np_random.integers(len(starts)))], 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move if there is no wall."""
        self.steps += 1
        move = _MOVES[int(action)]
        if move in self.open[self.cell]:
            self.cell = (self.cell[0] + move[0], self.cell[1] + move[1])
        arrived = self.cell == self.goal
        over = arrived or self.steps >= self.limit
        return self._observation(), float(arrived), arrived, over and not arrived, {"is_success": float(arrived)} if over else {}

    def _checked(self, level: Any) -> int:
        if isinstance(level, bool) or level not in range(1, self.levels + 1):
            raise ValueError(f"the difficulty of this maze is a whole number from 1 to {self.levels}, not {level!r:.40}")
        return int(level)

    def _observation(self) -> np.ndarray:
        seen = np.zeros(2 * self.size + 4, np.float32)
        seen[self.cell[0]] = seen[self.size + self.cell[1]] = 1.0
        for place, move in enumerate(_MOVES):
            seen[2 * self.size + place] = move in self.open[self.cell]
        return seen

    def _distances(self, origin: Cell) -> dict[Cell, int]:
        """Steps from every cell to one, by breadth-first search."""
        found, queue = {origin: 0}, deque([origin])
        while queue:
            cell = queue.popleft()
            for move in sorted(self.open[cell]):
                other = (cell[0] + move[0], cell[1] + move[1])
                if other not in found:
                    found[other] = found[cell] + 1
                    queue.append(other)
        return found


def _carve(size: int, rng: np.random.Generator) -> dict[Cell, set[Cell]]:
    """The open moves of each cell of a random maze without loops, by depth-first search."""
    moves: dict[Cell, set[Cell]] = {(row, column): set() for row in range(size) for column in range(size)}
    path, visited = [(0, 0)], {(0, 0)}
    while path:
        row, column = path[-1]
        new = [move for move in _MOVES if (row + move[0], column + move[1]) in moves and (row + move[0], column + move[1]) not in visited]
        if not new:
            path.pop()
            continue
        move = new[int(rng.integers(len(new)))]
        other = (row + move[0], column + move[1])
        moves[row, column].add(move)
        moves[other].add((-move[0], -move[1]))
        visited.add(other)
        path.append(other)
    return moves


WORLD = World(make_copy="inchworm.worlds.maze:Maze")
"""The maze as `env/registry` knows it: `Maze-v0`."""
