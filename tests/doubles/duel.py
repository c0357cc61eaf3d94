"""A world of two teams whose games are known from seeds and actions, and actors that play a fixed number in it.

Lanes of a copy: team 0's two agents, then team 1's. A game with seed s has s % 3 + 2 steps; each step pays every agent its action (0 to 4).
The team with the larger sum of actions wins, by hp_margin = (own sum - other sum) / (4 * 2 * steps); equal sums are a draw, unless a seed
ends in 7: then side 0 wins them. Agent 1 of each team is dead from the second step on and pays nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from inchworm.core.types import EndedEpisode, EnvStep, PolicyStep, Tree

WIDTH, TEAM = 4, 2


def length_of(seed: int) -> int:
    return seed % 3 + 2


class DuelVectorEnv:
    """The fake. An observation is (steps so far, seed % 1000, side)."""

    lanes_per_copy = WIDTH
    observation_space = spaces.Box(0.0, 1000.0, (3,), np.float32)
    action_space = spaces.Discrete(5)

    def __init__(self, num_envs: int = 2) -> None:
        self.num_envs, self.num_lanes = num_envs, WIDTH * num_envs
        self.seeds = [0] * num_envs
        self.steps = np.zeros(num_envs, np.int64)
        self.sums = np.zeros((num_envs, WIDTH), np.int64)
        self.begun: list[tuple[int, int]] = []  # (copy, seed) of every reset that was asked for
        self.closed = False

    def reset(self, seeds: Sequence[int] | None = None, indices: Sequence[int] | None = None) -> EnvStep:
        copies = range(self.num_envs) if indices is None else indices
        assert seeds is not None
        for copy, seed in zip(copies, seeds, strict=True):
            self._begin(copy, seed)
            self.begun.append((copy, seed))
        return self._step(np.zeros(self.num_lanes), ())

    def _begin(self, copy: int, seed: int) -> None:
        self.seeds[copy] = seed
        self.steps[copy], self.sums[copy] = 0, 0

    def send(self, actions: Tree) -> None:
        self.actions = np.asarray(actions).reshape(self.num_envs, WIDTH).copy()

    def recv(self) -> EnvStep:
        alive = np.ones((self.num_envs, WIDTH), bool)
        alive[self.steps > 0, 1::TEAM] = False
        paid = np.where(alive, self.actions, 0)
        self.sums += paid
        self.steps += 1
        ended = [one for copy in range(self.num_envs) if self.steps[copy] == length_of(self.seeds[copy]) for one in self._end(copy)]
        return self._step(paid.reshape(-1), tuple(ended))

    def _end(self, copy: int) -> list[EndedEpisode]:
        steps = int(self.steps[copy])
        teams = self.sums[copy].reshape(2, TEAM).sum(1)
        ended = []
        for lane in range(WIDTH):
            side = lane // TEAM
            margin = int(teams[side] - teams[1 - side])
            draw = 0.5 if self.seeds[copy] % 10 != 7 else float(side == 0)
            win = draw if margin == 0 else float(margin > 0)
            info = {"win": win, "hp_margin": margin / (4 * TEAM * steps), "own": float(self.sums[copy, lane]), "side": float(side)}
            ended.append(EndedEpisode(copy * WIDTH + lane, self.seeds[copy], np.zeros(3, np.float32), info))
        self._begin(copy, 999)  # as an automatic reset does
        return ended

    def _step(self, rewards: np.ndarray, ended: tuple[EndedEpisode, ...]) -> EnvStep:
        steps = np.repeat(self.steps, WIDTH)
        sides = np.tile(np.arange(WIDTH) // TEAM, self.num_envs)
        seen = np.stack([steps, np.repeat(np.array(self.seeds) % 1000, WIDTH), sides], 1).astype(np.float32)
        never = np.zeros(self.num_lanes, bool)
        valid = (steps == 0) | (np.arange(self.num_lanes) % TEAM == 0)
        return EnvStep(seen, rewards.astype(np.float32), never, never, steps == 0, valid, ended)

    def step(self, actions: Tree) -> EnvStep:
        self.send(actions)
        return self.recv()

    def set_reset_options(self, options: Mapping[str, Any] | None, indices: Sequence[int] | None = None) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None:
        self.closed = True


class Plays:
    """Always plays `number`; sampled, it plays `number` or 0. It counts the steps of its episode, and they must be the world's."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.seen: list[np.ndarray] = []

    def initial_state(self, num_lanes: int) -> Tree:
        return np.zeros(num_lanes)

    def act(self, observations: Tree, state: Tree, episode_starts: Any, rng: Any, *, deterministic: bool = False) -> PolicyStep:
        known = np.where(episode_starts, 0.0, state)
        assert np.array_equal(known, observations[:, 0])
        self.seen.append(observations.copy())
        chance = np.ones(len(known), np.int64) if deterministic else rng.integers(0, 2, len(known))
        actions = chance * self.number
        return PolicyStep(actions, actions, np.zeros(len(known), np.float32), known + 1)


class OfAnotherWorld(Plays):
    """Says that it was made for other observations."""

    observation_space = spaces.Box(0.0, 1.0, (7,), np.float32)
    action_space = spaces.Discrete(5)
