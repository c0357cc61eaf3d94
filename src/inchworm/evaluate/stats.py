"""What an evaluation found: every episode, and summaries that are computed from them. Serves the loop's evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inchworm.evaluate.student_t import t_quantile_975

_SUCCESS = ("is_success", "success")
_WIN = ("win", *_SUCCESS)


@dataclass(frozen=True, eq=False, kw_only=True)
class EvalStats:
    """The episodes of one evaluation, in order; whatever else there is to know is a property of them.

    A spread needs two episodes: with one, `std_return` and `interval95` are NaN (None in `to_dict`).
    """

    returns: np.ndarray
    """[episodes] f64, undiscounted sums of the environment's own rewards."""
    lengths: np.ndarray
    """[episodes] i64, in steps."""
    seeds: np.ndarray
    """[episodes] i64, what each episode was reset with."""
    infos: Mapping[str, np.ndarray] = field(default_factory=dict)
    """name -> [episodes] f64, the numbers of each episode's last `info`; NaN where an episode lacked one."""
    deterministic: bool = True
    """Whether the policy acted greedily."""

    def __post_init__(self) -> None:
        """Bring everything to one dtype and length, and lock it."""
        for name, dtype in (("returns", np.float64), ("lengths", np.int64), ("seeds", np.int64)):
            object.__setattr__(self, name, _locked(getattr(self, name), dtype))
        object.__setattr__(self, "infos", {name: _locked(self.infos[name], np.float64) for name in sorted(self.infos)})
        columns = [self.lengths, self.seeds, *self.infos.values()]
        if self.episodes < 1 or any(column.shape != self.returns.shape for column in columns):
            raise ValueError(f"EvalStats needs 1 episode or more and as many entries everywhere, not {[len(c) for c in columns]}")

    @property
    def episodes(self) -> int:
        """How many episodes were played."""
        return int(self.returns.shape[0])

    @property
    def mean_return(self) -> float:
        """The score."""
        return float(self.returns.mean())

    @property
    def std_return(self) -> float:
        """Standard deviation between episodes (n - 1)."""
        return float(self.returns.std(ddof=1)) if self.episodes > 1 else math.nan

    @property
    def min_return(self) -> float:
        """The worst episode."""
        return float(self.returns.min())

    @property
    def max_return(self) -> float:
        """The best episode."""
        return float(self.returns.max())

    @property
    def median_return(self) -> float:
        """The episode in the middle."""
        return float(np.median(self.returns))

    @property
    def interval95(self) -> tuple[float, float]:
        """Where the policy's true mean return lies with 95 % confidence (Student's t)."""
        if self.episodes < 2:
            return math.nan, math.nan
        half = t_quantile_975(self.episodes - 1) * self.std_return / math.sqrt(self.episodes)
        return self.mean_return - half, self.mean_return + half

    @property
    def mean_episode_length(self) -> float:
        """Steps per episode."""
        return float(self.lengths.mean())

    @property
    def success_rate(self) -> float | None:
        """Share of episodes whose last info said `is_success` (or `success`); None where the environment says neither."""
        return self._info_mean(*_SUCCESS)

    @property
    def win_rate(self) -> float | None:
        """Share of episodes that were won, by info `win`, else by `is_success`; None where the environment says neither."""
        return self._info_mean(*_WIN)

    @property
    def mean_hp_margin(self) -> float | None:
        """Mean of info `hp_margin`; None where the environment does not give it."""
        return self._info_mean("hp_margin")

    def _info_mean(self, *names: str) -> float | None:
        for name in names:
            values = self.infos.get(name, np.empty(0))
            if not np.isnan(values).all():
                return float(np.nanmean(values))
        return None

    def metrics(self) -> dict[str, float]:
        """The summaries as a flat mapping of finite floats, and the mean of every info number as `info/<name>`."""
        low, high = self.interval95
        summaries = {
            "mean_return": self.mean_return,
            "std_return": self.std_return,
            "min_return": self.min_return,
            "max_return": self.max_return,
            "median_return": self.median_return,
            "interval95_low": low,
            "interval95_high": high,
            "mean_episode_length": self.mean_episode_length,
            "episodes": float(self.episodes),
            "success_rate": self.success_rate,
            "win_rate": self._info_mean("win"),  # where success stands for it, success_rate says it already
            "mean_hp_margin": self.mean_hp_margin,
        }
        summaries |= {f"info/{name}": self._info_mean(name) for name in self.infos}
        return {name: value for name, value in summaries.items() if value is not None and math.isfinite(value)}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a file: finite floats or None."""
        low, high = self.interval95
        return {
            "episodes": self.episodes,
            "deterministic": self.deterministic,
            "mean_return": _plain(self.mean_return),
            "std_return": _plain(self.std_return),
            "min_return": _plain(self.min_return),
            "max_return": _plain(self.max_return),
            "median_return": _plain(self.median_return),
            "interval95": [_plain(low), _plain(high)],
            "mean_episode_length": _plain(self.mean_episode_length),
            "success_rate": _plain(self.success_rate),
            "win_rate": _plain(self.win_rate),
            "mean_hp_margin": _plain(self.mean_hp_margin),
            "infos": {name: [_plain(value) for value in values.tolist()] for name, values in self.infos.items()},
            "returns": [_plain(value) for value in self.returns.tolist()],
            "lengths": self.lengths.tolist(),
            "seeds": self.seeds.tolist(),
        }

    def __str__(self) -> str:
        """One line, such as `mean return 487.3 ± 9.2 (95 %, 100 greedy episodes), from 312 to 500, mean length 487.3`."""
        low, high = self.interval95
        spread = f" ± {(high - low) / 2:.4g}" if math.isfinite(high - low) else ""
        kind = "greedy" if self.deterministic else "sampled"
        count = f"{self.episodes:,} {kind} episode{'s' if self.episodes > 1 else ''}"
        success = f", success {self.success_rate:.1%}" if self.success_rate is not None else ""
        return (
            f"mean return {self.mean_return:.5g}{spread} ({'95 %, ' if spread else ''}{count}), from {self.min_return:.5g} "
            f"to {self.max_return:.5g}, mean length {self.mean_episode_length:.5g}{success}"
        )


def _locked(values: Any, dtype: type[Any]) -> np.ndarray:
    array = np.array(values, dtype)
    array.setflags(write=False)
    return array


def _plain(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
