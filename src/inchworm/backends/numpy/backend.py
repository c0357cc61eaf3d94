"""NumPy as a backend: the functions that `backends/registry` asks every backend for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from inchworm.backends.corrections import row_log_probs
from inchworm.backends.numpy.gae import compute_advantages as compute_advantages
from inchworm.backends.numpy.gae import compute_gae as compute_gae
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.config.sections import PPOConfig, TrainingConfig
from inchworm.core.protocols import Actor, Learner, Policy
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.rollout import Rollout
from inchworm.rollout.sequences import fill_invalid_rows


def make_policy(spec: PolicySpec, weights: Mapping[str, np.ndarray] | None, seed: int) -> Policy:
    """A policy of this backend."""
    return NumpyPolicy(spec, weights, seed=seed)


def make_learner(policy: Policy, config: TrainingConfig, dump_directory: str | Path | None) -> Learner:
    """The learner of a policy."""
    from inchworm.backends.numpy.learner import NumpyOptimizer  # acting does not need it

    run = config.run
    return NumpyOptimizer(policy, config.ppo, seed=run.seed, total_timesteps=run.total_timesteps, dump_directory=dump_directory)


def log_probs(policy: Policy, rollout: Rollout, config: PPOConfig) -> np.ndarray:
    """The log-probs [T, B] of a rollout's actions under the policy."""
    found: np.ndarray = row_log_probs(policy, fill_invalid_rows(rollout), config)
    return found


def acting_policy(policy: Policy) -> Actor:
    """The policy itself."""
    return policy


def generator_state() -> dict[str, Any]:
    """The state of NumPy's global generator as plain data; user code may draw from it."""
    state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - read, not used
    return {**state, "state": {name: np.asarray(value).tolist() for name, value in state["state"].items()}}


def restore_generator(state: Mapping[str, Any]) -> None:
    """Restore what `generator_state` returned."""
    np.random.set_state(dict(state))  # noqa: NPY002 - restored for user code


def to_array(_value: object) -> np.ndarray | None:
    """None: arrays of this backend need no conversion."""
    return None


def from_array(array: np.ndarray, like: Any = None) -> Any:  # noqa: ARG001
    """The array itself."""
    return array
