"""Serves the loop: torch's CPU threads, which are global to the process and therefore only set around a run."""

from __future__ import annotations

import torch


def get() -> int:
    """How many threads torch uses now."""
    return torch.get_num_threads()


def use(threads: int) -> None:
    """Use so many from now on."""
    torch.set_num_threads(threads)
