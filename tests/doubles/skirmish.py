"""An arena whose units a test puts where it wants them, and players for whole games."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from inchworm.core.protocols import Actor
from inchworm.worlds.skirmish import SkirmishConfig, SkirmishVectorEnv, SkirmishWorld
from inchworm.worlds.skirmish.state import DIRECTIONS, ENEMY, MOVES, OWN, TURNS, Layout

EAST, NORTH, NORTH_EAST, NORTH_WEST, WEST, SOUTH, SOUTH_WEST, SOUTH_EAST = (1 + index for index in range(len(DIRECTIONS)))
LEFT, RIGHT = 1, 2
BLUE, RED = 0, 1


class Arena:
    """One arena without walls, unless some are put there. Places and facings are in each team's own frame."""

    def __init__(self, **config: Any) -> None:
        self.config = SkirmishConfig(**{"wall_pairs": 0, "units": ("soldier",), **config})
        self.size = self.config.team_size
        self.world = SkirmishWorld(self.config, 1)
        self.world.begin([0])
        self.state = self.world.state
        self.park()

    def park(self) -> None:
        """Everybody in the corner behind, far from everything; facing forward."""
        self.state.places[0], self.state.places[1] = -self.config.width / 2 + 1, -self.config.height / 2 + 1
        self.world.observe()

    def put(self, team: int, unit: int, x: float, y: float, heading: int = 0) -> None:
        self.state.places[:, team, unit, 0] = x, y
        self.state.headings[team, unit, 0] = heading
        self.world.observe()

    def wall(self, x0: float, y0: float, x1: float, y1: float) -> None:
        """A block in blue's frame, and its mirror image; needs wall_pairs=1."""
        centre, half = np.array([(x0 + x1) / 2, (y0 + y1) / 2]), np.array([(x1 - x0) / 2, (y1 - y0) / 2])
        self.state.walls[0, :, :, 0] = np.stack([centre, -centre], 1)
        self.state.walls[1, :, :, 0] = half[:, None]
        self.world.observe()

    def step(self, **moves: Sequence[int]) -> None:
        """One step; `blue_0=(move, turn, attack)` and so on, the others do nothing."""
        joint = np.zeros((3, 2, self.size, 1), np.int64)
        for name, action in moves.items():
            team, unit = name.split("_")
            joint[:, ("blue", "red").index(team), int(unit), 0] = action
        self.world.step(joint)

    def mask(self, team: int, unit: int) -> tuple[list[bool], list[bool], list[bool]]:
        """(moves, turns, attacks) that a unit may choose."""
        whole = self.state.mask[:, team, unit, 0].tolist()
        return whole[:MOVES], whole[MOVES : MOVES + TURNS], whole[MOVES + TURNS :]

    def own(self, name: str, team: int = BLUE, unit: int = 0) -> float:
        return float(self.state.observations[OWN.index(name), team, unit, 0])

    def enemy(self, name: str, enemy: int = 0, team: int = BLUE, unit: int = 0) -> float:
        """What a unit sees of an enemy."""
        row = Layout(self.size).enemies.start + ENEMY.index(name) * self.size + enemy
        return float(self.state.observations[row, team, unit, 0])

    def rays(self, team: int = BLUE, unit: int = 0) -> list[float]:
        return self.state.observations[Layout(self.size).rays, team, unit, 0].tolist()

    def health(self, team: int, unit: int = 0) -> float:
        return float(self.state.health[team, unit, 0])

    def reward(self, component: int, team: int, unit: int = 0) -> float:
        return float(self.state.rewards[component, team, unit, 0])


def random_legal(mask: np.ndarray, rng: np.random.Generator, size: int) -> np.ndarray:
    """[B, 3]: uniform over what the masks allow."""
    drawn = rng.random(mask.shape) + mask
    ends = np.cumsum([0, MOVES, TURNS, 1 + size])
    return np.stack([drawn[:, start:end].argmax(1) for start, end in pairwise(ends)], 1)


def play(blue: Actor, red: Actor, games: int, *, seed: int = 0, num_envs: int = 64, **config: Any) -> list[dict[str, float]]:
    """The last infos of blue's first unit in `games` games or a few more."""
    rules = SkirmishConfig(**config)
    env = SkirmishVectorEnv(rules, num_envs, seed=seed)
    size, rng = rules.team_size, np.random.default_rng(seed)
    lanes = np.arange(env.num_lanes).reshape(num_envs, 2, size)
    step, results = env.reset(), []
    actions = np.zeros((env.num_lanes, 3), np.int64)
    while len(results) < games:
        for actor, team in ((blue, BLUE), (red, RED)):
            ours = lanes[:, team].reshape(-1)
            seen = {key: array[ours] for key, array in step.observations.items()}
            actions[ours] = actor.act(seen, (), np.zeros(len(ours), bool), rng).env_actions
        step = env.step(actions)
        results += [dict(ended.info) for ended in step.ended if ended.lane % (2 * size) == 0]
    return results
