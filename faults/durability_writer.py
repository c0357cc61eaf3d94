"""Serves section A: saves a few states, one after another, in a child, and says in a file of its own how far it came.

The notes are made with pwrite, which nobody makes fail or counts. A save that fails is tried again at once, as a trainer does at
the next iteration; a second failure is put down and the next state's turn comes.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from inchworm.core.errors import InchwormError
from inchworm.core.tensor_file import write_tensor_file
from inchworm.run.checkpoint import TrainingCheckpointer

SIZE = 300
CHECKPOINTS, POLICY, NOTES = "run/checkpoints", "run/policy.safetensors", "notes"


def state_of(step: int) -> dict[str, Any]:
    """The state that belongs to a step: nothing in it is equal to another step's."""
    rng = np.random.default_rng(step)
    weights = {"a": rng.standard_normal(SIZE).astype(np.float32), "b": rng.integers(0, 9, (3, 4))}
    return {"weights": weights, "counters": {"iteration": step, "score": step / 7}, "text": f"state of {step}", "none": None}


def policy_of(step: int) -> dict[str, np.ndarray]:
    """The arrays of the file beside the checkpoints."""
    return {"w": np.random.default_rng(1000 + step).standard_normal(SIZE)}


def save(directory: Path, step: int) -> None:
    """A checkpoint, then a file beside it."""
    TrainingCheckpointer(directory / CHECKPOINTS).save(step, state_of(step))
    write_tensor_file(directory / POLICY, policy_of(step), kind="policy", version=1, header={"step": step})


def is_intact(directory: Path, saved: int, begun: int) -> bool:
    """Whether the newest checkpoint is the last that was saved, or the one that has just been tried."""
    checkpointer = TrainingCheckpointer(directory / CHECKPOINTS)
    if not checkpointer.all():
        return saved == 0
    found = checkpointer.load()
    wanted = state_of(found.step)
    return saved <= found.step <= begun and all(
        np.array_equal(found.state["weights"][name], wanted["weights"][name]) for name in wanted["weights"]
    )


def write_states(directory: Path, states: int) -> int:
    """Save every state; 0."""
    notes: dict[str, Any] = {"begun": 0, "saved": 0, "errors": [], "intact": [], "warnings": []}
    descriptor = os.open(directory / NOTES, os.O_WRONLY | os.O_CREAT)

    def note() -> None:
        os.pwrite(descriptor, json.dumps(notes).encode().ljust(8000), 0)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(1, states + 1):
            notes["begun"] = step
            for _ in range(2):
                note()
                try:
                    save(directory, step)
                except (OSError, InchwormError) as error:
                    cause = error if isinstance(error, OSError) else error.__cause__
                    notes["errors"].append([step, cause.errno if isinstance(cause, OSError) else None, str(error)])
                    notes["intact"].append(is_intact(directory, notes["saved"], step))
                else:
                    notes["saved"] = step
                    break
            notes["warnings"] = [str(warning.message) for warning in warned]
            note()
    return 0
