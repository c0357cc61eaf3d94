"""Serves step 8 of 9: a GRU layer on the CPU, forwards in torch's kernel and backwards by hand: torch's own way back is three times slower.

Every gate of every row follows from what is known after the way there, so all but one recursion is done for all rows at once. With
a the sums before the activations, H = U h + d of the old memory h and G = ∂L/∂h' of the new one,

    n = tanh(a_n)   a_n = W x + b + r * H_n           h' = n + z * (h - n)
    ∂L/∂a_n = G (1 - z)(1 - n²)      ∂L/∂a_z = G (h - n) z (1 - z)      ∂L/∂a_r = ∂L/∂a_n · H_n r (1 - r)
    ∂L/∂H   = (∂L/∂a_r, ∂L/∂a_z, r ∂L/∂a_n)           ∂L/∂h = z G + (∂L/∂H) U

and only the last line needs the row after it: G is ∂L/∂h of the next row plus what the row's own output is worth.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class GruLayer(torch.autograd.Function):
    """Sequences [L, N, in] and the memory before them [N, size] as features [L, N, size]; no gradient goes into that memory."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, begin: Tensor, w: Tensor, u: Tensor, b: Tensor, d: Tensor) -> Tensor:
        """torch's kernel."""
        features = torch.gru(rows, begin[None], [w, u, b, d], True, 1, 0.0, False, False, False)[0]
        ctx.save_for_backward(rows, begin, w, u, b, d, features)
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """From ∂L/∂features [L, N, size] to those of the rows and the weights."""
        rows, begin, w, u, b, d, features = ctx.saved_tensors
        before = torch.cat([begin[None], features[:-1]])  # [L, N, size] h
        keep, to_sums, to_memory = _factors(rows, before, w, u, b, d)
        worth, d_memory = _recursion(slope, keep, to_memory, u)
        d_sums = (worth[:, :, None] * to_sums).flatten(2).flatten(0, 1)  # [L·N, 3 size]
        flat = d_memory.flatten(0, 1)
        d_rows = (d_sums @ w).reshape(rows.shape) if ctx.needs_input_grad[0] else None
        return d_rows, None, d_sums.t() @ rows.flatten(0, 1), flat.t() @ before.flatten(0, 1), d_sums.sum(0), flat.sum(0)


def _factors(rows: Tensor, before: Tensor, w: Tensor, u: Tensor, b: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What G is multiplied with on each way back, for all rows: z [L, N, size], and twice three gates [L, N, 3, size]."""
    size = before.shape[-1]
    of_input = torch.nn.functional.linear(rows, w, b)  # [L, N, 3 size]
    of_memory = torch.nn.functional.linear(before, u, d)
    opened = (of_input[..., : 2 * size] + of_memory[..., : 2 * size]).sigmoid()
    reset, update = opened[..., :size], opened[..., size:]
    recalled = of_memory[..., 2 * size :]
    new = torch.addcmul(of_input[..., 2 * size :], reset, recalled).tanh()
    to_new = (1 - update) * (1 - new * new)
    to_update = (before - new) * update * (1 - update)
    to_reset = to_new * recalled * reset * (1 - reset)
    to_sums, to_memory = (torch.stack([to_reset, to_update, last], 2) for last in (to_new, to_new * reset))
    return update, to_sums, to_memory


def _recursion(slope: Tensor, keep: Tensor, to_memory: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """G of every row [L, N, size] and ∂L/∂H [L, N, 3 size], from the last row to the first.

    In NumPy, on the same memory: L times a few small operations, each of which torch takes twice as long for.
    """
    own, kept, factors, matrix = (tensor.detach().numpy() for tensor in (slope, keep, to_memory, u))
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
