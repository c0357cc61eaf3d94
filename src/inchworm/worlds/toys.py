"""Tiny environments with known answers: corridors that need memory, a maze, agents that come and go, and a sacrifice that pays.

Each is its own factory: `make_vector_env(MemoryCorridor)`, or the id `inchworm.worlds.toys:MemoryCorridor`. Those with several agents
need PettingZoo, the extra `marl`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from inchworm.core.errors import MissingExtraError
from inchworm.core.spaces import MASK_KEY
from inchworm.env.registry import World

try:
    from pettingzoo import ParallelEnv
except ImportError:

    class ParallelEnv:  # type: ignore[no-redef]
        """Stands for the missing base class: environments with one agent work without PettingZoo."""

        def __new__(cls, *_: Any, **__: Any) -> Any:
            """Name the extra that is missing."""
            raise MissingExtraError('environments with many agents need PettingZoo; type: pip install "inchworm[marl]"')


LEFT, RIGHT, WALK = 0, 1, 2
_REACH = 0.5
"""The best `reach`, towards the side of the cue."""


class MemoryCorridor(gym.Env[Any, Any]):
    """A cue at the start, `length` empty steps, then a choice: reward 1 for turning to the side that the cue showed.

    The observation is (cue, here): the cue is -1 (left) or +1 (right) in the first observation and 0 afterwards; `here` is 1 in the last,
    where the choice is made. In between all observations are equal and actions have no effect, so a policy without memory is right half
    of the time. The last step's info has `is_success`.
    """

    def __init__(self, length: int = 20) -> None:
        if length < 1:
            raise ValueError(f"length={length} must be 1 or more: the steps between the cue and the choice")
        self.observation_space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space: spaces.Space[Any] = spaces.Discrete(2)
        self.length, self.place, self.cue = length, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin with a cue, left or right with equal probability."""
        super().reset(seed=seed, options=options)
        self.place, self.cue = 0, int(2 * self.np_random.integers(2) - 1)
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Walk; at the end, turn."""
        if self.place < self.length:
            self.place += 1
            return self._observe(), 0.0, False, False, {}
        turned = self._turn(action) == (RIGHT if self.cue > 0 else LEFT)
        return self._observe(), self._reward(action, turned), True, False, {"is_success": float(turned)}

    def _observe(self) -> Any:
        return np.array([self.cue if self.place == 0 else 0, self.place == self.length], np.float32)  # [2]

    def _turn(self, action: Any) -> int:
        return int(action)

    def _reward(self, action: Any, turned: bool) -> float:  # noqa: ARG002 - a subclass uses the action
        return float(turned)


class MixedMemoryCorridor(MemoryCorridor):
    """The memory corridor with action masks, dict observations and hybrid actions.

    The action is {"turn": left, right or walk; "reach": a number in -1 … 1}. The mask allows only walking, and at the end only turning;
    forbidden actions raise. At the end `reach` costs its squared distance from cue / 2, so it needs memory as well. Success depends on the
    turn alone; the best return is 1.
    """

    def __init__(self, length: int = 20) -> None:
        super().__init__(length)
        self.observation_space = spaces.Dict(
            {
                "cue": spaces.Box(-1.0, 1.0, (1,), np.float32),
                "here": spaces.Discrete(2),
                MASK_KEY: spaces.Dict({"turn": spaces.MultiBinary(3)}),
            }
        )
        self.action_space = spaces.Dict({"turn": spaces.Discrete(3), "reach": spaces.Box(-1.0, 1.0, (1,), np.float32)})

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Walk; at the end, turn."""
        if not self._legal()[self._turn(action)]:
            raise ValueError(f"turn={self._turn(action)} is illegal at place {self.place} of {self.length}")
        return super().step(action)

    def _legal(self) -> np.ndarray:
        end = self.place == self.length
        return np.array([end, end, not end], np.int8)  # [3]: left, right, walk

    def _observe(self) -> Any:
        cue, here = super()._observe()
        return {"cue": np.array([cue], np.float32), "here": np.int64(here), MASK_KEY: {"turn": self._legal()}}

    def _turn(self, action: Any) -> int:
        return int(action["turn"])

    def _reward(self, action: Any, turned: bool) -> float:
        reach = float(np.asarray(action["reach"]).reshape(-1)[0])
        return float(turned) - (reach - _REACH * self.cue) ** 2


class HideEntries(gym.ObservationWrapper[np.ndarray, Any, np.ndarray]):
    """Keeps only some entries of a flat observation."""

    def __init__(self, env: gym.Env[np.ndarray, Any], keep: tuple[int, ...]) -> None:
        super().__init__(env)
        seen = env.observation_space
        if not isinstance(seen, spaces.Box) or len(seen.shape) != 1:
            raise ValueError(f"cannot hide entries of {seen}; the observation space must be a Box of rank 1")
        self._keep = list(keep)
        self.observation_space = spaces.Box(seen.low[self._keep], seen.high[self._keep], dtype=seen.dtype.type)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Return the entries that are kept."""
        return observation[self._keep]


def PartialCartPole(**kwargs: Any) -> gym.Env[Any, Any]:
    """CartPole-v1 without velocities: the observation is (cart position, pole angle), so a policy must remember earlier steps."""
    return HideEntries(gym.make("CartPole-v1", **kwargs), (0, 2))


Stay = tuple[int, int, Literal["terminated", "truncated"]]
"""(steps taken when an agent appears, steps taken when it leaves, which flag it then gets)."""

DEATHS: tuple[tuple[Stay, ...], ...] = (((0, 6, "terminated"),), ((0, 2, "terminated"),), ((0, 6, "truncated"),))
"""Three agents; the second dies after 2 of 6 steps."""
JOINS: tuple[tuple[Stay, ...], ...] = (((0, 5, "terminated"),), ((2, 5, "terminated"),), ((0, 1, "truncated"), (3, 4, "terminated")))
"""Three agents; the second joins after 2 of 5 steps, the third leaves after 1, comes back after 3 and dies after 4."""


class Comings(ParallelEnv):  # type: ignore[misc]
    """Agents that come and go by a plan. The observation is (index, steps taken, luck), the reward 10 index + steps taken.

    Luck depends on the seed and on the actions of the agents present, so that a replay with other actions is noticed. Absent agents get
    `pension` per step. `state()` is (steps taken, number of agents present, luck).
    """

    metadata: dict[str, Any] = {"name": "comings", "is_parallelizable": True}  # noqa: RUF012

    def __init__(
        self,
        plan: Sequence[Sequence[Stay]] = DEATHS,
        *,
        pension: float | None = None,
        masks: Literal["none", "key", "info", "method"] = "none",
    ) -> None:
        self.plan, self.pension, self.masks = [list(stays) for stays in plan], pension, masks
        self.possible_agents = [f"agent_{place}" for place in range(len(self.plan))]
        self.agents: list[str] = []
        self.render_mode = None
        self.state_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        if masks == "method":
            self.action_masks = self._mask

    def observation_space(self, agent: str) -> spaces.Space[Any]:  # noqa: ARG002
        """(index, steps taken, luck), with a mask if that is a key."""
        seen = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        return spaces.Dict({"seen": seen, MASK_KEY: spaces.MultiBinary(3)}) if self.masks == "key" else seen

    def action_space(self, agent: str) -> spaces.Space[Any]:  # noqa: ARG002
        """Three choices."""
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin with the agents that are present at step 0."""
        self._rng = np.random.default_rng(seed)
        self._now, self._luck = 0, float(self._rng.random()) + float((options or {}).get("luck", 0))
        self.agents = self._present()
        return self._observations(self.agents), self._infos(self.agents)

    def step(self, actions: Mapping[str, int]) -> tuple[dict[str, Any], ...]:
        """Step with the actions of the agents present."""
        acted = self.agents
        if set(actions) != set(acted):
            raise AssertionError(f"present are {acted}, but {list(actions)} acted")
        self._now += 1
        self._luck = (self._luck + float(self._rng.random()) + 0.1 * sum(int(action) for action in actions.values())) % 1.0
        self.agents = self._present()
        ends = {agent: self._end(agent) for agent in acted}
        rewards = {agent: 10.0 * self.possible_agents.index(agent) + self._now for agent in acted}
        if self.pension is not None:
            rewards |= {agent: self.pension for agent in self.possible_agents if agent not in acted}
        shown = list(dict.fromkeys([*acted, *self.agents]))
        flags = [{agent: ends[agent] == flag for agent in acted} for flag in ("terminated", "truncated")]
        return self._observations(shown), rewards, *flags, self._infos(shown)

    def state(self) -> np.ndarray:
        """(steps taken, number of agents present, luck)."""
        return np.array([self._now, len(self.agents), self._luck], np.float32)

    def _present(self) -> list[str]:
        there = [any(first <= self._now < last for first, last, _ in stays) for stays in self.plan]
        return [agent for agent, is_there in zip(self.possible_agents, there) if is_there]

    def _end(self, agent: str) -> str | None:
        stays = self.plan[self.possible_agents.index(agent)]
        return next((flag for _, last, flag in stays if last == self._now), None)

    def _mask(self, agent: str) -> np.ndarray:
        """All actions but one, which changes with every step."""
        forbidden = (self._now + self.possible_agents.index(agent)) % 3
        return np.array([choice != forbidden for choice in range(3)])

    def _observations(self, agents: Sequence[str]) -> dict[str, Any]:
        seen = {agent: np.array([self.possible_agents.index(agent), self._now, self._luck], np.float32) for agent in agents}
        if self.masks == "key":
            return {agent: {"seen": row, MASK_KEY: self._mask(agent).astype(np.int8)} for agent, row in seen.items()}
        return seen

    def _infos(self, agents: Sequence[str]) -> dict[str, Any]:
        infos: dict[str, Any] = {agent: {"steps": self._now, "place": self.possible_agents.index(agent)} for agent in agents}
        if self.masks == "info":
            for agent in agents:
                infos[agent][MASK_KEY] = self._mask(agent)
        return infos


class Sacrifice(ParallelEnv):  # type: ignore[misc]
    """Two agents and `length` steps. Action 1 of the first agent in the first step kills it, and only then both get 1 at the end.

    The best policy is to die at once for `price`, which a learner whose credit stops at death never learns.
    """

    metadata: dict[str, Any] = {"name": "sacrifice", "is_parallelizable": True}  # noqa: RUF012

    def __init__(self, length: int = 4, price: float = 0.1) -> None:
        self.length, self.price = length, price
        self.possible_agents = ["hero", "friend"]
        self.agents: list[str] = []
        self.render_mode = None
        self.state_space = spaces.Box(0, 1, (length + 2,), np.float32)

    def observation_space(self, agent: str) -> spaces.Space[Any]:  # noqa: ARG002
        """Steps taken, one-hot of `length` + 1, and whether it is the hero."""
        return spaces.Box(0, 1, (self.length + 2,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:  # noqa: ARG002
        """0: live, 1: die."""
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ARG002
        """Begin with both agents alive."""
        self._now, self._died = 0, False
        self.agents = list(self.possible_agents)
        return {agent: self._seen(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: Mapping[str, int]) -> tuple[dict[str, Any], ...]:
        """Take one step; in the last one both agents are rewarded, alive or not."""
        acted, first = self.agents, self._now == 0
        self._now += 1
        dies = first and int(actions["hero"]) == 1
        self._died = self._died or dies
        over = self._now == self.length
        rewards = dict.fromkeys(acted, 0.0)
        if dies:
            rewards["hero"] -= self.price
        if over and self._died:
            rewards |= {agent: rewards.get(agent, 0.0) + 1.0 for agent in self.possible_agents}
        ends = {agent: over or (agent == "hero" and dies) for agent in acted}
        self.agents = [agent for agent in acted if not ends[agent]]
        return {agent: self._seen(agent) for agent in acted}, rewards, ends, dict.fromkeys(acted, False), {agent: {} for agent in acted}

    def state(self) -> np.ndarray:
        """Steps taken, one-hot of `length` + 1, and whether the hero died."""
        return np.array([*(np.arange(self.length + 1) == self._now), self._died], np.float32)

    def _seen(self, agent: str) -> np.ndarray:
        return np.array([*(np.arange(self.length + 1) == self._now), agent == "hero"], np.float32)


def comings(**kwargs: Any) -> Comings:
    """Create `Comings`; the id is `inchworm.worlds.toys:comings`."""
    return Comings(**kwargs)


def sacrifice(**kwargs: Any) -> Sacrifice:
    """Create `Sacrifice`; the id is `inchworm.worlds.toys:sacrifice`."""
    return Sacrifice(**kwargs)


# A maze with one reward, at its goal. The `difficulty` of an episode sets how far from the goal it begins, for curricula.

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


MAZE = World(make_copy="inchworm.worlds.toys:Maze")
"""The maze as `env/registry` knows it: `Maze-v0`."""
