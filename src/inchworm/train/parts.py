"""Serves the front door: the parts of the loop as a trainer puts them together, its own methods among them if a subclass wrote some."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inchworm.config import TrainingConfig
from inchworm.protocols import Callback
from inchworm.rollout.rollout import Rollout
from inchworm.train.callbacks import CheckpointCallback, EvaluateCallback, SnapshotCallback, TrackCallback
from inchworm.types import UpdateStats

if TYPE_CHECKING:
    from inchworm.train.trainer import PPOTrainer

NO_COPY = "an environment that was handed over cannot be copied for evaluation; give PPOTrainer an id or a factory"


def ordered_callbacks(
    trainer: PPOTrainer,
    config: TrainingConfig,
    own: Sequence[Callback],
    saving: tuple[CheckpointCallback, SnapshotCallback] | None,
) -> list[Callback]:
    """In the order in which an iteration needs them: score, watch the opponents, the user's `own`, write down, save."""
    chosen: list[Callback] = []
    scored = config.evaluation.interval or config.evaluation.final_episodes
    if scored and trainer.evaluator is None:
        warnings.warn(f"no scores are taken during training: {NO_COPY}", stacklevel=4)
    elif scored and trainer.evaluator is not None:
        safe = saving[0].secure if saving else None
        best = trainer.files.write_best_policy
        chosen.append(EvaluateCallback(trainer.evaluator, lambda: trainer.collector.policy, config.evaluation, best, safe))
    chosen += [*trainer.opponents, *own]
    if trainer.trackers:
        chosen.append(TrackCallback(trainer.trackers, config.run.log_interval))
    return [*chosen, *(saving or ())]


class OwnCollection:
    """A trainer's own `collect_rollouts` as a collector."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self._trainer = trainer
        self.set_weights = trainer.collector.set_weights
        self.state_dict = trainer.collector.state_dict
        self.load_state_dict = trainer.collector.load_state_dict
        self.close = trainer.collector.close

    def collect(self, num_steps: int) -> Rollout:
        """What the subclass collects."""
        return self._trainer.collect_rollouts(num_steps)


class OwnLearning:
    """A trainer's own `learn` as a learner."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self._trainer = trainer
        self.updates, self.total_timesteps = trainer.learner.updates, trainer.learner.total_timesteps
        self.state_dict = trainer.learner.state_dict
        self.load_state_dict = trainer.learner.load_state_dict

    def update(self, rollout: Rollout | Mapping[str, Any], custom_loss_fns: Sequence[Callable[..., Any]] = ()) -> UpdateStats:
        """What the subclass learns."""
        return self._trainer.learn(rollout, custom_loss_fns)
