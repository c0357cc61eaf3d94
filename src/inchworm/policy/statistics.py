"""Serves steps 4 and 9: the normalisers that a policy carries, under the same version as its weights.

They move once per rollout, after the last epoch. Outside the policy every value is in reward units.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from inchworm.normalization import ReturnNormalizer, RunningMeanStd
from inchworm.policy.spec import PolicySpec

OBSERVATIONS, VALUES = "observation_normalizer", "value_normalizer"


class PolicyStatistics:
    """The observation and value normalisers of one policy; each may be off."""

    def __init__(self, spec: PolicySpec) -> None:
        self._kept = spec.observations.normalized  # [F] entries that may be scaled
        wanted = spec.config.normalize_observations  # images and categories alone leave nothing to scale
        self.observations = RunningMeanStd((spec.observations.size,)) if wanted and self._kept.any() else None
        self.values = ReturnNormalizer() if spec.config.normalize_values else None

    @property
    def pending(self) -> bool:
        """A normaliser is on and has seen nothing yet: the first rollout only moves the statistics."""
        counts = [n.count for n in (self.observations, self.values.rms if self.values else None) if n is not None]
        return any(count == 0 for count in counts)

    @property
    def center(self) -> np.ndarray:
        """[F] f32 what is subtracted from the flat observation."""
        assert self.observations is not None
        return np.where(self._kept, self.observations.mean, 0.0).astype(np.float32)

    @property
    def inverse_std(self) -> np.ndarray:
        """[F] f32 what it is then multiplied with."""
        assert self.observations is not None
        return np.where(self._kept, 1.0 / self.observations.std, 1.0).astype(np.float32)

    @property
    def value_mean(self) -> float:
        """The mean of returns, in reward units; 0 without a normaliser."""
        return float(self.values.mean) if self.values else 0.0

    @property
    def value_std(self) -> float:
        """The standard deviation of returns; 1 without a normaliser."""
        return float(self.values.std) if self.values else 1.0

    def update(self, flat_observations: np.ndarray, returns: np.ndarray, valid: np.ndarray) -> None:
        """Enter one rollout: flat observations [T, B, F], returns [T, B]."""
        if self.observations is not None:
            self.observations.update(flat_observations, where=valid)
        if self.values is not None:
            self.values.update(returns, where=valid)

    def to_weights(self) -> dict[str, np.ndarray]:
        """The statistics as named arrays, beside the parameters."""
        named: dict[str, np.ndarray] = {}
        for prefix, part in ((OBSERVATIONS, self.observations), (VALUES, self.values)):
            if part is not None:
                named |= {f"{prefix}.{name}": np.array(value) for name, value in part.state_dict().items()}
        return named

    def from_weights(self, weights: Mapping[str, Any]) -> None:
        """Take the statistics from named arrays."""
        for prefix, part in ((OBSERVATIONS, self.observations), (VALUES, self.values)):
            if part is not None:
                mine = {name.removeprefix(f"{prefix}."): value for name, value in weights.items() if name.startswith(f"{prefix}.")}
                part.load_state_dict(mine)
