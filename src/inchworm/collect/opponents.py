"""Step 2 of 9, one layer around: plays the other team's lanes and shows ours, so that nobody after it knows of an opponent."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import optree
from gymnasium import spaces

from inchworm.core.errors import ConfigError, EnvError
from inchworm.core.protocols import Actor, Policy, Stateful, VectorEnv, complete_vector_env
from inchworm.core.seeding import make_stream, restore_stream, stream_state
from inchworm.core.spaces import Space, check_same_form, zeros
from inchworm.core.types import Array, EndedEpisode, EnvStep, Tree
from inchworm.env.step_arrays import map_tree, tree_leaves
from inchworm.env.values import make_put
from inchworm.policy.file import fingerprint

__all__ = ["OneOpponent", "OpponentSource", "OpponentVectorEnv", "team_lanes"]


@runtime_checkable
class OpponentSource(Protocol):
    """Says whom a copy meets next. A source that is also `Stateful` is saved with the environments that draw from it."""

    def draw(self, copy: int, rng: np.random.Generator) -> str:
        """The name of the opponent of the episode that begins in this copy; all randomness comes from `rng`."""
        ...

    def actor(self, name: str) -> Actor:
        """The opponent of that name, for as long as an episode against it runs."""
        ...

    def record(self, name: str, win: float) -> None:
        """An episode against that opponent ended: 1 won by us, 0 lost, 0.5 drawn."""
        ...


class OneOpponent:
    """The same opponent in every copy and every episode. Of a policy the name holds the fingerprint of its weights."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        mark = f"-{fingerprint(actor.get_weights()):016x}" if isinstance(actor, Policy) else ""
        self.name = f"{type(actor).__name__}{mark}"

    def draw(self, copy: int, rng: np.random.Generator) -> str:  # noqa: ARG002 - there is no choice
        """The one there is."""
        return self.name

    def actor(self, name: str) -> Actor:
        """The one there is, if it is the one that is meant."""
        if name != self.name:
            raise ConfigError(f"a saved game is against {name}, but the opponent here is {self.name}; give the opponent that it began with")
        return self._actor

    def record(self, name: str, win: float) -> None:
        """Nobody counts."""


def check_spaces(actor: Actor, observation_space: Space, action_space: Space, who: str) -> None:
    """Refuse a player that was made for another world. Bounds may differ: they are no part of a network."""
    known = getattr(actor, "spec", actor)
    seen, done = getattr(known, "observation_space", None), getattr(known, "action_space", None)
    if seen is not None and done is not None:  # else its actions are checked when it acts
        check_same_form(who, (seen, done), (observation_space, action_space))


@dataclass
class _Group:
    """The copies that meet one opponent, in order, and its memory of their lanes."""

    name: str
    actor: Actor
    copies: np.ndarray  # [n]
    lanes: np.ndarray  # [n * k] global
    state: Tree  # [n * k, *mem]
    rows: Tree  # [n * k, *act] where its actions are checked


class Opposition:
    """Everybody who plays the lanes [E, k] that are not ours."""

    def __init__(
        self,
        source: OpponentSource,
        spaces: tuple[Space, Space],
        lanes: np.ndarray,
        *,
        seed: int,
        first_copy: int = 0,
        deterministic: bool = False,
    ) -> None:
        """`spaces` are those of an observation and of an action; copies are numbered from `first_copy`, as in the whole run."""
        self.source, self._spaces, self._lanes = source, spaces, lanes
        self._seed, self._first_copy, self._deterministic = seed, first_copy, deterministic
        self._put = make_put(spaces[1], what=f"actions of an opponent for {spaces[1]}:")
        self.names: list[str | None] = [None] * len(lanes)
        self._groups: list[_Group] = []
        self.restart()

    def restart(self) -> None:
        """Begin all streams anew, so that the same games can be played again."""
        self._stream = make_stream(self._seed, "opponents", self._first_copy)
        self._draws = [0] * len(self._lanes)

    def draw(self, copies: Iterable[int]) -> None:
        """New opponents for copies whose episodes begin."""
        changed = False
        for copy in copies:
            stream = make_stream(self._seed, "opponent", self._first_copy + copy, self._draws[copy])
            name = self.source.draw(self._first_copy + copy, stream)
            self._draws[copy] += 1
            changed = changed or name != self.names[copy]
            self.names[copy] = name
        if changed:
            self._regroup()

    def record(self, copy: int, info: Mapping[str, float]) -> None:
        """An episode of this copy ended, with this `info` of ours."""
        name = self.names[copy]
        if name is not None and "win" in info:
            self.source.record(name, float(info["win"]))

    def act(self, now: EnvStep, actions: Tree) -> None:
        """Write what the others do into the actions [B', *act] of all lanes. Dead lanes act along: what they do is ignored."""
        for group in self._groups:
            lanes = group.lanes
            seen = map_tree(operator.itemgetter(lanes), now.observations)
            step = group.actor.act(seen, group.state, now.episode_starts[lanes], self._stream, deterministic=self._deterministic)
            group.state = step.state
            self._put(step.env_actions, group.rows)
            for target, row in zip(tree_leaves(actions), tree_leaves(group.rows)):
                target[lanes] = row

    def state_dict(self) -> dict[str, Any]:
        """Who plays where, what they remember, and the streams' positions."""
        return {
            "names": list(self.names),
            "draws": list(self._draws),
            "stream": stream_state(self._stream),
            "memory": [{"name": group.name, "state": optree.tree_map(np.array, group.state)} for group in self._groups],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the source must know everybody who plays."""
        names = [None if name is None else str(name) for name in state["names"]]
        if len(names) != len(self._lanes) or len(state["draws"]) != len(self._lanes):
            raise ConfigError(
                f"the saved opponents are of {len(names)} copies, but there are {len(self._lanes)}; set env.num_envs={len(names)}"
            )
        self._stream = restore_stream(state["stream"])
        self.names, self._draws = names, [int(count) for count in state["draws"]]
        self._groups = []
        self._regroup()
        saved = {str(entry["name"]): entry["state"] for entry in state["memory"]}
        for group in self._groups:
            group.state = optree.tree_map(np.array, saved[group.name])

    def _regroup(self) -> None:
        """One group per opponent, by name; who stays keeps the memory, who comes has none yet."""
        before = {group.name: group for group in self._groups}
        present = sorted({name for name in self.names if name is not None})
        self._groups = [self._group(name, before.get(name)) for name in present]

    def _group(self, name: str, before: _Group | None) -> _Group:
        copies = np.array([copy for copy, other in enumerate(self.names) if other == name])
        if before is not None and np.array_equal(before.copies, copies):
            return before
        actor = self.source.actor(name)
        if before is None:
            check_spaces(actor, *self._spaces, f"the opponent {name}")
        lanes = self._lanes[copies].reshape(-1)
        state = actor.initial_state(len(lanes))
        if before is not None:
            _, old, new = np.intersect1d(before.copies, copies, return_indices=True)
            width = self._lanes.shape[1]
            state = optree.tree_map(lambda fresh, kept: _moved(fresh, kept, _rows(old, width), _rows(new, width)), state, before.state)
        return _Group(name, actor, copies, lanes, state, zeros(self._spaces[1], (len(lanes),)))


def _rows(places: Sequence[int] | np.ndarray, width: int) -> np.ndarray:
    """The rows of the groups of `width` lanes at these places."""
    rows: np.ndarray = (np.asarray(places)[:, None] * width + np.arange(width)).reshape(-1)
    return rows


def _moved(fresh: np.ndarray, kept: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The memory of a new group, with that of the lanes that stay."""
    result = np.array(fresh)
    result[new] = kept[old]
    return result


SIDE = "first"
"""In a global state: which of a copy's agents is our team's first."""

_NOTHING_TO_ACT_ON = (
    "there is nothing to act on: the environments have not been reset, or a step has not been received; call reset() or recv()"
)


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
    ) -> None:
        """`lanes` are ours among the inner env's, equally many in each copy. `deterministic` opponents act greedily.

        Copies are numbered from `first_copy`.
        """
        self.inner = inner = complete_vector_env(inner)
        if inner.lanes_per_copy < 2:
            raise EnvError(f"{type(inner).__name__} has one lane per copy, so it has no teams; set its lanes_per_copy if it has more")
        self.observation_space, self.action_space = inner.observation_space, inner.action_space
        self.num_envs = inner.num_envs
        self.lanes, theirs = _split_lanes(inner, lanes)
        self.num_lanes = len(self.lanes)
        self.lanes_per_copy = self.num_lanes // self.num_envs
        self.agents_leave = True  # a copy has several lanes, of which some are hidden
        self._first = self.lanes[:: self.lanes_per_copy] % inner.lanes_per_copy  # [E] which of a copy's agents our first is
        self.global_state_space = _with_side(inner)
        self.opponent = _as_source(opponent, self)
        both = (self.observation_space, self.action_space)
        self._opposition = Opposition(self.opponent, both, theirs, seed=seed, first_copy=first_copy, deterministic=deterministic)
        self._saved_source = self.opponent if isinstance(self.opponent, Stateful) else None
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
    def inexact(self) -> Sequence[str]:
        """What of the environments a checkpoint cannot restore; the opponents it can."""
        return self.inner.inexact

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


def _with_side(inner: VectorEnv) -> Space | None:
    """The space of the world's state and of the side that is ours: one critic serves both, and the state alone does not tell them."""
    world = inner.global_state_space
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


def _split_lanes(inner: VectorEnv, lanes: Sequence[int] | Array) -> tuple[np.ndarray, np.ndarray]:
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
