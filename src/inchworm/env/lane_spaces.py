"""Step 1 of 9: the spaces of a copy's agents as its lanes have them, how an agent's observation enters its row, and its action leaves.

All lanes have one observation space and one action space. Agents may differ in bounds, then the lanes have the loosest, and in size, then
the lanes have the largest and smaller agents are padded (see `core/padding`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from inchworm.core.errors import EnvError
from inchworm.core.padding import DIMENSIONS_KEY, AgentSpaces, OwnPart, corner, unite_agents, unite_spaces
from inchworm.core.spaces import (
    MASK_KEY,
    Path,
    Space,
    build_tree,
    leaf,
    leaf_dtype,
    leaf_shape,
    leaves,
    mask_sizes,
    mask_space,
    split_mask,
    tree_leaves,
    value_range,
    with_mask,
    zeros,
)
from inchworm.core.types import Tree
from inchworm.env.restore import accepts
from inchworm.env.values import Masks, Write, allow_all, make_writer, refusal

Agent = Any
"""PettingZoo's name of an agent: mostly text."""


class LaneSpaces:
    """The spaces of the lanes of one copy, and what each agent has of them."""

    def __init__(self, env: Any, agents: Sequence[Agent], probe: Callable[[], Iterable[Any]]) -> None:
        """`probe` resets the environment and returns the agents' infos, which may hold masks."""
        observed, acted = _read(env, agents, "observation"), _read(env, agents, "action")
        self.padded = any(_form(space) != _form(found[agents[0]]) for found in (observed, acted) for space in found.values())
        infos: list[Any] = []

        def infos_once() -> list[Any]:
            infos[:] = infos or probe()
            return infos

        def mask_method(name: str) -> Any:
            method = getattr(env, name, None) or getattr(env.unwrapped, name, None)
            return method if callable(method) and accepts(method, "agent") else None

        self.action_space = unite_spaces(acted, "action")
        self._own_action = [None if acted[agent] == self.action_space else make_own_action(acted[agent]) for agent in agents]
        self.own: tuple[AgentSpaces, ...] = ()
        """Of each agent, if they are padded."""
        self.masks: list[Masks | None]
        """Of each agent; None where the environment offers none."""
        if self.padded:
            self.masks = [Masks.find(observed[agent], acted[agent], mask_method, infos_once) for agent in agents]
            seen = [split_mask(observed[agent])[0] for agent in agents]
            each = zip(seen, acted.values(), self.masks)
            self.own = tuple(AgentSpaces(observation, action, masks is not None) for observation, action, masks in each)
            whole = unite_agents(dict(zip(agents, self.own)))
            self.observation_space = whole[0]
            self._parts = [OwnPart(whole, (own.observation_space, own.action_space)) for own in self.own]
            self._write = [_part_writer(*one) for one in zip(seen, self._parts, self.masks)]
            self._nothing = [_padding(self.observation_space, part) for part in self._parts]
            self._scratch = [zeros(mask_space(own.action_space), (1,)) if own.masked else () for own in self.own]
            return
        common = unite_spaces(observed, "observation")
        masks = Masks.find(common, self.action_space, mask_method, infos_once)
        wrapped = masks is not None and masks.source != "key"
        self.observation_space = with_mask(common, mask_space(self.action_space)) if wrapped else common
        write = make_writer(common)
        if wrapped and not isinstance(common, spaces.Dict):
            in_key = write
            write = lambda value, rows, lane: in_key(value, rows["observation"], lane)  # noqa: E731
        self.masks, self._write = [masks] * len(agents), [write] * len(agents)
        self._nothing = [tree_leaves(nothing_seen(self.observation_space))] * len(agents)

    def write(self, place: int, observation: Any, rows: Tree, lane: int) -> None:
        """Check what the agent of a place observes, without its mask, and put it into its row. Padding stays as it is."""
        self._write[place](observation, rows, lane)

    def write_nothing(self, place: int, rows: Tree, lane: int) -> None:
        """Write what a lane without a living agent shows, which includes the padding of one with an agent."""
        for array, nothing in zip(tree_leaves(rows), self._nothing[place]):
            array[lane] = nothing

    def write_mask(self, place: int, mask: Any, rows: Tree, lane: int, *, acted_on: bool) -> None:
        """Check the mask that the environment gave an agent and put it into its row; None allows all of the agent's own actions."""
        masks = self.masks[place]
        assert masks is not None
        if not self.padded:
            if mask is None and not acted_on:
                allow_all(rows[MASK_KEY], lane)
            else:
                masks.write(mask, rows[MASK_KEY], lane, acted_on=acted_on)
            return
        part, scratch = self._parts[place], self._scratch[place]
        if mask is None and not acted_on:
            for path, legal in part.legal.items():
                leaf(rows[MASK_KEY], path)[lane] = legal
            return
        masks.write(mask, scratch, 0, acted_on=acted_on)
        for path, positions in part.choices.items():
            leaf(rows[MASK_KEY], path)[lane, positions] = leaf(scratch, path)[0]

    def own_action(self, place: int, action: Any) -> Any:
        """The part of a lane's action that its agent has, within its own bounds."""
        own = self._own_action[place]
        return action if own is None else own(action)


def _read(env: Any, agents: Sequence[Agent], kind: str) -> dict[Agent, Space]:
    """Each agent's observation or action space."""
    found = {agent: getattr(env, f"{kind}_space")(agent) for agent in agents}
    for agent, space in found.items():
        if not isinstance(space, spaces.Space):
            raise EnvError(f"{kind}_space({agent!r}) of {env} must return a space; got {type(space).__name__}")
        list(leaves(space))  # refuses kinds of spaces that are not supported
    return found


def _form(space: Space) -> list[Any]:
    """What must be equal for agents to need no padding: the tree, and of each leaf its kind, shape, dtype, choices and first choice."""
    parts = [(path, part, np.asarray(getattr(part, "start", 0)).tolist()) for path, part in leaves(space)]
    return [(path, type(part), leaf_shape(part), leaf_dtype(part), mask_sizes(part), start) for path, part, start in parts]


def nothing_seen(space: Space) -> Tree:
    """What a lane without a living agent shows: zeros where they are legal, else what is nearest; every action allowed."""

    def one(path: Path, part: Space) -> np.ndarray:
        shape, dtype = leaf_shape(part), leaf_dtype(part)
        if path[:1] == (MASK_KEY,):
            return np.ones(shape, dtype)
        if isinstance(part, spaces.Box):
            return np.clip(np.zeros(shape, dtype), part.low, part.high).astype(dtype)
        first, end = value_range(part)
        return np.where((first <= 0) & (end > 0), 0, first).astype(dtype)

    return build_tree(space, one)


def _padding(space: Space, part: OwnPart) -> list[np.ndarray]:
    """The leaves of `nothing_seen` for an agent that has a part of the lanes' actions: only those are allowed."""
    tree: Any = nothing_seen(space)
    if isinstance(tree, dict) and MASK_KEY in tree:
        tree[MASK_KEY] = build_tree(mask_space(part.whole[1]), lambda path, _: part.legal[path])
    if isinstance(tree, dict) and DIMENSIONS_KEY in tree:
        tree[DIMENSIONS_KEY] = part.dimensions.astype(np.int8)
    return tree_leaves(tree)


def _part_writer(seen: Space, part: OwnPart, masks: Masks | None) -> Write:
    """The writer of what an agent sees into its part of the row; its mask, if it is a key of the observation, is written apart."""
    write, with_key = make_writer(seen), masks is not None and masks.source == "key"

    def write_part(value: Any, rows: Tree, lane: int) -> None:
        if with_key and isinstance(value, dict):
            value = {key: inner for key, inner in value.items() if key != MASK_KEY}
        write(value, part.seen(rows), lane)

    return write_part


def make_own_action(space: Space) -> Callable[[Any], Any]:
    """The function from an action of the lanes' common space to an agent's own: cut to its size and clipped to its bounds."""
    if isinstance(space, spaces.Dict):
        by_key = {key: make_own_action(inner) for key, inner in space.spaces.items()}
        return lambda action: {key: own(action[key]) for key, own in by_key.items()}
    if isinstance(space, spaces.Tuple):
        parts = [make_own_action(inner) for inner in space.spaces]
        return lambda action: tuple(own(part) for own, part in zip(parts, action))
    at, dtype = corner(leaf_shape(space)), leaf_dtype(space)
    if isinstance(space, spaces.Box):
        low, high = space.low, space.high
        return lambda action: np.clip(action[at], low, high).astype(dtype, copy=False)

    def choose(action: Any) -> Any:
        own = action if isinstance(action, int) else action[at].astype(dtype, copy=False)
        if not space.contains(own if isinstance(own, np.ndarray) else np.int64(own)):
            raise refusal(("action",), f"is not in {space}, the agent's own; an actor must obey {MASK_KEY}", own)
        return own

    return choose
