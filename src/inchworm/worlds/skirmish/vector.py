"""Step 1 of 9, all arenas at once: Skirmish as the rows of a vector env, each unit a lane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from inchworm.core.spaces import MASK_KEY
from inchworm.core.types import Array
from inchworm.env.episodes import Ended, Replay, team_sums
from inchworm.env.step_arrays import StepRows, carve_rows
from inchworm.env.vector_env import Engine, LaneVectorEnv
from inchworm.worlds.skirmish.config import SkirmishConfig
from inchworm.worlds.skirmish.state import TIME, action_space, observation_space, state_space
from inchworm.worlds.skirmish.world import SkirmishWorld, episode_infos


class Nursery:
    """Makes the next games of `num_arenas` arenas before they are needed, whose seeds are known."""

    def __init__(self, config: SkirmishConfig, num_arenas: int) -> None:
        self._world = SkirmishWorld(config, num_arenas)
        self._seeds = [-1] * num_arenas  # of the games that lie ready

    def begin(self, world: SkirmishWorld, arenas: Sequence[int], seeds: Sequence[int], upcoming: Array) -> None:
        """Start games with these seeds in some arenas of a world; `upcoming` [E] are the seeds that all arenas will ask for."""
        wanted = dict(zip(arenas, map(int, seeds)))
        if any(self._seeds[arena] != seed for arena, seed in wanted.items()):
            self._prepare([wanted.get(arena, seed) for arena, seed in enumerate(upcoming.tolist())])
        world.state.take(arenas, self._world.state, arenas)

    def _prepare(self, seeds: list[int]) -> None:
        stale = [arena for arena, seed in enumerate(seeds) if seed != self._seeds[arena]]
        self._world.begin([seeds[arena] for arena in stale], stale)
        self._seeds = seeds


class SkirmishEngine(Engine):
    """The engine that moves all arenas. A copy is an arena; its lanes are the first team's units, then the second's."""

    def __init__(self, config: SkirmishConfig, num_envs: int, *, global_state: bool = False) -> None:
        self.config, self.world = config, SkirmishWorld(config, num_envs)
        self._nursery = Nursery(config, num_envs)
        self.lanes_per_copy = 2 * config.team_size
        self.observation_space, self.action_space = observation_space(config), action_space(config)
        shared = state_space(config) if global_state else None
        lanes = num_envs * self.lanes_per_copy
        self.rows: StepRows = carve_rows(self.observation_space, self.action_space, lanes, num_envs, global_state_space=shared)[0]
        self._shares_state = global_state
        self._seen, self._mask = self._by_arena(self.rows.observations["observation"]), self._by_arena(self.rows.observations[MASK_KEY])
        self._mask = self._mask.view(np.bool_)  # MultiBinary's int8, without a conversion a step
        self._rewards, self._valid = self._by_arena(self.rows.rewards), self._by_arena(self.rows.valid)
        self._terminated, self._truncated = self._by_arena(self.rows.terminated), self._by_arena(self.rows.truncated)
        self._asked = self._by_arena(self.rows.actions)
        self._actions = np.zeros(self._asked.shape, np.int64)

    def _by_arena(self, rows: Array) -> Array:
        """Rows [B, *] as a view [*, 2, n, E], as the world has them."""
        arenas = rows.reshape(len(self.rows.seeds), 2, self.config.team_size, *rows.shape[1:])
        return arenas.transpose(*range(3, arenas.ndim), 1, 2, 0)

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin games in some arenas."""
        if len(indices):
            self._begin(list(indices), seeds)

    def _begin(self, arenas: list[int], seeds: Sequence[int]) -> None:
        self._nursery.begin(self.world, arenas, seeds, self.rows.next_seeds)
        self._show(arenas)

    def _show(self, arenas: list[int]) -> None:
        """Write what is seen in some arenas into the rows."""
        state = self.world.state
        self._seen[..., arenas] = state.seen[..., arenas]
        self._mask[..., arenas] = state.mask[..., arenas]
        self._valid[..., arenas] = state.alive[..., arenas]
        if self._shares_state:
            self.world.global_state(self.rows.global_state)

    def start(self) -> None:
        """Nothing to wake: `finish` takes the step."""

    def finish(self) -> list[Ended]:
        """One step of all arenas; where a game ended, the next has begun."""
        world, state = self.world, self.world.state
        self._actions[...] = self._asked
        world.step(self._actions)
        self._rewards[...] = world.rewards()
        self._seen[...] = state.seen
        self._mask[...] = state.mask
        self._valid[...] = state.alive
        self._terminated[...] = False if self._shares_state else state.died
        self._truncated[...] = False
        if self._shares_state:
            world.global_state(self.rows.global_state)
        over = state.reasons.nonzero()[0].tolist()
        return self._end(over) if over else []

    def _end(self, arenas: list[int]) -> list[Ended]:
        rows, state = self.rows, self.world.state
        on_time = state.reasons[arenas] == TIME
        # For the dead the game was over before, unless a central critic carries their credit to its end.
        cut = on_time & (self._shares_state | state.alive[..., arenas])
        self._truncated[..., arenas] = cut
        self._terminated[..., arenas] = ~cut
        lanes = (np.array(arenas)[:, None] * self.lanes_per_copy + np.arange(self.lanes_per_copy)).reshape(-1)
        final, seen = rows.final_observations, rows.observations
        final["observation"][lanes] = seen["observation"][lanes]
        final[MASK_KEY][lanes] = seen[MASK_KEY][lanes] | rows.terminated[lanes, None]  # nobody acts where nothing follows
        rows.final_valid[lanes] = rows.valid[lanes] & rows.truncated[lanes]
        if self._shares_state:
            rows.final_global_state[arenas] = rows.global_state[arenas]
        infos = [info for arena in arenas for info in episode_infos(self.config, state, arena)]
        self._begin(arenas, rows.next_seeds[arenas].tolist())
        return list(zip(lanes.tolist(), infos))

    def set_options(self, indices: Sequence[int], options: Sequence[Any]) -> None:
        """A game has no options: all that it is comes from the config and its seed."""

    def replay(self, jobs: Sequence[Replay]) -> list[tuple[float, int]]:
        """Bring arenas to where their games stood, each in a world of its own."""
        return [self._replay(job) for job in jobs]

    def _replay(self, job: Replay) -> tuple[float, int]:
        world, total, taken = SkirmishWorld(self.config, 1), 0.0, 0
        world.begin([job.seed])
        for joint in np.asarray(job.actions):  # [2n, 3]
            world.step(joint.astype(np.int64).reshape(2, self.config.team_size, 3, 1).transpose(2, 0, 1, 3).copy())
            total += float(team_sums(world.rewards(), 1)[0])
            taken += 1
            if world.state.reasons[0]:
                break
        self.world.state.take([job.copy], world.state, [0])
        self._show([job.copy])
        return total, taken

    def close(self) -> None:
        """Nothing is held."""


class SkirmishVectorEnv(LaneVectorEnv):
    """`num_envs` arenas of Skirmish, stepped as one; all units of both teams are lanes."""

    def __init__(
        self, config: SkirmishConfig | Mapping[str, Any] | None = None, num_envs: int = 8, *, global_state: bool = False, **options: Any
    ) -> None:
        """`options` are those of every vector env: seed, first_copy, max_replay_steps."""
        self.config = config if isinstance(config, SkirmishConfig) else SkirmishConfig.from_dict(config or {})
        self._skirmish = SkirmishEngine(self.config, num_envs, global_state=global_state)
        super().__init__(self._skirmish, **options)

    def describe(self, copy: int) -> dict[str, Any]:
        """The world part of a replay of a copy's running game."""
        return self._skirmish.world.describe(copy)

    def frame(self, copy: int) -> dict[str, Any]:
        """A copy as it stands, as one frame of a replay."""
        return self._skirmish.world.frame(copy)
