"""Serves `check_policy` with what needs torch: a rollout evaluated, its gradients, weights disturbed, global streams put back."""

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
from inchworm.core.types import Advantages, Evaluation, Minibatch
from inchworm.rollout.rollout import Rollout
from inchworm.rollout.sequences import fill_invalid_rows

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """What a policy says of a rollout, each [T, B] but the last, as NumPy arrays."""

    log_probs: np.ndarray
    entropy: np.ndarray
    values: np.ndarray
    value_scale: float


class GlobalStreams:
    """The process's global random streams as they stand now; `replayed` calls something with them, and puts them back."""

    def __init__(self) -> None:
        self._saved = (np.random.get_state(), random.getstate(), torch.random.get_rng_state())  # noqa: NPY002 - the streams of others, only looked at

    def replayed(self, action: Callable[[], Result]) -> Result:
        """The action's result from here; afterwards the streams stand here again."""
        self._put_back()
        try:
            return action()
        finally:
            self._put_back()

    def _put_back(self) -> None:
        numpy_state, python_state, torch_state = self._saved
        np.random.set_state(numpy_state)  # noqa: NPY002 - and put back
        random.setstate(python_state)
        torch.random.set_rng_state(torch_state)


def is_module(policy: Any) -> bool:
    """Whether torch's optimisers can learn it."""
    return isinstance(policy, nn.Module)


def minibatch_of(policy: nn.Module, rollout: Rollout, length: int) -> Minibatch:
    """The rollout, whose memory was recorded at every row, as [L, N] sequences of tensors."""
    whole = _on_device(policy, rollout)
    nothing = torch.zeros_like(whole.rewards)
    return sequences_of(whole, Advantages(nothing, nothing, nothing, nothing), length, successors=False)


def _on_device(policy: nn.Module, rollout: Rollout) -> Rollout:
    return fill_invalid_rows(rollout).map(partial(to_tensor, device=_device(policy)))


def _device(policy: nn.Module) -> torch.device:
    return next((parameter.device for parameter in policy.parameters()), torch.device("cpu"))


def faults_of_evaluation(policy: Any, rollout: Rollout) -> list[str]:
    """What is wrong with the form of `evaluate`'s and `value`'s answers."""
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
        faults += _faults_of(policy.value(*_critic_input(policy, rollout)), "value's result", (length, lanes))
    return faults


def _critic_input(policy: nn.Module, rollout: Rollout) -> tuple[Any, Any, Any]:
    whole = _on_device(policy, rollout)
    return whole.observations, optree.tree_map(lambda leaf: leaf[0], whole.policy_state), whole.episode_starts


def _faults_of(part: Any, what: str, shape: tuple[int, int]) -> list[str]:
    if not isinstance(part, Tensor) or tuple(part.shape) != shape:
        found = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
        return [f"{what} must be a tensor [L, N], here {list(shape)}, not {found}"]
    return [] if bool(torch.isfinite(part).all()) else [f"{what} are not finite"]


def evaluated(policy: Any, rollout: Rollout, length: int | None = None, *, gradients: bool = False) -> Evaluated:
    """The policy's `evaluate` on the rollout cut into sequences, back in its rows [T, B]."""
    steps, lanes = rollout.rewards.shape
    length = steps if length is None else length
    with torch.set_grad_enabled(gradients):
        evaluation = policy.evaluate(minibatch_of(policy, rollout, length))
    logs, entropy, values = (_in_rows(part, steps, lanes) for part in (evaluation.log_probs, evaluation.entropy, evaluation.values))
    return Evaluated(logs, entropy, values, float(torch.as_tensor(evaluation.value_scale).detach()))


def _in_rows(part: Tensor, steps: int, lanes: int) -> np.ndarray:
    """[L, N] -> [T, B]: column `chunk * B + lane` holds the rows of one chunk."""
    length = part.shape[0]
    by_chunk = part.detach().cpu().numpy().reshape(length, -1, lanes).swapaxes(0, 1)  # [T/L, L, B]
    rows: np.ndarray = by_chunk.reshape(-1, lanes)[:steps]
    return rows


def critic_values(policy: Any, rollout: Rollout) -> np.ndarray:
    """The critic on the rollout as learn asks it, [T, B]."""
    values: np.ndarray = compute_advantages(policy, _on_device(policy, rollout), PPOConfig()).values.cpu().numpy()
    return values


def parameter_gradients(policy: Any, rollout: Rollout, length: int, rows: slice, *, seed: int = 0) -> dict[str, np.ndarray | None]:
    """Of a random sum of everything that `evaluate` says of some rows of each sequence; None where a parameter has no part in it."""
    evaluation = policy.evaluate(minibatch_of(policy, rollout, length))
    parts = [part[rows] for part in (evaluation.log_probs, evaluation.entropy, evaluation.values)]
    rng = np.random.default_rng(seed)
    total = torch.stack([(part * torch.from_numpy(rng.uniform(0.5, 1.5, part.shape)).to(part)).sum() for part in parts]).sum()
    parameters = trainable(policy)
    gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return {name: None if gradient is None else gradient.cpu().numpy() for name, gradient in zip(parameters, gradients)}


def tensors(policy: nn.Module) -> dict[str, np.ndarray]:
    """Copies of every parameter and buffer."""
    named = [*policy.named_parameters(), *policy.named_buffers()]
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in named}


def disturb(policy: nn.Module) -> None:
    """Move every parameter that learns, as an optimiser would: in place."""
    with torch.no_grad():
        for parameter in trainable(policy).values():
            parameter.add_(0.1 + 0.1 * parameter.abs())


def exercise(policy: Any, rollout: Rollout) -> None:
    """What moves in training besides the parameters: evaluate with gradients, and the statistics, twice."""
    length = rollout.rewards.shape[0]
    returns = torch.from_numpy(np.arange(rollout.rewards.size, dtype=np.float32).reshape(rollout.rewards.shape) / 7 - 1)
    for _ in range(2):
        policy.evaluate(minibatch_of(policy, rollout, length))
        policy.update_statistics(rollout, returns)
