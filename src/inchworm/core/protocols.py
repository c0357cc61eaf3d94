"""The contracts between the parts. Any object that meets one can take the part's place; inheriting is not required.

An `Actor` acts. A `Policy` is an actor that can be trained. A `VectorEnv` is many copies of an environment stepped as one. A
`Collector` runs a policy in it and returns rollouts; a `Learner` updates the policy from them. A `Callback` observes the
loop; a `Tracker` records metrics.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import numpy as np

from inchworm.core.padding import AgentSpaces
from inchworm.core.spaces import Space
from inchworm.core.types import Array, EnvStep, EpisodeRecord, Evaluation, Minibatch, PolicyStep, Tree, UpdateStats, Weights

if TYPE_CHECKING:
    import gymnasium as gym

    from inchworm.rollout.rollout import Rollout
    from inchworm.train.loop import TrainingState

UNKNOWN_EXACTNESS = "the vector env does not say whether it can be restored exactly (attribute inexact)"
_MISSING = object()


@runtime_checkable
class Actor(Protocol):
    """Anything that acts: a trained policy, a heuristic, a frozen opponent, a random one.

    It owns no memory: the caller hands the state in and gets the next one back. Without memory the state is `()`.
    """

    def initial_state(self, num_lanes: int) -> Tree:
        """The memory of `num_lanes` lanes that have seen nothing; `()` without memory."""

    def act(
        self, observations: Tree, state: Tree, episode_starts: Array, rng: np.random.Generator, *, deterministic: bool = False
    ) -> PolicyStep:
        """Choose one action per lane. All randomness comes from `rng`, so that every backend samples the same actions.

        Where `episode_starts` is true the lane's memory is forgotten before the observation is read.
        """


@runtime_checkable
class Policy(Actor, Protocol):
    """An actor that can be trained. Its weights, statistics and version travel together and only a learner moves them."""

    policy_version: int
    """How many updates made these weights; 0 at the start."""

    def value(self, observations: Tree, state: Tree, episode_starts: Array) -> Array:
        """The critic on [L, N, *obs]: values [L, N] in reward units, without gradients."""

    def evaluate(self, minibatch: Minibatch) -> Evaluation:
        """Evaluate a minibatch under the current weights: differentiable log-probs, entropy and values."""

    def update_statistics(self, rollout: Rollout, returns: Array) -> None:
        """Move the normalisers by one rollout and rescale the value head so that values in reward units stay (PopArt)."""

    def get_weights(self) -> Weights:
        """A copy of all weights and statistics, as named NumPy arrays."""

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Load what `get_weights` returned. Names and shapes must match exactly."""


@runtime_checkable
class VectorEnv(Protocol):
    """Copies of an environment, stepped as one: B lanes, same-step autoreset, the true final observation kept.

    Each episode of each copy is reset with its own seed, derived from (run seed, copy, episode), so that a copy is
    described by that seed, its reset options and the actions since: `state_dict` holds those, `load_state_dict` replays them.
    """

    observation_space: gym.Space[Any]
    """Of one lane; if the environment offers action masks it is a `Dict` with the key `action_mask`."""
    action_space: gym.Space[Any]
    """Of one lane."""
    num_lanes: int
    num_envs: int
    """Number of copies; `num_lanes` is `num_envs * lanes_per_copy`."""

    # Optional: a vector env without these gets the defaults from `complete_vector_env`.
    lanes_per_copy: int = 1
    """Number of adjacent lanes of each copy: lane i is agent i % lanes_per_copy of copy i // lanes_per_copy."""
    global_state_space: Space | None = None
    """Space of the global state of one copy, for a central critic; None without one."""
    agents_leave: bool = False
    """Whether an agent may leave or join while its copy's episode continues; by default where a copy has several lanes."""
    turn_based: bool = False
    """Whether the agents of a copy move one after another; a lane is then valid when it is its agent's turn."""
    resets_itself: bool = False
    """Whether it begins the next episode by itself where one ended, so that no single copy can be reset from outside."""
    agents: tuple[str, ...] = ()
    """The names of a copy's agents, in the order of its lanes; agent_0, agent_1, … by default."""
    agent_spaces: tuple[AgentSpaces, ...] = ()
    """The own spaces of these agents where they differ in size, so that the lanes are padded; else empty."""
    kept_infos: tuple[str, ...] = ()
    """The names of the numbers in `info` that every `EnvStep.infos` has."""

    @property
    def inexact(self) -> Sequence[str]:
        """Why a resumed run may differ from an uninterrupted one, a sentence each; empty if it is bit-identical."""
        return (UNKNOWN_EXACTNESS,)

    def reset(self, seeds: Sequence[int] | None = None, indices: Sequence[int] | None = None) -> EnvStep:
        """Begin new episodes in the copies `indices` (all by default), with these seeds or with derived ones.

        Returns all lanes: rewards 0, `episode_starts` true where the observation opens an episode.
        """

    def send(self, actions: Tree) -> None:
        """Start one step with actions [B, *act], already within bounds."""

    def recv(self) -> EnvStep:
        """Wait for the step that `send` started."""

    def step(self, actions: Tree) -> EnvStep:
        """`send`, then `recv`."""

    def set_reset_options(self, options: Mapping[str, Any] | None, indices: Sequence[int] | None = None) -> None:
        """Options that `env.reset` gets from the copies' next reset on; nothing changes in a running episode."""

    def state_dict(self) -> dict[str, Any]:
        """The state of every copy, as plain data and arrays."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore every copy, by replay; `reset(indices=())` then shows the lanes as they are."""

    def close(self) -> None:
        """Release everything, in bounded time; safe to call twice."""


@runtime_checkable
class Stateful(Protocol):
    """Something with state that the run depends on, such as a callback with a stop rule's count. Saved with every checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Its state, as plain data and arrays."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class Collector(Stateful, Protocol):
    """Collects rollouts: acts, steps, writes rows. Never learns, never runs the critic.

    Its state is the observation, memory, sampling stream, counters and the environments' state.
    """

    env_steps: int
    """Valid steps taken since the start of the run."""
    episodes: int
    """Episodes finished since then."""
    recent: deque[EpisodeRecord]
    """The most recent of them."""
    # Optional: a collector without it is given the weights after every update.
    follows: Policy | None = None
    """The policy whose weights it reads itself before it collects."""

    def collect(self, num_steps: int) -> Rollout:
        """The next `num_steps` steps of every lane, continuing where the last call stopped."""

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Act with these weights from the next `collect` on."""

    def close(self) -> None:
        """Close the environments."""


class Learner(Stateful, Protocol):
    """Updates a policy from rollouts. Its state is that of the optimiser, the shuffle stream and the schedules."""

    updates: int
    """How many rollouts it has learned from."""
    env_steps: int
    """The run's env steps before the next update, where schedules are read."""
    total_timesteps: int | None
    """The run's planned length, which schedules run towards."""

    def update(self, rollout: Rollout | Mapping[str, Any], custom_loss_fns: Sequence[Any] = ()) -> UpdateStats:
        """Some epochs of gradient steps; the rollout is read, never written."""


class Callback(Protocol):
    """Observes and steers the training loop. Exceptions propagate: a broken callback stops the run."""

    def on_train_start(self, state: TrainingState) -> None:
        """Before the first iteration."""

    def on_rollout(self, state: TrainingState, rollout: Rollout) -> Rollout | None:
        """After collect; a returned rollout (say, with other rewards) replaces it for learn."""

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> bool | None:
        """After learn; False stops the run."""

    def on_train_end(self, state: TrainingState) -> None:
        """After the last iteration, also when the run was stopped."""


class Closes:
    """A context manager that ends with `close`."""

    def close(self) -> None:
        """Release everything that is held; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BaseCallback:
    """A callback that does nothing; override what you need."""

    def on_train_start(self, state: TrainingState) -> None:
        """Before the first iteration."""

    def on_rollout(self, state: TrainingState, rollout: Rollout) -> Rollout | None:
        """After collect; a returned rollout replaces it for learn."""

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> bool | None:
        """After learn; False stops the run."""

    def on_train_end(self, state: TrainingState) -> None:
        """After the last iteration."""


class Tracker(Protocol):
    """Writes metrics, parameters and files somewhere."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One row at `step` env steps."""

    def log_params(self, params: Mapping[str, Any]) -> None:
        """The run's config, once."""

    def log_artifact(self, path: Path) -> None:
        """A file of the run."""

    def close(self) -> None:
        """Flush and release everything."""


class ReadsGlobalState(Protocol):
    """A policy whose critic may be central, that is, may read the environment's global state besides the observations."""

    @property
    def central_critic(self) -> bool:
        """Whether it does; False for a policy without this attribute."""

    def value(self, observations: Tree, state: Tree, episode_starts: Array, global_state: Tree = ..., valid: Array | None = ...) -> Array:
        """`Policy.value` with two more arguments for a central critic: `lane_states` [L, N, …] and which agents are alive [L, N].

        Those are {"world": the global state of the lane's copy, "place": the lane's number in its copy}.
        """


def reads_global_state(policy: object) -> bool:
    """Whether a policy's critic is central."""
    return bool(getattr(policy, "central_critic", False))


def reads_context(policy: object) -> bool:
    """Whether a policy is conditioned on the task context of a rollout: its `value` takes `context`, and its minibatches have one."""
    return bool(getattr(policy, "reads_context", False))


def default_agents(lanes_per_copy: int) -> tuple[str, ...]:
    """Names of a copy's agents where the environment gives none."""
    return tuple(f"agent_{place}" for place in range(lanes_per_copy))


def complete_vector_env(env: Any) -> VectorEnv:
    """Give a vector env that was written elsewhere the optional attributes of `VectorEnv` that it lacks."""
    lanes_per_copy = getattr(env, "lanes_per_copy", VectorEnv.lanes_per_copy)
    fixed = ("lanes_per_copy", "global_state_space", "turn_based", "resets_itself", "agent_spaces", "kept_infos")
    defaults = {name: getattr(VectorEnv, name) for name in fixed} | {
        "num_envs": env.num_lanes // lanes_per_copy,
        "agents_leave": lanes_per_copy > 1,
        "agents": default_agents(lanes_per_copy),
        "inexact": () if getattr(env, "exact", False) is True else (UNKNOWN_EXACTNESS,),
    }
    for name, default in defaults.items():
        if getattr(env, name, _MISSING) is _MISSING:
            setattr(env, name, default)
    completed: VectorEnv = env
    return completed
