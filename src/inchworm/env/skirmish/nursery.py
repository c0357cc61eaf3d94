"""Serves step 1: games that have not begun yet, one for each arena, made many at a time because that costs little more than one."""

from __future__ import annotations

from collections.abc import Sequence

from inchworm.env.skirmish.config import SkirmishConfig
from inchworm.env.skirmish.world import SkirmishWorld
from inchworm.types import Array


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
