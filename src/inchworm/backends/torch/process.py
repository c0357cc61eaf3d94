"""Serves checkpoints: what torch holds for the whole process. Imported only where torch is there already, or a state needs it."""

from __future__ import annotations

import numpy as np
import torch


def generator_state() -> str:
    """The state of torch's CPU generator, as hexadecimal text."""
    return torch.get_rng_state().numpy().tobytes().hex()


def restore_generator(state: str) -> None:
    """Put it where `generator_state` found it."""
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))


def capability() -> str:
    """The vector instructions that torch chose."""
    return str(torch.backends.cpu.get_cpu_capability())


def num_threads() -> int:
    """Threads of one operation."""
    return torch.get_num_threads()


def to_array(value: object) -> np.ndarray | None:
    """A copy of a tensor as an array; None for what is no tensor."""
    return value.detach().cpu().numpy().copy() if isinstance(value, torch.Tensor) else None


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """A copy of an array as a tensor."""
    return torch.from_numpy(np.array(array))
