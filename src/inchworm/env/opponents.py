"""Step 2 of 9, one layer around: plays the other team's lanes and shows ours, so that nobody after it knows of an opponent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from gymnasium import spaces

from inchworm.abilities import HasTeams, SaysExact, SaysInexact, SharesState, Stateful
from inchworm.env.actions import make_put
from inchworm.env.memory import tree_leaves
from inchworm.env.opposition import OneOpponent, OpponentSource, Opposition, check_spaces
from inchworm.errors import ConfigError, EnvError
from inchworm.protocols import Actor, VectorEnv
from inchworm.spaces import Space, zeros
from inchworm.types import Array, EndedEpisode, EnvStep, Tree

__all__ = ["OneOpponent", "OpponentSource", "OpponentVectorEnv", "TeamVectorEnv", "team_lanes"]

SIDE = "first"
"""In a global state: which of a copy's agents is our team's first."""

_NOTHING_TO_ACT_ON = (
    "there is nothing to act on: the environments have not been reset, or a step has not been received; call reset() or recv()"
)


@runtime_checkable
class TeamVectorEnv(VectorEnv, HasTeams, Protocol):
    """A vector env that says how its lanes are shared out: lane i is agent i % lanes_per_copy of copy i // lanes_per_copy."""


def team_lanes(num_envs: int, lanes_per_copy: int, sides: int | Sequence[int] | Array = 0) -> np.ndarray:
    """The lanes of one team in every copy: side 0 is the first half of a copy's lanes, side 1 the second; one for all or one per copy."""
    if lanes_per_copy < 2 or lanes_per_copy % 2:
        raise ConfigError(f"two teams need an even number of lanes per copy, but there are {lanes_per_copy}")
    chosen = np.broadcast_to(np.asarray(sides, np.int64), num_envs) if np.ndim(sides) == 0 else np.asarray(sides, np.int64)
    if chosen.shape != (num_envs,) or ((chosen != 0) & (chosen != 1)).any():
        raise ConfigError(
            f"sides must be 0 or 1, one for all or one for each of {num_envs} copies; got {np.asarray(sides).tolist()!s:.100}"
        )
    width = lanes_per_copy // 2
    first = np.arange(num_envs) * lanes_per_copy + chosen * width  # [E]
    lanes: np.ndarray = (first[:, None] + np.arange(width)).reshape(-1)
    return lanes


class OpponentVectorEnv:
    """The `VectorEnv` contract over our lanes; an actor, or whom a source draws for each copy's episode, plays the others.

    Given seeds for all copies, `reset` begins the opponents' streams anew, too: the same seeds then give the same games.
    """

    def __init__(
        self,
        inner: VectorEnv,
        opponent: Actor | OpponentSource,
        lanes: Sequence[int] | Array,
        *,
        seed: int = 0,
        first_copy: int = 0,
        deterministic: bool = False,
        keeps_source: bool = True,
    ) -> None:
        """`lanes` are ours among the inner env's, equally many in each copy. `deterministic` opponents act greedily.

        Copies are numbered from `first_copy`. Where several share one source that is saved, one of them `keeps_source`.
        """
        if not isinstance(inner, TeamVectorEnv):
            raise EnvError(f"{type(inner).__name__} does not say how many lanes a copy has (lanes_per_copy, num_envs), so it has no teams")
        self.inner = inner
        self.observation_space, self.action_space = inner.observation_space, inner.action_space
        self.num_envs = inner.num_envs
        self.lanes, theirs = _split_lanes(inner, lanes)
        self.num_lanes = len(self.lanes)
        self.lanes_per_copy = self.num_lanes // self.num_envs
        self._first = self.lanes[:: self.lanes_per_copy] % inner.lanes_per_copy  # [E] which of a copy's agents our first is
        self.global_state_space = _with_side(inner)
        self.opponent = _as_source(opponent, self)
        both = (self.observation_space, self.action_space)
        self._opposition = Opposition(self.opponent, both, theirs, seed=seed, first_copy=first_copy, deterministic=deterministic)
        self._saved_source = self.opponent if keeps_source and isinstance(self.opponent, Stateful) else None
        self._place = np.full(inner.num_lanes, -1)  # [B'] which of ours each lane is
        self._place[self.lanes] = np.arange(self.num_lanes)
        self._now: EnvStep | None = None  # of all lanes, while there is something to act on
        self._returns = np.zeros(self.num_lanes)  # [B] of the running episodes
        self._put, self._own_actions = make_put(self.action_space), zeros(self.action_space, (self.num_lanes,))
        self._actions = zeros(self.action_space, (inner.num_lanes,))
        self._observations = zeros(self.observation_space, (self.num_lanes,))
        self._rewards = np.zeros(self.num_lanes, np.float32)
        self._flags = tuple(np.zeros(self.num_lanes, np.bool_) for _ in range(4))  # terminated, truncated, episode_starts, valid
        self._seen, self._done = tree_leaves(self._observations), list(zip(tree_leaves(self._actions), tree_leaves(self._own_actions)))

    @property
    def playing(self) -> tuple[str | None, ...]:
        """[E] the name of each copy's opponent; None before its first episode."""
        return tuple(self._opposition.names)

    @property
    def inexact(self) -> list[str]:
        """What of the environments a checkpoint cannot bring back; the opponents it can."""
        if isinstance(self.inner, SaysInexact):
            return list(self.inner.inexact)
        is_exact = isinstance(self.inner, SaysExact) and self.inner.exact is True
        return [] if is_exact else ["the inner vector env says nothing of its exactness"]

    @property
    def exact(self) -> bool:
        """Whether `load_state_dict` brings everything to where it stood."""
        return not self.inexact

    def reset(self, seeds: Sequence[int] | None = None, indices: Sequence[int] | None = None) -> EnvStep:
        """Begin new episodes in the copies `indices` (all by default) against newly drawn opponents."""
        step = self.inner.reset(seeds, indices)
        copies = list(range(self.num_envs)) if indices is None else [int(index) for index in indices]
        if seeds is not None and len(copies) == self.num_envs:
            self._opposition.restart()
        self._opposition.draw(copies)
        self._now = step
        self._take(step)
        begins = step.episode_starts.reshape(self.num_envs, -1).all(axis=1)  # [E] not where an agent joins a running episode
        self._returns[np.repeat(begins, self.lanes_per_copy)] = 0.0
        return self._ours(step)

    def send(self, actions: Tree) -> None:
        """Start one step with our actions [B, *act]; the opponents act on what they see."""
        now = self._now
        if now is None:
            raise EnvError(_NOTHING_TO_ACT_ON)
        self._put(actions, self._own_actions)
        for target, own in self._done:
            target[self.lanes] = own
        self._now = None
        self._opposition.act(now, self._actions)
        self.inner.send(self._actions)

    def recv(self) -> EnvStep:
        """Wait for the step that `send` started."""
        step = self.inner.recv()
        self._now = step
        self._take(step)
        self._returns += self._rewards
        return self._ours(step, self._end(step) if step.ended else ())

    def step(self, actions: Tree) -> EnvStep:
        """`send`, then `recv`."""
        self.send(actions)
        return self.recv()

    def _take(self, step: EnvStep) -> None:
        """Copy our part of a step into arrays of our own."""
        lanes = self.lanes
        for source, target in zip(tree_leaves(step.observations), self._seen):
            np.take(source, lanes, 0, target, "clip")
        np.take(step.rewards, lanes, 0, self._rewards, "clip")
        for source, target in zip((step.terminated, step.truncated, step.episode_starts, step.valid), self._flags):
            np.take(source, lanes, 0, target, "clip")

    def _ours(self, step: EnvStep, ended: tuple[EndedEpisode, ...] = ()) -> EnvStep:
        terminated, truncated, episode_starts, valid = self._flags
        shared = () if self.global_state_space is None else {SIDE: self._first, "world": step.global_state}
        return EnvStep(self._observations, self._rewards, terminated, truncated, episode_starts, valid, ended, shared)

    def _end(self, step: EnvStep) -> tuple[EndedEpisode, ...]:
        """Our ended episodes, with our team's return; their copies meet the next opponents."""
        ours: list[EndedEpisode] = []
        copies: dict[int, Mapping[str, float] | None] = {}
        for ended in step.ended:
            place, copy = int(self._place[ended.lane]), ended.lane // self.inner.lanes_per_copy
            copies.setdefault(copy, None)
            if place < 0:
                continue
            first = copy * self.lanes_per_copy
            team = float(self._returns[first : first + self.lanes_per_copy].sum())
            shared = () if self.global_state_space is None else {SIDE: self._first[copy], "world": ended.final_global_state}
            named = {**ended.info, "team_return": team}
            record = dataclasses.replace(ended, lane=place, info=named, final_global_state=shared)
            ours.append(record)
            if copies[copy] is None:
                copies[copy] = record.info
        for copy, info in copies.items():
            self._opposition.record(copy, info or {})
            self._returns[copy * self.lanes_per_copy : (copy + 1) * self.lanes_per_copy] = 0.0
        self._opposition.draw(copies)
        return tuple(ours)

    def set_reset_options(self, options: Mapping[str, Any] | None, indices: Sequence[int] | None = None) -> None:
        """Options that the copies get from their next reset on."""
        self.inner.set_reset_options(options, indices)

    def state_dict(self) -> dict[str, Any]:
        """Where every copy stands, who plays it, what they remember; and what the source is, if it is saved here."""
        return {
            "inner": self.inner.state_dict(),
            "lanes": self.lanes.copy(),
            "returns": self._returns.copy(),
            "opponents": self._opposition.state_dict(),
            "source": None if self._saved_source is None else self._saved_source.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring everything to where `state` says; `reset(indices=())` then shows our lanes as they stand."""
        if not np.array_equal(state["lanes"], self.lanes):
            raise ConfigError("the saved game was played in other lanes than these; keep opponent.sides and env.num_envs as they were")
        if self._saved_source is not None and state["source"] is not None:
            self._saved_source.load_state_dict(state["source"])
        self.inner.load_state_dict(state["inner"])
        self._opposition.load_state_dict(state["opponents"])
        self._returns = np.array(state["returns"], np.float64)
        self._now = None

    def close(self) -> None:
        """Close the inner env; safe to call twice."""
        self.inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _with_side(inner: TeamVectorEnv) -> Space | None:
    """The space of the world's state and of the side that is ours: one critic serves both, and the state alone does not tell them."""
    world = inner.global_state_space if isinstance(inner, SharesState) else None
    return None if world is None else spaces.Dict({SIDE: spaces.Discrete(inner.lanes_per_copy), "world": world})


def _as_source(opponent: Actor | OpponentSource, env: OpponentVectorEnv) -> OpponentSource:
    """A source as it is, an actor as the only one."""
    if isinstance(opponent, OpponentSource):
        return opponent
    if not isinstance(opponent, Actor):
        raise ConfigError(f"{type(opponent).__name__} is no opponent: it needs initial_state and act (an Actor), or draw, actor and record")
    source = OneOpponent(opponent)
    check_spaces(opponent, env.observation_space, env.action_space, f"the opponent {source.name}")
    return source


def _split_lanes(inner: TeamVectorEnv, lanes: Sequence[int] | Array) -> tuple[np.ndarray, np.ndarray]:
    """Our lanes [B] and the others' [E, k], of an inner env whose copies have equally many of each."""
    ours = np.asarray(lanes, np.int64)
    inside = ours.ndim == 1 and len(ours) > 0 and (np.diff(ours) > 0).all() and ours[0] >= 0 and ours[-1] < inner.num_lanes
    counts = np.bincount(ours // inner.lanes_per_copy, minlength=inner.num_envs) if inside else np.zeros(1, np.int64)
    if not inside or counts.min() != counts.max() or not 0 < counts[0] < inner.lanes_per_copy:
        raise ConfigError(
            f"our lanes must be sorted, from 0 to {inner.num_lanes - 1}, and equally many in each of {inner.num_envs} copies of "
            f"{inner.lanes_per_copy} lanes, with some left for the opponent; got {ours.tolist()!s:.100} (see team_lanes)"
        )
    theirs = np.setdiff1d(np.arange(inner.num_lanes), ours)
    return ours, theirs.reshape(inner.num_envs, -1)
