"""Step 2 of 9, over worker processes and this one: while the workers step their copies, this process steps a share of its own.

On a machine with few cores nobody then sleeps, and nobody has to be woken: as many processes as cores, each with its copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from inchworm.config import EnvConfig
from inchworm.env.block import Block, warn_of
from inchworm.env.build import Env, make_env
from inchworm.env.engine import Ended, Replay
from inchworm.env.own_state import Restore
from inchworm.env.workers import WorkerPool
from inchworm.errors import EnvError, WorkerError


class HelpedPool:
    """The engine of a `WorkerVectorEnv` whose process helps: the first copies are the workers', the last ones its own."""

    def __init__(
        self,
        make: EnvConfig | Callable[[], Env],
        num_copies: int,
        num_workers: int,
        timeout: float,
        restarts: int = 0,
        *,
        global_state: bool = False,
    ) -> None:
        self._theirs = num_copies * num_workers // (num_workers + 1)  # copies of the workers
        options: dict[str, Any] = {"rows_for": num_copies, "global_state": global_state}
        self._pool = WorkerPool(make, self._theirs, num_workers, timeout, restarts, **options)
        self.rebuild_from = self._pool.rebuild_from
        try:
            factory = (lambda: make_env(make)) if isinstance(make, EnvConfig) else make
            self._block = Block(factory, self._theirs, num_copies - self._theirs, global_state=global_state)
            self._check_alike()
            self._block.attach(self._pool.rows)
        except BaseException:
            self._pool.close()
            raise
        self.observation_space, self.action_space, self.rows = self._block.observation_space, self._block.action_space, self._pool.rows
        self.lanes_per_copy = self._block.lanes_per_copy

    def _check_alike(self) -> None:
        parts = (self._block, self._pool)
        ours, theirs = ((part.observation_space, part.action_space, part.lanes_per_copy, part.global_state_space) for part in parts)
        if ours != theirs:
            self._block.close()
            raise EnvError(f"the copies here have the spaces {ours}, those in the workers {theirs}: all copies must be alike")

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin episodes in some copies."""
        theirs, ours = self._split(list(zip(indices, seeds)), indices)
        self._pool.reset(*_columns(theirs))
        self._block.reset(*_columns(ours))

    def start(self) -> None:
        """Wake the workers."""
        self._pool.start()

    def finish(self) -> list[Ended]:
        """Step our own copies while the workers step theirs, then wait for them."""
        try:
            ours = self._block.step()
        except Exception:
            with contextlib.suppress(WorkerError):  # the first error is the one that is told
                self._pool.finish()
            raise
        return self._pool.finish() + ours

    def set_options(self, indices: Sequence[int], options: Sequence[Any]) -> None:
        """Reset options from the copies' next reset on."""
        theirs, ours = self._split(list(zip(indices, options)), indices)
        self._pool.set_options(*_columns(theirs))
        self._block.set_options(*_columns(ours))

    def replay(self, jobs: Sequence[Replay]) -> list[tuple[float, int]]:
        """Bring copies to where their episodes stood."""
        theirs, ours = self._split(list(jobs), [job.copy for job in jobs])
        found = dict(zip([job.copy for job in theirs], self._pool.replay(theirs)))
        found |= {job.copy: self._block.replay(job) for job in ours}
        return [found[job.copy] for job in jobs]

    def get_states(self) -> list[dict[str, Any]]:
        """What the copies say of where they stand; nothing if they do not offer it."""
        return self._pool.get_states() + self._block.get_states() if self._block.keeps_states else []

    def set_states(self, jobs: Sequence[Restore]) -> None:
        """Put copies where they stood."""
        theirs, ours = self._split(list(jobs), [job.copy for job in jobs])
        self._pool.set_states(theirs)
        self._block.set_states(ours)

    def close(self) -> None:
        """End the workers and close our own."""
        self._pool.close()
        warn_of(self._block.close())

    def _split(self, items: list[Any], copies: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """What is the workers' and what is ours."""
        return (
            [item for item, copy in zip(items, copies) if copy < self._theirs],
            [item for item, copy in zip(items, copies) if copy >= self._theirs],
        )


def _columns(pairs: list[tuple[int, Any]]) -> tuple[list[int], list[Any]]:
    return [copy for copy, _ in pairs], [value for _, value in pairs]
