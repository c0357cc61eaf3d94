"""Serves checkpoints: what belongs to the whole process, not to one run. Never the first to import torch, but for a state with tensors."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np


def torch_is_there() -> bool:
    """Whether this process has imported torch, for whatever reason."""
    return "torch" in sys.modules


def generators_state() -> dict[str, Any]:
    """The process-wide generators of Python, NumPy and torch, which people's own losses, networks and worlds may draw from."""
    version, numbers, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - it is other people's
    state: dict[str, Any] = {"random": [version, list(numbers), gauss], "numpy": _as_lists(legacy)}
    if torch_is_there():
        from inchworm.backends.torch.process import generator_state

        state["torch"] = generator_state()
    return state


def restore_generators(state: Mapping[str, Any]) -> None:
    """Put them where `generators_state` found them; torch's only if torch is there, as it is wherever torch learns."""
    version, numbers, gauss = state["random"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(state["numpy"])  # noqa: NPY002
    if "torch" in state and torch_is_there():
        from inchworm.backends.torch.process import restore_generator

        restore_generator(state["torch"])


def cpu_capability() -> str | None:
    """The vector instructions that torch chose for this processor; None without torch in the process."""
    if not torch_is_there():
        return None
    from inchworm.backends.torch.process import capability

    return capability()


def thread_count(threads: int) -> int | None:
    """With how many threads a run that asks for `threads` learns; 0 asks for what the process has, which only torch knows."""
    if threads or not torch_is_there():
        return threads or None
    from inchworm.backends.torch.process import num_threads

    return num_threads()


def as_arrays(tree: Any) -> Any:
    """A foreign optimiser's state as plain data: `{"tensor": array}` for a tensor, `{"keys": …, "values": …}` for a dict by number."""
    if isinstance(tree, Mapping):
        values = [as_arrays(value) for value in tree.values()]
        return {"keys": list(tree), "values": values}
    if isinstance(tree, list | tuple):
        return [as_arrays(value) for value in tree]
    if torch_is_there():
        from inchworm.backends.torch.process import to_array

        array = to_array(tree)
        if array is not None:
            return {"tensor": array}
    return tree


def from_arrays(tree: Any) -> Any:
    """What `as_arrays` was given; tensors are torch's again."""
    if isinstance(tree, Mapping) and "tensor" in tree:
        from inchworm.backends.torch.process import to_tensor

        return to_tensor(tree["tensor"])
    if isinstance(tree, Mapping):
        return {key: from_arrays(value) for key, value in zip(tree["keys"], tree["values"], strict=True)}
    return [from_arrays(value) for value in tree] if isinstance(tree, list | tuple) else tree


def _as_lists(tree: Any) -> Any:
    """Arrays as lists of numbers, for JSON."""
    if isinstance(tree, Mapping):
        return {key: _as_lists(value) for key, value in tree.items()}
    return tree.tolist() if isinstance(tree, np.ndarray | np.generic) else tree
