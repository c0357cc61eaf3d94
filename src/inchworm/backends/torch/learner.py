"""Step 9 of 9: the gradient steps that fit a policy to a rollout.

First a rollout's minibatches, then the learner; the optimisers are in `optimizer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import optree
import torch
from torch import Tensor, nn

from inchworm.backends.custom_losses import CustomLoss, no_gradient
from inchworm.backends.learner import ALL_FROZEN, RATIO_TOLERANCE, MinibatchLearner, StepMetrics, ratio_metrics
from inchworm.backends.torch import backend
from inchworm.backends.torch.compiled import CompiledStep
from inchworm.backends.torch.distributed import TorchRanks, own_part
from inchworm.backends.torch.gae import compute_advantages
from inchworm.backends.torch.loss import normalize, ppo_loss
from inchworm.backends.torch.network import to_tensor, to_tensors
from inchworm.backends.torch.optimizer import Adam, TorchOptimizer, make_optimizer
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import PPOConfig
from inchworm.core.errors import ConfigError
from inchworm.core.protocols import Policy
from inchworm.core.spaces import PLACE, WORLD
from inchworm.core.types import Advantages, Array, Evaluation, LossCoefficients, Minibatch, ProfilePoint, Tree
from inchworm.rollout.rollout import Rollout
from inchworm.rollout.sequences import (
    fill_invalid_rows,
    lane_states,
    minibatch_fields,
    minibatch_places,
    sequence_states,
    split_into_sequences,
    split_valid,
)

PER_SEQUENCE = "policy_state"
"""The one field of a minibatch that has no time axis: [N, *mem]."""


def sequences_of(rollout: Rollout, advantages: Advantages, length: int, *, successors: bool) -> Minibatch:
    """The whole rollout as one minibatch of [L, N] sequences, in order."""
    steps = minibatch_fields(rollout, advantages, torch.where, successors=successors)
    steps["global_state"] = to_tensors(lane_states(rollout), rollout.valid.device)
    steps["context"] = rollout.context[1:]  # (index [T, B],), or () without one
    return Minibatch(
        **split_into_sequences(steps, length),
        valid=split_valid(rollout.valid, length),
        policy_state=sequence_states(rollout.policy_state, rollout.num_steps, length, rollout.state_every),
    )


class PackedSequences:
    """A rollout's sequences, packed so that an epoch gathers few arrays: all leaves [L, N] of one dtype are one array [L, N, k].

    `shared` is the global state, once per env copy, [L, N / lanes per copy, *]; each sequence gets the state of its copy. `table` is that
    of the task context, which every minibatch has as a whole, with its own part of the index.
    """

    def __init__(self, sequences: Minibatch, shared: Tree = (), table: Tree = ()) -> None:
        self.valid, self._shared, self._table = sequences.valid, shared, table
        leaves: Tree = {field.name: getattr(sequences, field.name) for field in fields(sequences)}
        self._states = leaves.pop(PER_SEQUENCE)
        flat, self._structure = optree.tree_flatten(leaves)
        kinds: dict[Any, list[int]] = {}
        for index, leaf in enumerate(flat):
            kinds.setdefault(leaf.dtype if leaf.ndim == 2 else index, []).append(index)
        self._packs = [
            (places, torch.stack([flat[index] for index in places], -1) if len(places) > 1 else flat[places[0]])
            for places in kinds.values()
        ]
        named: Any = self._structure.unflatten(range(len(flat)))
        self._valid_at, self._advantages_at = named["valid"], named["advantages"]

    def minibatches(self, chosen: np.ndarray, real: np.ndarray, *, total: Callable[[Tensor], Tensor] | None = None) -> list[Minibatch]:
        """The minibatches that hold the chosen sequences [minibatches, N]; those that are not `real` are padding and marked invalid.

        With `total`, which adds up the parts of all processes, each minibatch gets advantages of mean 0 and standard deviation 1.
        """
        count, (length, width), device = len(chosen), self.valid.shape, self.valid.device
        columns = torch.from_numpy(chosen.reshape(-1)).to(device)
        leaves: dict[int, Tensor] = {}  # [L, minibatches · N, …]
        for indices, pack in self._packs:
            packed = pack.index_select(1, columns)
            leaves |= zip(indices, packed.movedim(-1, 0).contiguous().unbind() if len(indices) > 1 else [packed])
        if not real.all():
            leaves[self._valid_at] = leaves[self._valid_at] & torch.from_numpy(np.array(real).reshape(-1)).to(device)
        if total is not None:
            advantages, valid = (leaves[index].reshape(length, count, -1) for index in (self._advantages_at, self._valid_at))
            leaves[self._advantages_at] = normalize(advantages, valid, dims=(0, 2), total=total).flatten(1)
        steps: Tree = self._structure.unflatten([leaves[index] for index in range(len(leaves))])
        if optree.tree_leaves(self._shared):
            per_copy = width // optree.tree_leaves(self._shared)[0].shape[1]
            # Column chunk * B + lane belongs to copy lane // k, whose column is chunk * B / k + lane // k.
            worlds: Tree = optree.tree_map(lambda leaf: leaf.index_select(1, columns // per_copy), self._shared)
            steps["global_state"] = {WORLD: worlds, PLACE: (columns % per_copy).repeat(length, 1)}
        states: Tree = optree.tree_map(lambda leaf: leaf[columns], self._states)
        parts = zip(_chunks(steps, count, 1), _chunks(states, count, 0))
        return [Minibatch(**with_table(chunk, self._table), policy_state=state) for chunk, state in parts]


def with_table(steps: Tree, table: Tree) -> Tree:
    """The fields of a minibatch whose `context` is (index,), with the table put before it; without a context as they are."""
    return {**steps, "context": (table, *steps["context"])} if steps["context"] else steps


def _chunks(tree: Tree, count: int, axis: int) -> list[Tree]:
    """`count` equal parts of every leaf along an axis; views, no copies."""
    leaves, structure = optree.tree_flatten(tree)
    return [structure.unflatten(part) for part in zip(*[leaf.chunk(count, axis) for leaf in leaves])] if leaves else [tree] * count


def micro_batches(minibatch: Minibatch, pieces: int) -> Iterator[Minibatch]:
    """A minibatch in `pieces` parts of whole sequences, for gradient accumulation; views, no copies."""
    if pieces == 1:
        yield minibatch
        return
    steps: Tree = {field.name: getattr(minibatch, field.name) for field in fields(minibatch)}
    states = steps.pop(PER_SEQUENCE)
    table, steps["context"] = minibatch.context[:1], minibatch.context[1:]
    width = minibatch.valid.shape[1]
    for start, stop in pairwise(np.linspace(0, width, min(pieces, width) + 1).astype(int)):
        chosen: Tree = optree.tree_map(lambda leaf, part=slice(start, stop): leaf[:, part], steps)
        yield Minibatch(
            **with_table(chosen, *table) if table else chosen,
            policy_state=optree.tree_map(lambda leaf, part=slice(start, stop): leaf[part], states),
        )


Row = dict[str, Tensor]
"""The results of one minibatch step: scalars under their metric names, and the flags `bad` and `empty`."""


class PPOOptimizer(MinibatchLearner):
    """Learns a torch policy from rollouts, wherever they were collected; never touches an environment or its input.

    `policy` is a `TorchPolicy`, or any `torch.nn.Module` that implements the `Policy` protocol. By position it is followed by the config,
    or by `optimizer`, `device` and `config`. An `optimizer` that is given is used as it is, instead of the one that the config names.
    `total_timesteps` is what schedules run towards; it is only needed when one is not constant.
    """

    takes_tensors = True

    def __init__(
        self,
        policy: Any,
        given: PPOConfig | torch.optim.Optimizer | None = None,
        device: str | torch.device | None = None,
        config: PPOConfig | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        seed: int = 0,
        total_timesteps: int | None = None,
        dump_directory: str | Path | None = None,
    ) -> None:
        if given is not None and (config if isinstance(given, PPOConfig) else optimizer) is not None:
            raise TypeError(f"PPOOptimizer got two of {type(given).__name__}, by position and by name; give one")
        if isinstance(given, PPOConfig):
            config = given
        elif given is not None:
            optimizer = given
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"PPOOptimizer needs a torch.optim.Optimizer or a PPOConfig after the policy, not {type(optimizer).__name__}; "
                "call it as PPOOptimizer(policy, optimizer, device, config) or PPOOptimizer(policy, config)"
            )
        if config is not None and not isinstance(config, PPOConfig):
            raise ConfigError(f"the config of PPOOptimizer is a PPOConfig, not {type(config).__name__}; see PPOConfig.from_dict")
        super().__init__(config, seed=seed, total_timesteps=total_timesteps, dump_directory=dump_directory)
        if not isinstance(policy, nn.Module):
            raise ConfigError(f"the torch backend learns torch.nn.Module policies, not {type(policy).__name__}")
        self.policy = cast(Policy, policy)
        if isinstance(policy, TorchPolicy):
            self.spec, self.statistics = policy.spec, policy.statistics
        self.device = pick_device(device)
        policy.to(self.device)
        candidates = trainable(policy)
        parameters = {name: parameter for name, parameter in candidates.items() if name not in self.frozen}
        if candidates and not parameters:
            raise ConfigError(ALL_FROZEN)
        self._frozen = [parameter for name, parameter in candidates.items() if name in self.frozen]
        held = set() if optimizer is None else {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if optimizer is not None and parameters and held.isdisjoint(map(id, parameters.values())):
            raise ConfigError(
                f"the optimizer {type(optimizer).__name__} holds none of the policy's parameters, so nothing would be learned; make it "
                "with policy.parameters()"
            )
        self._updater = make_optimizer(parameters, self.config) if optimizer is None else TorchOptimizer([optimizer], parameters)
        self.optimizer = self._updater if optimizer is None else optimizer
        if optimizer is not None:
            self.initial_rate = float(optimizer.param_groups[0]["lr"])
        self._held = held
        self._own: dict[str, Adam | TorchOptimizer] = {}  # of custom losses with parameters, by name
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
        shape = np.shape(log_probs)
        steps: Tree = {
            "observations": observations,
            "actions": actions,
            "log_probs": log_probs,
            "advantages": advantages,
            "returns": returns,
            "values": values,
            "valid": np.ones(shape, bool) if valid is None else valid,
            "episode_starts": np.zeros(shape, bool) if episode_starts is None else episode_starts,
            "global_state": global_state,
        }
        steps = to_tensors(steps, self.device)
        if len(shape) == 1:  # samples are sequences of one step, [1, N, …]
            steps = optree.tree_map(lambda leaf: leaf[None], steps)
        minibatch = Minibatch(**steps, policy_state=to_tensors(policy_state, self.device))
        return ppo_loss(self.policy.evaluate(minibatch), minibatch, self._coefficients(), minibatch.valid.sum())

    def log_probs(self, rollout: Rollout) -> np.ndarray:
        """The log-probs [T, B] of a rollout's actions."""
        return backend.log_probs(self.policy, rollout, self.config)

    def critic_pass(self, rollout: Rollout, log_ratios: np.ndarray | None) -> tuple[Rollout, Advantages]:
        """Fill invalid rows, move the rollout to the device and compute advantages."""
        on_device = fill_invalid_rows(rollout).map(partial(to_tensor, device=self.device))  # the one transfer
        ratios = None if log_ratios is None else to_tensor(log_ratios, self.device)
        return on_device, compute_advantages(self.policy, on_device, self.config, ratios)

    def make_sequences(
        self, rollout: Rollout, advantages: Advantages, length: int, weights: np.ndarray | None = None, *, successors: bool
    ) -> PackedSequences:
        """Pack the rollout's sequences, with advantages normalised if that is per batch."""
        if self.config.normalize_advantages == "batch":
            advantages = replace(advantages, advantages=normalize(advantages.advantages, rollout.valid, total=self._total))
        if weights is not None:
            advantages = replace(advantages, advantages=advantages.advantages * to_tensor(weights, self.device))
        shared = split_into_sequences(rollout.global_state, length)  # [L, N / lanes per copy, *]
        sequences = sequences_of(replace(rollout, global_state=()), advantages, length, successors=successors)
        return PackedSequences(sequences, shared, rollout.context[0] if rollout.context else ())

    def shuffle(self, sequences: PackedSequences, num_minibatches: int, permutation: np.ndarray) -> list[Minibatch]:
        """One epoch of minibatches, with advantages normalised if that is per minibatch."""
        places, real = minibatch_places(len(permutation), num_minibatches)  # [minibatches, N]
        columns = permutation[places]
        if isinstance(self.ranks, TorchRanks):
            columns, real = self.ranks.own_columns(columns, real)
        normalized = self.config.normalize_advantages == "minibatch" and self._compiled is None  # else it is part of the graph
        return sequences.minibatches(columns, real, total=self._total if normalized else None)

    @property
    def _total(self) -> Callable[[Tensor], Tensor]:
        """What sums a tensor over all ranks."""
        return self.ranks.sum if isinstance(self.ranks, TorchRanks) else own_part

    def take_steps(
        self, minibatches: Sequence[Minibatch], coefficients: LossCoefficients, rate_factor: float, losses: tuple[CustomLoss, ...]
    ) -> StepMetrics:
        """Take one step on each minibatch, or none where its loss or gradient is not finite or no row is valid."""
        self._updater.scale_learning_rate(rate_factor)
        if self._compiled is not None:
            if losses:
                raise ConfigError(f"ppo.compile=on compiles PPO's own loss, not the custom loss {losses[0].name}; set ppo.compile=off")
            return self._compiled.run(minibatches, coefficients)
        rows = []
        own = {loss.name: self._own[loss.name] for loss in losses if loss.name in self._own}
        counts = self._total(torch.stack([minibatch.valid.sum() for minibatch in minibatches]))  # [minibatches]
        with without_gradients(self._frozen):
            for minibatch, count in zip(minibatches, counts):
                row: Row = {}
                for updater in (self._updater, *own.values()):
                    updater.zero_grad()
                for micro in micro_batches(minibatch, self.config.gradient_accumulation):
                    terms = self._backward(self.policy.evaluate(micro), micro, coefficients, losses, count)
                    row = {name: row[name] + term.detach() if row else term.detach() for name, term in terms.items()}
                if isinstance(self.ranks, TorchRanks):
                    row = self.ranks.sum_gradients(self._updater.parameters, row)
                for loss in losses:
                    row[f"grad_norm/{loss.name}"] = row.pop(f"gradient/{loss.name}").norm()
                row["grad_norm"] = self._updater.clip(self.config.max_grad_norm)
                norms = sum((row[f"grad_norm/{name}"] for name in own), row["grad_norm"])
                row["bad"] = (row["loss"] + norms).isfinite().logical_not_()
                row["empty"] = count == 0
                for updater in (self._updater, *own.values()):
                    updater.step(row["bad"] | row["empty"])
                rows.append(row)
        return as_metrics(rows)

    def _backward(
        self, evaluation: Evaluation, micro: Minibatch, coefficients: LossCoefficients, losses: Sequence[CustomLoss], count: Tensor
    ) -> Row:
        """Add the gradient of a micro-batch's share of the loss to the optimiser's, and return the loss terms.

        A custom loss also returns its own gradient, as one vector: vectors add up over micro-batches, their norms would not.
        """
        terms = ppo_loss(evaluation, micro, coefficients, count)
        for loss in losses:
            value = loss(self.policy, micro, evaluation)
            if not isinstance(value, Tensor) or value.shape != ():
                found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ConfigError(f"the custom loss {loss.name} returned {found}; it must return a scalar tensor, such as a mean")
            if not value.requires_grad and not self.frozen:
                raise no_gradient(loss.name)
            if not value.requires_grad:  # it depends on what is frozen
                value = value + 0 * terms["loss"]
            value = value * (micro.valid.sum().to(evaluation.values.dtype) / count.clamp(min=1))
            value = value if loss.weight == 1.0 else value * loss.weight
            parameters = [*self._updater.parameters, *(self._own[loss.name].parameters if loss.name in self._own else ())]
            parts = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
            terms[f"gradient/{loss.name}"] = torch.cat([part.flatten() for part in parts])
            terms[f"loss/{loss.name}"] = value
            terms["loss"] = terms["loss"] + value
        terms["loss"].backward()  # type: ignore[no-untyped-call]
        return terms

    def adopt_loss(self, loss: CustomLoss) -> None:
        """Move a loss that is a module to the device, and make the optimiser of parameters that are its own.

        That is the loss's attribute `optimizer`, else Adam with its `learning_rate`, by default the config's at the start of the run.
        """
        given, self._own = loss.owner, {name: updater for name, updater in self._own.items() if name != loss.name}
        if isinstance(given, nn.Module):
            given.to(self.device)
        listed = getattr(given, "parameters", None)
        named = dict(given.named_parameters()) if isinstance(given, nn.Module) else dict(enumerate(listed() if callable(listed) else ()))
        elsewhere = self._held | {id(parameter) for parameter in cast(nn.Module, self.policy).parameters()}
        parameters = {str(name): p for name, p in named.items() if p.requires_grad and id(p) not in elsewhere}
        if parameters and isinstance(self.ranks, TorchRanks):
            raise ConfigError(f"the custom loss {loss.name} has parameters of its own, which ranks do not share; use one process")
        if parameters:
            brought, rate = getattr(given, "optimizer", None), getattr(given, "learning_rate", self.config.learning_rate)
            mine = make_optimizer(parameters, PPOConfig(learning_rate=rate)) if brought is None else TorchOptimizer([brought], parameters)
            self._own[loss.name] = mine

    def loss_state(self, name: str) -> Any:
        """The state of a loss and of the optimiser of its own parameters; a module's tensors as arrays."""
        given = self._losses[name]
        state = {key: value.cpu().numpy().copy() for key, value in given.state_dict().items()} if isinstance(given, nn.Module) else None
        state = super().loss_state(name) if state is None else state
        moments = self._own[name].state_dict() if name in self._own else None
        return None if state is None and moments is None else {"state": state, "moments": moments}

    def restore_loss(self, name: str, state: Any) -> None:
        """Restore what `loss_state` returned."""
        given = self._losses[name]
        if isinstance(given, nn.Module):
            given.load_state_dict({key: torch.from_numpy(np.array(value)) for key, value in state["state"].items()})
        elif state["state"] is not None:
            super().restore_loss(name, state["state"])
        if name in self._own and state["moments"] is not None:
            self._own[name].load_state_dict(state["moments"])

    def ratios(self, minibatch: Minibatch) -> np.ndarray:
        """The probability ratios [n] of the valid rows.

        A network of the user's runs as in a step: with gradients, by which it knows that it learns, though nothing is backpropagated,
        and with the same random numbers. Its buffers, such as running means, stay as they are.
        """
        policy = cast(nn.Module, self.policy)
        own = not getattr(policy, "builtin", False)
        buffers = [(buffer, buffer.clone()) for buffer in policy.buffers()] if own else []
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices, enabled=own), torch.set_grad_enabled(own):
            log_probs = self.policy.evaluate(minibatch).log_probs.detach()
        for buffer, kept in buffers:
            buffer.copy_(kept)
        return self.to_host((log_probs - minibatch.log_probs).exp()[minibatch.valid])

    def mode_parts(self, minibatch: Minibatch) -> list[str]:
        """The classes of layers, such as Dropout and BatchNorm, that behave differently while learning, or the network's own code."""
        layers = sorted({type(module).__name__ for module in cast(nn.Module, self.policy).modules() if _changes_with_mode(module)})
        if layers or getattr(self.policy, "builtin", False):
            return layers
        with torch.no_grad():  # by which the policy knows that it does not learn
            log_probs = self.policy.evaluate(minibatch).log_probs
        as_it_acted = ratio_metrics(self.to_host((log_probs - minibatch.log_probs).exp()[minibatch.valid]))
        return ["the network's own code, such as torch.nn.functional.dropout"] if as_it_acted["ratio_error"] <= RATIO_TOLERANCE else []

    def to_host(self, array: Tensor) -> np.ndarray:
        """A tensor as an array."""
        host: np.ndarray = array.cpu().numpy()
        return host

    def host_minibatch(self, minibatch: Minibatch) -> Minibatch:
        """The minibatch as NumPy arrays."""
        tree: Tree = {field.name: getattr(minibatch, field.name) for field in fields(minibatch)}
        return Minibatch(**optree.tree_map(lambda leaf: leaf.detach().cpu().numpy(), tree))

    def profile_points(self) -> list[ProfilePoint]:
        """The sections of an update; a compiled step is one section."""
        if self._compiled is not None:
            return [*super().profile_points(), ("compiled step", self._compiled, "run")]
        inside: list[ProfilePoint] = [
            ("forward", self.policy, "evaluate"),
            ("backward", self, "_backward"),
            ("optimiser", self._updater, "clip"),
            ("optimiser", self._updater, "step"),
        ]
        return [*super().profile_points(), *inside]

    def moments(self) -> dict[str, Any]:
        """The optimiser's state."""
        return self._updater.state_dict()

    def load_moments(self, moments: Mapping[str, Any]) -> None:
        """Restore the optimiser's state."""
        self._updater.load_state_dict(moments)

    def _make_compiled(self) -> CompiledStep:
        obstacle = None
        if self.optimizer is not self._updater:
            obstacle = "an optimizer of your own"
        elif not isinstance(self._updater, Adam):
            obstacle = f"ppo.optimizer={self.config.optimizer}"
        elif type(self.policy) is not TorchPolicy or not self.policy.builtin:  # a subclass may evaluate as it likes
            obstacle = "a network or policy of your own"
        elif self.policy.spec.memory is not None:
            obstacle = f"a policy with memory (policy.kind={self.policy.spec.config.kind})"
        elif self.config.gradient_accumulation > 1:
            obstacle = f"ppo.gradient_accumulation={self.config.gradient_accumulation}"
        if obstacle is not None:
            raise ConfigError(f"ppo.compile=on compiles built-in policies with Adam, not {obstacle}; set ppo.compile=off")
        return CompiledStep(cast(TorchPolicy, self.policy), self.config, cast(Adam, self._updater))


def trainable(policy: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that learn, by the names of the policy's weights."""
    name_of = policy.public_name if isinstance(policy, TorchPolicy) else str
    return {name_of(name): p for name, p in policy.named_parameters() if p.requires_grad and p.numel()}


@contextlib.contextmanager
def without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Compute no gradients of these parameters inside, so that no optimiser moves them."""
    for parameter in parameters:
        parameter.requires_grad_(False)
        parameter.grad = None
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def _changes_with_mode(module: nn.Module) -> bool:
    """Whether a layer of torch behaves differently in training mode."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return module.track_running_stats
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0
    return isinstance(module, nn.RReLU)


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


def as_metrics(rows: Sequence[Row]) -> StepMetrics:
    """The rows of an epoch as columns [n], read from the device in one transfer."""
    flags = ("bad", "empty")
    names = [name for name in rows[0] if name not in flags]
    numbers = torch.stack([row[name] for row in rows for name in names]).double()
    flagged = torch.stack([row[name] for row in rows for name in flags]).double()
    whole = torch.cat([numbers, flagged]).cpu().numpy()
    columns = np.hstack([part.reshape(len(rows), -1) for part in np.split(whole, [len(numbers)])])  # [n, names]
    return dict(zip((*names, *flags), columns.T))
