"""One arena of Skirmish as a PettingZoo parallel environment, bit-identical to the vector env."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from inchworm.core.errors import EnvError, MissingExtraError
from inchworm.core.spaces import MASK_KEY, Space
from inchworm.core.types import Array
from inchworm.worlds.replay import make_replay
from inchworm.worlds.skirmish.render import render_frame
from inchworm.worlds.skirmish.state import TIME, Layout, SkirmishConfig, observation_space, state_space
from inchworm.worlds.skirmish.world import TEAMS, SkirmishWorld, agent_names

try:
    from pettingzoo import ParallelEnv
except ImportError as error:
    raise MissingExtraError('Skirmish as a PettingZoo environment needs PettingZoo; type: pip install "inchworm[marl]"') from error

Observation = dict[str, Array]


class UnitActions(spaces.MultiDiscrete):
    """The space [move, turn, attack], which can also be sampled with the flat mask of an observation."""

    def sample(self, mask: Any = None, probability: Any = None) -> Array:
        """Draw a random action; Gymnasium expects one mask for each part."""
        parts = tuple(np.split(mask, np.cumsum(self.nvec)[:-1])) if isinstance(mask, np.ndarray) else mask
        return super().sample(parts, probability)


def make_arena(*, render_mode: str | None = None, **config: Any) -> SkirmishParallelEnv:
    """Create a copy for a vector env, in which dead units also receive their team's rewards and final infos."""
    return SkirmishParallelEnv(SkirmishConfig.from_dict(config), render_mode=render_mode, after_death=True)


class SkirmishParallelEnv(ParallelEnv):  # type: ignore[misc]
    """An arena with the agents blue_0, blue_1, … and red_0, red_1, …"""

    metadata: ClassVar[dict[str, Any]] = {
        "name": "Skirmish-v0",
        "render_modes": ["rgb_array", "replay"],
        "render_fps": 5,
        "is_parallelizable": True,
    }

    def __init__(self, config: SkirmishConfig | None = None, *, render_mode: str | None = None, after_death: bool = False) -> None:
        """With `after_death` dead units stay in the rewards and final infos: team credit needs that, but PettingZoo's tests warn of it."""
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise EnvError(f"render_mode={render_mode!r} is unknown; use rgb_array or replay")
        self.config, self.render_mode = config or SkirmishConfig(), render_mode
        self.possible_agents = list(agent_names(self.config))
        self.agents: list[str] = []
        self._after_death = after_death
        self.world = SkirmishWorld(self.config, 1)
        self.state_space: Space = state_space(self.config)
        self.observation_spaces: dict[str, Space] = {agent: observation_space(self.config) for agent in self.possible_agents}
        choices = Layout(self.config.team_size).choices
        self.action_spaces: dict[str, Space] = {agent: UnitActions(list(choices)) for agent in self.possible_agents}
        self._seeds = np.random.default_rng(0)
        self._seed = 0
        self._frames: list[Any] = []  # of this game, if render_mode is replay
        self._last_info: Mapping[str, float] = {}  # of blue_0, once the game is over

    def observation_space(self, agent: str) -> Space:
        """The observation and action mask of an agent."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Space:
        """[move, turn, attack]."""
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[dict[str, Observation], dict[str, Any]]:  # noqa: ARG002 - PettingZoo's
        """Begin a game; without a seed, with the next one of the stream that the last seed started."""
        if seed is not None:
            self._seeds = np.random.default_rng(seed)
        self._seed = int(self._seeds.integers(2**31)) if seed is None else int(seed)
        self.world.begin([self._seed])
        self.agents = list(self.possible_agents)
        self._frames, self._last_info = [], {}
        self._record_frame()
        return self._observations(), {agent: {} for agent in self.agents}

    def step(
        self, actions: Mapping[str, Any]
    ) -> tuple[dict[str, Observation], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, float]]]:
        """Step with the actions of all living agents."""
        if not self.agents:
            raise EnvError("the game is over, or has not begun; call reset() first")
        joint = np.zeros((len(self.possible_agents), 3), np.int64)  # zeros for dead units
        for agent in self.agents:
            joint[self.possible_agents.index(agent)] = actions[agent]
        self.world.step(np.ascontiguousarray(joint.T).reshape(3, 2, self.config.team_size, 1))
        state, acted = self.world.state, self.agents
        reason = int(state.reasons[0])
        alive = dict(zip(self.possible_agents, state.alive[..., 0].reshape(-1).tolist()))
        rewards = dict(zip(self.possible_agents, self.world.rewards().reshape(-1).tolist()))
        infos = dict(zip(self.possible_agents, self.world.episode_infos(0))) if reason else {agent: {} for agent in self.possible_agents}
        receivers = self.possible_agents if self._after_death else acted
        result = (
            self._observations(),
            {agent: rewards[agent] for agent in receivers},
            {agent: not alive[agent] or (reason not in (0, TIME)) for agent in acted},
            {agent: alive[agent] and reason == TIME for agent in acted},
            {agent: dict(infos[agent]) for agent in receivers},
        )
        self.agents = [] if reason else [agent for agent in acted if alive[agent]]
        self._last_info = infos[self.possible_agents[0]]
        self._record_frame()
        return result

    def _record_frame(self) -> None:
        if self.render_mode == "replay":
            self._frames.append(self.world.frame(0))

    def _observations(self) -> dict[str, Observation]:
        """The observations of the agents that acted in this step, including those that died in it."""
        state, lanes = self.world.state, len(self.possible_agents)
        rows = state.observations.reshape(-1, lanes).T
        mask = state.mask.reshape(-1, lanes).T.astype(np.int8)
        numbers = {agent: lane for lane, agent in enumerate(self.possible_agents)}
        return {agent: {"observation": rows[numbers[agent]].copy(), MASK_KEY: mask[numbers[agent]].copy()} for agent in self.agents}

    def state(self) -> Array:
        """The global state, for a central critic."""
        out = np.empty((1, *self.state_space.shape), np.float32)  # type: ignore[misc]
        self.world.global_state(out)
        return out[0]

    def render(self) -> Array | dict[str, Any] | None:
        """Return an image [height, width, 3] uint8 (rgb_array) or the game so far as a replay (replay), by `render_mode`."""
        if self.render_mode is None:
            return None
        if self.render_mode == "replay":
            meta = {"seed": self._seed, "players": list(TEAMS)}
            return make_replay(self.world.describe(0), self._frames, meta, self._last_info)
        return render_frame(self.world.describe(0), self.world.frame(0))

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
