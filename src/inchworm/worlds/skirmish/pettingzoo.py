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
from inchworm.worlds.skirmish.state import TIME, Layout, SkirmishConfig, observation_space, state_space
from inchworm.worlds.skirmish.world import TEAMS, SkirmishWorld, agent_names

GROUND, OUTSIDE, WALL, ZONE = (251, 250, 246), (226, 228, 231), (115, 125, 136), (206, 209, 213)
TEAM_COLOURS = ((0, 114, 178), (213, 94, 0))  # blue and vermilion, distinguishable for colour-blind people (Okabe and Ito)
INNER, EMPTY, HEALTHY, HURT, DYING = (255, 255, 255), (190, 195, 201), (47, 143, 91), (201, 138, 0), (179, 38, 30)


class _Canvas:
    """An image with world coordinates: the arena fills as much of the square as its shape allows, with y upwards."""

    def __init__(self, world: Mapping[str, Any], size: int) -> None:
        self.image = np.empty((size, size, 3), np.uint8)  # [size, size, 3]
        self.box(0, 0, size, size, OUTSIDE)
        self.scale = size / max(world["width"], world["height"])
        self._left = (size - world["width"] * self.scale) / 2
        self._bottom = (size + world["height"] * self.scale) / 2

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Column and row of a place, as fractions of pixels; places far outside are clipped."""
        far = 4.0 * len(self.image)
        return min(max(self._left + x * self.scale, -far), far), min(max(self._bottom - y * self.scale, -far), far)

    def box(self, left: float, top: float, right: float, bottom: float, colour: tuple[int, int, int]) -> None:
        """Draw a filled rectangle, at least a pixel thick, by columns and rows."""
        size = len(self.image)
        column, row = max(0, round(left)), max(0, round(top))
        bottom, right = min(size, max(row + 1, round(bottom))), min(size, max(column + 1, round(right)))
        if row < bottom and column < right:
            width = right - column
            stripe = np.frombuffer(bytes(colour) * width, np.uint8).reshape(width, 3)  # fills a box five times as fast as the colour itself
            self.image[row:bottom, column:right] = stripe

    def disc(self, x: float, y: float, radius: float, colour: tuple[int, int, int]) -> None:
        """Draw a filled disc by its centre in columns and rows and its radius in pixels."""
        size = len(self.image)
        left, right = max(0, int(x - radius)), min(size, int(x + radius) + 2)
        top, bottom = max(0, int(y - radius)), min(size, int(y + radius) + 2)
        if left >= right or top >= bottom:
            return
        across = (np.arange(left, right) + 0.5 - x) ** 2  # [w]
        down = (np.arange(top, bottom) + 0.5 - y) ** 2  # [h]
        self.image[top:bottom, left:right][down[:, None] + across <= radius * radius] = colour

    def line(
        self, start: tuple[float, float], end: tuple[float, float], thickness: int, colour: tuple[int, int, int], gap: int = 0
    ) -> None:
        """Draw a line by its ends in columns and rows, dashed in pieces of `gap` pixels if that is not 0."""
        size, length = len(self.image), int(max(abs(end[0] - start[0]), abs(end[1] - start[1]))) + 1
        along = np.arange(length + 1)
        along = along[along // gap % 2 == 0] if gap else along
        columns = (start[0] + (end[0] - start[0]) / length * along).astype(np.int64)  # [n]
        rows = (start[1] + (end[1] - start[1]) / length * along).astype(np.int64)
        for offset in np.ndindex(thickness, thickness):
            column, row = columns + (offset[0] - thickness // 2), rows + (offset[1] - thickness // 2)
            inside = (column >= 0) & (column < size) & (row >= 0) & (row < size)
            self.image[row[inside], column[inside]] = colour


def render_frame(world: Mapping[str, Any], frame: Mapping[str, Any], size: int = 512) -> Array:
    """Draw arena, zone, walls, shots, and the units with their facing and health, as [size, size, 3] uint8. Dead units are crosses."""
    canvas = _Canvas(world, size)
    canvas.box(*canvas.place(0, world["height"]), *canvas.place(world["width"], 0), GROUND)
    zone = canvas.place(world["zone"]["x"], world["zone"]["y"])
    zone_radius = min(world["zone"]["radius"] * canvas.scale, 4.0 * size)
    canvas.disc(*zone, zone_radius, ZONE)
    canvas.disc(*zone, zone_radius - 2, tuple((a + b) // 2 for a, b in zip(ZONE, GROUND)))  # type: ignore[arg-type]
    for x0, y0, x1, y1 in world["walls"]:
        canvas.box(*canvas.place(min(x0, x1), max(y0, y1)), *canvas.place(max(x0, x1), min(y0, y1)), WALL)
    units = world["units"]
    places = [canvas.place(x, y) for x, y, *_ in frame["units"]]
    radii = [float(min(max(unit["radius"] * canvas.scale, 4.0), size)) for unit in units]  # never too small to see
    colours = [TEAM_COLOURS[unit["team"]] for unit in units]
    alive = [index for index, row in enumerate(frame["units"]) if row[3] > 0]
    for index in sorted(set(range(len(units))) - set(alive)):
        arm, (x, y) = 0.6 * radii[index], places[index]
        canvas.line((x - arm, y - arm), (x + arm, y + arm), 2, colours[index])
        canvas.line((x - arm, y + arm), (x + arm, y - arm), 2, colours[index])
    for shooter, target, hit in frame["shots"]:
        canvas.line(places[shooter], places[target], 2 if hit else 1, colours[shooter], gap=0 if hit else 4)
    for index in alive:  # a disc, with a white centre for the second team, and a line where it faces
        radius, (x, y), facing = radii[index], places[index], frame["units"][index][2]
        nose = (x + 1.6 * radius * np.cos(facing), y - 1.6 * radius * np.sin(facing))
        canvas.line((x, y), nose, max(2, int(radius / 4)), colours[index])
        canvas.disc(x, y, radius, colours[index])
        if units[index]["team"]:
            canvas.disc(x, y, 0.55 * radius, INNER)
    for index in alive:
        share = frame["units"][index][3] / units[index]["max_health"]
        width, (x, y) = max(16.0, 2 * radii[index]), places[index]
        left, top = x - width / 2, y - radii[index] - 7
        canvas.box(left, top, left + width, top + 4, EMPTY)
        canvas.box(left, top, left + width * share, top + 4, HEALTHY if share > 0.6 else HURT if share > 0.3 else DYING)
    return canvas.image


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
