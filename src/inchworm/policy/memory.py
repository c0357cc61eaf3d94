"""A policy's memory as data: its kind, its sizes, the names of its weights and the form of its state. Serves steps 4 and 8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from inchworm.core.errors import InchwormError
from inchworm.core.types import Tree, Weights

KINDS = ("lstm", "gru")
"""The values of `policy.kind` that remember."""
GATES = {"lstm": 4, "gru": 3}
"""Blocks of rows in each weight, in torch's order: input, forget, cell, output; reset, update, new."""
FORGET_GATE = 1
"""Which of the LSTM's it is."""


@dataclass(frozen=True)
class MemoryLayout:
    """Recurrent layers one above the other, each reading the one below."""

    kind: Literal["lstm", "gru"]
    inputs: int
    """Width of what the first layer reads."""
    size: int
    """Width of every layer's memory."""
    layers: int

    @property
    def names(self) -> tuple[str, ...]:
        """The parts of the state, each [B, layers, size]."""
        return ("hidden", "cell") if self.kind == "lstm" else ("hidden",)

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Every weight's name and shape: [gates * size, what it reads] and [gates * size]."""
        shapes: dict[str, tuple[int, ...]] = {}
        rows = GATES[self.kind] * self.size
        for layer in range(self.layers):
            for part, width in (("input", self.size if layer else self.inputs), ("state", self.size)):
                shapes |= {f"memory.{layer}.{part}.weight": (rows, width), f"memory.{layer}.{part}.bias": (rows,)}
        return shapes

    def empty(self, num_lanes: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
        """The memory of lanes that have seen nothing."""
        return {name: np.zeros((num_lanes, self.layers, self.size), dtype) for name in self.names}

    def refusal(self, state: Tree, num_lanes: int) -> InchwormError:
        """The error for a state that is not this memory's, in words."""
        wanted = f"{{{', '.join(self.names)}}}, each [{num_lanes}, {self.layers}, {self.size}]"
        found = {name: np.shape(leaf) for name, leaf in state.items()} if isinstance(state, dict) else repr(state)[:80]
        return InchwormError(
            f"the policy remembers ({self.kind}), so its state is {wanted}, not {found}; begin with policy.initial_state({num_lanes}) "
            "and hand on the state of each PolicyStep"
        )

    def fits(self, state: Tree, leading: tuple[int, ...]) -> bool:
        """Whether a tree is this memory's, with these axes in front."""
        shape = (*leading, self.layers, self.size)
        return isinstance(state, dict) and state.keys() == set(self.names) and all(np.shape(leaf) == shape for leaf in state.values())


def gate_blocks(name: str, shape: tuple[int, ...], kind: str) -> list[tuple[int, ...]]:
    """The shapes of a weight's gates; one block for what is no memory."""
    gates = GATES[kind] if name.startswith("memory.") else 1
    return [(shape[0] // gates, *shape[1:])] * gates


def open_forget_gates(weights: Weights, memory: MemoryLayout) -> None:
    """Begin an LSTM with a bias of 1 at the forget gates, so that it remembers at first (Jozefowicz et al. 2015, section 2.2)."""
    if memory.kind == "lstm":
        for layer in range(memory.layers):
            weights[f"memory.{layer}.input.bias"][FORGET_GATE * memory.size : (FORGET_GATE + 1) * memory.size] = 1
