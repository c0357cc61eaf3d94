"""Whole runs of a trainer, and all that two equal runs must have in common."""

from typing import Any

import numpy as np
import optree

from inchworm.tracking.jsonl import METRICS
from inchworm.train.trainer import PPOTrainer

PARTS = ("weights", "learner", "collector", "state", "callbacks", "trackers")


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in optree.tree_leaves(tree, none_is_leaf=True)]


def outcome(trainer: PPOTrainer) -> dict[str, Any]:
    """The state to the bit and the rows of metrics, timing apart."""
    state = trainer.full_state()
    rows = {} if trainer.run_dir is None else {METRICS: (trainer.run_dir / METRICS).read_bytes()}
    return {**{part: bits(state[part]) for part in PARTS}, **rows}


def finish(trainer: PPOTrainer, *arguments: Any, resume: bool = False, **options: Any) -> dict[str, Any]:
    """Train to the end and close: the outcome."""
    with trainer:
        if resume:
            trainer.load_checkpoint()
        trainer.train(*arguments, **options)
        return outcome(trainer)
