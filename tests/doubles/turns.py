"""A turn-based game with known results: stones are taken from a pile in turns, and who takes the last one wins."""

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv

from inchworm.core.types import PolicyStep

TOLL = 0.25


class TakesOne:
    """Always takes one stone."""

    def initial_state(self, num_lanes: int) -> Any:
        return ()

    def act(self, observations: Any, state: Any, episode_starts: Any, rng: Any, *, deterministic: bool = False) -> PolicyStep:
        actions = np.zeros(len(episode_starts), np.int64)
        return PolicyStep(actions, actions, np.zeros(len(actions), np.float32), ())


class Stones(AECEnv):  # type: ignore[misc]
    """`players` take one or two stones in turns. Every stone pays the toll to each other player; the last stone pays 1 and costs them 1.

    A player observes (stones left, stones in the pile at first, own number). `out` is the number of stones at which the last player is
    eliminated, with a cost of 2, while the others play on. `seeded` draws the pile from the seed, between `pile` and `pile` + 3.
    """

    metadata = {"name": "stones", "is_parallelizable": False}  # noqa: RUF012

    def __init__(self, pile: int = 4, players: int = 2, *, out: int = 0, toll: float = TOLL, seeded: bool = False) -> None:
        super().__init__()
        self.possible_agents = [f"player_{number}" for number in range(players)]
        self._pile, self._out, self._toll, self._seeded = pile, out, toll, seeded
        self.render_mode = None

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Dict({"observation": spaces.Box(0, 100, (3,), np.float32), "action_mask": spaces.Box(0, 1, (2,), np.int8)})

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.pile = self.left = self._pile + (int(np.random.default_rng(seed).integers(4)) if self._seeded else 0)
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = (dict.fromkeys(self.agents, False) for _ in range(2))
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self.agent_selection = self.agents[0]

    def observe(self, agent: str) -> Any:
        seen = np.array([self.left, self.pile, self.possible_agents.index(agent)], np.float32)
        return {"observation": seen, "action_mask": np.array([self.left >= 1, self.left >= 2], np.int8)}

    def step(self, action: int | None) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        assert action is not None
        taken = int(action) + 1
        assert taken <= self.left
        self._cumulative_rewards[agent] = 0.0
        self.left -= taken
        for other in self.agents:
            self.rewards[other] = 0.0 if other == agent else self._toll * taken
        playing = [other for other in self.agents if not self.terminations[other]]
        self.agent_selection = playing[(playing.index(agent) + 1) % len(playing)]
        loser = self.possible_agents[-1]
        if self.left == 0:
            self.rewards = {other: 1.0 if other == agent else -1.0 for other in self.agents}
            self.terminations = dict.fromkeys(self.agents, True)
        elif self.left <= self._out and loser in playing and len(playing) > 2:
            self.rewards[loser], self.terminations[loser] = -2.0, True
            self.agent_selection = playing[(playing.index(agent) + 1) % (len(playing) - 1)]
        self._accumulate_rewards()
        self._deads_step_first()
