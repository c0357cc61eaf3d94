"""Serves the loop: which backend acts, learns and looks at a policy. The only place that chooses; nothing heavy is imported before it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import threadpoolctl

from inchworm.backends.numpy.gae import compute_advantages as compute_advantages_numpy
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.config.sections import PPOConfig, TrainingConfig
from inchworm.core.protocols import Actor, Learner, Policy
from inchworm.core.types import Advantages
from inchworm.policy.composite import CompositePolicy, weights_of
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.rollout import Rollout

Backend: TypeAlias = Literal["torch", "numpy"]


def make_policy(spec: PolicySpec, *, seed: int = 0, weights: Mapping[str, np.ndarray] | None = None, backend: Backend = "torch") -> Policy:
    """A policy that can be trained, from its spec."""
    if backend == "numpy":
        return NumpyPolicy(spec, weights, seed=seed)
    from inchworm.backends.torch.policy import TorchPolicy

    return TorchPolicy(spec, weights, seed=seed)


def acting_policy(policy: Actor) -> Actor:
    """Who acts for a policy while it learns: a NumPy twin where the network is small enough to be one, else the policy itself."""
    if isinstance(policy, CompositePolicy):
        return policy.replaced({name: acting_policy(part) for name, part in policy.policies.items()})
    if not isinstance(policy, Policy) or isinstance(policy, NumpyPolicy):
        return policy
    from inchworm.backends.torch.policy import TorchPolicy

    if isinstance(policy, TorchPolicy) and policy.builtin and not policy.spec.observations.images:
        return NumpyPolicy(policy.spec, policy.get_weights())
    return policy


def is_builtin(policy: Actor) -> bool:
    """Whether a policy is fully described by its spec and weights, and so has a policy file."""
    if isinstance(policy, CompositePolicy):  # its parts may be
        return False
    return isinstance(policy, NumpyPolicy) or (isinstance(policy, Policy) and _is_builtin_torch(policy))


def _is_builtin_torch(policy: Policy) -> bool:
    from inchworm.backends.torch.policy import TorchPolicy

    return isinstance(policy, TorchPolicy) and policy.builtin


def policy_files(policy: Actor, name: str, weights: Mapping[str, np.ndarray]) -> dict[str, tuple[PolicySpec, Mapping[str, np.ndarray]]]:
    """The policy files that describe a policy, by file name: one for a built-in policy, one for each built-in part of a composite."""
    if isinstance(policy, CompositePolicy):
        stem, _, kind = name.rpartition(".")
        parts = {f"{stem}-{part}.{kind}": (part, learned) for part, learned in policy.learned.items() if is_builtin(learned)}
        return {file: (_spec_of(learned), weights_of(weights, part)) for file, (part, learned) in parts.items()}
    return {name: (_spec_of(policy), weights)} if is_builtin(policy) else {}


def describe_policy(policy: Actor) -> dict[str, Any] | None:
    """A policy's architecture as plain data, as far as it is built in; None if it is not."""
    if isinstance(policy, CompositePolicy):
        return policy.to_dict(describe_policy)
    return _spec_of(policy).to_dict() if is_builtin(policy) else None


def _spec_of(policy: Any) -> PolicySpec:
    spec: PolicySpec = policy.spec
    return spec


def make_learner(policy: Policy, config: TrainingConfig, *, dump_directory: str | Path | None = None) -> Learner:
    """The learner of a policy, with the run's seed, device and length."""
    if isinstance(policy, CompositePolicy):
        return _composite_learner(policy, config, dump_directory)
    run = config.run
    known: dict[str, Any] = {"seed": run.seed, "total_timesteps": run.total_timesteps, "dump_directory": dump_directory}
    if run.backend == "numpy":
        from inchworm.backends.numpy.learner import NumpyOptimizer

        return NumpyOptimizer(policy, config.ppo, **known)
    from inchworm.backends.torch.learner import PPOOptimizer

    return PPOOptimizer(policy, config.ppo, device=run.device, **known)


def _composite_learner(policy: CompositePolicy, config: TrainingConfig, dump_directory: str | Path | None) -> Learner:
    from inchworm.backends.composite import CompositeLearner

    learners: dict[str, Any] = {}
    for name in policy.trainable:
        own = config.replace(ppo=config.ppo.replace(**policy.ppo.get(name, {})))
        learners[name] = make_learner(policy.learned[name], own, dump_directory=dump_directory)
    return CompositeLearner(policy, learners)


def compute_advantages(policy: Policy, rollout: Rollout, config: PPOConfig) -> Advantages:
    """The current critic's view of a rollout: values, successors' values, advantages and returns, each [T, B], as NumPy arrays."""
    if isinstance(policy, CompositePolicy):
        from inchworm.backends.composite import composite_advantages

        return composite_advantages(policy, rollout, lambda part, own: compute_advantages(part, own, config))
    if isinstance(policy, NumpyPolicy):
        return compute_advantages_numpy(policy, rollout, config)
    from inchworm.backends.torch.gae import advantages_as_arrays

    return advantages_as_arrays(policy, rollout, config)


@contextlib.contextmanager
def learning_threads(threads: int, backend: Backend = "torch") -> Iterator[None]:
    """So many CPU threads for torch inside, and as before outside; 0 changes nothing. The number changes the last bits of a result.

    NumPy's matrices always get one: those of small networks lose by being shared, and so they have the same bits everywhere.
    """
    if not threads:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(_matrix_library().limit(limits=1))
        if backend == "torch":
            from inchworm.backends.torch.learner import torch_threads

            stack.enter_context(torch_threads(threads))
        yield


@functools.cache
def _matrix_library() -> threadpoolctl.ThreadpoolController:
    """NumPy's matrix library, looked for once: that takes a millisecond."""
    return threadpoolctl.ThreadpoolController().select(user_api="blas")
