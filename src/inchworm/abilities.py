"""Serves the contracts of `protocols.py`: what policies, environments and callbacks may say of themselves besides, asked at run time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from inchworm.spaces import Space
from inchworm.types import Array, Tree


@runtime_checkable
class Stateful(Protocol):
    """A callback or tracker that remembers something the run depends on, such as a stop rule's count. Saved with every checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, as plain data and arrays."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember this instead."""
        ...


@runtime_checkable
class ReadsGlobalState(Protocol):
    """A policy that says whether its critic is central: whether it reads the world's global state beside the observations."""

    @property
    def central_critic(self) -> bool:
        """Whether it does."""
        ...

    def value(self, observations: Tree, state: Tree, episode_starts: Array, global_state: Tree = ..., valid: Array | None = ...) -> Array:
        """`Policy.value` with two more arguments, which a central critic gets: `lane_states` [L, N, …] and who lives [L, N].

        Those are {"world": the global state of the lane's copy, "place": the lane's number in its copy}.
        """
        ...


def reads_global_state(policy: object) -> bool:
    """Whether a policy's critic is central."""
    return isinstance(policy, ReadsGlobalState) and policy.central_critic


@runtime_checkable
class HasTeams(Protocol):
    """A vector env that says how many adjacent lanes each of its copies fills; one that does not has one lane a copy."""

    lanes_per_copy: int
    num_envs: int
    """Copies: `num_lanes` is `num_envs * lanes_per_copy`."""


def lanes_per_copy(env: object) -> int:
    """How many adjacent lanes each copy of a vector env fills."""
    return int(env.lanes_per_copy) if isinstance(env, HasTeams) else 1


@runtime_checkable
class HidesLanes(Protocol):
    """A vector env around another, of which it shows only some lanes."""

    inner: object


def agents_leave(env: object) -> bool:
    """Whether an agent may leave, or join, while the episode of its copy goes on: a copy has several lanes, be they shown or not."""
    return lanes_per_copy(env) > 1 or (isinstance(env, HidesLanes) and agents_leave(env.inner))


@runtime_checkable
class SaysInexact(Protocol):
    """A vector env that says what of it a checkpoint cannot bring back exactly."""

    @property
    def inexact(self) -> Sequence[str]:
        """A sentence for each such thing; empty if a resumed run has the bits of an uninterrupted one."""
        ...


@runtime_checkable
class SaysExact(Protocol):
    """A vector env that says whether a checkpoint brings it back exactly."""

    @property
    def exact(self) -> bool:
        """Whether it does."""
        ...


@runtime_checkable
class SharesState(Protocol):
    """A vector env that says of what space its global states are; None where it has none."""

    global_state_space: Space | None
