"""Step 2 of 9, over somebody else's vector env: the `VectorEnv` contract for worlds that are batched already.

Gymnasium's vector envs and EnvPool step all copies in one call. Here their resets are brought into the same step, with the true final
observation kept. Their episodes have no seeds, so none can be replayed: a world is brought to where it stood by its whole state, if that
can be saved. If it cannot, `inexact` says why, and a resumed run begins fresh episodes and is from there on another run.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from inchworm.env.actions import make_put
from inchworm.env.episodes import plain_options
from inchworm.env.lane_env import copy_row
from inchworm.env.memory import carve_rows, map_tree, tree_leaves
from inchworm.env.worlds import BatchedWorld, SavedWorld, lane_numbers, scatter, write_outcome
from inchworm.errors import EnvError
from inchworm.spaces import zeros
from inchworm.types import EndedEpisode, EnvStep, Tree

NO_SEED = -1
"""The seed of an episode that had none of its own."""


class BatchedVectorEnv:
    """The `VectorEnv` contract over a batched world whose episodes have no seeds of their own."""

    def __init__(self, world: BatchedWorld, *, seed: int = 0, first_copy: int = 0) -> None:
        self._world, self._seed, self._first_copy = world, seed, first_copy
        self.observation_space, self.action_space = world.observation_space, world.action_space
        self.num_lanes = self.num_envs = lanes = world.num_lanes
        self._rows, _ = carve_rows(self.observation_space, self.action_space, lanes, lanes)
        self._put_actions = make_put(self.action_space)
        self._put_observations = make_put(self.observation_space, (), "observations")
        self._episodes = [-1] * lanes
        self._lengths = np.zeros(lanes, np.int64)  # [B] steps of the running episodes
        self._options: list[dict[str, Any] | None] = [None] * lanes
        self._episode_starts, self._valid = np.zeros(lanes, np.bool_), np.ones(lanes, np.bool_)
        self._strayed: list[str] = []  # of this run: what could not be brought back
        self._sent = self._closed = self._warned = False

    @property
    def inexact(self) -> list[str]:
        """Why a resumed run may have other bits than an uninterrupted one, in sentences; empty if it has the same."""
        return [*self._world.inexact, *self._strayed]

    @property
    def exact(self) -> bool:
        """Whether `load_state_dict` brings every lane to where it stood, so that a resumed run has the bits of an uninterrupted one."""
        return not self.inexact

    def reset(self, seeds: Sequence[int] | None = None, indices: Sequence[int] | None = None) -> EnvStep:
        """Begin new episodes in the copies `indices` (all by default). The world's own streams decide what they are: seeds are not used."""
        self._require(sent=False, begun=False)
        chosen = list(range(self.num_lanes)) if indices is None else [int(index) for index in indices]
        if self._episodes[0] < 0 and len(chosen) < self.num_lanes:
            raise EnvError(f"the first reset must be of all {self.num_lanes} copies")
        if seeds is not None and len(seeds) != len(chosen):
            raise EnvError(f"reset got {len(seeds)} seeds for {len(chosen)} copies")
        if seeds is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"the episodes of {type(self._world).__name__} cannot be given seeds: those of this reset are not used", stacklevel=2
            )
        self._begin(chosen)
        self._rows.rewards[:] = 0.0
        self._rows.terminated[:] = self._rows.truncated[:] = False
        self._episode_starts[:] = self._lengths == 0
        return self._step(())

    def _begin(self, lanes: Sequence[int]) -> None:
        for lane in lanes:
            self._episodes[lane] += 1
        left = list(lanes)
        while left:  # those that begin with the same options begin together
            same = [lane for lane in left if self._options[lane] == self._options[left[0]]]
            left = [lane for lane in left if lane not in same]
            self._begin_alike(same)
        self._lengths[list(lanes)] = 0

    def _begin_alike(self, lanes: list[int]) -> None:
        first = zeros(self.observation_space, (len(lanes),))  # [n, *obs]
        self._put_observations(self._world.begin(lanes, None, self._options[lanes[0]]), first)
        scatter(first, self._rows.observations, lanes)

    def send(self, actions: Tree) -> None:
        """Start one step with actions [B, *act], already within bounds."""
        self._require(sent=False, begun=True)
        self._put_actions(actions, self._rows.actions)
        self._world.start(map_tree(np.copy, self._rows.actions))
        self._sent = True

    def recv(self) -> EnvStep:
        """Wait for the step that `send` started."""
        self._require(sent=True, begun=True)
        moved, rows = self._world.finish(), self._rows
        self._sent = False
        self._put_observations(moved.observations, rows.observations)
        write_outcome(moved, rows)
        self._lengths += 1
        np.logical_or(rows.terminated, rows.truncated, out=self._episode_starts)
        over = self._episode_starts.nonzero()[0].tolist()
        if not over:
            return self._step(())
        ended = [EndedEpisode(lane, NO_SEED, copy_row(rows.observations, lane), lane_numbers(moved.info, lane)) for lane in over]
        self._begin(over)
        return self._step(tuple(ended))

    def step(self, actions: Tree) -> EnvStep:
        """`send`, then `recv`."""
        self.send(actions)
        return self.recv()

    def _step(self, ended: tuple[EndedEpisode, ...]) -> EnvStep:
        rows = self._rows
        return EnvStep(rows.observations, rows.rewards, rows.terminated, rows.truncated, self._episode_starts, self._valid, ended)

    def set_reset_options(self, options: Mapping[str, Any] | None, indices: Sequence[int] | None = None) -> None:
        """Options that the copies' next reset gets, if the world takes any."""
        plain = plain_options(options)
        for lane in range(self.num_lanes) if indices is None else indices:
            self._options[int(lane)] = plain

    def state_dict(self) -> dict[str, Any]:
        """Where all lanes stand, if the world can say so; else how many episodes began. Plain data and arrays."""
        self._require(sent=False, begun=False)
        state = {
            "episodes": list(self._episodes),
            "options": list(self._options),
            "lengths": self._lengths.copy(),
            "strayed": list(self._strayed),
            "world": None,
        }
        if isinstance(self._world, SavedWorld) and not self._world.inexact and self._episodes[0] >= 0:
            state["world"] = self._world.state(self._rows.observations)
            state["observations"] = [array.copy() for array in tree_leaves(self._rows.observations)]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring all lanes to where `state` says. If that cannot be done they begin fresh episodes, with a warning."""
        self._require(sent=False, begun=False)
        if len(state["episodes"]) != self.num_lanes:
            raise EnvError(f"the saved environments are {len(state['episodes'])} copies, here are {self.num_lanes}; set env.num_envs to it")
        self._episodes[:] = [int(episode) for episode in state["episodes"]]
        self._options[:] = state["options"]
        self._strayed = [str(text) for text in state.get("strayed", ())]
        if self._episodes[0] < 0:
            return
        why = self._restore(state)
        if why is not None:
            text = f"no lane came back at a resume, and all began fresh episodes: {why}"
            warnings.warn(f"{type(self._world).__name__} is not exact: {text}", stacklevel=2)
            self._strayed += [text] if text not in self._strayed else []
            self.reset()

    def _restore(self, state: Mapping[str, Any]) -> str | None:
        """Bring all lanes to where they stood; why they are not there, or None if they are."""
        if self._world.inexact or not isinstance(self._world, SavedWorld):
            return "; ".join(self._world.inexact)
        if state.get("world") is None:
            return "where they stood was not saved"
        rows = tree_leaves(self._rows.observations)
        if [(a.shape, a.dtype) for a in rows] != [(a.shape, a.dtype) for a in state["observations"]]:
            return "the saved observations are of other shapes"
        for row, saved in zip(rows, state["observations"]):
            row[...] = saved
        self._lengths[:] = state["lengths"]
        return self._world.restore(state["world"], self._rows.observations)

    def _require(self, *, sent: bool, begun: bool) -> None:
        if self._closed:
            raise EnvError("the vector env is closed; make a new one")
        if begun and self._episodes[0] < 0:
            raise EnvError("the environments have not been reset; call reset() first")
        if self._sent != sent:
            raise EnvError("no step has been sent; call send(actions) first" if sent else "a step has been sent; call recv() first")

    def close(self) -> None:
        """Release everything; safe to call twice."""
        if not self._closed:
            self._closed = True
            self._world.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a constructor that failed, or an interpreter that is shutting down
            self.close()
