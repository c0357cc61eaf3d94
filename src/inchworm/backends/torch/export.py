"""A policy as one graph: a torch.export program (`policy.pt2`), or ONNX (`policy.onnx`)."""

from __future__ import annotations

import copy
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from inchworm.backends.numpy.distributions import MASKED_LOGIT
from inchworm.backends.torch.network import Memory, Past, SpecNetwork, encode_legal, to_tensor
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.core.errors import ConfigError, MissingExtraError, describe_error
from inchworm.core.spaces import MASK_KEY, build_tree, leaves
from inchworm.core.types import Tree
from inchworm.policy.layout import MemoryLayout
from inchworm.policy.spec import TANH_LOG_STD_RANGE

Runs = Callable[[Sequence[Any]], Sequence[np.ndarray]]
"""Runs a written program on the arrays of observations and memory, in order, and returns its outputs in order."""


class OneStep(nn.Module):
    """The recurrent layers of a policy for one row, in operations that every runtime has instead of torch's kernels."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.layout: MemoryLayout = memory.layout
        self.layers = nn.ModuleList(memory.values())

    def forward(self, rows: Tensor, past: Past) -> tuple[Tensor, Tree]:
        """Features [B, size] of rows [B, in], and the next state. Nothing is reset: zeros in a lane's state begin an episode."""
        after: dict[str, list[Tensor]] = {name: [] for name in self.layout.names}
        for index, layer in enumerate(self.layers):
            parts = cast(nn.ModuleDict, layer)
            before = [past.state[name][:, index] for name in self.layout.names]
            of_input, of_memory = (
                nn.functional.linear(given, parts[part]["weight"], parts[part]["bias"])  # type: ignore[index]
                for part, given in (("input", rows), ("state", before[0]))
            )
            if self.layout.kind == "lstm":
                into, forget, cell, out = (of_input + of_memory).chunk(4, 1)
                remembered = forget.sigmoid() * before[1] + into.sigmoid() * cell.tanh()
                rows = out.sigmoid() * remembered.tanh()
                after["cell"].append(remembered)
            else:
                (reset, update, new), (own_reset, own_update, recalled) = of_input.chunk(3, 1), of_memory.chunk(3, 1)
                new = (new + (reset + own_reset).sigmoid() * recalled).tanh()
                rows = new + (update + own_update).sigmoid() * (before[0] - new)
            after["hidden"].append(rows)
        return rows, {name: torch.stack(parts, 1) for name, parts in after.items()}


class ExportedActor(nn.Module):
    """From observations and memory to the most likely action, its distribution and the next memory; without a critic.

    Inputs and outputs are tensors in order: torch writes the keys of a dict into the program's source.
    """

    def __init__(self, policy: TorchPolicy) -> None:
        super().__init__()
        self.spec = policy.spec
        self.network = copy.deepcopy(policy.network).cpu().eval()
        if isinstance(self.network, SpecNetwork):
            self.network.critic = nn.ModuleDict()
            if not self.spec.observations.size:  # only images: torch.export.save fails on an empty tensor
                self.network.center = self.network.inverse_std = torch.zeros(1)
            if self.network.memory is not None:
                self.network.memory = OneStep(self.network.memory)  # type: ignore[assignment]
        self.remembers = self.spec.memory is not None and policy.builtin
        self.dtypes = [to_tensor(np.zeros(1, part.dtype), "cpu").dtype for part in self.spec.actions.parts]
        if self.spec.actions.num_gaussians:
            bounds = (torch.from_numpy(np.array(bound)) for bound in (self.spec.actions.low, self.spec.actions.high))
            self.low, self.high = (bound.to(torch.promote_types(bound.dtype, torch.float32)) for bound in bounds)
            self.log_std = policy.log_std.detach().cpu().clone()
            if self.spec.config.action_bounds == "tanh":
                self.log_std.clamp_(*TANH_LOG_STD_RANGE)
        self.requires_grad_(requires_grad=False)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Read the leaves of an observation [B, *], then those of a state [B, layers, size]; return the outputs."""
        parts = {path: tensor for (path, _), tensor in zip(leaves(self.spec.observation_space), inputs)}
        observation: Tree = build_tree(self.spec.observation_space, lambda path, _: parts[path])
        state = dict(zip(self.spec.memory.names, inputs[len(parts) :])) if self.remembers and self.spec.memory is not None else {}
        layout, has_mask = self.spec.actions, self.spec.observations.has_mask
        seen = {key: leaf for key, leaf in observation.items() if key != MASK_KEY} if has_mask else observation
        after: Tree = {}
        if self.remembers:
            outputs, after = cast(SpecNetwork, self.network).step_outputs(seen, Past(state, torch.zeros(1)))
        else:
            outputs = self.network.action_outputs(seen)
        logits, means = outputs[:, : layout.num_logits], outputs[:, layout.num_logits :]
        legal = encode_legal(self.spec, observation, 1)
        if has_mask and legal is not None:
            logits = torch.where(legal[:, : layout.num_logits], logits, MASKED_LOGIT)
        gaussians = means
        if self.spec.has_dimensions and legal is not None:
            gaussians = torch.where(legal[:, layout.num_logits :], means, 0.0)
        found = self._actions(logits, gaussians)
        if layout.num_logits:
            found.append(logits)
        if layout.num_gaussians:
            found += [means, self.log_std.clone()]
        return (*found, *after.values())

    def _actions(self, logits: Tensor, gaussians: Tensor) -> list[Tensor]:
        """The most likely action as the environment takes it, part by part."""
        layout, actions = self.spec.actions, []
        values = gaussians
        if layout.num_gaussians:
            values = gaussians.to(self.low.dtype)
            if layout.bounds == "tanh":
                values = self.low + (values.tanh() + 1) * (0.5 * (self.high - self.low))
            values = torch.minimum(torch.maximum(values, self.low), self.high)
        group = dimension = 0
        for part, dtype in zip(layout.parts, self.dtypes):
            if part.kind == "categorical":
                chosen = [logits[:, one].argmax(1) for one in layout.groups[group : group + part.width]]
                flat = torch.stack(chosen, 1) + torch.from_numpy(np.array(part.starts))
                group += part.width
            else:
                flat = values[:, dimension : dimension + part.width]
                dimension += part.width
            actions.append(flat.reshape(-1, *part.shape).to(dtype))
        return actions


def export_program(policy: TorchPolicy, example: Sequence[Any]) -> torch.export.ExportedProgram:
    """Trace a policy with an example batch [B >= 2]; the program takes any batch."""
    actor, batch = ExportedActor(policy), torch.export.Dim("batch")
    given = tuple(to_tensor(leaf, "cpu") for leaf in example)
    with torch.no_grad(), _quiet():
        try:
            return torch.export.export(actor, given, dynamic_shapes=(tuple({0: batch} for _ in given),), strict=False)
        except Exception as error:  # whatever a network of the user's does that cannot be traced
            if policy.builtin:
                raise
            raise ConfigError(
                f"torch.export cannot trace the network {type(policy.network).__name__}: {describe_error(error)}; its action_outputs "
                "must be tensor operations, without branches that depend on their values"
            ) from error


def write_program(policy: TorchPolicy, example: Sequence[Any], path: Path) -> Runs:
    """Write `policy.pt2`; return what runs it as it was written."""
    program = export_program(policy, example)
    with _quiet():
        torch.export.save(program, path)
        module = torch.export.load(path).module()

    def run(arrays: Sequence[Any]) -> Sequence[np.ndarray]:
        with torch.inference_mode():
            return [tensor.numpy() for tensor in module(*(to_tensor(array, "cpu") for array in arrays))]

    return run


def write_onnx(policy: TorchPolicy, example: Sequence[Any], path: Path, inputs: Sequence[str], outputs: Sequence[str]) -> Runs:
    """Write `policy.onnx` with these names of its inputs and outputs; return what runs it in onnxruntime as it was written."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise MissingExtraError(
                f'export to ONNX needs {package}, which is not installed; type: pip install "inchworm[export]"'
            ) from error
    import onnxruntime

    program = export_program(policy, example)
    with _quiet():
        try:
            written = torch.onnx.export(program, dynamo=True, input_names=inputs, output_names=outputs, verbose=False)
        except Exception as error:
            if policy.builtin:
                raise
            name = type(policy.network).__name__
            raise ConfigError(
                f"the network {name} uses an operation that cannot be written as ONNX: {describe_error(error)}; use the format torch"
            ) from error
    assert written is not None
    written.save(path)
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])

    def run(arrays: Sequence[Any]) -> Sequence[np.ndarray]:
        found: Sequence[np.ndarray] = session.run(None, dict(zip(inputs, (to_tensor(array, "cpu").numpy() for array in arrays))))
        return found

    return run


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what the exporters log and warn of: packages that are not needed, and their own deprecated calls."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
