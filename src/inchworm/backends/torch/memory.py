"""LSTM and GRU in torch (steps 4 and 8 of 9): whole batches of sequences run in one fused kernel.

Kernels do not know about episodes, so where one starts within a sequence, a row is inserted that resets the memory. It has a 1 in an extra
column whose weights close the gates: σ(-10,000) is exactly 0, and so are the memory after that row and the gradient before it. A GRU, whose
new memory is then n alone, has n = tanh(b - b) = 0 there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from inchworm.core.types import Tree
from inchworm.policy.layout import MemoryLayout
from inchworm.rollout.sequences import insert_reset_rows


class GruLayer(torch.autograd.Function):
    """A GRU layer on the CPU with a faster backward pass.

    Sequences [L, N, in] and the memory before them [N, size], which gets no gradient -> features [L, N, size].
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, begin: Tensor, w: Tensor, u: Tensor, b: Tensor, d: Tensor) -> Tensor:
        """Run torch's kernel."""
        features = torch.gru(rows, begin[None], [w, u, b, d], True, 1, 0.0, False, False, False)[0]
        ctx.save_for_backward(rows, begin, w, u, b, d, features)
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Backpropagate ∂L/∂features [L, N, size] to the rows and the weights."""
        rows, begin, w, u, b, d, features = ctx.saved_tensors
        before = torch.cat([begin[None], features[:-1]])  # [L, N, size] h
        size = before.shape[-1]
        of_input = torch.nn.functional.linear(rows, w, b)  # [L, N, 3 size]
        of_memory = torch.nn.functional.linear(before, u, d)
        opened = (of_input[..., : 2 * size] + of_memory[..., : 2 * size]).sigmoid()
        reset, update = opened[..., :size], opened[..., size:]
        recalled = of_memory[..., 2 * size :]
        new = torch.addcmul(of_input[..., 2 * size :], reset, recalled).tanh()
        # The factors of ∂L/∂features on the way to each gate's sum, for all rows.
        to_new = (1 - update) * (1 - new * new)
        to_update = (before - new) * update * (1 - update)
        to_reset = to_new * recalled * reset * (1 - reset)
        to_sums, to_memory = (torch.stack([to_reset, to_update, last], 2) for last in (to_new, to_new * reset))  # [L, N, 3, size]
        d_features, d_memory = _recursion(gradient, update, to_memory, u)
        d_sums = (d_features[:, :, None] * to_sums).flatten(2).flatten(0, 1)  # [L·N, 3 size]
        flat = d_memory.flatten(0, 1)
        d_rows = (d_sums @ w).reshape(rows.shape) if ctx.needs_input_grad[0] else None
        return d_rows, None, d_sums.t() @ rows.flatten(0, 1), flat.t() @ before.flatten(0, 1), d_sums.sum(0), flat.sum(0)


def _recursion(gradient: Tensor, keep: Tensor, to_memory: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The total ∂L/∂features [L, N, size] and ∂L/∂(U h + d) [L, N, 3 size], from the last row to the first.

    In NumPy, on the same memory: these are many small operations, and each takes twice as long in torch.
    """
    own, kept, factors, matrix = (tensor.detach().numpy() for tensor in (gradient, keep, to_memory, u))
    worth, parts = np.empty_like(own), np.empty_like(factors)
    flat = parts.reshape(*own.shape[:2], -1)
    carried, share = np.zeros_like(own[0]), np.empty_like(own[0])
    for t in range(len(own) - 1, -1, -1):
        np.add(own[t], carried, worth[t])
        np.multiply(worth[t][:, None], factors[t], parts[t])
        np.dot(flat[t], matrix, carried)
        np.multiply(worth[t], kept[t], share)
        np.add(carried, share, carried)
    return torch.from_numpy(worth), torch.from_numpy(flat)


CLOSED = {"lstm": (-1e4, -1e4, 0.0, -1e4), "gru": (-1e4, -1e4)}
"""Weights that close the gates i, f, (g), o and r, z, whatever else is added. For a GRU's n it is the negative of its bias."""


class Past(NamedTuple):
    """The memory of sequences [L, N]."""

    state: Tree
    """[N, layers, size] before the first row."""
    starts: Tensor
    """[L, N] bool: reset before reading this row."""


class Memory(nn.ModuleDict):
    """Recurrent layers under the spec's names. It holds only weights; the state belongs to the caller."""

    closed: Tensor

    def __init__(self, layout: MemoryLayout) -> None:
        super().__init__({str(layer): nn.ModuleDict() for layer in range(layout.layers)})
        self.layout = layout
        self.register_buffer("closed", torch.tensor(CLOSED[layout.kind]).repeat_interleave(layout.size)[:, None], persistent=False)
        for name, shape in layout.weights.items():
            _, layer, part, kind = name.split(".")
            parts: nn.ModuleDict = self[layer]  # type: ignore[assignment]
            if part not in parts:
                parts[part] = nn.ParameterDict()
            parts[part][kind] = nn.Parameter(torch.empty(shape))  # type: ignore[operator]

    def forward(self, rows: Tensor, past: Past) -> tuple[Tensor, Tree]:
        """Features [L·N, size] of sequences [L·N, in] that begin with `past`, and the state after the last row.

        Where an episode starts after the first row, the state after the last one is left out: only acting, row by row, needs it.
        """
        rows = rows.reshape(*past.starts.shape, -1)  # [L, N, in]
        resets = past.starts.cpu().numpy()  # shapes depend on it, so this waits for the device
        begin = [past.state[name].to(rows.dtype).transpose(0, 1).contiguous() for name in self.layout.names]  # as kernels read it
        if resets[0].any():
            begin = [torch.where(past.starts[0][:, None], 0.0, part) for part in begin]  # [layers, N, size]
        if not resets[1:].any():
            features, after = self._run(rows, begin)
            return features.flatten(0, 1), {name: part.transpose(0, 1) for name, part in zip(self.layout.names, after)}
        plan, width = insert_reset_rows(resets), rows.shape[1]
        places = torch.from_numpy(plan.places).to(rows.device)
        spread = rows.new_zeros((plan.depth * width, rows.shape[2] + 1))
        spread[:, :-1].index_copy_(0, places, rows.flatten(0, 1))
        spread[torch.from_numpy(plan.inserted).to(rows.device), -1] = 1.0
        features = self._run_with_resets(spread.reshape(plan.depth, width, -1), begin)
        return features.flatten(0, 1).index_select(0, places), ()

    def _run(self, rows: Tensor, begin: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Run sequences [L, N, in] without resets; return features [L, N, size] and the state after the last row."""
        layers = [_in_order(layer) for layer in self.values()]
        if self.layout.kind == "lstm" or rows.device.type != "cpu":
            return self._kernel(rows, [weight for layer in layers for weight in layer], begin)
        after = []
        for weights, before in zip(layers, begin[0]):
            rows = GruLayer.apply(rows, before, *weights)  # type: ignore[no-untyped-call]
            after.append(rows[-1])
        return rows, [torch.stack(after)]

    def _run_with_resets(self, rows: Tensor, begin: list[Tensor]) -> Tensor:
        """Run sequences [L, N, in + 1], whose last column is 1 in rows that reset the memory; return features [L, N, size]."""
        resets, size = rows[..., -1:], self.layout.size
        for index, layer in enumerate(self.values()):
            w, u, b, d = _in_order(layer)
            closed = self.closed if self.layout.kind == "lstm" else torch.cat([self.closed, -b[2 * size :, None]])
            weights = [torch.cat([w, closed], 1), u, b, d]
            rows = rows if index == 0 else torch.cat([rows, resets], -1)
            if self.layout.kind == "lstm" or rows.device.type != "cpu":
                rows, _ = self._kernel(rows, weights, [part[index : index + 1] for part in begin])
            else:
                rows = GruLayer.apply(rows, begin[0][index], *weights)  # type: ignore[no-untyped-call]
        return rows

    def _kernel(self, rows: Tensor, weights: list[Tensor], begin: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Run torch's kernel with as many layers as there are weights for."""
        options = (True, len(weights) // 4, 0.0, False, False, False)  # biases, layers, dropout, training, two ways, batch first
        if self.layout.kind == "lstm":
            features, *after = torch.lstm(rows, begin, weights, *options)
        else:
            features, *after = torch.gru(rows, begin[0], weights, *options)
        return features, after


def _in_order(layer: nn.Module) -> list[Tensor]:
    """A layer's weights in the order of torch's kernels."""
    return [layer[part][kind] for kind in ("weight", "bias") for part in ("input", "state")]  # type: ignore[index]
