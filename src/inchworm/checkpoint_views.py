"""Serves `TrainingCheckpointer`: a policy and a trainer's state as parts of one checkpoint, which can be had apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym

from inchworm.checkpoint_reading import Checkpoint
from inchworm.errors import ConfigError, CorruptFileError
from inchworm.policy.composite import CompositePolicy, weights_of
from inchworm.policy.spec import PolicySpec
from inchworm.policy.weights import check_weights
from inchworm.protocols import Policy
from inchworm.spaces import check_same_form
from inchworm.types import Weights

NO_SPEC = "only built-in networks can be saved with their architecture; save a network of your own with its own state_dict"


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """A policy and where it is kept."""

    policy: Policy
    epoch: int
    path: Path
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainerRecord:
    """How far a training had come, and its optimiser."""

    agent_step: int
    epoch: int
    optimizer_state: Mapping[Any, Any]
    path: Path


def policy_part(policy: Policy, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """A policy's share of a checkpoint."""
    from inchworm.backends.interface import is_builtin

    if not is_builtin(policy):
        raise ConfigError(NO_SPEC)
    learned: Any = policy
    return {"spec": learned.spec.to_dict(), "weights": policy.get_weights(), "metadata": dict(metadata or {})}


def policy_of(checkpoint: Checkpoint, env: Any = None) -> PolicyRecord:
    """The policy of a checkpoint: acting in NumPy where that is possible, in torch where it needs convolutions."""
    from inchworm.backends.interface import make_policy

    state = checkpoint.state
    if state.get("spec") is None or "weights" not in state:
        raise CorruptFileError(f"{checkpoint.path} holds no policy with its architecture; {NO_SPEC}")

    def one(described: Mapping[str, Any] | None, weights: Weights) -> Policy:
        if described is None:
            raise CorruptFileError(f"{checkpoint.path} holds a policy without its architecture; {NO_SPEC}")
        spec = PolicySpec.from_dict(described)
        check_weights(spec, weights)
        if env is not None:
            _check_fits(spec, env, checkpoint.path)
        return make_policy(spec, weights=weights, backend="torch" if spec.observations.images else "numpy")

    policy = _composite(state["spec"], state["weights"], one) if "policies" in state["spec"] else one(state["spec"], state["weights"])
    return PolicyRecord(policy, checkpoint.step, checkpoint.path, state.get("metadata", {}))


def _composite(spec: Mapping[str, Any], weights: Weights, one: Callable[[Any, Weights], Policy]) -> CompositePolicy:
    """The composite policy that `CompositePolicy.to_dict` described."""
    parts = {name: one(part, weights_of(weights, name)) for name, part in spec["policies"].items()}
    policy = CompositePolicy(parts, spec["lane_map"], trainable=spec["trainable"], ppo=spec["ppo"])
    policy.set_weights(weights)
    return policy


def trainer_part(agent_step: int, epoch: int, optimizer_state: Mapping[Any, Any]) -> dict[str, Any]:
    """A trainer's share of a checkpoint; `optimizer_state` may hold tensors, as torch's do."""
    from inchworm.backends.process import as_arrays

    return {"trainer": {"agent_step": int(agent_step), "epoch": int(epoch), "optimizer_state": as_arrays(optimizer_state)}}


def trainer_of(checkpoint: Checkpoint) -> TrainerRecord:
    """The trainer's share of a checkpoint, whoever made it."""
    from inchworm.backends.process import from_arrays

    state = checkpoint.state
    if "trainer" in state:
        part = state["trainer"]
        return TrainerRecord(part["agent_step"], part["epoch"], from_arrays(part["optimizer_state"]), checkpoint.path)
    return TrainerRecord(state["collector"]["env_steps"], state["state"]["iteration"], state["learner"], checkpoint.path)


def _check_fits(spec: PolicySpec, env: Any, path: Path) -> None:
    several = isinstance(env, gym.vector.VectorEnv)
    found = (env.single_observation_space, env.single_action_space) if several else (env.observation_space, env.action_space)
    check_same_form(f"the policy in {path}", (spec.observation_space, spec.action_space), found)
