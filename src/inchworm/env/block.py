"""Step 1 of 9: copies that live in the same process take their steps one after another, here or in a worker."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym

from inchworm.env.actions import Split, make_split
from inchworm.env.build import Env
from inchworm.env.engine import Ended, Replay
from inchworm.env.lanes import GymnasiumCopy
from inchworm.env.memory import StepRows, map_tree
from inchworm.env.own_state import Restore
from inchworm.errors import EnvError


class Block:
    """Copies that are stepped one after another in this process. `first_copy` is the index of the first in all rows."""

    def __init__(self, make: Callable[[], Env], first_copy: int, num_copies: int) -> None:
        self.failed: GymnasiumCopy | None = None
        self.copies: list[GymnasiumCopy] = []
        self._first_copy = first_copy
        self._ended: list[Ended] = []
        try:
            for index in range(num_copies):
                self._add(make, first_copy + index)
        except BaseException:
            self.close()
            raise
        self.observation_space = self.copies[0].observation_space
        self.action_space = self.copies[0].action_space
        self._split: Split = make_split(self.action_space)

    def _add(self, make: Callable[[], Env], lane: int) -> None:
        try:
            env = make()
            if not isinstance(env, gym.Env):
                raise EnvError(f"the factory returned {type(env).__name__}, not a gymnasium.Env")
            if any(env.unwrapped is copy.env.unwrapped for copy in self.copies):
                raise EnvError(f"the factory returned the same environment for two lanes; lane {lane} needs a new one on each call")
            copy = GymnasiumCopy(env, lane)
        except BaseException as error:  # an environment may also raise KeyboardInterrupt
            error.add_note(f"while lane {lane} was made")
            raise
        if self.copies and (copy.observation_space, copy.action_space) != (self.copies[0].observation_space, self.copies[0].action_space):
            raise EnvError(f"lane {lane} has other spaces than lane {self.copies[0].lane}: all copies of an environment must be alike")
        self.copies.append(copy)

    def attach(self, rows: StepRows) -> None:
        """Read and write these rows from now on."""
        self._rows = rows
        lanes = slice(self._first_copy, self._first_copy + len(self.copies))
        self._actions = map_tree(lambda array: array[lanes], rows.actions)  # [own lanes, *act]
        self._ended = [(copy.lane, {}) for copy in self.copies]  # as far as is known here: a worker before this one may have set flags
        for copy in self.copies:
            copy.attach(rows)

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin new episodes in some copies, numbered as in all rows."""
        self._clear_flags()
        for index, seed in zip(indices, seeds):
            copy = self._copy(index)
            try:
                copy.reset(seed, copy.next_options)
            except BaseException as error:
                self._note(copy, error)
                raise

    def step(self) -> list[Ended]:
        """One step of every copy, with the actions that stand in the rows."""
        if self._ended:
            self._clear_flags()
        ended = self._ended
        copy = self.copies[0]
        try:
            for copy, action in zip(self.copies, self._split(self._actions)):
                numbers = copy.step(action)
                if numbers is not None:
                    ended.append((copy.lane, numbers))
        except BaseException as error:
            self._note(copy, error)
            raise
        return ended

    def _clear_flags(self) -> None:
        for lane, _ in self._ended:
            self._rows.terminated[lane] = self._rows.truncated[lane] = False
        self._ended = []

    def _note(self, copy: GymnasiumCopy, error: BaseException) -> None:
        self.failed = copy
        if not isinstance(error, EnvError | KeyboardInterrupt):
            error.add_note(f"in the environment of {copy.where()}")

    def set_options(self, indices: Sequence[int], options: Sequence[Any]) -> None:
        """What `env.reset` gets from the copies' next reset on."""
        for index, value in zip(indices, options):
            self._copy(index).next_options = value

    def replay(self, job: Replay, tick: Callable[[], None] = lambda: None) -> tuple[float, int]:
        """Bring a copy to where an episode stood: (return, steps) of the way; fewer steps if it ended on the way.

        Flags that stand in the rows stay, for whoever has not read them yet; the next step or reset clears them.
        """
        copy = self._copy(job.copy)
        total, taken = 0.0, 0
        try:
            copy.reset(job.seed, job.options)
            for action in self._split(job.actions):
                tick()
                over = copy.step(action)
                if over is not None:
                    self._ended.append((copy.lane, over))
                    break
                total, taken = total + float(self._rows.rewards[copy.lane]), taken + 1
        except BaseException as error:
            self._note(copy, error)
            raise
        return total, taken

    @property
    def keeps_states(self) -> bool:
        """Whether copies offer their own states."""
        return any(copy.keeper is not None for copy in self.copies)

    def get_states(self) -> list[dict[str, Any]]:
        """Of each copy {"state": …}, {"why": why not}, or nothing if it does not offer one."""
        return [{} if copy.keeper is None else copy.keeper.get() for copy in self.copies]

    def set_states(self, jobs: Sequence[Restore]) -> None:
        """Begin episodes and put their copies where they stood."""
        for job in jobs:
            copy = self._copy(job.copy)
            try:
                copy.restore(job)
            except BaseException as error:
                self._note(copy, error)
                raise

    def _copy(self, index: int) -> GymnasiumCopy:
        return self.copies[index - self._first_copy]

    def close(self, harmless: type[BaseException] = Exception) -> list[str]:
        """Close every environment, whatever others do; what went wrong, in words.

        In a worker, where no Ctrl-C arrives, even a KeyboardInterrupt is `harmless`: an environment has raised it.
        """
        problems = []
        for copy in self.copies:
            try:
                copy.env.close()
            except harmless as error:  # one environment that cannot close must not keep the others open
                problems.append(f"lane {copy.lane} failed to close: {type(error).__name__}: {str(error)[:2000]}")
        return problems


def warn_of(problems: Sequence[str]) -> None:
    """Report what went wrong while closing: nothing was lost, so it is no error."""
    for problem in problems:
        warnings.warn(problem, stacklevel=3)
