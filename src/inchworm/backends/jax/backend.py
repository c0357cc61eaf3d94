"""JAX as a backend: the functions that `backends/registry` asks every backend for, and the persistent compilation cache."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from inchworm.backends.corrections import row_log_probs
from inchworm.backends.jax import gae
from inchworm.backends.jax.gae import Estimates
from inchworm.backends.jax.native import JaxVectorEnv, why_not_native
from inchworm.backends.jax.network import Params, Scales
from inchworm.backends.jax.policy import JaxPolicy, StaticSpec
from inchworm.backends.jax.samples import Steps, steps_of
from inchworm.backends.jax.worlds import WORLDS, is_of_package, make_jax_env
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.config.sections import EnvConfig, PPOConfig, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Actor, Learner, Policy, VectorEnv
from inchworm.core.types import Advantages
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.rollout import Rollout
from inchworm.rollout.sequences import fill_invalid_rows

CACHE_VARIABLE = "INCHWORM_JAX_CACHE"
"""Environment variable with the directory of compiled programs; `off` keeps none."""
NO_NETWORKS = "networks of users are trained with torch; use run.backend=torch"


@functools.cache
def use_compilation_cache() -> None:
    """Keep compiled programs on disk, in the user's cache directory, unless the user has chosen a directory or none.

    JAX stores only what takes a second to compile; the programs of small networks are stored, too.
    """
    chosen, settings = os.environ.get(CACHE_VARIABLE, ""), cast(Any, jax.config)
    if chosen == "off" or settings.jax_compilation_cache_dir is not None:
        return
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    settings.update("jax_compilation_cache_dir", chosen or str(Path(base) / "inchworm" / "jax"))
    settings.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    settings.update("jax_persistent_cache_min_entry_size_bytes", 0)


def make_policy(spec: PolicySpec, weights: Mapping[str, np.ndarray] | None, seed: int) -> Policy:
    """A policy of this backend."""
    use_compilation_cache()
    return JaxPolicy(spec, weights, seed=seed)


def policy_with_network(_spec: PolicySpec, _network: Any) -> Policy:
    """Refuse: this backend trains built-in networks."""
    raise ConfigError(NO_NETWORKS)


def make_learner(policy: Policy, config: TrainingConfig, dump_directory: str | Path | None) -> Learner:
    """The learner of a policy."""
    from inchworm.backends.jax.learner import JaxOptimizer  # acting does not need it

    run = config.run
    return JaxOptimizer(
        policy, config.ppo, device=run.device, seed=run.seed, total_timesteps=run.total_timesteps, dump_directory=dump_directory
    )


@functools.partial(jax.jit, static_argnums=(0, 4))
def _estimates(static: StaticSpec, params: Params, scales: Scales, steps: Steps, length: int, discounts: Any) -> Estimates:
    return gae.compute_advantages(static.spec, params, scales, steps, length, *(discounts[place] for place in range(3)))


def compute_advantages(policy: Policy, rollout: Rollout, config: PPOConfig, log_ratios: np.ndarray | None = None) -> Advantages:
    """The advantages of a rollout of NumPy arrays, as NumPy arrays."""
    if not isinstance(policy, JaxPolicy):
        raise ConfigError(f"the jax backend reads policies of its own, not {type(policy).__name__}")
    length = config.sequence_length_for(rollout.num_steps, memory=policy.spec.memory is not None)
    with policy.precision():
        steps = steps_of(policy.spec, fill_invalid_rows(rollout), length)._replace(log_ratios=() if log_ratios is None else log_ratios)
        discounts = np.array([config.gamma, config.gae_lambda, config.vtrace_clip], policy.dtype)
        found = _estimates(StaticSpec(policy.spec), policy.params, policy.scales, steps, length, discounts)
    return Advantages(*[np.array(part) for part in found])


def log_probs(policy: Policy, rollout: Rollout, config: PPOConfig) -> np.ndarray:
    """The log-probs [T, B] of a rollout's actions under the policy."""
    return np.asarray(row_log_probs(policy, fill_invalid_rows(rollout), config))


_compute_gae = jax.jit(gae.compute_gae)


def compute_gae(rewards: Any, values: Any, next_values: Any, terminated: Any, truncated: Any, gamma: float, gae_lambda: float) -> Any:
    """Generalised advantage estimates, each argument and the result [T, B]."""
    return _compute_gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda)


def acting_policy(policy: Policy) -> Actor:
    """A NumPy copy where the network has no convolutions, which acts faster; else the policy itself."""
    if isinstance(policy, JaxPolicy) and not policy.spec.observations.images:
        return NumpyPolicy(policy.spec, policy.get_weights())
    return policy


def to_array(value: object) -> np.ndarray | None:
    """A copy of a JAX array as a NumPy array; None for anything else."""
    return np.array(value) if isinstance(value, jax.Array) else None


def from_array(array: np.ndarray, like: Any = None) -> jax.Array:  # noqa: ARG001
    """A copy of an array as a JAX array; 64 bits become 32 unless JAX is set to keep them."""
    return jnp.array(array)


def checking() -> ModuleType:
    """Refuse: `check_policy` checks networks of users, which torch trains."""
    raise ConfigError(NO_NETWORKS)


def native_choice(config: EnvConfig) -> tuple[bool, str]:
    """Whether the copies of a config are stepped by JAX, and the reason."""
    if is_of_package(config.id):
        return True, ""
    if config.id not in WORLDS:
        return False, ""
    how = f"the JAX-native {config.id}, which has the same dynamics and compiles together with learning"
    if not (config.native and config.jax_native):
        name = "jax_native" if config.native else "native"
        return False, f"stepping {config.id} on the host, because env.{name}=false; true uses {how}"
    why_not = why_not_native(config) or (f"env.kwargs={config.kwargs}" if config.kwargs else None)
    if why_not is not None:
        return False, f"stepping {config.id} on the host, because {why_not}; without that, JAX would use {how}"
    return True, f"using {how}; env.jax_native=false steps Gymnasium's on the host"


def make_native_env(config: EnvConfig, **options: Any) -> VectorEnv:
    """The copies of a config that JAX steps."""
    return make_jax_env(config, **options)


def make_native_collector(policy: Policy, env: VectorEnv, *, seed: int, sequence_length: int) -> Any | None:
    """A `ScanCollector` where JAX steps the environments; else None."""
    from inchworm.backends.jax.scan_collector import ScanCollector  # which imports the registry

    if not isinstance(env, JaxVectorEnv) or not isinstance(policy, JaxPolicy):
        return None
    return ScanCollector(env, policy, seed=seed, sequence_length=sequence_length)


def prefers_one_program() -> bool:
    """Whether `vmap` trains several seeds faster than processes: not on a CPU, where it gains nothing, and processes use all cores."""
    return jax.default_backend() != "cpu"


def fuse(policy: Policy, collector: Any, learner: Any, config: TrainingConfig) -> Any | str:
    """Collect and learn as one compiled program; or why not."""
    from inchworm.backends.jax.fused import FusedTraining, why_not_fused  # not needed for acting

    why_not = why_not_fused(policy, collector, learner)
    return FusedTraining(collector, learner, config) if why_not is None else why_not
