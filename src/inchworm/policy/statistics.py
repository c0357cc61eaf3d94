"""Serves steps 4 and 9: the normalisers that a policy carries, under the same version as its weights.

They move once per rollout, after the last epoch. Outside the policy every value is in reward units.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from inchworm.normalization import ReturnNormalizer, RunningMeanStd
from inchworm.policy.spec import PolicySpec

OBSERVATIONS, VALUES, GLOBAL_STATE = "observation_normalizer", "value_normalizer", "global_state_normalizer"


class PolicyStatistics:
    """The normalisers of one policy, for observations, values and what its central critic reads; each may be off."""

    def __init__(self, spec: PolicySpec) -> None:
        self._kept = spec.observations.normalized  # [F] entries that may be scaled
        wanted = spec.config.normalize_observations  # images and categories alone leave nothing to scale
        self.observations = RunningMeanStd((spec.observations.size,)) if wanted and self._kept.any() else None
        self.values = ReturnNormalizer() if spec.config.normalize_values else None
        shared = spec.global_state
        self._kept_of_shared = np.zeros(0, bool) if shared is None else shared.normalized  # [G]
        self.global_state = RunningMeanStd(self._kept_of_shared.shape) if wanted and self._kept_of_shared.any() else None

    @property
    def wanted(self) -> bool:
        """Whether any normaliser is on."""
        return any(part is not None for _, part in self._parts())

    @property
    def pending(self) -> bool:
        """A normaliser is on and has seen nothing yet: the first rollout only moves the statistics."""
        counts = [n.count for n in (self.observations, self.values.rms if self.values else None, self.global_state) if n is not None]
        return any(count == 0 for count in counts)

    @property
    def center(self) -> np.ndarray:
        """[F] f32 what is subtracted from the flat observation."""
        assert self.observations is not None
        return _center(self.observations, self._kept)

    @property
    def inverse_std(self) -> np.ndarray:
        """[F] f32 what it is then multiplied with."""
        assert self.observations is not None
        return _inverse_std(self.observations, self._kept)

    @property
    def global_center(self) -> np.ndarray:
        """[G] f32 what is subtracted from the flat global state."""
        assert self.global_state is not None
        return _center(self.global_state, self._kept_of_shared)

    @property
    def global_inverse_std(self) -> np.ndarray:
        """[G] f32 what it is then multiplied with."""
        assert self.global_state is not None
        return _inverse_std(self.global_state, self._kept_of_shared)

    @property
    def value_mean(self) -> float:
        """The mean of returns, in reward units; 0 without a normaliser."""
        return float(self.values.mean) if self.values else 0.0

    @property
    def value_std(self) -> float:
        """The standard deviation of returns; 1 without a normaliser."""
        return float(self.values.std) if self.values else 1.0

    def update(
        self, flat_observations: np.ndarray, returns: np.ndarray, valid: np.ndarray, flat_global_state: np.ndarray | None = None
    ) -> None:
        """Enter one rollout: flat observations [T, B, F], returns [T, B]; flat global state [T, E, G], of which every row counts."""
        if self.global_state is not None and flat_global_state is not None:
            self.global_state.update(flat_global_state)
        if self.observations is not None:
            self.observations.update(flat_observations, where=valid)
        if self.values is not None:
            self.values.update(returns, where=valid)

    def to_weights(self) -> dict[str, np.ndarray]:
        """The statistics as named arrays, beside the parameters."""
        named: dict[str, np.ndarray] = {}
        for prefix, part in self._parts():
            if part is not None:
                named |= {f"{prefix}.{name}": np.array(value) for name, value in part.state_dict().items()}
        return named

    def from_weights(self, weights: Mapping[str, Any]) -> None:
        """Take the statistics from named arrays."""
        for prefix, part in self._parts():
            if part is not None:
                mine = {name.removeprefix(f"{prefix}."): value for name, value in weights.items() if name.startswith(f"{prefix}.")}
                part.load_state_dict(mine)

    def _parts(self) -> tuple[tuple[str, RunningMeanStd | ReturnNormalizer | None], ...]:
        return (OBSERVATIONS, self.observations), (VALUES, self.values), (GLOBAL_STATE, self.global_state)


def _center(statistics: RunningMeanStd, kept: np.ndarray) -> np.ndarray:
    return np.where(kept, statistics.mean, 0.0).astype(np.float32)


def _inverse_std(statistics: RunningMeanStd, kept: np.ndarray) -> np.ndarray:
    return np.where(kept, 1.0 / statistics.std, 1.0).astype(np.float32)
