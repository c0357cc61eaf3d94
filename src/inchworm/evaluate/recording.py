"""The first episodes of an evaluation as their seeds, actions and rewards: what a replay and a video are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from inchworm.core.errors import ConfigError
from inchworm.core.protocols import VectorEnv
from inchworm.core.spaces import map_tree
from inchworm.core.types import Array, EnvStep, Tree
from inchworm.env.registry import team_worlds


@dataclass
class RecordedEpisode:
    """One episode of a copy with k lanes, from its reset to its end, or to where it was cut off."""

    seed: int
    actions: list[Tree] = field(default_factory=list)
    """[k, *act] for each step."""
    rewards: list[Array] = field(default_factory=list)
    """[k] for each step."""
    info: Mapping[str, float] = field(default_factory=dict)
    """The last info of the first lane; empty if the episode was cut off."""
    ended: bool = False


class RecordedVectorEnv:
    """Records the first episodes that are played in a vector env, when asked to; everything else is forwarded to it."""

    def __init__(self, inner: VectorEnv) -> None:
        self._inner = inner
        self._episodes: dict[int, RecordedEpisode] = {}  # by number
        self._running: dict[int, RecordedEpisode] = {}  # by copy
        self._count = 0
        self._next: list[int] = []  # the number of the next episode of each copy

    def record(self, count: int) -> None:
        """Record the first `count` episodes that begin from now on; episode i is played by copy i % n, as in every evaluation."""
        self._episodes, self._running, self._count = {}, {}, count
        self._next = list(range(self._inner.num_envs))

    def finish(self, lengths: Sequence[int]) -> list[RecordedEpisode]:
        """Stop recording; return the recorded episodes, which have these lengths."""
        episodes = [episode for _, episode in sorted(self._episodes.items())]
        for episode, length in zip(episodes, lengths):
            if len(episode.actions) > length or not episode.ended:  # cut off: the copy was stepped on until all others had ended
                episode.info = {}
            del episode.actions[length:], episode.rewards[length:]
        self._episodes, self._running, self._count = {}, {}, 0
        return episodes

    def reset(self, seeds: Sequence[int] | None = None, indices: Sequence[int] | None = None) -> EnvStep:
        """Forward; the episodes that begin are recorded if they are among the first."""
        for copy, seed in zip(indices if indices is not None else range(self._inner.num_envs), seeds or ()):
            self._running.pop(copy, None)
            if self._count and self._next[copy] < self._count:
                self._running[copy] = self._episodes[self._next[copy]] = RecordedEpisode(int(seed))
                self._next[copy] += self._inner.num_envs
        return self._inner.reset(seeds, indices)

    def send(self, actions: Tree) -> None:
        """Forward, and record the actions."""
        for copy, episode in self._running.items():
            episode.actions.append(map_tree(partial(_copy_lanes, self._lanes(copy)), actions))
        self._inner.send(actions)

    def recv(self) -> EnvStep:
        """Forward, and record the rewards; an episode that has ended is complete."""
        step = self._inner.recv()
        if self._running:
            for copy, episode in self._running.items():
                episode.rewards.append(step.rewards[self._lanes(copy)].copy())
            for ended in step.ended:
                if ended.lane % self._inner.lanes_per_copy == 0:
                    complete = self._running.pop(ended.lane // self._inner.lanes_per_copy, None)
                    if complete is not None:
                        complete.info, complete.ended = ended.info, True
        return step

    def step(self, actions: Tree) -> EnvStep:
        """`send`, then `recv`."""
        self.send(actions)
        return self.recv()

    def _lanes(self, copy: int) -> slice:
        width = self._inner.lanes_per_copy
        return slice(copy * width, (copy + 1) * width)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _copy_lanes(lanes: slice, array: Array) -> Array:
    return np.array(array[lanes])


def replay_maker(env: VectorEnv) -> Any:
    """Return the `make_replay` of a vector env whose games can be replayed as files; others are refused."""
    make = getattr(env, "make_replay", None)
    if make is None:
        raise ConfigError(
            f"cannot make a replay of {type(env).__name__}, which has no make_replay; only games of {team_worlds()} can be replayed, "
            "without wrappers and without env.max_episode_steps (use max_steps in env.kwargs)"
        )
    return make
