"""What `check_policy` needs of torch: evaluate a rollout, take gradients, perturb weights, restore global generators."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import optree
import torch
from torch import Tensor, nn

from inchworm.backends.torch.gae import compute_advantages
from inchworm.backends.torch.learner import sequences_of, trainable
from inchworm.backends.torch.network import to_tensor
from inchworm.config.sections import PPOConfig
from inchworm.core.protocols import reads_global_state
from inchworm.core.types import Advantages, Evaluation, Minibatch, Tree
from inchworm.rollout.rollout import Rollout
from inchworm.rollout.sequences import fill_invalid_rows, join_sequences

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """A policy's evaluation of a rollout, each [T, B] but the last, as NumPy arrays."""

    log_probs: np.ndarray
    entropy: np.ndarray
    values: np.ndarray
    value_scale: float


class GlobalStreams:
    """A snapshot of the process's global random generators; `replayed` calls a function from it, and restores it afterwards."""

    def __init__(self) -> None:
        self._saved = (np.random.get_state(), random.getstate(), torch.random.get_rng_state())  # noqa: NPY002 - user code may use it

    def replayed(self, action: Callable[[], Result]) -> Result:
        """Call the action from the snapshot, and restore the snapshot afterwards."""
        self._put_back()
        try:
            return action()
        finally:
            self._put_back()

    def _put_back(self) -> None:
        numpy_state, python_state, torch_state = self._saved
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)
        torch.random.set_rng_state(torch_state)


def is_module(policy: Any) -> bool:
    """Whether torch can train it."""
    return isinstance(policy, nn.Module)


def minibatch_of(policy: nn.Module, rollout: Rollout, length: int) -> Minibatch:
    """The rollout, whose memory was recorded at every row, as [L, N] sequences of tensors."""
    whole = _on_device(policy, rollout)
    nothing = torch.zeros_like(whole.rewards)
    return sequences_of(whole, Advantages(nothing, nothing, nothing, nothing), length, successors=False)


def _on_device(policy: nn.Module, rollout: Rollout) -> Rollout:
    device = next((parameter.device for parameter in policy.parameters()), torch.device("cpu"))
    return fill_invalid_rows(rollout).map(partial(to_tensor, device=device))


def faults_of_evaluation(policy: Any, rollout: Rollout) -> list[str]:
    """What is wrong with the shapes and types that `evaluate` and `value` return."""
    length, lanes = rollout.rewards.shape
    evaluation = policy.evaluate(minibatch_of(policy, rollout, length))
    if not isinstance(evaluation, Evaluation):
        return [f"evaluate must return Evaluation(log_probs, entropy, values, value_scale), not {type(evaluation).__name__}"]
    faults = []
    for name in ("log_probs", "entropy", "values"):
        faults += _faults_of(getattr(evaluation, name), f"evaluate's {name}", (length, lanes))
        part = getattr(evaluation, name)
        if isinstance(part, Tensor) and not part.requires_grad and name != "entropy":
            faults.append(f"evaluate's {name} have no gradient; leave out no_grad and detach there")
    scale = torch.as_tensor(evaluation.value_scale)
    if scale.numel() != 1 or not float(scale.detach()) > 0:
        faults.append(f"evaluate's value_scale must be one number above 0, such as 1.0, not {evaluation.value_scale!r}")
    if not reads_global_state(policy):  # a central critic takes more than these
        whole = _on_device(policy, rollout)
        first_state: Tree = optree.tree_map(lambda leaf: leaf[0], whole.policy_state)
        faults += _faults_of(policy.value(whole.observations, first_state, whole.episode_starts), "value's result", (length, lanes))
    return faults


def _faults_of(part: Any, what: str, shape: tuple[int, int]) -> list[str]:
    if not isinstance(part, Tensor) or tuple(part.shape) != shape:
        found = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
        return [f"{what} must be a tensor [L, N], here {list(shape)}, not {found}"]
    return [] if bool(torch.isfinite(part).all()) else [f"{what} are not finite"]


def evaluated(policy: Any, rollout: Rollout, length: int | None = None, *, gradients: bool = False) -> Evaluated:
    """Run the policy's `evaluate` on the rollout as sequences, and return the results in its rows [T, B]."""
    steps, lanes = rollout.rewards.shape
    length = steps if length is None else length
    with torch.set_grad_enabled(gradients):
        evaluation = policy.evaluate(minibatch_of(policy, rollout, length))
    outputs = (evaluation.log_probs, evaluation.entropy, evaluation.values)
    log_probs, entropy, values = (join_sequences(part.detach().cpu().numpy(), steps, lanes) for part in outputs)
    return Evaluated(log_probs, entropy, values, float(torch.as_tensor(evaluation.value_scale).detach()))


def critic_values(policy: Any, rollout: Rollout) -> np.ndarray:
    """The values [T, B] of the rollout as learning computes them."""
    values: np.ndarray = compute_advantages(policy, _on_device(policy, rollout), PPOConfig()).values.cpu().numpy()
    return values


def parameter_gradients(policy: Any, rollout: Rollout, length: int, rows: slice) -> dict[str, np.ndarray | None]:
    """The gradients of a random sum of `evaluate`'s outputs in some rows of each sequence; None for a parameter that is not used."""
    evaluation = policy.evaluate(minibatch_of(policy, rollout, length))
    parts = [part[rows] for part in (evaluation.log_probs, evaluation.entropy, evaluation.values)]
    rng = np.random.default_rng(0)
    total = torch.stack([(part * torch.from_numpy(rng.uniform(0.5, 1.5, part.shape)).to(part)).sum() for part in parts]).sum()
    parameters = trainable(policy)
    gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return {name: None if gradient is None else gradient.cpu().numpy() for name, gradient in zip(parameters, gradients)}


def tensors(policy: nn.Module) -> dict[str, np.ndarray]:
    """Copies of every parameter and buffer."""
    named = [*policy.named_parameters(), *policy.named_buffers()]
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in named}


def disturb(policy: nn.Module) -> None:
    """Change every trainable parameter in place, as an optimiser would."""
    with torch.no_grad():
        for parameter in trainable(policy).values():
            parameter.add_(0.1 + 0.1 * parameter.abs())


def exercise(policy: Any, rollout: Rollout) -> None:
    """Do what changes a policy in training besides the parameters: evaluate with gradients, and update the statistics, twice."""
    length = rollout.rewards.shape[0]
    returns = torch.from_numpy(np.arange(rollout.rewards.size, dtype=np.float32).reshape(rollout.rewards.shape) / 7 - 1)
    for _ in range(2):
        policy.evaluate(minibatch_of(policy, rollout, length))
        policy.update_statistics(rollout, returns)
