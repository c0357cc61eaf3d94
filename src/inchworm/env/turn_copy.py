"""Step 1 of 9, where agents take turns: one copy of a PettingZoo AEC environment is k lanes, of which one moves in every step.

A lane is valid when it is its agent's turn; until then it shows what the agent saw at its last turn, and its action is ignored. A step is
one move. An agent gets the reward that it has accumulated since its last move when its turn comes or its game ends, as `env.last()`
reports it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from inchworm.core.errors import EnvError
from inchworm.env.episodes import Ended
from inchworm.env.lane_spaces import Agent
from inchworm.env.pettingzoo_copy import Flags, Team, TeamCopy
from inchworm.env.values import call_reset, flag, real_scalar


class TurnCopy(TeamCopy):
    """One AEC environment as `num_lanes` lanes; in games of two the numbers of an ended episode include `win`, by the returns."""

    turn_based = True

    def __init__(self, team: Team, copy: int, *, global_state: bool = False, is_given: bool = False) -> None:
        if global_state:
            raise EnvError(f"the agents of {team.env} take turns, which a central critic does not support; set policy.central_critic=false")
        super().__init__(team, copy, is_given=is_given)

    def _reset_env(self, seed: int, options: Any) -> tuple[Mapping[Agent, Any], Mapping[Agent, Any]]:
        call_reset(self.env, seed, options, self.where)
        agent = self.env.agent_selection
        return {agent: self.env.observe(agent)}, self.env.infos

    def reset(self, seed: int, options: Any) -> None:
        """Begin an episode and show the first agent what it acts on."""
        observations, infos = self._begin_episode(seed, options)
        self._returns = [0.0] * self.num_lanes  # of this episode
        self._waits_for_first = set(range(self.num_lanes))  # agents that have not had a turn
        for place in range(self.num_lanes):
            self._show_nothing(place, self._rows.observations)
        self._begin_turn(observations, infos)
        self._joined[:] = False  # the episode begins for all lanes

    def _begin_turn(self, observations: Mapping[Agent, Any], infos: Mapping[Agent, Any]) -> None:
        """Show the agent whose turn it is what it sees; its first turn opens the episode for its lane."""
        place = self._turn = self._place[self.env.agent_selection]
        self._show(place, observations, infos, self._rows.observations, mask="required")
        self._valid[:] = self._joined[:] = False
        self._valid[place] = True
        self._joined[place] = place in self._waits_for_first
        self._waits_for_first.discard(place)

    def step(self, actions: Sequence[Any]) -> list[Ended] | None:
        """Take one move and write the rows; where the episode ended, begin the next and return the last infos' numbers."""
        self.steps += 1
        env, turn = self.env, self._turn
        env.step(self._named(turn, self.spaces.own_action, turn, actions[turn]))
        self._rewards[:] = 0.0
        self._terminated[:] = self._truncated[:] = False
        observations: dict[Agent, Any] = {}
        infos: dict[Agent, Any] = {}
        left: dict[int, tuple[bool, bool]] = {}  # the places whose agents' games are over, with their flags
        while env.agents:
            agent, place = env.agent_selection, self._place[env.agent_selection]
            if place in left:
                raise EnvError(
                    f"{self.where(place)}: step(None) of an agent that is terminated or truncated must remove it from env.agents"
                )
            observations[agent], reward, terminated, truncated, infos[agent] = env.last()
            self._add_reward(place, reward)
            flags = self._named(place, flag, terminated, "terminations"), self._named(place, flag, truncated, "truncations")
            if not any(flags):
                break
            left[place] = flags[0], not flags[0]
            env.step(None)
        self._alive = self._alive_now()
        if not self._alive:
            return self._end(observations, left, infos)
        if self.steps >= self._limit:
            seen = {self.agents[place]: env.observe(self.agents[place]) for place in self._alive}
            return self._end(observations | seen, left | dict.fromkeys(self._alive, (False, False)), env.infos)
        for place, flags in left.items():
            self._last_infos[place] = self._numbers(place, infos)
            self._terminated[place], self._truncated[place] = flags
            self._show(place, observations, infos, self._rows.observations, mask="none")  # the true successor of its last move
        self._begin_turn(observations, infos)
        return None

    def _add_reward(self, place: int, reward: Any) -> None:
        """Write what an agent got since its last move."""
        value = reward if type(reward) is float else self._named(place, real_scalar, reward)
        if not math.isfinite(value):
            raise EnvError(f"{self.where(place)}: reward is {value}")
        self._rewards[place] = value
        self._returns[place] += value

    def _end(self, observations: Mapping[Agent, Any], flags: Flags, infos: Mapping[Agent, Any]) -> list[Ended]:
        returns = self._returns
        ended = super()._end(observations, flags, infos)
        if self.num_lanes != 2:
            return ended
        wins = [0.5 + 0.5 * ((own > other) - (own < other)) for own, other in (returns, returns[::-1])]
        return [(lane, {"win": win, **numbers}) for (lane, numbers), win in zip(ended, wins)]
