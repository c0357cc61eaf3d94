"""Step 2 of 9, over somebody else's vector env: the `VectorEnv` contract for worlds that are batched already.

Gymnasium's vector envs and EnvPool step all copies in one call. Here their resets are brought into the same step, with the true final
observation kept. What they cannot do is stand where a saved episode stood: `exact` is False, and a resumed run
begins fresh episodes, says so, and is from there on another run than the uninterrupted one.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from inchworm.env.actions import make_put
from inchworm.env.episodes import plain_options
from inchworm.env.lane_env import copy_row
from inchworm.env.memory import carve_rows, map_tree
from inchworm.errors import EnvError
from inchworm.seeding import episode_seed
from inchworm.spaces import Space, zeros
from inchworm.types import Array, EndedEpisode, EnvStep, Tree

NO_SEED = -1
"""The seed of an episode that had none of its own."""


class Moved(NamedTuple):
    """One step of all lanes, before any reset."""

    observations: Tree
    rewards: Array
    terminated: Array
    truncated: Array
    info: Mapping[str, Any]


class BatchedWorld(Protocol):
    """A vector env as its library makes it, reduced to what is needed here."""

    observation_space: Space
    action_space: Space
    num_lanes: int
    takes_seeds: bool
    """Whether every episode can be given a seed."""

    def begin(self, lanes: Sequence[int], seeds: Sequence[int] | None, options: Mapping[str, Any] | None) -> Tree:
        """Begin episodes in some lanes: their first observations [len(lanes), *obs]."""
        ...

    def start(self, actions: Tree) -> None:
        """Begin a step."""
        ...

    def finish(self) -> Moved:
        """Wait for it."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class BatchedVectorEnv:
    """The `VectorEnv` contract over a batched world. Not exact: where episodes stand cannot be saved."""

    exact = False

    def __init__(self, world: BatchedWorld, *, seed: int = 0, first_copy: int = 0) -> None:
        self._world, self._seed, self._first_copy = world, seed, first_copy
        self.observation_space, self.action_space = world.observation_space, world.action_space
        self.num_lanes = self.num_envs = lanes = world.num_lanes
        self._rows, _ = carve_rows(self.observation_space, self.action_space, lanes, lanes)
        self._put_actions = make_put(self.action_space)
        self._put_observations = make_put(self.observation_space, (), "observations")
        self._episodes, self._seeds = [-1] * lanes, [NO_SEED] * lanes
        self._lengths = np.zeros(lanes, np.int64)  # [B] steps of the running episodes
        self._options: list[dict[str, Any] | None] = [None] * lanes
        self._episode_starts, self._valid = np.zeros(lanes, np.bool_), np.ones(lanes, np.bool_)
        self._sent = self._closed = self._warned = False

    def reset(self, seeds: Sequence[int] | None = None, indices: Sequence[int] | None = None) -> EnvStep:
        """Begin new episodes in the copies `indices` (all by default), with these seeds or with derived ones, where they are taken."""
        self._require(sent=False, begun=False)
        chosen = list(range(self.num_lanes)) if indices is None else [int(index) for index in indices]
        if self._episodes[0] < 0 and len(chosen) < self.num_lanes:
            raise EnvError(f"the first reset must be of all {self.num_lanes} copies")
        if seeds is not None and len(seeds) != len(chosen):
            raise EnvError(f"reset got {len(seeds)} seeds for {len(chosen)} copies")
        if seeds is not None and not self._world.takes_seeds and not self._warned:
            self._warned = True
            warnings.warn(
                f"the episodes of {type(self._world).__name__} cannot be given seeds: those of this reset are not used", stacklevel=2
            )
        self._begin(chosen, seeds)
        self._rows.rewards[:] = 0.0
        self._rows.terminated[:] = self._rows.truncated[:] = False
        self._episode_starts[:] = self._lengths == 0
        return self._step(())

    def _begin(self, lanes: Sequence[int], seeds: Sequence[int] | None = None) -> None:
        for place, lane in enumerate(lanes):
            self._episodes[lane] += 1
            if self._world.takes_seeds:
                derived = episode_seed(self._seed, self._first_copy + lane, self._episodes[lane])
                self._seeds[lane] = derived if seeds is None else int(seeds[place])
        left = list(lanes)
        while left:  # those that begin with the same options begin together
            same = [lane for lane in left if self._options[lane] == self._options[left[0]]]
            left = [lane for lane in left if lane not in same]
            self._begin_alike(same)
        self._lengths[list(lanes)] = 0

    def _begin_alike(self, lanes: list[int]) -> None:
        seeds = [self._seeds[lane] for lane in lanes] if self._world.takes_seeds else None
        first = zeros(self.observation_space, (len(lanes),))  # [n, *obs]
        self._put_observations(self._world.begin(lanes, seeds, self._options[lanes[0]]), first)
        _scatter(first, self._rows.observations, lanes)

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
        rows.rewards[:] = moved.rewards
        rows.terminated[:] = moved.terminated
        np.logical_and(moved.truncated, ~rows.terminated, out=rows.truncated)  # both flags mean terminated
        self._lengths += 1
        np.logical_or(rows.terminated, rows.truncated, out=self._episode_starts)
        over = self._episode_starts.nonzero()[0].tolist()
        if not over:
            return self._step(())
        ended = [EndedEpisode(lane, self._seeds[lane], copy_row(rows.observations, lane), lane_numbers(moved.info, lane)) for lane in over]
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
        """How many episodes began, and the reset options: where they stand cannot be saved."""
        return {"exact": False, "episodes": list(self._episodes), "options": list(self._options)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin fresh episodes after those that the state counted, with a warning: a batched world cannot go where it stood."""
        if len(state["episodes"]) != self.num_lanes:
            raise EnvError(f"the saved environments are {len(state['episodes'])} copies, here are {self.num_lanes}; set env.num_envs to it")
        self._episodes[:] = [int(episode) for episode in state["episodes"]]
        self._options[:] = state["options"]
        if self._episodes[0] >= 0:
            warnings.warn(f"{type(self._world).__name__} is not exact: all lanes begin fresh episodes instead of those saved", stacklevel=2)
            self.reset()

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


def _scatter(values: Tree, rows: Tree, lanes: Sequence[int]) -> None:
    """Put values [n, *leaf] into the rows of n lanes."""
    if isinstance(rows, dict):
        for key, part in rows.items():
            _scatter(values[key], part, lanes)
    elif isinstance(rows, tuple):
        for value, part in zip(values, rows):
            _scatter(value, part, lanes)
    else:
        rows[list(lanes)] = values


def lane_numbers(info: Mapping[str, Any], lane: int) -> dict[str, float]:
    """The numbers of one lane in an info that holds an array [B] for each key, and for some keys `_key`, who has it."""
    numbers = {}
    for key, value in info.items():
        has = info.get(f"_{key}")
        if key.startswith("_") or not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "biuf":
            continue
        if has is None or has[lane]:
            numbers[key] = float(value[lane])
    return numbers
