"""Step 9 of 9: the gradient steps that draw a policy up to a rollout; after the last epoch its statistics move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import optree
import torch
from torch import Tensor, nn

from inchworm.backends.custom_losses import CustomLoss
from inchworm.backends.fitting import check_global_state, check_memory
from inchworm.backends.guard import Table
from inchworm.backends.learner import BaseLearner
from inchworm.backends.numpy.loss import LossCoefficients
from inchworm.backends.torch.adam import Adam
from inchworm.backends.torch.compiled import CompiledStep
from inchworm.backends.torch.encoding import to_tensor, to_tensors
from inchworm.backends.torch.gae import compute_advantages
from inchworm.backends.torch.loss import normalize, ppo_loss
from inchworm.backends.torch.minibatches import PackedSequences, sequences_of
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.backends.torch.step import ForeignStep, MinibatchStep, OwnStep, Row
from inchworm.config import PPOConfig
from inchworm.errors import ConfigError
from inchworm.protocols import Policy
from inchworm.rollout.living import harmless
from inchworm.rollout.rollout import Rollout
from inchworm.rollout.sequences import split_into_sequences
from inchworm.types import Advantages, Array, Minibatch, Seam, Tree


class PPOOptimizer(BaseLearner):
    """Learns a torch policy from rollouts, whoever collected them; never touches an environment or its input.

    `policy` is a `TorchPolicy`, or any `torch.nn.Module` that keeps the `Policy` protocol. `total_timesteps` is what schedules
    run towards; it is only needed when one is not constant.
    """

    def __init__(
        self,
        policy: Any,
        config: PPOConfig | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        device: str | torch.device | None = None,
        seed: int = 0,
        total_timesteps: int | None = None,
        dump_directory: str | Path | None = None,
    ) -> None:
        super().__init__(config, seed=seed, total_timesteps=total_timesteps, dump_directory=dump_directory)
        if not isinstance(policy, nn.Module):
            raise ConfigError(f"the torch backend learns torch.nn.Module policies; {type(policy).__name__} is none")
        self.policy = cast(Policy, policy)
        self._builtin = policy if isinstance(policy, TorchPolicy) else None  # whose spaces and statistics are known
        self.device = pick_device(device)
        policy.to(self.device)
        parameters = trainable(policy)
        self._adam = None if optimizer is not None else self._make_adam(parameters)
        self.optimizer: Adam | torch.optim.Optimizer = self._adam or cast(torch.optim.Optimizer, optimizer)
        self._initial_rates = [] if optimizer is None else [float(group["lr"]) for group in optimizer.param_groups]
        self._step = self._make_step(list(parameters.values()))
        self._compiled = self._make_compiled() if self.config.compile == "on" else None

    def compute_ppo_loss(
        self,
        observations: Tree,
        actions: Tree,
        log_probs: Array,
        advantages: Array,
        returns: Array,
        values: Array,
        *,
        valid: Array | None = None,
        episode_starts: Array | None = None,
        policy_state: Tree = (),
        global_state: Tree = (),
    ) -> dict[str, Tensor]:
        """The loss terms of [N, …] samples (or [L, N, …] sequences) under the current weights, `loss` with its gradient graph.

        Advantages are taken as they are given: normalise them before, if you want that.
        """
        flat = np.ndim(log_probs) == 1
        fields_given = (observations, actions, log_probs, advantages, returns, values)
        trees = [to_tensors(tree, self.device) for tree in fields_given]
        shape = np.shape(log_probs)
        trees.append(to_tensor(np.ones(shape, bool) if valid is None else valid, self.device))
        trees.append(to_tensor(np.zeros(shape, bool) if episode_starts is None else episode_starts, self.device))
        trees.append(to_tensors(global_state, self.device))
        if flat:
            trees = [to_sequences(tree) for tree in trees]
        names = ("observations", "actions", "log_probs", "advantages", "returns", "values", "valid", "episode_starts", "global_state")
        minibatch = Minibatch(**dict(zip(names, trees)), policy_state=to_tensors(policy_state, self.device))
        return ppo_loss(self.policy.evaluate(minibatch), minibatch, self._coefficients(), minibatch.valid.sum())

    def _look(self, rollout: Rollout) -> tuple[Rollout, Advantages]:
        on_device = harmless(rollout).map(partial(to_tensor, device=self.device))  # the one transfer
        return on_device, compute_advantages(self.policy, on_device, self.config)

    def _sequences(self, rollout: Rollout, advantages: Advantages, length: int, *, successors: bool) -> PackedSequences:
        shared = split_into_sequences(rollout.global_state, length)  # [L, N / lanes per copy, *]
        own = replace(rollout, global_state=())
        return PackedSequences(sequences_of(own, self._scaled(advantages, rollout.valid), length, successors=successors), shared)

    def _scaled(self, advantages: Advantages, valid: Tensor) -> Advantages:
        if self.config.normalize_advantages != "batch":
            return advantages
        scaled = normalize(advantages.advantages, valid)
        return Advantages(advantages.values, advantages.next_values, scaled, advantages.returns)

    def _shuffled(self, sequences: PackedSequences, num_minibatches: int, permutation: np.ndarray) -> list[Minibatch]:
        normalized = self.config.normalize_advantages == "minibatch" and self._compiled is None  # else it is part of the graph
        return sequences.shuffled(num_minibatches, permutation, normalized=normalized)

    def _steps(
        self, minibatches: Sequence[Minibatch], coefficients: LossCoefficients, rate_factor: float, losses: tuple[CustomLoss, ...]
    ) -> Table:
        if self._adam is not None:
            self._adam.learning_rate = self.config.learning_rate * rate_factor
        for group, initial in zip(self._foreign_groups(), self._initial_rates):
            group["lr"] = initial * rate_factor
        if self._compiled is not None:
            refuse_losses(losses)
            return self._compiled.run(minibatches, coefficients)
        return as_table([self._step(minibatch, coefficients, losses) for minibatch in minibatches])

    def _ratio_error(self, minibatch: Minibatch) -> float:
        with torch.no_grad():
            ratio = (self.policy.evaluate(minibatch).log_probs - minibatch.log_probs).exp()
            return float(((ratio - 1).abs() * minibatch.valid).max().nan_to_num(nan=torch.finfo(ratio.dtype).max))

    def _to_host(self, array: Tensor) -> np.ndarray:
        host: np.ndarray = array.cpu().numpy()
        return host

    def _statistics_pending(self) -> bool:
        return self._builtin is not None and self._builtin.statistics.pending

    def _validate(self, rollout: Rollout) -> None:
        if self._builtin is not None:
            rollout.validate(self._builtin.spec.observation_space, self._builtin.spec.action_space)
            check_memory(self._builtin.spec, rollout)
            check_global_state(self._builtin.spec, rollout)
        else:
            rollout.validate()

    def seams(self) -> list[Seam]:
        """Forward, backward and step are functions of their own, unless they are one graph."""
        if self._compiled is not None:
            return [*super().seams(), ("compiled step", self._compiled, "run")]
        step = self._step
        inside = [
            ("forward", step, "_forward"),
            ("backward", step, "_backward"),
            ("optimiser", step, "_clip"),
            ("optimiser", step, "_move_unless"),
        ]
        return [*super().seams(), *inside]

    def _moments(self) -> dict[str, Any]:
        packed = self.optimizer.state_dict()
        if self._adam is not None:
            return packed
        return {str(index): {name: _to_plain(value) for name, value in entry.items()} for index, entry in packed["state"].items()}

    def _load_moments(self, moments: Mapping[str, Any]) -> None:
        if self._adam is not None:
            self._adam.load_state_dict(moments)
            return
        groups = self.optimizer.state_dict()["param_groups"]
        state = {int(index): {name: _from_plain(value) for name, value in entry.items()} for index, entry in moments.items()}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _make_adam(self, parameters: Mapping[str, nn.Parameter]) -> Adam:
        config = self.config
        return Adam(parameters, learning_rate=config.learning_rate, eps=config.adam_eps, weight_decay=config.weight_decay)

    def _make_step(self, parameters: list[nn.Parameter]) -> MinibatchStep:
        if self._adam is not None:
            return OwnStep(self.policy, self.config, self._adam)
        return ForeignStep(self.policy, self.config, parameters, cast(torch.optim.Optimizer, self.optimizer))

    def _make_compiled(self) -> CompiledStep:
        obstacle = None
        if self._adam is None:
            obstacle = "an optimizer that was brought along"
        elif type(self.policy) is not TorchPolicy or not self.policy.builtin:  # a subclass may evaluate as it likes
            obstacle = "a network or policy that was brought along"
        elif self.policy.spec.memory is not None:
            obstacle = f"a policy with memory (policy.kind={self.policy.spec.config.kind})"
        elif self.config.gradient_accumulation > 1:
            obstacle = f"ppo.gradient_accumulation={self.config.gradient_accumulation}"
        if obstacle is not None:
            raise ConfigError(f"ppo.compile=on compiles built-in policies with the built-in optimiser, not {obstacle}; set ppo.compile=off")
        return CompiledStep(cast(TorchPolicy, self.policy), self.config, cast(Adam, self._adam))

    def _foreign_groups(self) -> list[dict[str, Any]]:
        return [] if isinstance(self.optimizer, Adam) else self.optimizer.param_groups


def refuse_losses(losses: Sequence[CustomLoss]) -> None:
    """A compiled step knows its own loss only."""
    if losses:
        raise ConfigError(f"ppo.compile=on compiles PPO's own loss, not the custom loss {losses[0].name}; set ppo.compile=off")


def trainable(policy: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that learn, by the names of the policy's weights."""
    name_of = policy.public_name if isinstance(policy, TorchPolicy) else str
    return {name_of(name): p for name, p in policy.named_parameters() if p.requires_grad and p.numel()}


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device to learn on: the one given, or cuda if there is one."""
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"run.device={device!r} cannot be used here ({str(error).splitlines()[0]}); use cpu or auto") from None
    return chosen


def to_sequences(tree: Tree) -> Tree:
    """[N, …] as sequences of one step, [1, N, …]."""
    return optree.tree_map(lambda leaf: leaf[None], tree)


def as_table(rows: Sequence[Row]) -> Table:
    """The rows of an epoch as columns [n], read from the device at once."""
    flags = ("bad", "empty")
    names = [name for name in rows[0] if name not in flags]
    numbers = torch.stack([row[name] for row in rows for name in names]).double()
    flagged = torch.stack([row[name] for row in rows for name in flags]).double()
    whole = torch.cat([numbers, flagged]).cpu().numpy()
    columns = np.hstack([part.reshape(len(rows), -1) for part in np.split(whole, [len(numbers)])])  # [n, names]
    return dict(zip((*names, *flags), columns.T))


def _to_plain(value: Any) -> Any:
    return value.detach().cpu().numpy().copy() if isinstance(value, Tensor) else value


def _from_plain(value: Any) -> Any:
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value
