"""Step 1 of 9: what the agents of one PettingZoo environment see is checked and put into the rows of their lanes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from inchworm.env.masks import allow_all
from inchworm.env.memory import StepRows, tree_leaves
from inchworm.env.rows import Refusal, make_writer
from inchworm.env.team_masks import TeamMasks
from inchworm.env.teams import Agent, common_space, nothing_seen
from inchworm.spaces import MASK_KEY, Space, mask_space, with_mask
from inchworm.types import Tree


class TeamRows:
    """Writes what agents see, and their masks, into k adjacent lanes from `lane` on; places count from 0 within them.

    `probe` resets the environment and returns its infos, and is called only if need be.
    """

    def __init__(self, env: Any, agents: Sequence[Agent], action_space: Space, lane: int, probe: Callable[[], Mapping[Agent, Any]]) -> None:
        self._agents, self._lane = agents, lane
        own = common_space(env, agents, "observation")
        self._put, self._is_plain = make_writer(own), not isinstance(own, spaces.Dict)
        self._masks = TeamMasks.find(env, own, action_space, probe)
        beside = self._masks is not None and self._masks.source != "key"
        self.observation_space = with_mask(own, mask_space(action_space)) if beside else own
        self._nothing = tree_leaves(nothing_seen(self.observation_space))

    def attach(self, rows: StepRows) -> None:
        """Write into these rows from now on."""
        self._seen, self._final = rows.observations, rows.final_observations

    def show(self, place: int, observations: Mapping[Agent, Any], infos: Mapping[Agent, Any]) -> None:
        """What a living agent sees, and may do."""
        self._put_observation(place, observations, self._seen)
        self._put_mask(place, observations, infos, self._seen, acted_on=True)

    def show_last(self, place: int, observations: Mapping[Agent, Any]) -> None:
        """What an agent saw last that has left a running episode; nobody acts on it."""
        self._put_observation(place, observations, self._seen)
        self._allow_all(place, self._seen)

    def show_nothing(self, place: int, *, final: bool = False) -> None:
        """A legal observation of nobody."""
        for array, nothing in zip(tree_leaves(self._final if final else self._seen), self._nothing):
            array[self._lane + place] = nothing

    def show_final(self, place: int, truncated: bool, observations: Mapping[Agent, Any], infos: Mapping[Agent, Any]) -> None:
        """What an agent saw at the end of an episode. Where nothing follows nobody acts, and games often have no legal action there."""
        self._put_observation(place, observations, self._final)
        self._allow_all(place, self._final)
        if truncated and self._masks is not None and self._masks.has(self._agents[place], observations, infos):
            self._put_mask(place, observations, infos, self._final, acted_on=False)

    def _put_observation(self, place: int, observations: Mapping[Agent, Any], rows: Tree) -> None:
        agent = self._agents[place]
        if agent not in observations:
            raise Refusal(f"observations lack the agent, which is in env.agents; they have {list(observations)}")
        own = rows["observation"] if self._is_plain and self._masks is not None else rows
        self._put(observations[agent], own, self._lane + place)

    def _put_mask(self, place: int, observations: Mapping[Agent, Any], infos: Mapping[Agent, Any], rows: Tree, *, acted_on: bool) -> None:
        if self._masks is not None:
            self._masks.write(self._agents[place], observations, infos, rows[MASK_KEY], self._lane + place, acted_on=acted_on)

    def _allow_all(self, place: int, rows: Tree) -> None:
        if self._masks is not None:
            allow_all(rows[MASK_KEY], self._lane + place)


class StateRows:
    """Writes the global state of one copy into its row."""

    def __init__(self, space: Space, read: Callable[[], Any], copy: int) -> None:
        self.space, self._read, self._copy = space, read, copy
        self._put = make_writer(space, ("global state",))

    def write(self, rows: Tree) -> None:
        """The state as it is now; whole numbers become those of a Box of real ones."""
        state = self._read()
        if isinstance(self.space, spaces.Box) and self.space.dtype.kind == "f" and np.asarray(state).dtype.kind in "iub":
            state = np.asarray(state).astype(self.space.dtype)
        self._put(state, rows, self._copy)
