"""Step 9 of 9, for several policies at once: one learner for each, on the lanes that it acted in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from inchworm.backends.learner import BaseLearner
from inchworm.core.errors import ConfigError
from inchworm.core.types import Advantages, ProfilePoint, UpdateStats
from inchworm.policy.composite import CompositePolicy
from inchworm.policy.file import fingerprint
from inchworm.rollout.rollout import Rollout

LARGEST = ("ratio_error", "staleness")
"""Metrics of which the worst part's stands for all; of the others it is the mean."""


class CompositeLearner:
    """Learns the parts of a composite policy, each from its own lanes and by its own learner, as if the others were not there.

    Metrics are named `part/metric`; the plain names hold the mean over the parts that learned.
    """

    def __init__(self, policy: CompositePolicy, learners: Mapping[str, BaseLearner]) -> None:
        if not learners:
            raise ConfigError(f"nobody learns: none of {', '.join(policy.policies)} is trainable; leave trainable out, or only collect")
        self.policy, self.learners = policy, dict(learners)
        self.updates = 0
        self.env_steps = 0
        self._total_timesteps = next(iter(learners.values())).total_timesteps

    def update(self, rollout: Rollout | Mapping[str, Any], custom_loss_fns: Sequence[Callable[..., Any]] = ()) -> UpdateStats:
        """One update of every part that learns; the rollout is read, never written."""
        rollout = rollout if isinstance(rollout, Rollout) else Rollout.from_dict(rollout)
        rollout.validate()
        acted = fingerprint(self.policy.get_weights())  # before any part moves
        stats: dict[str, UpdateStats] = {}
        for name, learner in self.learners.items():
            stats[name] = learner.update(self._own(rollout, name, acted), custom_loss_fns)
            learner.env_steps = self.env_steps + rollout.num_valid  # schedules run with the whole run, not with a part's share of it
        if rollout.num_valid:
            self.policy.policy_version += 1
            self.updates += 1
            self.env_steps += rollout.num_valid
        return UpdateStats({**_overall(stats), **{f"{name}/{key}": value for name, one in stats.items() for key, value in one.items()}})

    def _own(self, rollout: Rollout, name: str, acted: int) -> Rollout:
        """A part's rollout, with the part's own version and fingerprint where the composite's stood."""
        part, own = self.policy.learned[name], self.policy.part_of(rollout, name)
        known = own.weights_fingerprint != 0
        versions = part.policy_version - (self.policy.policy_version - own.policy_version)
        prints = np.where(own.weights_fingerprint == np.uint64(acted), np.uint64(fingerprint(part.get_weights())), own.weights_fingerprint)
        return dataclasses.replace(
            own, policy_version=np.where(known, versions, own.policy_version).astype(np.int32), weights_fingerprint=prints
        )

    @property
    def total_timesteps(self) -> int | None:
        """What the schedules of all parts run towards."""
        return self._total_timesteps

    @total_timesteps.setter
    def total_timesteps(self, value: int | None) -> None:
        self._total_timesteps = value
        for learner in self.learners.values():
            learner.total_timesteps = value

    @property
    def optimizer(self) -> dict[str, Any]:
        """The optimiser inside each part's learner, by name."""
        learners: dict[str, Any] = dict(self.learners)
        return {name: learner.optimizer for name, learner in learners.items()}

    @property
    def device(self) -> str:
        """Where the parts learn."""
        first: Any = next(iter(self.learners.values()))
        return str(first.device)

    def profile_points(self) -> list[ProfilePoint]:
        """The sections of an update, for a profile: those of every part."""
        return [seam for learner in self.learners.values() for seam in learner.profile_points()]

    def state_dict(self) -> dict[str, Any]:
        """What every part's learner remembers, and the counters."""
        parts = {name: learner.state_dict() for name, learner in self.learners.items()}
        return {"parts": parts, "updates": self.updates, "env_steps": self.env_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` described."""
        if state["parts"].keys() != self.learners.keys():
            raise ConfigError(f"the state is of learners for {', '.join(state['parts'])}, but {', '.join(self.learners)} learn here")
        for name, learner in self.learners.items():
            learner.load_state_dict(state["parts"][name])
        self.updates, self.env_steps = int(state["updates"]), int(state["env_steps"])


def _overall(stats: Mapping[str, UpdateStats]) -> dict[str, float]:
    """Over the parts: of each metric the mean, or the largest where one bad part is what matters."""
    names = dict.fromkeys(key for one in stats.values() for key in one)
    columns = {key: [one[key] for one in stats.values() if key in one] for key in names}
    return {key: max(column) if key in LARGEST else float(np.mean(column)) for key, column in columns.items()}


def composite_advantages(policy: CompositePolicy, rollout: Rollout, look: Callable[[Any, Rollout], Advantages]) -> Advantages:
    """What each part's critic says of its own lanes, by `look(part, its rollout)`, side by side again: [T, B] arrays."""
    fields = [np.zeros(rollout.rewards.shape, np.float32) for _ in range(4)]
    for name in policy.policies:
        if name not in policy.learned:
            raise ConfigError(f"the part {name} is a {type(policy.policies[name]).__name__}, an actor without a critic")
        own = look(policy.learned[name], policy.part_of(rollout, name))
        for field, values in zip(fields, (own.values, own.next_values, own.advantages, own.returns)):
            field[:, policy.lanes_of(name, rollout.num_lanes)] = values
    return Advantages(*fields)
