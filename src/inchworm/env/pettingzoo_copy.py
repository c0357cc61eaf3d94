"""Step 1 of 9: the environment steps. One copy of a PettingZoo environment is k adjacent lanes, one for each possible agent.

Agents may die, join and return. `valid` marks the lanes with a living agent; any other lane shows a legal observation, and its action
is ignored. The copy's episode ends for all lanes at once, when no agent is left or the time is up, and the next begins in the same step.

Where agents take turns (`TurnCopy`), a step is one move. A lane is valid when it is its agent's turn; until then it shows what the agent
saw at its last turn, and its action is ignored. An agent gets the reward that it has accumulated since its last move when its turn comes or
its game ends, as `env.last()` reports it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from inchworm.core.errors import EnvError
from inchworm.core.spaces import MASK_KEY, Space, leaves
from inchworm.core.types import Tree
from inchworm.env.episodes import Ended
from inchworm.env.lane_spaces import Agent, LaneSpaces
from inchworm.env.step_arrays import StepRows
from inchworm.env.values import MASKS_UNKNOWN, Refusal, call_reset, flag, info_numbers, make_writer, put_infos, real_scalar


@dataclass(frozen=True, slots=True)
class Team:
    """A PettingZoo environment and what is put around it; one copy of it is as many lanes as it has possible agents."""

    env: Any
    max_steps: int | None = None
    """Truncate every agent after this number of steps of an episode."""

    @property
    def unwrapped(self) -> Any:
        """The environment itself."""
        return self.env.unwrapped

    @property
    def turn_based(self) -> bool:
        """Whether its agents move one after another."""
        return isinstance(self.env, sys.modules["pettingzoo"].AECEnv)

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def is_team_env(thing: Any) -> bool:
    """Whether something is a PettingZoo environment; without PettingZoo there is none."""
    zoo = sys.modules.get("pettingzoo")
    return isinstance(thing, Team) or (zoo is not None and isinstance(thing, zoo.ParallelEnv | zoo.AECEnv))


def check_one_env(env: Any, who: str) -> None:
    """Refuse what a factory returned if it is not one environment."""
    if isinstance(env, gym.Env) or is_team_env(env):
        return
    vector = "; give a vector env itself to PPOTrainer, or a function that returns one environment"
    has_copies = getattr(env, "num_envs", None) is not None
    raise EnvError(f"{who} returned {type(env).__name__}, not a gymnasium.Env{vector if has_copies else ''}")


def as_team(env: Any, max_steps: int | None = None) -> Team:
    """A PettingZoo environment as a team; an AEC environment that is updated once per cycle is made parallel by PettingZoo's converter."""
    if isinstance(env, Team):
        return env if max_steps is None else Team(env.env, max_steps)
    zoo = sys.modules["pettingzoo"]
    if isinstance(env, zoo.AECEnv) and env.metadata.get("is_parallelizable", False):
        from pettingzoo.utils.conversions import aec_to_parallel

        env = aec_to_parallel(env)
    return Team(env, max_steps)


def possible_agents(env: Any) -> list[Agent]:
    """All agents that may ever live in an environment, in their order, which is that of the lanes."""
    agents = list(getattr(env, "possible_agents", None) or ())
    if not agents:
        raise EnvError(f"{env} has no possible_agents: set it to the list of all agents that may ever live in it, for they are the lanes")
    if len(set(agents)) < len(agents):
        raise EnvError(f"possible_agents of {env} names an agent twice: {agents}")
    return agents


def state_space(env: Any, first: Any) -> Space:
    """The space of an environment's global state: its `state_space`, or, if it has none, that of its `first` state."""
    given = getattr(env, "state_space", None)
    if isinstance(given, spaces.Space):
        list(leaves(given))  # refuses kinds of spaces that are not supported
        return given
    state = np.asarray(first)
    if state.dtype.kind not in "fiub":
        raise EnvError(f"state() of {env} must return an array of numbers; got {state.dtype}")
    dtype = state.dtype if state.dtype.kind == "f" else np.dtype(np.float32)
    return spaces.Box(-np.inf, np.inf, state.shape, dtype.type)


def has_state(env: Any) -> bool:
    """Whether `state()` of an environment that was reset returns a global state; some keep other data under that name."""
    if not callable(getattr(env.unwrapped, "state", None)):
        return False
    try:
        env.state()
    except NotImplementedError:
        return False
    return True


_DICTS = ("observations", "rewards", "terminations", "truncations", "infos")
"""What a step returns."""

Flags = Mapping[int, tuple[bool, bool]]
"""(terminated, truncated) of the places whose agents acted."""


class TeamCopy:
    """One PettingZoo environment as `num_lanes` lanes. With `global_state`, `state()` is read too and dead agents keep earning credit.

    To find out whether its infos hold masks, and what its global state is, a copy is reset once when it is made. One that `is_given`, the
    caller's own, is reset only for its global state; masks in its infos are refused when they are met.
    """

    turn_based = False
    state_keeper = None  # a team's episode is restored by replay
    global_state_space: Space | None = None

    def __init__(self, team: Team, copy: int, *, global_state: bool = False, is_given: bool = False) -> None:
        env = self.env = team.env
        self.next_options = None
        self._limit = math.inf if team.max_steps is None else team.max_steps
        self.agents = possible_agents(env)
        self.num_lanes = len(self.agents)
        self.copy, self.lane = copy, copy * self.num_lanes
        self._place = {agent: place for place, agent in enumerate(self.agents)}
        self.seed, self.steps = -1, 0
        # Every copy in every layout makes this reset if masks may be in its infos, so that no copy differs.
        self._masks_unknown = False

        def first_infos() -> Iterable[Any]:
            self._masks_unknown = is_given
            return () if is_given else self._reset_env(0, None)[1].values()

        self.spaces = LaneSpaces(env, self.agents, first_infos)
        self.observation_space, self.action_space = self.spaces.observation_space, self.spaces.action_space
        self.names: tuple[str, ...] = tuple(map(str, self.agents))
        self.agent_spaces = self.spaces.own
        if global_state:
            self._reset_env(0, None)
            if not has_state(env):
                raise EnvError(
                    f"{env} has no state(), so there is no global state for a central critic; define state() and state_space, "
                    "or set policy.central_critic=false"
                )
            self.global_state_space = state_space(env, env.state())
            self._put_state = make_writer(self.global_state_space, ("global state",))

    def attach(self, rows: StepRows) -> None:
        """Write into these rows from now on."""
        self._rows = rows
        own = slice(self.lane, self.lane + self.num_lanes)
        self._rewards, self._terminated, self._truncated, self._valid, self._joined, self._final_valid = (
            array[own] for array in (rows.rewards, rows.terminated, rows.truncated, rows.valid, rows.joined, rows.final_valid)
        )

    # ---- an episode begins

    def reset(self, seed: int, options: Any) -> None:
        """Begin an episode and write its first observations."""
        observations, infos = self._begin_episode(seed, options)
        self._just_left: list[int] = []  # places whose agents' last observations are shown
        self._valid[:] = self._joined[:] = False
        for place in range(self.num_lanes):
            if place not in self._alive or self.spaces.padded:
                self.spaces.write_nothing(place, self._rows.observations, self.lane + place)
            if place in self._alive:
                self._show(place, observations, infos, self._rows.observations, mask="required")
                self._valid[place] = True
        self._write_state(self._rows.global_state)

    def _begin_episode(self, seed: int, options: Any) -> tuple[Mapping[Agent, Any], Mapping[Agent, Any]]:
        """Reset the environment and everything that is kept of an episode; returns what the reset did."""
        self.seed, self.steps = seed, 0
        result = self._reset_env(seed, options)
        self._alive = self._alive_now()
        if not self._alive:
            raise EnvError(f"{self.where()}: after reset env.agents is empty; an episode needs an agent to begin with")
        self._last_infos: dict[int, Mapping[str, float]] = {}  # of agents that have left
        if self._masks_unknown and any(isinstance(info, Mapping) and MASK_KEY in info for info in result[1].values()):
            raise EnvError(f"{self.where()}: {MASKS_UNKNOWN}")
        return result

    def _reset_env(self, seed: int, options: Any) -> tuple[Mapping[Agent, Any], Mapping[Agent, Any]]:
        result = call_reset(self.env, seed, options, self.where)
        if not isinstance(result, tuple) or len(result) != 2 or not all(isinstance(part, Mapping) for part in result):
            raise EnvError(f"{self.where()}: reset must return the dicts (observations, infos); got {type(result).__name__}")
        return result

    # ---- a step

    def step(self, actions: Sequence[Any]) -> list[Ended] | None:
        """Step the environment and write the rows; where the episode ended, begin the next and return the last infos' numbers."""
        self.steps += 1
        own_action = self.spaces.own_action
        result = self.env.step({self.agents[place]: self._named(place, own_action, place, actions[place]) for place in self._alive})
        observations, flags, infos = self._read_step(result)
        self._keep_infos(infos)
        living = self._alive_now()
        for place, done in flags.items():
            if any(done) and place in living:
                raise EnvError(
                    f"{self.where(place)}: it is terminated or truncated and still in env.agents; remove it from them in that step"
                )
            if not any(done) and place not in living:
                raise EnvError(f"{self.where(place)}: it left env.agents and is neither terminated nor truncated; set one of them")
        if not living or self.steps >= self._limit:
            return self._end(observations, flags, infos)
        seen = self._rows.observations
        self._terminated[:] = self._truncated[:] = self._joined[:] = False
        for place in self._just_left:
            self.spaces.write_nothing(place, seen, self.lane + place)
        self._just_left = [place for place in flags if any(flags[place])]
        for place in self._just_left:  # the last observation is shown once, as the true successor of the agent's last row
            self._show(place, observations, infos, seen, mask="none")
            self._valid[place] = False
            self._last_infos[place] = self._numbers(place, infos)
            if self.global_state_space is None:  # else the agent is still credited with what its actions lead to
                self._terminated[place], self._truncated[place] = flags[place]
        for place in living:
            self._show(place, observations, infos, seen, mask="required")
            self._valid[place], self._joined[place] = True, place not in flags
        self._alive = living
        self._write_state(self._rows.global_state)
        return None

    def _read_step(self, result: Any) -> tuple[Mapping[Agent, Any], Flags, Mapping[Agent, Any]]:
        """Check what a step returned and write its rewards; returns the observations, the flags and the infos."""
        if not isinstance(result, tuple) or len(result) != 5 or not all(isinstance(part, Mapping) for part in result):
            raise EnvError(f"{self.where()}: step must return the 5 dicts ({', '.join(_DICTS)}); got {result!r:.200}")
        for place in self._alive:
            for name, part in zip(_DICTS[:4], result):
                if self.agents[place] not in part:
                    raise EnvError(f"{self.where(place)}: {name} lack the agent, which acted in this step; they have {list(part)}")
        observations, rewards, terminations, truncations, infos = result
        self._rewards[:] = 0.0
        for agent, reward in rewards.items():  # also of agents that left before
            at = self._place.get(agent)
            if at is None:
                raise EnvError(f"{self.where()}: rewards name {agent!r}, which is not in possible_agents {self.agents}")
            value = reward if type(reward) is float else self._named(at, real_scalar, reward)
            if not math.isfinite(value):
                raise EnvError(f"{self.where(at)}: reward is {value}")
            self._rewards[at] = value
        flags = {}
        for place in self._alive:
            terminated = self._named(place, flag, terminations[self.agents[place]], "terminations")
            truncated = self._named(place, flag, truncations[self.agents[place]], "truncations")
            flags[place] = terminated, truncated and not terminated  # both mean that the world ended for the agent
        return observations, flags, infos

    def _alive_now(self) -> list[int]:
        """The places of the agents in `env.agents`, in their order."""
        agents = list(self.env.agents)
        unknown = [agent for agent in agents if agent not in self._place]
        if unknown or len(set(agents)) < len(agents):
            why = f"names {unknown[0]!r}, which is not in possible_agents {self.agents}" if unknown else f"names an agent twice: {agents}"
            raise EnvError(f"{self.where()}: env.agents {why}")
        return sorted(self._place[agent] for agent in agents)

    # ---- an episode ends

    def _end(self, observations: Mapping[Agent, Any], flags: Flags, infos: Mapping[Agent, Any]) -> list[Ended]:
        ends = {place: (terminated, not terminated) for place, (terminated, _) in flags.items()}  # the limit truncates the rest
        cut, final = any(truncated for _, truncated in ends.values()), self._rows.final_observations
        for place in range(self.num_lanes):
            # With a global state the episode ends for all agents; without one nothing follows for those that left before.
            terminated, truncated = ends.get(place, (True, False)) if self.global_state_space is None else (not cut, cut)
            self._terminated[place], self._truncated[place] = terminated, truncated
            self._final_valid[place] = self.num_lanes == 1 or ends.get(place, (True, False))[1]
            if place not in flags or self.spaces.padded:
                self.spaces.write_nothing(place, final, self.lane + place)
            if place in flags:
                # Terminal states often have no legal action.
                self._show(place, observations, infos, final, mask="optional" if truncated else "none")
                self._last_infos[place] = self._numbers(place, infos)
            else:
                self._last_infos[place] = self._numbers(place, infos) or self._last_infos.get(place, {})  # infos may name dead agents too
        self._write_state(self._rows.final_global_state)
        numbers = self._last_infos
        self.reset(int(self._rows.next_seeds[self.copy]), self.next_options)
        return [(self.lane + place, numbers.get(place, {})) for place in range(self.num_lanes)]

    # ---- rows and messages

    def _show(
        self,
        place: int,
        observations: Mapping[Agent, Any],
        infos: Mapping[Agent, Any],
        rows: Tree,
        *,
        mask: Literal["required", "optional", "none"],
    ) -> None:
        """Write what an agent sees. A required mask must have a legal action; without a mask all are allowed."""
        agent, lane = self.agents[place], self.lane + place
        try:
            if agent not in observations:
                raise Refusal(f"observations lack the agent, which is in env.agents; they have {list(observations)}")
            self.spaces.write(place, observations[agent], rows, lane)
            masks = self.spaces.masks[place]
            if masks is not None:
                given = None if mask == "none" else masks.fetch(observations[agent], infos.get(agent, {}), agent)
                self.spaces.write_mask(place, given, rows, lane, acted_on=mask == "required")
        except Refusal as refusal:
            raise EnvError(f"{self.where(place)}: {refusal}") from None

    def _keep_infos(self, infos: Mapping[Agent, Any]) -> None:
        """Write the numbers that are kept of each agent's info; NaN for agents without one."""
        columns = self._rows.infos
        for place in range(self.num_lanes) if columns else ():
            self._named(place, put_infos, infos.get(self.agents[place], {}), columns, self.lane + place)

    def _numbers(self, place: int, infos: Mapping[Agent, Any]) -> Mapping[str, float]:
        numbers: Mapping[str, float] = self._named(place, info_numbers, infos.get(self.agents[place], {}))
        return numbers

    def _write_state(self, rows: Tree) -> None:
        """Write the global state, if it is read; whole numbers become those of a Box of real ones."""
        space = self.global_state_space
        if space is not None:
            state: Any = self.env.state()
            if isinstance(space, spaces.Box) and space.dtype.kind == "f" and np.asarray(state).dtype.kind in "iub":
                state = np.asarray(state).astype(space.dtype)
            self._named(None, self._put_state, state, rows, self.copy)

    def _named(self, place: int | None, action: Callable[..., Any], *arguments: Any) -> Any:
        """Call `action`; a `Refusal` becomes an error that names the agent, the lane and the step."""
        try:
            return action(*arguments)
        except Refusal as refusal:
            raise EnvError(f"{self.where(place)}: {refusal}") from None

    def where(self, place: int | None = None) -> str:
        """Lane, step and episode, for a message; of one agent, or of the copy."""
        if place is None:
            who = f"lanes {self.lane} to {self.lane + self.num_lanes - 1}" if self.num_lanes > 1 else f"lane {self.lane}"
        else:
            who = f"agent {self.agents[place]!r} (lane {self.lane + place})"
        if self.seed < 0:
            return f"{who}, before the first episode"
        return f"{who}, step {self.steps} of {self._rows.describe_episode(self.copy, self.seed)}"


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
            self.spaces.write_nothing(place, self._rows.observations, self.lane + place)
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
            value = reward if type(reward) is float else self._named(place, real_scalar, reward)  # since its last move
            if not math.isfinite(value):
                raise EnvError(f"{self.where(place)}: reward is {value}")
            self._rewards[place] = value
            self._returns[place] += value
            flags = self._named(place, flag, terminated, "terminations"), self._named(place, flag, truncated, "truncations")
            if not any(flags):
                break
            left[place] = flags[0], not flags[0]
            env.step(None)
        self._alive = self._alive_now()
        is_cut = bool(self._alive) and self.steps >= self._limit
        self._keep_infos(env.infos if is_cut else infos)
        if not self._alive:
            return self._end(observations, left, infos)
        if is_cut:
            seen = {self.agents[place]: env.observe(self.agents[place]) for place in self._alive}
            return self._end(observations | seen, left | dict.fromkeys(self._alive, (False, False)), env.infos)
        for place, flags in left.items():
            self._last_infos[place] = self._numbers(place, infos)
            self._terminated[place], self._truncated[place] = flags
            self._show(place, observations, infos, self._rows.observations, mask="none")  # the true successor of its last move
        self._begin_turn(observations, infos)
        return None

    def _end(self, observations: Mapping[Agent, Any], flags: Flags, infos: Mapping[Agent, Any]) -> list[Ended]:
        returns = self._returns
        ended = super()._end(observations, flags, infos)
        if self.num_lanes != 2:
            return ended
        wins = [0.5 + 0.5 * ((own > other) - (own < other)) for own, other in (returns, returns[::-1])]
        return [(lane, {"win": win, **numbers}) for (lane, numbers), win in zip(ended, wins)]
