"""Serves step 9 of 9: watching for numbers that are not finite, and stopping a run that meets too many."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import optree

from inchworm.backends.torch.step import Row
from inchworm.errors import BadNumberError
from inchworm.files import write_tensor_file
from inchworm.trees import flatten_tree
from inchworm.types import Minibatch, Tree

MAX_BAD_STEPS = 3
"""Bad minibatches in a row after which the run stops."""


class BadNumberGuard:
    """Counts bad minibatches in a row, over epochs and updates."""

    def __init__(self, dump_directory: str | Path | None) -> None:
        self.bad_steps = 0
        self._directory = dump_directory

    def watch(self, minibatches: Sequence[Minibatch], rows: Sequence[Row]) -> None:
        """Read an epoch's flags, once; several in a row stop the run, with the last minibatch saved."""
        for minibatch, row in zip(minibatches, rows):
            self.bad_steps = self.bad_steps + 1 if bool(row["bad"]) else 0
            if self.bad_steps >= MAX_BAD_STEPS:
                raise BadNumberError(
                    f"the loss or its gradient was not finite in {MAX_BAD_STEPS} minibatches in a row (loss {float(row['loss']):g}, "
                    f"gradient norm {float(row['grad_norm']):g}); the weights are as before them, the minibatch is saved in "
                    f"{self._dump(minibatch)}. Lower ppo.learning_rate, or look at the observations and rewards in that file"
                )

    def _dump(self, minibatch: Minibatch) -> Path:
        directory = Path(self._directory) if self._directory is not None else Path(tempfile.mkdtemp(prefix="inchworm-"))
        directory.mkdir(parents=True, exist_ok=True)
        tree: Tree = {field.name: getattr(minibatch, field.name) for field in fields(minibatch)}
        arrays, structure = flatten_tree(optree.tree_map(lambda leaf: leaf.detach().cpu().numpy(), tree))
        path = directory / "bad_minibatch.safetensors"
        return write_tensor_file(path, arrays, kind="minibatch", version=1, header={"structure": structure})
