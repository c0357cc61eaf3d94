"""Serves step 1: finds the action masks of a PettingZoo environment's agents, and puts them beside their observations.

A mask comes as the key `action_mask` of an agent's observation, from the environment's `action_masks(agent)` or
`get_action_mask(agent)`, or as `infos[agent]["action_mask"]`, in this order; what the first reset offers must be there ever after.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Self

from gymnasium import spaces

from inchworm.env.masks import MaskSource, check_key_space, make_mask_write
from inchworm.env.rows import Refusal
from inchworm.spaces import MASK_KEY, Space, leaves, mask_sizes
from inchworm.types import Tree


class TeamMasks:
    """Fetches the mask that belongs to an agent's observation, and writes it into its lane's row."""

    def __init__(self, source: MaskSource, action_space: Space, ask: Callable[[Any], Any] | None = None) -> None:
        self.source, self._ask = source, ask
        self._write = make_mask_write(action_space, (MASK_KEY,))

    @classmethod
    def find(cls, env: Any, observation_space: Space, action_space: Space, probe: Callable[[], Mapping[Any, Any]]) -> Self | None:
        """Where the masks come from, if there are any; `probe` resets the environment and returns its infos, if need be."""
        if not any(mask_sizes(part) for _, part in leaves(action_space)):
            return None
        if isinstance(observation_space, spaces.Dict) and MASK_KEY in observation_space.spaces:
            check_key_space(observation_space.spaces[MASK_KEY], action_space)
            return cls("key", action_space)
        offered: tuple[MaskSource, ...] = ("action_masks", "get_action_mask")
        for name in offered:
            ask = getattr(env, name, None) or getattr(env.unwrapped, name, None)
            if callable(ask) and _takes_an_agent(ask):
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
        """Put the mask into its row. If somebody acts on it, every discrete part must have a legal action."""
        mask = self._of(agent, observations, infos)
        if mask is None:
            raise Refusal(f"{MASK_KEY} is gone: the first reset offered one by {self.source}, and now there is none")
        self._write(mask, rows, lane, acted_on)


def _takes_an_agent(ask: Callable[..., Any]) -> bool:
    try:
        inspect.signature(ask).bind("agent")
    except (TypeError, ValueError):
        return False
    return True
