"""Step 1 of 9: Skirmish as a vector env. All arenas are stepped together, and each unit is a lane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from inchworm.core.spaces import MASK_KEY
from inchworm.core.types import Array
from inchworm.env.episodes import Ended, Replay, team_sums
from inchworm.env.step_arrays import StepRows, allocate_rows
from inchworm.env.vector_env import Engine, LaneVectorEnv
from inchworm.worlds.replay import make_replay
from inchworm.worlds.skirmish.state import TIME, SkirmishConfig, action_space, observation_space, state_space
from inchworm.worlds.skirmish.world import SkirmishWorld, agent_names


class NextGames:
    """Prepares the next games of all arenas together before they are needed: their seeds are known."""

    def __init__(self, config: SkirmishConfig, num_arenas: int) -> None:
        self._world = SkirmishWorld(config, num_arenas)
        self._seeds = [-1] * num_arenas  # of the games that are ready

    def begin(self, world: SkirmishWorld, arenas: Sequence[int], seeds: Sequence[int], upcoming: Array) -> None:
        """Start games with these seeds in some arenas of a world; `upcoming` [E] are the seeds of every arena's next game."""
        wanted = dict(zip(arenas, map(int, seeds)))
        if any(self._seeds[arena] != seed for arena, seed in wanted.items()):
            prepared = [wanted.get(arena, seed) for arena, seed in enumerate(upcoming.tolist())]
            stale = [arena for arena, seed in enumerate(prepared) if seed != self._seeds[arena]]
            self._world.begin([prepared[arena] for arena in stale], stale)
            self._seeds = prepared
        world.state.copy_from(self._world.state, arenas, arenas)


class SkirmishEngine(Engine):
    """Steps all arenas together. A copy is an arena; its lanes are the first team's units, then the second's."""

    start = None  # `finish` takes the step

    def __init__(self, config: SkirmishConfig, num_envs: int, *, global_state: bool = False) -> None:
        self.config, self.world = config, SkirmishWorld(config, num_envs)
        self._next_games = NextGames(config, num_envs)
        self.lanes_per_copy = 2 * config.team_size
        self.agents = agent_names(config)
        self.observation_space, self.action_space = observation_space(config), action_space(config)
        shared = state_space(config) if global_state else None
        lanes = num_envs * self.lanes_per_copy
        self.rows: StepRows = allocate_rows(self.observation_space, self.action_space, lanes, num_envs, global_state_space=shared)[0]
        self._global_state = global_state
        self._observations = self._by_arena(self.rows.observations["observation"])
        self._mask = self._by_arena(self.rows.observations[MASK_KEY]).view(np.bool_)  # int8 viewed as bool: no conversion per step
        self._rewards, self._valid = self._by_arena(self.rows.rewards), self._by_arena(self.rows.valid)
        self._terminated, self._truncated = self._by_arena(self.rows.terminated), self._by_arena(self.rows.truncated)
        self._action_rows = self._by_arena(self.rows.actions)
        self._actions = np.zeros(self._action_rows.shape, np.int64)

    def _by_arena(self, rows: Array) -> Array:
        """A view of rows [B, *] in the world's order [*, 2, n, E]."""
        arenas = rows.reshape(len(self.rows.seeds), 2, self.config.team_size, *rows.shape[1:])
        return arenas.transpose(*range(3, arenas.ndim), 1, 2, 0)

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin games in some arenas."""
        if len(indices):
            self._begin(list(indices), seeds)

    def _begin(self, arenas: list[int], seeds: Sequence[int]) -> None:
        self._next_games.begin(self.world, arenas, seeds, self.rows.next_seeds)
        self._show(arenas)

    def _show(self, arenas: list[int]) -> None:
        """Write the observations and masks of some arenas into the rows."""
        state = self.world.state
        self._observations[..., arenas] = state.observations[..., arenas]
        self._mask[..., arenas] = state.mask[..., arenas]
        self._valid[..., arenas] = state.alive[..., arenas]
        if self._global_state:
            self.world.global_state(self.rows.global_state)

    def finish(self) -> list[Ended]:
        """Step all arenas; where a game ended, begin the next."""
        world, state = self.world, self.world.state
        self._actions[...] = self._action_rows
        world.step(self._actions)
        self._rewards[...] = world.rewards()
        self._observations[...] = state.observations
        self._mask[...] = state.mask
        self._valid[...] = state.alive
        self._terminated[...] = False if self._global_state else state.died
        self._truncated[...] = False
        if self._global_state:
            world.global_state(self.rows.global_state)
        over = state.reasons.nonzero()[0].tolist()
        return self._end(over) if over else []

    def _end(self, arenas: list[int]) -> list[Ended]:
        rows, state = self.rows, self.world.state
        on_time = state.reasons[arenas] == TIME
        # A dead unit's episode was over before, unless a central critic carries its credit to the game's end.
        cut = on_time & (self._global_state | state.alive[..., arenas])
        self._truncated[..., arenas] = cut
        self._terminated[..., arenas] = ~cut
        lanes = (np.array(arenas)[:, None] * self.lanes_per_copy + np.arange(self.lanes_per_copy)).reshape(-1)
        final, current = rows.final_observations, rows.observations
        final["observation"][lanes] = current["observation"][lanes]
        final[MASK_KEY][lanes] = current[MASK_KEY][lanes] | rows.terminated[lanes, None]  # nothing follows a terminated lane: all allowed
        rows.final_valid[lanes] = rows.valid[lanes] & rows.truncated[lanes]
        if self._global_state:
            rows.final_global_state[arenas] = rows.global_state[arenas]
        infos = [info for arena in arenas for info in self.world.episode_infos(arena)]
        self._begin(arenas, rows.next_seeds[arenas].tolist())
        return list(zip(lanes.tolist(), infos))

    def set_options(self, indices: Sequence[int], options: Sequence[Any]) -> None:
        """Do nothing: a game depends only on its config and seed."""

    def replay(self, jobs: Sequence[Replay]) -> list[tuple[float, int]]:
        """Replay games, each in a world with a single arena; return (return, steps) of each."""
        results = []
        for job in jobs:
            world, total, taken = SkirmishWorld(self.config, 1), 0.0, 0
            world.begin([job.seed])
            for joint in np.asarray(job.actions):  # [2n, 3]
                world.step(joint.astype(np.int64).reshape(2, self.config.team_size, 3, 1).transpose(2, 0, 1, 3).copy())
                total += float(team_sums(world.rewards(), 1)[0])
                taken += 1
                if world.state.reasons[0]:
                    break
            self.world.state.copy_from(world.state, [0], [job.copy])
            self._show([job.copy])
            results.append((total, taken))
        return results

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class SkirmishVectorEnv(LaneVectorEnv):
    """`num_envs` arenas of Skirmish, stepped together; all units of both teams are lanes."""

    def __init__(
        self, config: SkirmishConfig | Mapping[str, Any] | None = None, num_envs: int = 8, *, global_state: bool = False, **options: Any
    ) -> None:
        """`options` are seed, first_copy and max_replay_steps, as for every vector env."""
        self.config = config if isinstance(config, SkirmishConfig) else SkirmishConfig.from_dict(config or {})
        self._skirmish = SkirmishEngine(self.config, num_envs, global_state=global_state)
        super().__init__(self._skirmish, **options)

    def describe(self, copy: int) -> dict[str, Any]:
        """Describe a copy's running game for a replay: what does not change."""
        return self._skirmish.world.describe(copy)

    def make_replay(self, seed: int, actions: Sequence[np.ndarray], players: tuple[str, str], info: Mapping[str, float]) -> dict[str, Any]:
        """The replay of a game, from its seed and the actions [2n, 3] of each step; `info` is its last, empty if it was cut off."""
        world = SkirmishWorld(self.config, 1)
        world.begin([seed])
        frames = [world.frame(0)]
        for joint in actions:
            by_team = joint.astype(np.int64).reshape(2, self.config.team_size, -1, 1)  # [2, n, 3, 1]
            world.step(np.ascontiguousarray(by_team.transpose(2, 0, 1, 3)))
            frames.append(world.frame(0))
        meta = {"seed": seed, "players": list(players), "steps": len(actions), **({"hp_margin": info["hp_margin"]} if info else {})}
        return make_replay(world.describe(0), frames, meta, info)

    def frame(self, copy: int) -> dict[str, Any]:
        """Describe a copy's current state as one frame of a replay."""
        return self._skirmish.world.frame(copy)
