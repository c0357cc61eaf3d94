"""Serves step 2 of 9: the other side. Who plays each copy's other lanes, what they remember, and how they act.

Copies that meet the same opponent act as one batch, so a step asks each distinct opponent once. An opponent is drawn when a copy's
episode begins and stays until it ends; the draw has a stream of its own, derived from (seed, copy, number of the draw).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import optree

from inchworm.env.actions import make_put
from inchworm.env.memory import map_tree, tree_leaves
from inchworm.errors import ConfigError
from inchworm.policy.spec import PolicySpec
from inchworm.policy.weights import fingerprint
from inchworm.protocols import Actor, Policy
from inchworm.seeding import make_stream, restore_stream, stream_state
from inchworm.spaces import Space, check_same_form, zeros
from inchworm.types import EnvStep, Tree


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


@runtime_checkable
class KnowsSpaces(Protocol):
    """An actor that says what it was made for."""

    observation_space: Space
    action_space: Space


@runtime_checkable
class HasSpec(Protocol):
    """An actor with an architecture as data, as the built-in policies have one."""

    spec: PolicySpec


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
    known: Any = actor.spec if isinstance(actor, HasSpec) else actor
    if not isinstance(known, KnowsSpaces):
        return  # its actions are checked when it acts
    check_same_form(who, (known.observation_space, known.action_space), (observation_space, action_space))


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
