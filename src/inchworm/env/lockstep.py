"""Step 1 of 9, by Gymnasium's `SyncVectorEnv` and `AsyncVectorEnv`: an engine over copies that can only move all together.

Every episode has a seed of its own, so it can be replayed, and a run over such a vector env is resumed exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from inchworm.env.actions import make_put
from inchworm.env.engine import Ended, Replay
from inchworm.env.lane_env import LaneVectorEnv
from inchworm.env.memory import carve_rows, map_tree, tree_leaves
from inchworm.env.probe import put_legal_actions
from inchworm.env.worlds import BatchedWorld, Moved, lane_numbers, scatter, write_outcome
from inchworm.spaces import zeros


class LockstepVectorEnv(LaneVectorEnv):
    """The `VectorEnv` contract over a batched world whose episodes take seeds."""

    def __init__(self, world: BatchedWorld, **options: Any) -> None:
        super().__init__(_Lockstep(world), **options)
        for why in world.inexact:
            self.mark_inexact(why)


class _Lockstep:
    """The engine: resets are brought into the step in which an episode ended."""

    lanes_per_copy = 1

    def __init__(self, world: BatchedWorld) -> None:
        self._world, self._lanes = world, world.num_lanes
        self.observation_space, self.action_space = world.observation_space, world.action_space
        self.rows, _ = carve_rows(self.observation_space, self.action_space, self._lanes, self._lanes)
        self._put = make_put(self.observation_space, (), "observations")
        self._options: list[Any] = [None] * self._lanes

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin episodes in some copies."""
        self._begin(indices, seeds, [self._options[lane] for lane in indices])

    def _begin(self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Any]) -> None:
        left = list(zip(lanes, seeds, options))
        while left:  # those that begin with the same options begin together
            same = [entry for entry in left if entry[2] == left[0][2]]
            left = [entry for entry in left if entry not in same]
            chosen = [lane for lane, _, _ in same]
            first = zeros(self.observation_space, (len(chosen),))  # [n, *obs]
            self._put(self._world.begin(chosen, [int(seed) for _, seed, _ in same], same[0][2]), first)
            scatter(first, self.rows.observations, chosen)

    def start(self) -> None:
        """Begin a step with the actions that stand in the rows."""
        self._world.start(map_tree(np.copy, self.rows.actions))

    def finish(self) -> list[Ended]:
        """Wait for it; where an episode ended, the next begins."""
        moved, over = self._land()
        if not over:
            return []
        scatter(map_tree(lambda array: array[over], self.rows.observations), self.rows.final_observations, over)
        self.reset(over, self.rows.next_seeds[over].tolist())
        return [(lane, lane_numbers(moved.info, lane)) for lane in over]

    def _land(self) -> tuple[Moved, list[int]]:
        """One step of all copies stands in the rows; who ended."""
        moved, rows = self._world.finish(), self.rows
        self._put(moved.observations, rows.observations)
        write_outcome(moved, rows)
        return moved, (rows.terminated | rows.truncated).nonzero()[0].tolist()

    def set_options(self, indices: Sequence[int], options: Sequence[Any]) -> None:
        """Reset options from the copies' next reset on."""
        for lane, value in zip(indices, options):
            self._options[lane] = value

    def replay(self, jobs: Sequence[Replay]) -> list[tuple[float, int]]:
        """Bring copies to where their episodes stood, all at once.

        They move together, so each episode begins as many steps late as it is shorter than the longest; till then its copy
        plays an episode that nobody looks at.
        """
        lengths = {job.copy: len(tree_leaves(job.actions)[0]) for job in jobs}
        longest = max(lengths.values(), default=0)
        results = {job.copy: (0.0, 0) for job in jobs}
        lost: set[int] = set()  # copies whose episode ended on the way
        rng = np.random.default_rng(0)  # no stream of the run: these actions are taken back by a reset
        if longest:
            self._begin_anew(range(self._lanes), jobs)
        for now in range(longest):
            self._begin_anew([job.copy for job in jobs if longest - lengths[job.copy] == now], jobs)
            running = [job for job in jobs if longest - lengths[job.copy] <= now and job.copy not in lost]
            self._choose({job.copy: _action(job, now - longest + lengths[job.copy]) for job in running}, rng)
            self.start()
            _, over = self._land()
            for job in running:
                total, taken = results[job.copy]
                results[job.copy] = (total, taken) if job.copy in over else (total + float(self.rows.rewards[job.copy]), taken + 1)
            lost.update(job.copy for job in running if job.copy in over)
            self._begin_anew(over, jobs)
        self._begin_anew([lane for lane, length in lengths.items() if length == 0], jobs)
        return [results[job.copy] for job in jobs]

    def _begin_anew(self, lanes: Sequence[int], jobs: Sequence[Replay]) -> None:
        """Begin the episodes that are replayed; copies without one begin any."""
        own = {job.copy: (job.seed, job.options) for job in jobs}
        begun = [own.get(lane, (0, self._options[lane])) for lane in lanes]
        self._begin(lanes, [seed for seed, _ in begun], [options for _, options in begun])

    def _choose(self, actions: dict[int, list[Any]], rng: np.random.Generator) -> None:
        """Put the given actions into the rows, and legal ones for the copies that wait."""
        for lane, parts in actions.items():
            for row, part in zip(tree_leaves(self.rows.actions), parts):
                row[lane] = part
        waiting = [lane for lane in range(self._lanes) if lane not in actions]
        put_legal_actions(self.action_space, self.rows.observations, rng, self.rows.actions, waiting)

    def close(self) -> None:
        """Close the world."""
        self._world.close()


def _action(job: Replay, step: int) -> list[Any]:
    """The leaves of one action of an episode."""
    return [part[step] for part in tree_leaves(job.actions)]
