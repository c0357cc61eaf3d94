"""A policy's memory as data: kind, sizes, the names of its weights and the shape of its state (steps 4 and 8 of 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from inchworm.core.errors import InchwormError
from inchworm.core.types import Tree

KINDS = ("lstm", "gru")
"""The values of `policy.kind` with a memory."""
GATES = {"lstm": 4, "gru": 3}
"""Blocks of rows in each weight, in torch's order: input, forget, cell, output; reset, update, new."""
FORGET_GATE = 1
"""Its position among the LSTM's gates."""


@dataclass(frozen=True)
class MemoryLayout:
    """A stack of recurrent layers, each reading the output of the one below."""

    kind: Literal["lstm", "gru"]
    inputs: int
    """Width of the first layer's input."""
    size: int
    """Width of every layer's state."""
    layers: int

    @property
    def names(self) -> tuple[str, ...]:
        """The parts of the state, each [B, layers, size]."""
        return ("hidden", "cell") if self.kind == "lstm" else ("hidden",)

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Every weight's name and shape: [gates * size, inputs] and [gates * size]."""
        shapes: dict[str, tuple[int, ...]] = {}
        rows = GATES[self.kind] * self.size
        for layer in range(self.layers):
            for part, width in (("input", self.size if layer else self.inputs), ("state", self.size)):
                shapes |= {f"memory.{layer}.{part}.weight": (rows, width), f"memory.{layer}.{part}.bias": (rows,)}
        return shapes

    def empty(self, num_lanes: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
        """The initial state of lanes: zeros."""
        return {name: np.zeros((num_lanes, self.layers, self.size), dtype) for name in self.names}

    def refusal(self, state: Tree, num_lanes: int) -> InchwormError:
        """The error for a state that does not fit this memory."""
        wanted = f"{{{', '.join(self.names)}}}, each [{num_lanes}, {self.layers}, {self.size}]"
        found = {name: np.shape(leaf) for name, leaf in state.items()} if isinstance(state, dict) else repr(state)[:80]
        return InchwormError(
            f"the policy has a memory ({self.kind}), so its state must be {wanted}, not {found}; begin with "
            f"policy.initial_state({num_lanes}) and pass on the state of each PolicyStep"
        )

    def fits(self, state: Tree, leading: tuple[int, ...]) -> bool:
        """Whether a tree has the form of this memory's state, with these leading axes."""
        shape = (*leading, self.layers, self.size)
        return isinstance(state, dict) and state.keys() == set(self.names) and all(np.shape(leaf) == shape for leaf in state.values())
