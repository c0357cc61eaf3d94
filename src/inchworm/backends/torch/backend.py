"""Torch as a backend: the functions that `backends/registry` asks every backend for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from inchworm.backends.corrections import row_log_probs
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.backends.torch import gae
from inchworm.backends.torch.gae import compute_gae as compute_gae
from inchworm.backends.torch.network import Network, to_tensor, to_tensors
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import PPOConfig, TrainingConfig
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Actor, Learner, Policy
from inchworm.core.types import Advantages
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.rollout import Rollout
from inchworm.rollout.sequences import fill_invalid_rows, lane_states


def make_policy(spec: PolicySpec, weights: Mapping[str, np.ndarray] | None, seed: int) -> Policy:
    """A policy of this backend."""
    return TorchPolicy(spec, weights, seed=seed)


def policy_with_network(spec: PolicySpec, network: Any) -> Policy:
    """A policy with a network of the user's."""
    made = network if isinstance(network, nn.Module) or not callable(network) else network(spec)
    if not isinstance(made, Network):
        raise ConfigError(f"network must be an inchworm.backends.torch.network.Network, or make one from the spec; it is {made!r:.80}")
    return TorchPolicy(spec, network=made)


def make_learner(policy: Policy, config: TrainingConfig, dump_directory: str | Path | None) -> Learner:
    """The learner of a policy."""
    from inchworm.backends.torch.learner import PPOOptimizer  # acting does not need it

    run = config.run
    return PPOOptimizer(
        policy, config.ppo, device=run.device, seed=run.seed, total_timesteps=run.total_timesteps, dump_directory=dump_directory
    )


def compute_advantages(policy: Policy, rollout: Rollout, config: PPOConfig, log_ratios: np.ndarray | None = None) -> Advantages:
    """The advantages of a rollout of NumPy arrays, as NumPy arrays."""
    device = _device_of(policy)
    ratios = None if log_ratios is None else to_tensor(log_ratios, device)
    result = gae.compute_advantages(policy, fill_invalid_rows(rollout).map(partial(to_tensor, device=device)), config, ratios)
    return Advantages(*[tensor.cpu().numpy() for tensor in (result.values, result.next_values, result.advantages, result.returns)])


def log_probs(policy: Policy, rollout: Rollout, config: PPOConfig) -> np.ndarray:
    """The log-probs [T, B] of a rollout's actions under the policy, evaluated as it acts: without dropout, and changing nothing."""
    device = _device_of(policy)
    on_device = replace(fill_invalid_rows(rollout), global_state=()).map(partial(to_tensor, device=device))
    shared = to_tensors(lane_states(rollout), device)
    with torch.no_grad():
        found: np.ndarray = row_log_probs(policy, on_device, config, shared).cpu().numpy()
    return found


def _device_of(policy: Policy) -> torch.device:
    return next(iter(policy.parameters())).device if isinstance(policy, torch.nn.Module) else torch.device("cpu")


def acting_policy(policy: Policy) -> Actor:
    """A NumPy copy where the network is built in and has no convolutions, which acts faster; else the policy itself."""
    if isinstance(policy, TorchPolicy) and policy.builtin and not policy.spec.observations.images:
        return NumpyPolicy(policy.spec, policy.get_weights())
    return policy


def make_native_collector(policy: Any, env: Any, *, seed: int, sequence_length: int) -> Any | None:
    """A `DeviceCollector` for a simulator on a device; else None."""
    from inchworm.backends.torch.device_collector import DeviceCollector
    from inchworm.backends.torch.device_env import DeviceVectorEnv

    if not isinstance(env, DeviceVectorEnv) or not isinstance(policy, TorchPolicy):
        return None
    return DeviceCollector(env, policy, seed=seed, sequence_length=sequence_length)


def join_ranks(timeout: float) -> Any:
    """This process's place among those that torchrun or Ray Train has started."""
    from inchworm.backends.torch.distributed import join_ranks

    return join_ranks(timeout)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Use `count` CPU threads inside, and as many as before outside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def num_threads() -> int | None:
    """The number of CPU threads of one operation."""
    return torch.get_num_threads()


def cpu_capability() -> str | None:
    """The vector instructions that torch uses on this processor."""
    return str(torch.backends.cpu.get_cpu_capability())


def generator_state() -> str:
    """The state of torch's CPU generator, as hexadecimal text; user code may draw from it."""
    return torch.get_rng_state().numpy().tobytes().hex()


def restore_generator(state: str) -> None:
    """Restore what `generator_state` returned."""
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))


def to_array(value: object) -> np.ndarray | None:
    """A copy of a tensor as an array; None for anything else."""
    return value.detach().cpu().numpy().copy() if isinstance(value, torch.Tensor) else None


def from_array(array: np.ndarray, like: Any = None) -> torch.Tensor:
    """A copy of an array as a tensor, on the device of `like`."""
    tensor = torch.from_numpy(np.array(array))
    return tensor if like is None else tensor.to(like.device)


def checking() -> ModuleType:
    """The functions that `check_policy` needs."""
    from inchworm.backends.torch import checking

    return checking


def exporting() -> ModuleType:
    """The functions that write a policy as a graph."""
    from inchworm.backends.torch import export

    return export
