"""Step 1 of 9: copies in the same process are stepped one after another, here or in a worker."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from inchworm.core.errors import EnvError, InchwormError, describe_error, error_text
from inchworm.core.padding import AgentSpaces
from inchworm.core.spaces import map_tree
from inchworm.core.types import Tree
from inchworm.env.episodes import Ended, Replay, team_sums
from inchworm.env.gymnasium_copy import GymnasiumCopy
from inchworm.env.pettingzoo_copy import TeamCopy, TurnCopy, as_team, check_one_env, is_team_env
from inchworm.env.restore import Env, Restore, call_method, find_method, plain_result
from inchworm.env.step_arrays import StepRows, allocate_rows
from inchworm.env.values import make_split

Copy: TypeAlias = GymnasiumCopy | TeamCopy
"""One copy of an environment, and the lanes that it fills."""


def team_copy(env: Any, copy: int, *, global_state: bool = False, is_given: bool = False) -> TeamCopy:
    """A PettingZoo environment as one copy, whose agents act at once or take turns."""
    team = as_team(env)
    return (TurnCopy if team.turn_based else TeamCopy)(team, copy, global_state=global_state, is_given=is_given)


class LocalCopies:
    """An engine whose copies are stepped one after another in this process. `first_copy` is the index of the first in all rows.

    An environment that `is_given` is the caller's own: it is not reset to find out about its masks.
    """

    start = None  # `finish` takes the step

    def __init__(
        self,
        make: Callable[[], Env],
        first_copy: int,
        num_copies: int,
        *,
        global_state: bool = False,
        keep_infos: Sequence[str] = (),
        is_given: bool = False,
    ) -> None:
        self.failed: Copy | None = None
        self.copies: list[Copy] = []  # all of one kind
        self._first_copy, self._global_state, self._keep_infos, self._is_given = first_copy, global_state, keep_infos, is_given
        self._ended: list[Ended] = []
        try:
            for index in range(num_copies):
                self._add(make, first_copy + index)
        except BaseException:
            self.close_all()
            raise
        self.observation_space = self.copies[0].observation_space
        self.action_space = self.copies[0].action_space
        self.global_state_space = self.copies[0].global_state_space
        self.lanes_per_copy: int = self.copies[0].num_lanes
        self.turn_based = self.copies[0].turn_based
        self.agents: tuple[str, ...] = self.copies[0].names
        self.agent_spaces: tuple[AgentSpaces, ...] = self.copies[0].agent_spaces
        split, width = make_split(self.action_space), self.lanes_per_copy

        def split_teams(actions: Tree) -> list[Any]:
            """Actions [N * k, *act] as N lists of the k agents'."""
            lanes = split(actions)
            return [lanes[first : first + width] for first in range(0, len(lanes), width)]

        self._split: Callable[[Tree], list[Any]] = split_teams if isinstance(self.copies[0], TeamCopy) else split

    def _add(self, make: Callable[[], Env], index: int) -> None:
        doing = "making the environment"
        try:
            env: Any = make()
            check_one_env(env, "the factory")
            doing = "reading its spaces and its first reset"
            is_team = is_team_env(env)
            if any(env.unwrapped is copy.env.unwrapped for copy in self.copies):
                raise EnvError(f"the factory returned the same environment for two lanes; lane {index} needs a new one on each call")
            if self._global_state and not is_team:
                raise EnvError(
                    f"{env} has one agent and so no global state for a central critic: its critic sees what the agent sees; "
                    "set policy.central_critic=false"
                )
            copy: Copy
            if is_team:
                copy = team_copy(env, index, global_state=self._global_state, is_given=self._is_given)
            else:
                copy = GymnasiumCopy(env, index, is_given=self._is_given)
        except BaseException as error:
            where = f"lane {index * (self.copies[0].num_lanes if self.copies else 1)}"
            if isinstance(error, InchwormError | KeyboardInterrupt):  # an environment may also raise KeyboardInterrupt
                error.add_note(f"while {where} was made")
                raise
            raise EnvError(f"{where}: {doing} raised {describe_error(error)}") from error
        if self.copies and _kind(copy) != _kind(self.copies[0]):
            raise EnvError(f"lane {copy.lane} has other spaces than lane {self.copies[0].lane}: all copies of an environment must be alike")
        self.copies.append(copy)

    def allocate(self, num_copies: int, buffer: Any = None) -> tuple[StepRows, int]:
        """Allocate rows for `num_copies` copies like these; also returns the bytes that a buffer for them needs."""
        lanes = num_copies * self.lanes_per_copy
        spaces = (self.observation_space, self.action_space)
        more: dict[str, Any] = {"global_state_space": self.global_state_space, "keep_infos": self._keep_infos}
        return allocate_rows(*spaces, lanes, num_copies, buffer, **more)

    def attach(self, rows: StepRows) -> None:
        """Read and write these rows from now on."""
        self.rows = rows
        width = self.lanes_per_copy
        lanes = range(self._first_copy * width, (self._first_copy + len(self.copies)) * width)
        self._actions = map_tree(lambda array: array[lanes.start : lanes.stop], rows.actions)  # [own lanes, *act]
        self._ended = [(lane, {}) for lane in lanes]  # unknown here: a worker before this one may have set flags
        for copy in self.copies:
            copy.attach(rows)

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin new episodes in some copies, numbered as in all rows."""
        self._clear_flags()
        for index, seed in zip(indices, seeds):
            copy = self._copy(index)
            with self._watched(copy):
                copy.reset(seed, copy.next_options)

    def step(self) -> list[Ended]:
        """One step of every copy, with the actions in the rows."""
        if self._ended:
            self._clear_flags()
        ended = self._ended
        copy = self.copies[0]
        try:
            for copy, action in zip(self.copies, self._split(self._actions)):
                over = copy.step(action)
                if over is not None:
                    ended += over
        except BaseException:
            with self._watched(copy):
                raise
        return ended

    finish = step

    def _clear_flags(self) -> None:
        for lane, _ in self._ended:
            self.rows.terminated[lane] = self.rows.truncated[lane] = False
        self._ended = []

    @contextmanager
    def _watched(self, copy: Copy, call: str = "") -> Iterator[None]:
        """Raise what a copy raises as an `EnvError` that names the lane, the episode and the call: also SystemExit, but not Ctrl-C."""
        try:
            yield
        except (InchwormError, KeyboardInterrupt):
            self.failed = copy
            raise
        except BaseException as error:
            self.failed = copy
            call = call or ("step" if copy.steps else "reset")
            raise EnvError(f"{copy.where()}: {call} raised {describe_error(error)}") from error

    def set_options(self, indices: Sequence[int], options: Sequence[Any]) -> None:
        """What `env.reset` gets from the copies' next reset on."""
        for index, value in zip(indices, options):
            self._copy(index).next_options = value

    def check_method(self, name: str) -> str | None:
        """Why the copies have no such method; None if they have."""
        try:
            find_method(self.copies[0].env, name)
        except EnvError as error:
            return str(error)
        return None

    def call(self, indices: Sequence[int], name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
        """Call a method of some copies now; returns their results as plain data."""
        chosen = [self._copy(index) for index in indices]
        return [plain_result(call_method(copy.env, name, arguments, keywords, copy.where), name) for copy in chosen]

    def replay(self, jobs: Sequence[Replay], tick: Callable[[], None] = lambda: None) -> list[tuple[float, int]]:
        """Replay episodes in their copies: (return, steps) of each; fewer steps if one ended early. `tick` is called before every step.

        Flags in the rows stay, because they may not have been read yet; the next step or reset clears them.
        """
        results, width = [], self.lanes_per_copy
        for job in jobs:
            copy = self._copy(job.copy)
            rewards = self.rows.rewards[copy.lane : copy.lane + width]
            actions = job.actions if width == 1 else map_tree(lambda array: array.reshape(-1, *array.shape[2:]), job.actions)
            total, taken = 0.0, 0
            with self._watched(copy):
                copy.reset(job.seed, job.options)
                for action in self._split(actions):
                    tick()
                    over = copy.step(action)
                    if over is not None:
                        self._ended += over
                        break
                    total, taken = total + float(rewards[0] if width == 1 else team_sums(rewards, 1)[0]), taken + 1
            results.append((total, taken))
        return results

    @property
    def keeps_states(self) -> bool:
        """Whether some copies have get_state and set_state."""
        return any(copy.state_keeper is not None for copy in self.copies)

    def get_states(self) -> list[dict[str, Any]]:
        """For each copy {"state": …}, {"why": why not}, or nothing if it has no get_state."""
        return [{} if copy.state_keeper is None else copy.state_keeper.get() for copy in self.copies]

    def set_states(self, jobs: Sequence[Restore]) -> None:
        """Begin episodes and set their saved states."""
        for job in jobs:
            copy = self._copy(job.copy)
            with self._watched(copy, "restoring it"):
                if copy.state_keeper is None:
                    raise EnvError(f"{copy.where()}: it was saved by get_state, but the environment here has no get_state and set_state")
                copy.reset(job.seed, job.options)
                copy.state_keeper.set(job.state)

    def _copy(self, index: int) -> Copy:
        return self.copies[index - self._first_copy]

    def close(self) -> None:
        """Close every environment; a failure is a warning."""
        warn_of(self.close_all())

    def close_all(self, ignored: type[BaseException] | tuple[type[BaseException], ...] = (Exception, SystemExit)) -> list[str]:
        """Close every environment, also after one failed to; returns the failures, a sentence each.

        In a worker, where no Ctrl-C arrives, even a KeyboardInterrupt is `ignored`: an environment has raised it.
        """
        problems = []
        for copy in self.copies:
            try:
                copy.env.close()
            except ignored as error:  # one environment that cannot be closed must not keep the others open
                problems.append(f"lane {copy.lane} failed to close: {type(error).__name__}: {error_text(error)}")
        return problems


def _kind(copy: Copy) -> tuple[Any, ...]:
    """What all copies of an environment have in common."""
    return copy.observation_space, copy.action_space, copy.global_state_space, copy.num_lanes, copy.names, copy.agent_spaces


def warn_of(problems: Sequence[str]) -> None:
    """Warn of failures while closing: nothing was lost, so they are not errors."""
    for problem in problems:
        warnings.warn(problem, stacklevel=3)
