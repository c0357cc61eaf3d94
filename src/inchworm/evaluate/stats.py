"""What an evaluation found: every episode, and summaries that are computed from them. Serves the loop's evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inchworm.evaluate.student_t import t_quantile_975
from inchworm.evaluate.wilson import wilson_interval95

_SUCCESS = ("is_success", "success")
_WIN = ("win", *_SUCCESS)


@dataclass(frozen=True, eq=False, kw_only=True)
class EvalStats:
    """The episodes of one evaluation, in order; whatever else there is to know is a property of them.

    A spread needs two episodes: with one, `std_return` and `interval95` are NaN (None in `to_dict`). Where several agents play in one
    copy of the environment, an episode is the game of the copy, and its return is the team's.
    """

    returns: np.ndarray
    """[episodes] f64, undiscounted sums of the environment's own rewards, over all agents."""
    lengths: np.ndarray
    """[episodes] i64, in steps."""
    seeds: np.ndarray
    """[episodes] i64, what each episode was reset with."""
    infos: Mapping[str, np.ndarray] = field(default_factory=dict)
    """name -> [episodes] f64, the numbers of each episode's last `info` (the mean over agents); NaN where an episode lacked one."""
    deterministic: bool = True
    """Whether the policy acted greedily."""
    agent_returns: np.ndarray = field(default_factory=lambda: np.empty(0))
    """[episodes, k] f64, the return of each of a copy's k agents; with one agent, and where it is not given, `returns` as a column."""

    def __post_init__(self) -> None:
        """Bring everything to one dtype and length, and lock it."""
        for name, dtype in (("returns", np.float64), ("lengths", np.int64), ("seeds", np.int64)):
            object.__setattr__(self, name, _locked(getattr(self, name), dtype))
        agents = np.asarray(self.agent_returns, np.float64)
        object.__setattr__(self, "agent_returns", _locked(agents if agents.size else self.returns[:, np.newaxis], np.float64))
        object.__setattr__(self, "infos", {name: _locked(self.infos[name], np.float64) for name in sorted(self.infos)})
        columns = [self.lengths, self.seeds, *self.infos.values(), self.agent_returns[..., 0]]
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
    def win_interval95(self) -> tuple[float, float] | None:
        """Where the true win rate lies with 95 % confidence (Wilson's score, a draw being half a win); None without a win rate."""
        return self._rate_interval(*_WIN)

    @property
    def mean_hp_margin(self) -> float | None:
        """Mean of info `hp_margin`; None where the environment does not give it."""
        return self._info_mean("hp_margin")

    def _info_mean(self, *names: str) -> float | None:
        values = self._info_values(*names)
        return float(np.nanmean(values)) if values.size else None

    def _info_values(self, *names: str) -> np.ndarray:
        """The first of these info numbers that any episode has, [episodes] with NaN where one lacked it; empty if none has any."""
        for name in names:
            values = self.infos.get(name, np.empty(0))
            if not np.isnan(values).all():
                return values
        return np.empty(0)

    def _rate_interval(self, *names: str) -> tuple[float, float] | None:
        """The interval of a share; None where there is none, or where the numbers are no shares."""
        values = self._info_values(*names)
        told = values[~np.isnan(values)]
        if not told.size or told.min() < 0 or told.max() > 1:
            return None
        return wilson_interval95(float(told.mean()), told.size)

    def metrics(self) -> dict[str, float]:
        """The summaries as a flat mapping of finite floats, and the mean of every info number as `info/<name>`."""
        low, high = self.interval95
        win_low, win_high = self._rate_interval("win") or (None, None)
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
            "win_interval95_low": win_low,
            "win_interval95_high": win_high,
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
            "win_interval95": None if self.win_interval95 is None else list(self.win_interval95),
            "mean_hp_margin": _plain(self.mean_hp_margin),
            "infos": {name: [_plain(value) for value in values.tolist()] for name, values in self.infos.items()},
            "returns": [_plain(value) for value in self.returns.tolist()],
            "agent_returns": [[_plain(value) for value in row] for row in self.agent_returns.tolist()],
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
        wins = f", {self.win_text}" if self._info_mean("win") is not None else ""
        return (
            f"mean return {self.mean_return:.5g}{spread} ({'95 %, ' if spread else ''}{count}), from {self.min_return:.5g} "
            f"to {self.max_return:.5g}, mean length {self.mean_episode_length:.5g}{success}{wins}"
        )

    @property
    def win_text(self) -> str:
        """The win rate as people read it: `win rate 0.83 [0.77, 0.88]`; empty without one."""
        if self.win_rate is None:
            return ""
        interval = self.win_interval95
        return f"win rate {self.win_rate:.2f}" + ("" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]")


def _locked(values: Any, dtype: type[Any]) -> np.ndarray:
    array = np.array(values, dtype)
    array.setflags(write=False)
    return array


def _plain(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
