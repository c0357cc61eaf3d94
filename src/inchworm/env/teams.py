"""Step 1 of 9: PettingZoo environments, whose agents become adjacent lanes, and what their lanes have in common.

PettingZoo is an extra, so it is not imported here: it is looked up among the imported modules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from inchworm.core.errors import EnvError, SpaceError
from inchworm.core.spaces import MASK_KEY, Space, build_tree, leaf_dtype, leaf_shape, leaves, mask_sizes
from inchworm.core.types import Tree

Agent = Any
"""PettingZoo's name of an agent: mostly text."""


@dataclass(frozen=True, slots=True)
class Team:
    """A PettingZoo parallel environment and what is put around it; one copy of it is as many lanes as it has possible agents."""

    env: Any
    max_steps: int | None = None
    """Truncate every agent after so many steps of an episode."""

    @property
    def unwrapped(self) -> Any:
        """The environment itself."""
        return self.env.unwrapped

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def is_team_env(thing: Any) -> bool:
    """Whether something is a PettingZoo environment; without PettingZoo there is none."""
    zoo = sys.modules.get("pettingzoo")
    return isinstance(thing, Team) or (zoo is not None and isinstance(thing, zoo.ParallelEnv | zoo.AECEnv))


def as_team(env: Any, max_steps: int | None = None) -> Team:
    """A PettingZoo environment as a team; one whose agents take turns goes through PettingZoo's own converter."""
    if isinstance(env, Team):
        return env if max_steps is None else Team(env.env, max_steps)
    zoo = sys.modules["pettingzoo"]
    if isinstance(env, zoo.AECEnv):
        from pettingzoo.utils.conversions import aec_to_parallel

        try:
            env = aec_to_parallel(env)
        except AssertionError as error:
            raise EnvError(
                f"{env} is an AEC environment whose agents take turns one after another, and PettingZoo cannot make it parallel: {error}; "
                "use an environment that is updated once per cycle (metadata is_parallelizable), or its parallel_env"
            ) from None
    return Team(env, max_steps)


def possible_agents(env: Any) -> list[Agent]:
    """All agents that may ever live in an environment, in their order, which is that of the lanes."""
    agents = list(getattr(env, "possible_agents", None) or ())
    if not agents:
        raise EnvError(f"{env} has no possible_agents: set it to the list of all agents that may ever live in it, for they are the lanes")
    if len(set(agents)) < len(agents):
        raise EnvError(f"possible_agents of {env} names an agent twice: {agents}")
    return agents


def common_space(env: Any, agents: Sequence[Agent], kind: str) -> Space:
    """The space that all agents' lanes have: theirs, or, where they differ in bounds alone, one that holds them all."""
    found = [getattr(env, f"{kind}_space")(agent) for agent in agents]
    for agent, space in zip(agents, found):
        if not isinstance(space, spaces.Space):
            raise EnvError(f"{kind}_space({agent!r}) of {env} must return a space; got {type(space).__name__}")
    forms = [_form(space) for space in found]
    for agent, form, space in zip(agents, forms, found):
        if form != forms[0]:
            raise SpaceError(
                f"all agents of an environment need one kind of space, but the {kind} space of {agents[0]} is {found[0]} and that of "
                f"{agent} is {space}; pad them to one shape (SuperSuit's pad_observations_v0 and pad_action_space_v0 do), or leave some out"
            )
    return found[0] if all(space == found[0] for space in found) else _union(found)


def _form(space: Space) -> list[Any]:
    """What must be equal: the tree, and of each leaf its kind, shape, dtype and choices."""
    return [(path, type(leaf), leaf_shape(leaf), leaf_dtype(leaf), mask_sizes(leaf), _start(leaf)) for path, leaf in leaves(space)]


def _start(leaf: Space) -> Any:
    return np.asarray(leaf.start).tolist() if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete) else None


def _union(found: Sequence[Space]) -> Space:
    """One space with the loosest bounds of some that differ in nothing else."""
    first = found[0]
    if isinstance(first, spaces.Dict):
        return spaces.Dict({key: _union([space.spaces[key] for space in found]) for key in first.spaces})  # type: ignore[attr-defined]
    if isinstance(first, spaces.Tuple):
        return spaces.Tuple([_union([space.spaces[index] for space in found]) for index in range(len(first.spaces))])  # type: ignore[attr-defined]
    if not isinstance(first, spaces.Box):
        return first
    low = np.min([space.low for space in found], 0)  # type: ignore[attr-defined]
    high = np.max([space.high for space in found], 0)  # type: ignore[attr-defined]
    return spaces.Box(low, high, first.shape, leaf_dtype(first).type)


def nothing_seen(space: Space) -> Tree:
    """What a lane without a living agent shows: zeros where they are legal, else what is nearest; every action allowed."""

    def one(path: tuple[str | int, ...], leaf: Space) -> np.ndarray:
        shape, dtype = leaf_shape(leaf), leaf_dtype(leaf)
        if path[:1] == (MASK_KEY,):
            return np.ones(shape, dtype)
        if isinstance(leaf, spaces.Box):
            return np.clip(np.zeros(shape, dtype), leaf.low, leaf.high).astype(dtype)
        if isinstance(leaf, spaces.Discrete):
            return np.array(0 if leaf.start <= 0 < leaf.start + leaf.n else leaf.start, dtype)
        if isinstance(leaf, spaces.MultiDiscrete):
            return np.where((leaf.start <= 0) & (leaf.start + leaf.nvec > 0), 0, leaf.start).astype(dtype)
        return np.zeros(shape, dtype)

    return build_tree(space, one)


def state_space(env: Any, read: Callable[[], Any]) -> Space:
    """The space of an environment's global state: its `state_space`, or, if it has none, that of a state that `read` reads."""
    first, given = read(), getattr(env, "state_space", None)
    if isinstance(given, spaces.Space):
        list(leaves(given))  # refuses kinds of spaces that are not supported
        return given
    state = np.asarray(first)
    if state.dtype.kind not in "fiub":
        raise EnvError(f"state() of {env} must return an array of numbers; got {state.dtype}")
    dtype = state.dtype if state.dtype.kind == "f" else np.dtype(np.float32)
    return spaces.Box(-np.inf, np.inf, state.shape, dtype.type)


def make_clip(space: Space) -> Callable[[Any], Any]:
    """The function that brings an action of the lanes' common space into an agent's own bounds."""
    if isinstance(space, spaces.Dict):
        by_key = {key: make_clip(inner) for key, inner in space.spaces.items()}
        return lambda action: {key: clip(action[key]) for key, clip in by_key.items()}
    if isinstance(space, spaces.Tuple):
        clips = [make_clip(inner) for inner in space.spaces]
        return lambda action: tuple(clip(part) for clip, part in zip(clips, action))
    if isinstance(space, spaces.Box):
        low, high = space.low, space.high
        return lambda action: np.clip(action, low, high)
    return lambda action: action
