"""Serves steps 4 and 9: running statistics of observations and returns, in float64. They live in the policy and travel with its weights.

Moments are merged by the parallel algorithm of Chan, Golub and LeVeque (1983), so an offset of a million costs no accuracy
and the order in which data arrive does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from inchworm.types import Array

_EPSILON = 1e-8  # keeps the scale of a constant above 0


class RunningMeanStd:
    """Mean and population variance [*shape] of everything seen so far; before any data they are 0 and 1."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.mean = np.zeros(shape)
        self.var = np.ones(shape)
        self.count = 0

    @property
    def std(self) -> np.ndarray:
        """[*shape] the scale, never 0."""
        return np.sqrt(self.var + _EPSILON)

    def update(self, x: Array, where: Array | None = None) -> None:
        """Enter samples [*batch, *shape]; `where` [*batch] bool leaves some out."""
        samples = np.asarray(x)
        batch = samples.shape[: samples.ndim - self.mean.ndim]
        if samples.shape[len(batch) :] != self.mean.shape:
            raise ValueError(f"samples of shape {list(samples.shape)} do not end in {list(self.mean.shape)}, the shape of these statistics")
        if where is not None:
            chosen = np.asarray(where)
            if chosen.shape != batch or chosen.dtype != np.bool_:
                raise ValueError(f"where must be bool{list(batch)}, not {chosen.dtype}{list(chosen.shape)}")
            samples = samples[chosen]
        self._merge(*_moments(samples.reshape((-1, *self.mean.shape))))

    def merge(self, other: RunningMeanStd) -> None:
        """Enter all that `other` has seen."""
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

    def normalize(self, x: Array, clip: float | None = None) -> np.ndarray:
        """Samples in units of the scale around the mean, float32 if `x` is, bounded by ±clip."""
        samples = np.asarray(x)
        scaled = (samples - self.mean) / self.std
        return _in_dtype_of(samples, scaled if clip is None else np.clip(scaled, -clip, clip))

    def denormalize(self, x: Array) -> np.ndarray:
        """The inverse of `normalize` without its clip: scale and mean are both undone."""
        samples = np.asarray(x)
        return _in_dtype_of(samples, samples * self.std + self.mean)

    def state_dict(self) -> dict[str, np.ndarray]:
        """mean, var and count as arrays."""
        return {"mean": self.mean.copy(), "var": self.var.copy(), "count": np.array(self.count, np.int64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` described."""
        if set(state) != {"mean", "var", "count"}:
            raise ValueError(f"statistics are saved as mean, var and count, not as {sorted(state)}")
        mean, var = np.array(state["mean"], np.float64), np.array(state["var"], np.float64)
        if mean.shape != self.mean.shape or var.shape != self.var.shape or np.shape(state["count"]) != ():
            raise ValueError(f"saved statistics of shape {list(mean.shape)} do not fit {list(self.mean.shape)}")
        self.mean, self.var, self.count = mean, var, int(state["count"])

    def copy(self) -> Self:
        """The same statistics, to be moved on their own."""
        other = type(self)(self.mean.shape)
        other.load_state_dict(self.state_dict())
        return other


def _in_dtype_of(samples: np.ndarray, result: np.ndarray) -> np.ndarray:
    """float32 stays float32; whole numbers become float64."""
    return np.asarray(result, samples.dtype if samples.dtype.kind == "f" else np.float64)


def _moments(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Mean, population variance and number of samples [n, *shape], by two passes in float64."""
    if len(samples) == 0:
        return np.zeros(samples.shape[1:]), np.zeros(samples.shape[1:]), 0
    samples = samples.astype(np.float64)
    mean = samples.mean(0)
    deviation = samples - mean
    # The mean's own rounding error is in every deviation; what they add up to takes it out again.
    correction = deviation.mean(0)
    return mean + correction, (deviation * deviation).mean(0) - correction * correction, len(samples)


class ReturnNormalizer:
    """Running statistics of returns. The value head predicts normalised returns; everybody outside it sees reward units."""

    def __init__(self) -> None:
        self.rms = RunningMeanStd()

    @property
    def mean(self) -> float:
        """Of all returns so far; 0 before any."""
        return float(self.rms.mean)

    @property
    def std(self) -> float:
        """The scale of returns, never 0."""
        return float(self.rms.std)

    def update(self, returns: Array, where: Array | None = None) -> None:
        """Enter returns of any shape; `where`, of the same shape, leaves some out."""
        self.rms.update(returns, where)

    def normalize(self, returns: Array) -> np.ndarray:
        """Reward units -> normalised."""
        return self.rms.normalize(returns)

    def denormalize(self, values: Array) -> np.ndarray:
        """Normalised -> reward units: scale and mean are both undone."""
        return self.rms.denormalize(values)

    def state_dict(self) -> dict[str, np.ndarray]:
        """mean, var and count as arrays."""
        return self.rms.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` described."""
        self.rms.load_state_dict(state)


def popart(
    old_mean: float, old_std: float, new_mean: float, new_std: float, weight: np.ndarray, bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The last layer of a value head after its statistics moved, so that its values in reward units stay (Hessel et al. 2018, section 3.1).

    sigma (W h + b) + mu = sigma' (W' h + b') + mu'  holds for all h with  W' = W sigma / sigma',  b' = (sigma b + mu - mu') / sigma'.
    """
    new_weight = weight.astype(np.float64) * (old_std / new_std)
    new_bias = (old_std * bias.astype(np.float64) + old_mean - new_mean) / new_std
    return new_weight.astype(weight.dtype), new_bias.astype(bias.dtype)
