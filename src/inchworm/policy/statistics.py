"""The normalisers of a policy (steps 4 and 9 of 9), saved under the same version as its weights.

They are updated once per rollout, after the last epoch. Outside the policy every value is in reward units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self, TypeAlias

import numpy as np

from inchworm.core.types import Array
from inchworm.policy.spec import PolicySpec

EPSILON = 1e-8  # keeps the scale of a constant above 0
MergeRanks: TypeAlias = Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray, int]]


class RunningMeanStd:
    """Running mean and population variance [*shape]; 0 and 1 before any data."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.mean = np.zeros(shape)
        self.var = np.ones(shape)
        self.count = 0
        self.merge_ranks: MergeRanks | None = None
        """Adds to the moments of new samples those that other processes add at the same time; None in a single process."""

    @property
    def std(self) -> np.ndarray:
        """The scale [*shape], never 0."""
        return np.sqrt(self.var + EPSILON)

    def update(self, x: Array, where: Array | None = None) -> None:
        """Add samples [*batch, *shape], or those where `where` [*batch] is true."""
        samples = _on_host(x)
        batch = samples.shape[: samples.ndim - self.mean.ndim]
        if samples.shape[len(batch) :] != self.mean.shape:
            raise ValueError(f"samples of shape {list(samples.shape)} do not end in {list(self.mean.shape)}, the shape of these statistics")
        if where is not None:
            chosen = np.asarray(where)
            if chosen.shape != batch or chosen.dtype != np.bool_:
                raise ValueError(f"where must be bool{list(batch)}, not {chosen.dtype}{list(chosen.shape)}")
            samples = samples[chosen]
        self.add_moments(*_moments(samples.reshape((-1, *self.mean.shape))))

    def add_moments(self, mean: np.ndarray, var: np.ndarray, count: int) -> None:
        """Add samples by their mean, population variance and number."""
        self._merge(*((mean, var, count) if self.merge_ranks is None else self.merge_ranks(mean, var, count)))

    def merge(self, other: RunningMeanStd) -> None:
        """Add all samples of `other`."""
        if other.mean.shape != self.mean.shape:
            raise ValueError(f"statistics of shape {list(other.mean.shape)} do not merge into {list(self.mean.shape)}")
        self._merge(other.mean, other.var, other.count)

    def _merge(self, mean: np.ndarray, var: np.ndarray, count: int) -> None:
        if count == 0:
            return
        total = self.count + count
        delta = mean - self.mean
        own = self.var * self.count  # the sum of squares; 0 before any data, whatever var says then
        self.var = (own + var * count + delta * delta * (self.count * count / total)) / total
        self.mean = self.mean + delta * (count / total)
        self.count = total

    def normalize(self, x: Array, clip: float | None = None) -> Array:
        """(x - mean) / std, clipped to ±clip, in the dtype of `x` if that is a float; a framework's tensor gives a tensor on its device."""
        samples = _on_host(x)
        scaled = (samples - self.mean) / self.std
        return _as_given(x, samples, scaled if clip is None else np.clip(scaled, -clip, clip))

    def denormalize(self, x: Array) -> Array:
        """The inverse of `normalize` without clipping."""
        samples = _on_host(x)
        return _as_given(x, samples, samples * self.std + self.mean)

    def state_dict(self) -> dict[str, np.ndarray]:
        """mean, var and count as arrays."""
        return {"mean": np.array(self.mean), "var": np.array(self.var), "count": np.array(self.count, np.int64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if set(state) != {"mean", "var", "count"}:
            raise ValueError(f"statistics are saved as mean, var and count, not as {sorted(state)}")
        mean, var = np.array(state["mean"], np.float64), np.array(state["var"], np.float64)
        if mean.shape != self.mean.shape or var.shape != self.var.shape or np.shape(state["count"]) != ():
            raise ValueError(f"saved statistics of shape {list(mean.shape)} do not fit {list(self.mean.shape)}")
        self.mean, self.var, self.count = mean, var, int(state["count"])

    def copy(self) -> Self:
        """An independent copy."""
        other = type(self)(self.mean.shape)
        other.load_state_dict(self.state_dict())
        return other


def _on_host(x: Array) -> np.ndarray:
    """Samples as an array, also of a framework's tensor with gradients or on another device."""
    from inchworm.backends.registry import backend_of_array  # which frameworks there are is known above this package

    found = None if isinstance(x, np.ndarray) else backend_of_array(x).to_array(x)
    return np.asarray(x) if found is None else found


def _as_given(x: Array, samples: np.ndarray, result: np.ndarray) -> Array:
    """The result in the samples' dtype if it is a float, else in float64, and as a tensor of the framework that `x` is of."""
    cast = np.asarray(result, samples.dtype if samples.dtype.kind == "f" else np.float64)
    if isinstance(x, np.ndarray):
        return cast
    from inchworm.backends.registry import backend_of_array

    return backend_of_array(x).from_array(cast, x)


def _moments(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Mean, population variance and number of samples [n, *shape], by two passes in float64."""
    if len(samples) == 0:
        return np.zeros(samples.shape[1:]), np.zeros(samples.shape[1:]), 0
    samples = samples.astype(np.float64)
    mean = samples.mean(0)
    deviation = samples - mean
    # The rounding error of the mean is in every deviation; their mean corrects it.
    correction = deviation.mean(0)
    return mean + correction, (deviation * deviation).mean(0) - correction * correction, len(samples)


class ReturnNormalizer(RunningMeanStd):
    """Running statistics of returns: the value head predicts normalised returns, everything else uses reward units."""

    @property
    def rms(self) -> RunningMeanStd:
        """The statistics, which are the normaliser itself."""
        return self


def popart(
    old_mean: float, old_std: float, new_mean: float, new_std: float, weight: np.ndarray, bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The last layer of a value head after a change of statistics that keeps its values in reward units (Hessel et al. 2018, section 3.1).

    sigma (W h + b) + mu = sigma' (W' h + b') + mu'  holds for all h with  W' = W sigma / sigma',  b' = (sigma b + mu - mu') / sigma'.
    """
    new_weight = weight.astype(np.float64) * (old_std / new_std)
    new_bias = (old_std * bias.astype(np.float64) + old_mean - new_mean) / new_std
    return new_weight.astype(weight.dtype), new_bias.astype(bias.dtype)


OBSERVATIONS, VALUES, GLOBAL_STATE = "observation_normalizer", "value_normalizer", "global_state_normalizer"


class PolicyStatistics:
    """The normalisers of a policy: of observations, of values and of a central critic's global state; each may be off."""

    def __init__(self, spec: PolicySpec) -> None:
        self._kept = spec.observations.normalized  # [F] entries that may be scaled
        wanted = spec.config.normalize_observations  # there may be nothing to scale: only images and categories
        self.observations = RunningMeanStd((spec.observations.size,)) if wanted and self._kept.any() else None
        self.values = ReturnNormalizer() if spec.config.normalize_values else None
        shared = spec.global_state
        self._kept_of_shared = np.zeros(0, bool) if shared is None else shared.normalized  # [G]
        self.global_state = RunningMeanStd(self._kept_of_shared.shape) if wanted and self._kept_of_shared.any() else None
        named = ((OBSERVATIONS, self.observations), (VALUES, self.values), (GLOBAL_STATE, self.global_state))
        self.parts = {name: part for name, part in named if part is not None}
        """The normalisers that are on, by the names of their weights."""

    @property
    def pending(self) -> bool:
        """Whether a normaliser is on and has no data yet: the next rollout then only updates the statistics."""
        return any(part.count == 0 for part in self.parts.values())

    @property
    def observation_scale(self) -> tuple[np.ndarray, np.ndarray] | None:
        """What is subtracted from the flat observation and what the result is multiplied with, each [F] f32; None if it stays as it is."""
        return None if self.observations is None else _scale(self.observations, self._kept)

    @property
    def global_scale(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The same for the flat global state, each [G] f32."""
        return None if self.global_state is None else _scale(self.global_state, self._kept_of_shared)

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
        """Add one rollout: flat observations [T, B, F] and returns [T, B] of valid rows, and the whole flat global state [T, E, G]."""
        if self.global_state is not None and flat_global_state is not None:
            self.global_state.update(flat_global_state)
        if self.observations is not None:
            self.observations.update(flat_observations, where=valid)
        if self.values is not None:
            self.values.update(returns, where=valid)

    def to_weights(self) -> dict[str, np.ndarray]:
        """The statistics as named arrays, saved with the parameters."""
        named: dict[str, np.ndarray] = {}
        for prefix, part in self.parts.items():
            named |= {f"{prefix}.{name}": value for name, value in part.state_dict().items()}
        return named

    def from_weights(self, weights: Mapping[str, Any]) -> None:
        """Restore the statistics from named arrays."""
        for prefix, part in self.parts.items():
            mine = {name.removeprefix(f"{prefix}."): value for name, value in weights.items() if name.startswith(f"{prefix}.")}
            part.load_state_dict(mine)


def _scale(statistics: RunningMeanStd, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and inverse standard deviation; 0 and 1 for entries that are not kept."""
    center, inverse_std = np.where(kept, statistics.mean, 0.0), np.where(kept, 1.0 / statistics.std, 1.0)
    return center.astype(np.float32), inverse_std.astype(np.float32)
