"""Step 9 of 9 for several policies: one learner for each, on the lanes in which it acted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from inchworm.backends.learner import HISTORY, BaseLearner
from inchworm.core.errors import ConfigError
from inchworm.core.types import Advantages, ProfilePoint, UpdateStats
from inchworm.policy.composite import CompositePolicy
from inchworm.policy.file import fingerprint
from inchworm.rollout.rollout import Rollout

WORST = {"ratio_error": max, "staleness": max, "behavior_kl": max, "effective_sample_size": min}
"""Metrics whose overall value is the worst part's; for the others it is the mean."""


class CompositeLearner:
    """Learns the parts of a composite policy, each from its own lanes and with its own learner, independently of the others.

    Metrics are named `part/metric`; the plain names hold the mean over the parts that learned.
    """

    def __init__(self, policy: CompositePolicy, learners: Mapping[str, BaseLearner]) -> None:
        if not learners:
            raise ConfigError(
                f"no policy is trainable (trainable=() for {', '.join(policy.policies)}); leave trainable out, or only collect"
            )
        self.policy, self.learners = policy, dict(learners)
        self.updates = 0
        self.env_steps = 0
        self._history: dict[int, dict[str, int]] = {}  # recent fingerprints of the composite -> those of the parts that learn
        self._total_timesteps = next(iter(learners.values())).total_timesteps

    def update(self, rollout: Rollout | Mapping[str, Any], custom_loss_fns: Sequence[Callable[..., Any]] = ()) -> UpdateStats:
        """Update every part that learns; the rollout is only read."""
        rollout = rollout if isinstance(rollout, Rollout) else Rollout.from_dict(rollout)
        rollout.validate()
        current = fingerprint(self.policy.get_weights())  # before any update
        self._history[current] = {name: fingerprint(self.policy.learned[name].get_weights()) for name in self.learners}
        if len(self._history) > HISTORY:
            del self._history[next(iter(self._history))]
        stats: dict[str, UpdateStats] = {}
        updates = {name: learner.updates for name, learner in self.learners.items()}
        for name, learner in self.learners.items():
            learner.env_steps = self.env_steps
            stats[name] = learner.update(self._own(rollout, name), custom_loss_fns)
            learner.env_steps = self.env_steps + rollout.num_valid  # schedules follow the whole run, not a part's share of it
        if rollout.num_valid:
            self.policy.policy_version += 1
            self.updates += 1
            self.env_steps += rollout.num_valid
        metrics: dict[str, float] = {}
        learned = [one for name, one in stats.items() if self.learners[name].updates > updates[name]] or list(stats.values())
        for key in dict.fromkeys(key for one in learned for key in one):
            column = [one[key] for one in learned if key in one]
            metrics[key] = WORST[key](column) if key in WORST else float(np.mean(column))
        metrics["n_updates"] = float(self.updates)
        return UpdateStats(metrics | {f"{name}/{key}": value for name, one in stats.items() for key, value in one.items()})

    def attach_losses(self, functions: Sequence[Callable[..., Any]]) -> None:
        """Bind custom losses to every part's learner, which restore what a checkpoint holds of them."""
        for learner in self.learners.values():
            learner.attach_losses(functions)

    def _own(self, rollout: Rollout, name: str) -> Rollout:
        """A part's rollout, with the part's version and fingerprint instead of the composite's."""
        part, own = self.policy.learned[name], self.policy.part_of(rollout, name)
        known = own.weights_fingerprint != 0
        versions = part.policy_version - (self.policy.policy_version - own.policy_version)
        prints = np.array([self._history.get(one, {name: one})[name] for one in own.weights_fingerprint.tolist()], np.uint64)
        return dataclasses.replace(
            own, policy_version=np.where(known, versions, own.policy_version).astype(np.int32), weights_fingerprint=prints
        )

    @property
    def warming_up(self) -> bool:
        """Whether the first update will only initialise the normalisers of a part."""
        return any(learner.warming_up for learner in self.learners.values())

    @property
    def total_timesteps(self) -> int | None:
        """The end of the schedules of all parts."""
        return self._total_timesteps

    @total_timesteps.setter
    def total_timesteps(self, value: int | None) -> None:
        self._total_timesteps = value
        for learner in self.learners.values():
            learner.total_timesteps = value

    @property
    def on_stage(self) -> Callable[..., object] | None:
        """Called at each stage of an update: those of all parts, one after another."""
        return next(iter(self.learners.values())).on_stage

    @on_stage.setter
    def on_stage(self, value: Callable[..., object] | None) -> None:
        for learner in self.learners.values():
            learner.on_stage = value

    @property
    def optimizer(self) -> dict[str, Any]:
        """The optimiser inside each part's learner, by name."""
        learners: dict[str, Any] = dict(self.learners)
        return {name: learner.optimizer for name, learner in learners.items()}

    @property
    def device(self) -> str:
        """The device on which the parts learn."""
        first: Any = next(iter(self.learners.values()))
        return str(first.device)

    def profile_points(self) -> list[ProfilePoint]:
        """The sections of an update, for a profile: those of every part."""
        return [point for learner in self.learners.values() for point in learner.profile_points()]

    def state_dict(self) -> dict[str, Any]:
        """The state of every part's learner, and the counters."""
        parts = {name: learner.state_dict() for name, learner in self.learners.items()}
        history = {name: np.array([row[name] for row in self._history.values()], np.uint64) for name in self.learners}
        recent = {"whole": np.array(list(self._history), np.uint64), "parts": history}
        return {"parts": parts, "updates": self.updates, "env_steps": self.env_steps, "history": recent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state["parts"].keys() != self.learners.keys():
            raise ConfigError(f"the state is of learners for {', '.join(state['parts'])}, but {', '.join(self.learners)} learn here")
        for name, learner in self.learners.items():
            learner.load_state_dict(state["parts"][name])
        self.updates, self.env_steps = int(state["updates"]), int(state["env_steps"])
        recent = state.get("history", {"whole": np.zeros(0, np.uint64), "parts": {}})  # older checkpoints lack it
        rows = zip(*[recent["parts"][name].tolist() for name in self.learners]) if recent["parts"] else ()
        self._history = {whole: dict(zip(self.learners, row)) for whole, row in zip(recent["whole"].tolist(), rows)}


def composite_advantages(policy: CompositePolicy, rollout: Rollout, compute: Callable[[Any, Rollout], Advantages]) -> Advantages:
    """The advantages [T, B] of all lanes, each part's computed by `compute(part, its rollout)`."""
    fields = [np.zeros(rollout.rewards.shape, np.float32) for _ in range(4)]
    for name in policy.policies:
        if name not in policy.learned:
            raise ConfigError(f"the part {name} is a {type(policy.policies[name]).__name__}, an actor without a critic")
        own = compute(policy.learned[name], policy.part_of(rollout, name))
        for field, values in zip(fields, (own.values, own.next_values, own.advantages, own.returns)):
            field[:, policy.lanes_of(name, rollout.num_lanes)] = values
    return Advantages(*fields)
