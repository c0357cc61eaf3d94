"""Serves step 9 of 9: watching for numbers that are not finite, and stopping a run that meets too many."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import optree

from inchworm.errors import BadNumberError
from inchworm.files import write_tensor_file
from inchworm.trees import flatten_tree
from inchworm.types import Minibatch, Tree

Table = Mapping[str, np.ndarray]
"""What an epoch's minibatch steps gave, one entry [n] each, under metric names; and the flags `bad` and `empty`."""

MAX_BAD_STEPS = 3
"""Bad minibatches in a row after which the run stops."""


class BadNumberGuard:
    """Counts bad minibatches in a row, over epochs and updates."""

    def __init__(self, dump_directory: str | Path | None) -> None:
        self.bad_steps = 0
        self._directory = dump_directory

    def watch(self, table: Table, minibatches: Sequence[Any], whole: Callable[[Any], Minibatch]) -> None:
        """Read an epoch's flags, once; several in a row stop the run, with the last minibatch saved, as `whole` gives it."""
        if not table["bad"].any():
            self.bad_steps = 0
            return
        for index, bad in enumerate(table["bad"]):
            self.bad_steps = self.bad_steps + 1 if bad else 0
            if self.bad_steps >= MAX_BAD_STEPS:
                saved = self._dump(whole(minibatches[index]))
                raise BadNumberError(
                    f"the loss or its gradient was not finite in {MAX_BAD_STEPS} minibatches in a row (loss {table['loss'][index]:g}, "
                    f"gradient norm {table['grad_norm'][index]:g}); the weights are as before them, the minibatch is saved in "
                    f"{saved}. Lower ppo.learning_rate, or look at the observations and rewards in that file"
                )

    def check_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Stop before anybody acts with, or saves, a weight that a good gradient has carried out of range."""
        for name, array in weights.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise BadNumberError(
                    f"the weight {name} is not finite after this update; lower ppo.learning_rate. Nothing of the update was saved"
                )

    def _dump(self, minibatch: Minibatch) -> Path:
        directory = Path(self._directory) if self._directory is not None else Path(tempfile.mkdtemp(prefix="inchworm-"))
        directory.mkdir(parents=True, exist_ok=True)
        tree: Tree = {field.name: getattr(minibatch, field.name) for field in fields(minibatch)}
        arrays, structure = flatten_tree(optree.tree_map(_as_array, tree))
        path = directory / "bad_minibatch.safetensors"
        return write_tensor_file(path, arrays, kind="minibatch", version=1, header={"structure": structure})


def _as_array(leaf: Any) -> np.ndarray:
    """A NumPy array, or another library's in the host's memory, as a NumPy array."""
    return np.asarray(leaf if isinstance(leaf, np.ndarray) else leaf.detach().cpu())
