"""Step 2 of 9: what a replay of every copy's running episode needs: its seed, reset options and actions so far.

This history is kept with the vector env, not in the workers: a dead worker is rebuilt from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from inchworm.core.errors import EnvError, WorkerError
from inchworm.core.seeding import episode_seed
from inchworm.core.spaces import Space, build_tree, tree_leaves
from inchworm.core.types import Array, Tree
from inchworm.env.step_arrays import StepRows

Ended = tuple[int, Mapping[str, float]]
"""A lane whose copy's episode ended in this step, and the numbers of its last `info`."""


class Replay(NamedTuple):
    """A running episode: what is needed to replay it."""

    copy: int
    seed: int
    options: Any
    actions: Tree
    """[n, *act]; [n, k, *act] where a copy has k lanes, those of dead agents among them"""


class ActionLog:
    """The last actions of all lanes, [step, B, *act] for each leaf; drops what no running episode needs."""

    def __init__(self, actions: Tree, starts: Array, limit: int) -> None:
        """`actions` are the rows to record, `starts` [E] the numbers of the steps that running episodes began with; both are read live."""
        self._live, self._starts, self._limit = tree_leaves(actions), starts, limit
        self._hold([np.empty((64, *live.shape), live.dtype) for live in self._live])
        self._first = 0  # the number of the step in row 0
        self._filled = 0

    @property
    def now(self) -> int:
        """The number of the next step."""
        return self._first + self._filled

    def append(self) -> None:
        """Record the actions in the rows."""
        filled = self._filled
        if filled == self._size:  # drop what no episode needs, and double the rest
            oldest = max(int(self._starts.min()), self.now - self._limit, self._first)
            keep = slice(oldest - self._first, filled)
            length = keep.stop - keep.start
            larger = [np.empty((max(64, 2 * length), *buffer.shape[1:]), buffer.dtype) for buffer in self._buffers]
            for new, old in zip(larger, self._buffers):
                new[:length] = old[keep]
            self._hold(larger)
            self._first, filled = oldest, length
        for buffer, live in self._pairs:
            buffer[filled] = live
        self._filled = filled + 1

    def _hold(self, buffers: list[np.ndarray]) -> None:
        self._buffers, self._size = buffers, len(buffers[0])
        self._pairs = list(zip(buffers, self._live))

    def holds(self, start: int) -> bool:
        """Whether everything since this step is still there."""
        return start >= self._first

    def since(self, start: int, lanes: slice, end: int | None = None) -> list[np.ndarray]:
        """The actions of some lanes since a step, [n, *act] for each leaf; a copy's lanes are joined if it has several."""
        rows = slice(start - self._first, self._filled if end is None else end - self._first)
        width = lanes.stop - lanes.start
        return [buffer[rows, lanes.start].copy() if width == 1 else buffer[rows, lanes].copy() for buffer in self._buffers]

    def preload(self, actions: Sequence[Sequence[np.ndarray]], lanes_per_copy: int) -> np.ndarray:
        """Replace the log by the actions of each copy [copy][leaf][n, *act], aligned so that all end now; returns their starts [E]."""
        longest = max((len(copy[0]) for copy in actions), default=0)
        self._hold([np.zeros((max(64, 2 * longest), *live.shape), live.dtype) for live in self._live])
        self._first, self._filled = 0, longest
        for index, copy in enumerate(actions):
            lanes = slice(index * lanes_per_copy, (index + 1) * lanes_per_copy)
            for buffer, saved in zip(self._buffers, copy):
                buffer[longest - len(saved) : longest, lanes] = saved[:, None] if lanes_per_copy == 1 else saved
        return np.array([longest - len(copy[0]) for copy in actions], np.int64)


def team_sums(rewards: Array, num_copies: int) -> Array:
    """[E] f64: the summed rewards of each copy's lanes; bit-identical for one copy and for many."""
    return rewards.reshape(num_copies, -1).astype(np.float64).sum(1)


class RunningReturns:
    """The returns of E running episodes. Rewards are buffered and summed every 64 steps, which is cheaper than a sum per step."""

    _EVERY = 64

    def __init__(self, rewards: Array, num_copies: int) -> None:
        self._rewards, self._num_copies = rewards, num_copies
        self._rows = np.zeros((1 + self._EVERY, num_copies), np.float64)  # [1 + steps, E]: the sums, then what is not in them yet
        self._filled = 1
        self._is_plain = len(rewards) == num_copies

    def append(self) -> None:
        """Add the rewards in the rows; those of a copy's lanes are summed."""
        filled = self._filled
        self._rows[filled] = self._rewards if self._is_plain else team_sums(self._rewards, self._num_copies)
        self._filled = filled + 1
        if filled == self._EVERY:
            self.sums()

    def sums(self) -> Array:
        """[E] f64, added one step after another as a replay does, so that both are bit-identical; a writable view."""
        np.add.accumulate(self._rows[: self._filled], 0, out=self._rows[: self._filled])
        self._rows[0] = self._rows[self._filled - 1]
        self._filled = 1
        return self._rows[0]

    def clear(self, copy: int) -> None:
        """Start at 0 again: a new episode begins in a copy."""
        self._rows[: self._filled, copy] = 0.0


class RunningEpisode(NamedTuple):
    """A copy's running episode: how to replay it, and the result that the replay must have."""

    job: Replay
    episode_return: float
    length: int


class EpisodeLedger:
    """The episodes of E copies: numbers, seeds, options, actions, returns. Seeds are in the rows, where workers read them."""

    def __init__(
        self, rows: StepRows, action_space: Space, *, seed: int, first_copy: int, lanes_per_copy: int, max_replay_steps: int
    ) -> None:
        self._rows, self._action_space = rows, action_space
        self.seed, self.first_copy, self.lanes_per_copy = seed, first_copy, lanes_per_copy
        self.num_copies = len(rows.seeds)
        self.episodes = rows.episodes  # [E] the number of the running episode of each copy
        self.episodes[:] = -1
        self.options: list[Any] = [None] * self.num_copies
        self.next_options: list[Any] = [None] * self.num_copies
        self._returns = RunningReturns(rows.rewards, self.num_copies)
        self.add_rewards = self._returns.append
        self.starts = np.zeros(self.num_copies, np.int64)  # [E] the log's number of each episode's first step
        self._limit = max_replay_steps
        self._log = ActionLog(rows.actions, self.starts, max_replay_steps)
        self.record_actions = self._log.append
        for copy in range(self.num_copies):
            self._derive_next_seed(copy)

    def episode_returns(self) -> Array:
        """[E] f64: the return of each copy's running episode, summed over its lanes; a view."""
        return self._returns.sums()

    @property
    def lengths(self) -> Array:
        """[E] steps of the running episodes."""
        return self._log.now - self.starts

    def begin(self, copy: int, seed: int | None = None) -> int:
        """Record that a new episode begins, with this seed or the derived one; returns its seed."""
        seed = int(self._rows.next_seeds[copy]) if seed is None else seed
        self._rows.seeds[copy] = seed
        self.episodes[copy] += 1
        self._derive_next_seed(copy)
        self.options[copy] = self.next_options[copy]
        self._returns.clear(copy)
        self.starts[copy] = self._log.now
        return seed

    def _derive_next_seed(self, copy: int) -> None:
        self._rows.next_seeds[copy] = episode_seed(self.seed, self.first_copy + copy, int(self.episodes[copy]) + 1)

    def running_episode(self, copy: int, *, step_pending: bool) -> RunningEpisode:
        """The running episode of a copy; without the last recorded actions if their step is still pending."""
        start, end = int(self.starts[copy]), self._log.now - step_pending
        if not self._log.holds(start):
            raise WorkerError(
                f"cannot rebuild lane {copy * self.lanes_per_copy} after its worker died: its episode had {end - start} steps, but only "
                f"collect.max_replay_steps={self._limit} are kept; resume the run from its last checkpoint, or raise it"
            )
        lanes = slice(copy * self.lanes_per_copy, (copy + 1) * self.lanes_per_copy)
        actions = self._as_tree(self._log.since(start, lanes, end))
        job = Replay(copy, int(self._rows.seeds[copy]), self.options[copy], actions)
        return RunningEpisode(job, float(self._returns.sums()[copy]), end - start)

    def saved_options(self, state: Mapping[str, Any]) -> list[Any]:
        """The options that `state_dict` saved for each copy's next reset; refuses another number of copies."""
        saved = len(state["copies"])
        if saved != self.num_copies:
            raise EnvError(f"the saved environments are {saved} copies, here are {self.num_copies}; set env.num_envs={saved}")
        return [copy["next_options"] for copy in state["copies"]]

    def state_dict(self, observation_hashes: Sequence[str]) -> dict[str, Any]:
        """Every copy's episode as plain data, and the actions of all copies concatenated, an array for each leaf."""
        returns, now = self._returns.sums(), self._log.now
        copies, whole = [], []
        for copy, start in enumerate(self.starts.tolist()):
            kept = now - start <= self._limit and self._log.holds(start)
            lanes = slice(copy * self.lanes_per_copy, (copy + 1) * self.lanes_per_copy)
            whole.append(self._log.since(start if kept else now, lanes))
            copies.append(
                {
                    "episode": int(self.episodes[copy]),
                    "seed": int(self._rows.seeds[copy]),
                    "options": self.options[copy],
                    "next_options": self.next_options[copy],
                    "length": now - start,
                    "episode_return": float(returns[copy]),
                    "replayable": kept,
                    "observation_hash": observation_hashes[copy],
                }
            )
        actions = {f"part{leaf}": np.concatenate(parts) for leaf, parts in enumerate(zip(*whole))}
        return {"seed": self.seed, "first_copy": self.first_copy, "copies": copies, "actions": actions}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[Replay]:
        """Load what `state_dict` returned; returns the episodes to replay."""
        copies = state["copies"]
        self.seed, self.first_copy = int(state["seed"]), int(state["first_copy"])
        for index, copy in enumerate(copies):
            self.episodes[index] = int(copy["episode"])
            self.options[index], self.next_options[index] = copy["options"], copy["next_options"]
            self._rows.seeds[index] = int(copy["seed"])
            self._derive_next_seed(index)
            self._returns.sums()[index] = float(copy["episode_return"])
        parts = [np.asarray(state["actions"][f"part{leaf}"]) for leaf in range(len(tree_leaves(self._rows.actions)))]
        lengths = [copy["length"] if copy["replayable"] else 0 for copy in copies]
        if any(len(part) != sum(lengths) for part in parts):
            raise EnvError(f"the saved environments need {sum(lengths)} actions, but {[len(part) for part in parts]} were saved")
        actions = [[part[end - length : end] for part in parts] for end, length in zip(np.cumsum(lengths), lengths)]
        self._log.preload(actions, self.lanes_per_copy)
        self.starts[:] = [self._log.now - int(copy["length"]) for copy in copies]  # before the log's first step where they are not kept
        return [
            Replay(index, int(copy["seed"]), copy["options"], self._as_tree(actions[index]))
            for index, copy in enumerate(copies)
            if copy["replayable"] and copy["episode"] >= 0
        ]

    def _as_tree(self, parts: Sequence[np.ndarray]) -> Tree:
        """Leaves in their order as a tree in the structure of the action space."""
        ordered = iter(parts)
        return build_tree(self._action_space, lambda *_: next(ordered))


def plain_options(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Reset options as plain data, which workers and checkpoints can hold."""
    return None if options is None else {key: plain_value(value, key) for key, value in options.items()}


def plain_value(value: Any, where: str) -> Any:
    """A value as plain data; `where` names it in the error about one that is not."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list | tuple):
        return [plain_value(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain_value(item, f"{where}.{key}") for key, item in value.items()}
    raise EnvError(
        f"reset options must be plain data (numbers, text, lists, dicts with text keys); {where} is {type(value).__name__}: "
        "give an array as a list, by its tolist()"
    )
