"""Step 1 of 9: finds an environment's action masks and adds them to its observations.

A mask is the observation key `action_mask`, the result of the environment's `action_masks()` or `get_action_mask()`, or
`info["action_mask"]`, in this order; where the first reset provides one, every step must.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, Literal, NoReturn, Self, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from inchworm.core.errors import EnvError
from inchworm.core.spaces import MASK_KEY, Path, Space, build_tree, leaf_shape, leaves, mask_sizes, mask_space
from inchworm.core.types import Tree
from inchworm.env.values import Refusal, accepts, brief

MaskSource = Literal["key", "action_masks", "get_action_mask", "info"]

MaskWrite: TypeAlias = Callable[[Any, Any, int, bool], None]
"""(mask, rows [B, n] of a tree, lane, must every part have a legal action)."""


def find_mask_source(env: gym.Env[Any, Any], probe: Callable[[], Mapping[str, Any]]) -> MaskSource | None:
    """Where the masks come from; `probe` resets the environment and returns its info, and is called only if needed."""
    if not any(mask_sizes(part) for _, part in leaves(env.action_space)):
        return None
    if isinstance(env.observation_space, spaces.Dict) and MASK_KEY in env.observation_space.spaces:
        check_key_space(env.observation_space.spaces[MASK_KEY], env.action_space)
        return "key"
    for name in ("action_masks", "get_action_mask"):
        if env.has_wrapper_attr(name) and callable(env.get_wrapper_attr(name)):
            return name
    return "info" if MASK_KEY in probe() else None


def check_key_space(given: Space, action_space: Space) -> None:
    """Refuse a key of the observation that cannot hold the masks of an action space."""
    wanted = mask_space(action_space)
    sizes = {path: int(np.prod(leaf_shape(part))) for path, part in leaves(given)}
    if sizes != {path: int(np.prod(leaf_shape(part))) for path, part in leaves(wanted)}:
        raise EnvError(f"the observation key {MASK_KEY!r} has the space {given}, but masks of {action_space} need {wanted}")


class MaskReader:
    """Fetches the mask that belongs to the latest observation, and writes it into its lane's row."""

    def __init__(self, env: gym.Env[Any, Any], source: MaskSource) -> None:
        self.source = source
        self._ask: Callable[[], Any] | None = env.get_wrapper_attr(source) if source in ("action_masks", "get_action_mask") else None
        self._write = make_mask_write(env.action_space, (MASK_KEY,))

    def write(self, observation: Any, info: Mapping[str, Any], rows: Tree, lane: int, *, acted_on: bool) -> None:
        """Put the mask into its row. If it is `acted_on`, every discrete part must have a legal action."""
        if self._ask is not None:
            mask = self._ask()
        elif self.source == "key":
            mask = observation[MASK_KEY]
        else:
            mask = info.get(MASK_KEY)
        if mask is None:
            raise Refusal(f"{MASK_KEY} missing: reset() provided it via {self.source}, this step did not")
        self._write(mask, rows, lane, acted_on)


def allow_all(rows: Tree, lane: int) -> None:
    """Write the mask of a state in which no action follows."""
    if isinstance(rows, dict):
        for part in rows.values():
            allow_all(part, lane)
    elif isinstance(rows, tuple):
        for part in rows:
            allow_all(part, lane)
    else:
        rows[lane] = 1


def make_mask_write(space: Space, path: Path) -> MaskWrite:
    """The function that checks a mask of an action space and writes it into its lane's row."""
    if isinstance(space, spaces.Dict):
        parts = [(key, make_mask_write(inner, (*path, key))) for key, inner in space.spaces.items() if _discrete(inner)]
        return _container_write(parts, path, f"a dict with the keys {[key for key, _ in parts]}")
    if isinstance(space, spaces.Tuple):
        writes = [(index, make_mask_write(inner, (*path, index))) for index, inner in enumerate(space.spaces) if _discrete(inner)]
        return _container_write(writes, path, f"a tuple of {len(space.spaces)} masks")
    sizes = mask_sizes(space)
    total = sum(sizes)
    firsts = np.array([0, *accumulate(sizes)][:-1])  # where each part begins in the flat mask

    def write(mask: Any, rows: Any, lane: int, acted_on: bool) -> None:
        flat = mask
        if type(mask) is not np.ndarray:  # a flat list, or one vector per part
            try:
                flat = np.concatenate([np.asarray(part).reshape(-1) for part in mask])
            except (TypeError, ValueError):
                _refuse(path, "must be a vector of true and false", mask)
        if flat.shape != (total,) and not (flat.size == total and rows.shape[1:] == flat.shape):
            _refuse(path, f"has shape {flat.shape}, but masks of {space} need ({total},)", mask)
        flat = flat.reshape(-1)
        if flat.dtype != np.bool_:
            if flat.dtype.kind not in "iuf" or ((flat != 0) & (flat != 1)).any():
                _refuse(path, "must hold true and false, or 1 and 0", mask)
            flat = flat != 0
        if acted_on and not np.logical_or.reduceat(flat, firsts).all():
            _refuse(path, f"leaves no legal action in a part of {space}", mask)
        rows[lane] = flat.reshape(rows.shape[1:])

    return write


def _discrete(space: Space) -> bool:
    return any(mask_sizes(part) for _, part in leaves(space))


def _container_write(parts: list[Any], path: Path, wanted: str) -> MaskWrite:
    def write(mask: Any, rows: Any, lane: int, acted_on: bool) -> None:
        for key, put in parts:
            try:
                part = mask[key]
            except (KeyError, IndexError, TypeError):
                _refuse(path, f"must be {wanted}", mask)
            put(part, rows[key], lane, acted_on)

    return write


def _refuse(path: Path, what: str, mask: Any) -> NoReturn:
    raise Refusal(f"{'.'.join(map(str, path))} {what}; got {brief(mask)}")


class TeamMasks:
    """Fetches the mask that belongs to an agent's observation, and writes it into its lane's row."""

    def __init__(self, source: MaskSource, action_space: Space, ask: Callable[[Any], Any] | None = None) -> None:
        self.source, self._ask = source, ask
        self._write = make_mask_write(action_space, (MASK_KEY,))

    @classmethod
    def find(cls, env: Any, observation_space: Space, action_space: Space, probe: Callable[[], Mapping[Any, Any]]) -> Self | None:
        """Where the masks come from, if there are any; `probe` resets the environment and returns its infos, if needed."""
        if not any(mask_sizes(part) for _, part in leaves(action_space)):
            return None
        if isinstance(observation_space, spaces.Dict) and MASK_KEY in observation_space.spaces:
            check_key_space(observation_space.spaces[MASK_KEY], action_space)
            return cls("key", action_space)
        offered: tuple[MaskSource, ...] = ("action_masks", "get_action_mask")
        for name in offered:
            ask = getattr(env, name, None) or getattr(env.unwrapped, name, None)
            if callable(ask) and accepts(ask, "agent"):
                return cls(name, action_space, ask)
        infos = probe()
        has = any(isinstance(info, Mapping) and MASK_KEY in info for info in infos.values())
        return cls("info", action_space) if has else None

    def has(self, agent: Any, observations: Mapping[Any, Any], infos: Mapping[Any, Any]) -> bool:
        """Whether there is a mask for what an agent sees."""
        return self._of(agent, observations, infos) is not None

    def _of(self, agent: Any, observations: Mapping[Any, Any], infos: Mapping[Any, Any]) -> Any:
        if self._ask is not None:
            return self._ask(agent)
        return (observations if self.source == "key" else infos).get(agent, {}).get(MASK_KEY)

    def write(
        self, agent: Any, observations: Mapping[Any, Any], infos: Mapping[Any, Any], rows: Tree, lane: int, *, acted_on: bool
    ) -> None:
        """Put the mask into its row. If it is `acted_on`, every discrete part must have a legal action."""
        mask = self._of(agent, observations, infos)
        if mask is None:
            raise Refusal(f"{MASK_KEY} missing: reset() provided it via {self.source}, this step did not")
        self._write(mask, rows, lane, acted_on)


def random_mask(action_space: Space, rng: np.random.Generator) -> Tree:
    """A mask in which every discrete part has one legal action or more."""
    wanted = mask_space(action_space)
    actions = dict(leaves(action_space))

    def one(path: tuple[str | int, ...], leaf: Space) -> np.ndarray:
        mask = rng.integers(2, size=leaf_shape(leaf)).astype(np.int8)
        first = 0
        for size in mask_sizes(actions[path]):
            mask[first + rng.integers(size)] = 1
            first += size
        return mask

    return build_tree(wanted, one)


def is_legal(action_space: Space, action: Any, mask: Tree) -> bool:
    """Whether every discrete part of an action is allowed by its mask."""
    if isinstance(action_space, spaces.Dict):
        return all(is_legal(inner, action[key], mask.get(key)) for key, inner in action_space.spaces.items())
    if isinstance(action_space, spaces.Tuple):
        return all(is_legal(inner, action[index], mask[index]) for index, inner in enumerate(action_space.spaces))
    sizes = mask_sizes(action_space)
    firsts = np.cumsum([0, *sizes])[:-1].astype(np.int64)
    start = getattr(action_space, "start", 0) if sizes else 0
    chosen = np.reshape(np.asarray(action) - start, -1).astype(np.int64) if sizes else np.zeros(0, np.int64)
    return not sizes or bool(np.all(np.asarray(mask)[firsts + chosen]))
