"""Results of an evaluation or a match: every episode, and the summaries and confidence intervals computed from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from inchworm.core.types import Array, Tree

_Z = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""


@lru_cache(maxsize=256)
def t_quantile_975(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t with `degrees` degrees of freedom."""
    if degrees < 1:
        raise ValueError(f"Student's t needs 1 degree of freedom or more, not {degrees}")
    if degrees > 100:  # the expansion around the normal quantile, Abramowitz and Stegun 26.7.5, is then accurate to nine digits
        z = _Z
        terms = (
            (z**3 + z) / 4,
            (5 * z**5 + 16 * z**3 + 3 * z) / 96,
            (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
            (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
        )
        return z + math.fsum(term / degrees ** (power + 1) for power, term in enumerate(terms))
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # bisection over the angle, down to less than a float's spacing
        middle = (low + high) / 2
        low, high = (middle, high) if _central_probability(middle, degrees) < 0.95 else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _central_probability(angle: float, degrees: int) -> float:
    """Compute P(|t| < sqrt(degrees) tan(angle)) by the finite sums of Abramowitz and Stegun 26.7.3 (odd) and 26.7.4 (even)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(2 + odd, degrees + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


def mean_interval95(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean of independent values (Student's t); NaN for a single one."""
    if len(values) < 2:
        return math.nan, math.nan
    half = t_quantile_975(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return float(values.mean()) - half, float(values.mean()) + half


def wilson_interval95(rate: float, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a rate, if `count` independent games had the mean score `rate` (Wilson 1927).

    Unlike rate ± 2 standard errors it stays within 0 and 1 and is informative after 20 wins of 20. A draw counts as half a win;
    draws have less variance than wins and losses of the same mean, so with them the interval is conservative.
    """
    if count < 1:
        raise ValueError(f"a rate needs 1 game or more, not {count}")
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"a rate is from 0 to 1, not {rate}")
    share = _Z * _Z / count
    middle = (rate + share / 2) / (1 + share)
    half = _Z / (1 + share) * math.sqrt(rate * (1 - rate) / count + share / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


RESAMPLES = 10_000
"""Bootstrap samples of an interval."""


def interquartile_mean(values: ArrayLike) -> float:
    """Return the mean of the middle half of some scores: as robust as a median, with less variance (Agarwal et al. 2021).

    A quarter is cut from each end, rounded down: three scores or fewer are averaged whole.
    """
    ordered = np.sort(np.asarray(values, np.float64))
    if not ordered.size:
        raise ValueError("an interquartile mean needs 1 value or more")
    return float(_middle(ordered).mean())


def bootstrap_interval95(values: ArrayLike) -> tuple[float, float]:
    """Return the 95 % percentile interval of the interquartile mean over resampled scores; NaN for a single one.

    It is always the same for the same scores.
    """
    scores = np.asarray(values, np.float64)
    if len(scores) < 2:
        return math.nan, math.nan
    drawn = np.random.default_rng(0).choice(scores, (RESAMPLES, len(scores)))
    low, high = np.quantile(_middle(np.sort(drawn, axis=1)).mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def _middle(ordered: np.ndarray) -> np.ndarray:
    """The middle half of sorted values along the last axis."""
    cut = ordered.shape[-1] // 4
    return ordered[..., cut : ordered.shape[-1] - cut]


_SUCCESS = ("is_success", "success")
_WIN = ("win", *_SUCCESS)
UNDECIDED = {"win": 0.5, **dict.fromkeys(_SUCCESS, 0.0)}
"""What an episode that was cut off counts as: a draw, and not a success."""
_RETURNS = ("mean_return", "std_return", "min_return", "max_return", "median_return")
_SUMMARIES = (*_RETURNS, "mean_episode_length", "success_rate", "mean_hp_margin", "difference")
"""Properties that are reported under their own names."""


@dataclass
class RecordedEpisode:
    """One episode of a copy with k lanes, from its reset to its end, or to where it was cut off."""

    seed: int
    actions: list[Tree] = field(default_factory=list)
    """[k, *act] for each step."""
    rewards: list[Array] = field(default_factory=list)
    """[k] for each step."""
    info: Mapping[str, float] = field(default_factory=dict)
    """The last info of the first lane; empty if the episode was cut off."""
    ended: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class EvalStats:
    """The episodes of one evaluation, in order, with summaries as properties.

    With a single episode `std_return` and `interval95` are NaN (None in `to_dict`). Where several agents play in one copy of the
    environment, an episode is the copy's game, and its return is the sum over its agents.
    """

    returns: np.ndarray
    """[episodes] f64, undiscounted sums of the environment's own rewards, over all agents."""
    lengths: np.ndarray
    """[episodes] i64, in steps."""
    seeds: np.ndarray
    """[episodes] i64, the seed of each episode's reset."""
    infos: Mapping[str, np.ndarray] = field(default_factory=dict)
    """name -> [episodes] f64, the numbers of each episode's last `info` (the mean over agents); NaN where missing."""
    deterministic: bool = True
    """Whether the policy acted greedily."""
    agent_returns: np.ndarray = field(default_factory=lambda: np.empty(0))
    """[episodes, k] f64, the return of each of a copy's k agents; by default `returns` as a column."""
    capped: np.ndarray = field(default_factory=lambda: np.empty(0))
    """[episodes] bool, whether the episode was cut off at the evaluation's `max_episode_steps`; by default none."""
    baseline: str | None = None
    """Name of the player that the policy is compared with; None without one."""
    baseline_returns: np.ndarray = field(default_factory=lambda: np.empty(0))
    """[episodes] f64, the baseline's returns in episodes with the same seeds; empty without one."""
    recorded: tuple[RecordedEpisode, ...] = ()
    """The first episodes with their actions, if that was asked for: what a video is made from."""

    def __post_init__(self) -> None:
        """Convert and check the arrays, and make them read-only."""
        for name, dtype in (("returns", np.float64), ("lengths", np.int64), ("seeds", np.int64)):
            object.__setattr__(self, name, _locked(getattr(self, name), dtype))
        agents = np.asarray(self.agent_returns, np.float64)
        object.__setattr__(self, "agent_returns", _locked(agents if agents.size else self.returns[:, np.newaxis], np.float64))
        capped = np.asarray(self.capped, np.bool_)
        object.__setattr__(self, "capped", _locked(capped if capped.size else np.zeros(self.returns.shape), np.bool_))
        object.__setattr__(self, "infos", {name: _locked(self.infos[name], np.float64) for name in sorted(self.infos)})
        object.__setattr__(self, "baseline_returns", _locked(self.baseline_returns, np.float64))
        compared = [] if self.baseline is None else [self.baseline_returns]
        columns = [self.lengths, self.seeds, self.capped, *compared, *self.infos.values(), self.agent_returns[..., 0]]
        if self.episodes < 1 or any(column.shape != self.returns.shape for column in columns):
            raise ValueError(f"EvalStats needs 1 episode or more and arrays of equal length, not {[len(c) for c in columns]}")

    @property
    def episodes(self) -> int:
        """Number of episodes."""
        return int(self.returns.shape[0])

    @property
    def mean_return(self) -> float:
        """Mean over episodes: the score."""
        return float(self.returns.mean())

    @property
    def std_return(self) -> float:
        """Standard deviation between episodes (n - 1)."""
        return float(self.returns.std(ddof=1)) if self.episodes > 1 else math.nan

    @property
    def min_return(self) -> float:
        """Return of the worst episode."""
        return float(self.returns.min())

    @property
    def max_return(self) -> float:
        """Return of the best episode."""
        return float(self.returns.max())

    @property
    def median_return(self) -> float:
        """Median over episodes."""
        return float(np.median(self.returns))

    @property
    def interval95(self) -> tuple[float, float]:
        """95 % confidence interval of the mean return (Student's t)."""
        return mean_interval95(self.returns)

    @property
    def mean_episode_length(self) -> float:
        """Steps per episode."""
        return float(self.lengths.mean())

    @property
    def agents(self) -> int:
        """Number of agents whose returns are summed to the return of an episode; 1 unless a team plays."""
        return int(self.agent_returns.shape[1])

    @property
    def mean_agent_return(self) -> float:
        """Mean return of one agent: the mean return, divided by the number of agents."""
        return self.mean_return / self.agents

    @property
    def difference(self) -> float | None:
        """Mean difference to the baseline's return in episodes with the same seeds; None without a baseline."""
        return None if self.baseline is None else float((self.returns - self.baseline_returns).mean())

    @property
    def difference_interval95(self) -> tuple[float, float] | None:
        """95 % confidence interval of the difference (Student's t over pairs of episodes); None without a baseline."""
        return None if self.baseline is None else mean_interval95(self.returns - self.baseline_returns)

    @property
    def capped_episodes(self) -> int:
        """Number of episodes that did not end and were cut off."""
        return int(self.capped.sum())

    @property
    def success_rate(self) -> float | None:
        """Mean of the last info's `is_success` (or `success`); None if the environment reports neither."""
        return self._info_mean(*_SUCCESS)

    @property
    def win_rate(self) -> float | None:
        """Mean of the last info's `win`, else of `is_success`; None if the environment reports neither."""
        return self._info_mean(*_WIN)

    @property
    def win_interval95(self) -> tuple[float, float] | None:
        """95 % confidence interval of the win rate (Wilson; a draw is half a win); None without a win rate."""
        return self._rate_interval(*_WIN)

    @property
    def mean_hp_margin(self) -> float | None:
        """Mean of the last info's `hp_margin`; None if the environment does not report it."""
        return self._info_mean("hp_margin")

    def _info_mean(self, *names: str) -> float | None:
        values = self._info_values(*names)
        return float(np.nanmean(values)) if values.size else None

    def _info_values(self, *names: str) -> np.ndarray:
        """Return the first of these info numbers that any episode has, [episodes] with NaN where missing; empty if there is none."""
        for name in names:
            values = self.infos.get(name, np.empty(0))
            if not np.isnan(values).all():
                return values
        return np.empty(0)

    def _rate_interval(self, *names: str) -> tuple[float, float] | None:
        """Return the interval of a rate; None if there are no values, or they are not within 0 and 1."""
        values = self._info_values(*names)
        known = values[~np.isnan(values)]
        if not known.size or known.min() < 0 or known.max() > 1:
            return None
        return wilson_interval95(float(known.mean()), known.size)

    def metrics(self) -> dict[str, float]:
        """Return the summaries as a flat mapping of finite floats, with the mean of every info number as `info/<name>`."""
        summaries = {
            **{name: getattr(self, name) for name in _SUMMARIES},
            "episodes": float(self.episodes),
            "win_rate": self._info_mean("win"),  # not by success, which success_rate reports
            "capped_episodes": float(self.capped_episodes) if self.capped_episodes else None,
            **{f"info/{name}": self._info_mean(name) for name in self.infos},
        }
        intervals = {"": self.interval95, "win_": self._rate_interval("win"), "difference_": self.difference_interval95}
        for name, interval in intervals.items():
            summaries[f"{name}interval95_low"], summaries[f"{name}interval95_high"] = interval or (None, None)
        return {name: value for name, value in summaries.items() if value is not None and math.isfinite(value)}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a file: finite floats or None."""
        return {
            "episodes": self.episodes,
            "deterministic": self.deterministic,
            "capped_episodes": self.capped_episodes,
            "return_of": self.return_of,
            "agents": self.agents,
            "mean_agent_return": _plain(self.mean_agent_return),
            "baseline": self.baseline,
            **{name: _plain(getattr(self, name)) for name in (*_SUMMARIES, "win_rate")},
            **{name: _plain(getattr(self, name)) for name in ("interval95", "win_interval95", "difference_interval95")},
            "infos": {name: _plain(values.tolist()) for name, values in self.infos.items()},
            "returns": _plain(self.returns.tolist()),
            "agent_returns": _plain(self.agent_returns.tolist()),
            "lengths": self.lengths.tolist(),
            "seeds": self.seeds.tolist(),
            "capped": self.capped.tolist(),
            "baseline_returns": _plain(self.baseline_returns.tolist()),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_dict` returned; keys that are not fields are ignored."""
        return cls(**{field.name: data[field.name] for field in fields(cls) if field.name in data})

    def __str__(self) -> str:
        """One line, such as `mean return 487.3 ± 9.2 (95 %, 100 greedy episodes), from 312 to 500, mean length 487.3`.

        A win rate stands first, and the return of a team is called that: `win rate 0.83 [0.77, 0.88], mean team return 12 ± 0.4 …`.
        """
        low, high = self.interval95
        spread = f" ± {(high - low) / 2:.4g}" if math.isfinite(high - low) else ""
        kind = "greedy" if self.deterministic else "sampled"
        count = f"{self.episodes:,} {kind} episode{'s' if self.episodes > 1 else ''}"
        success = f", success {self.success_rate:.1%}" if self.success_rate is not None else ""
        wins = f"{self.win_text}, " if self._info_mean("win") is not None else ""
        ends = f", from {self.min_return:.5g} to {self.max_return:.5g}" if self.episodes > 1 else ""
        return (
            f"{wins}{self.return_text(spread)} ({'95 %, ' if spread else ''}{count}){ends}{self.difference_text}"
            f", mean length {self.mean_episode_length:.5g}{success}{self.capped_text}"
        )

    def __repr__(self) -> str:
        """The same line with the name of the class, without the arrays."""
        return f"{type(self).__name__}({self})"

    @property
    def return_of(self) -> str:
        """Whose return the return of an episode is: `team` where it is the sum over several agents, else `agent`."""
        return "team" if self.agents > 1 else "agent"

    def return_text(self, spread: str = "") -> str:
        """`mean return 487.3`, or with several agents `mean team return 12.2, per agent 6.1`; `spread` follows the first number."""
        if self.agents == 1:
            return f"mean return {self.mean_return:.5g}{spread}"
        return f"mean team return {self.mean_return:.5g}{spread}, per agent {self.mean_agent_return:.5g}"

    @property
    def difference_text(self) -> str:
        """`, difference to random on the same seeds +465.2 [455.1, 475.3]`; empty without a baseline."""
        if self.difference is None or self.difference_interval95 is None:
            return ""
        low, high = self.difference_interval95
        interval = f" [{low:.5g}, {high:.5g}]" if math.isfinite(high - low) else ""
        return f", difference to {self.baseline} on the same seeds {self.difference:+.5g}{interval}"

    @property
    def capped_text(self) -> str:
        """`, 3 of 20 episodes capped at 100,000 steps`; empty if all ended."""
        if not self.capped_episodes:
            return ""
        return f", {self.capped_episodes:,} of {self.episodes:,} episodes capped at {self.lengths[self.capped].max():,} steps"

    @property
    def win_text(self) -> str:
        """The win rate with its interval, `win rate 0.83 [0.77, 0.88]`; empty without one."""
        if self.win_rate is None:
            return ""
        interval = self.win_interval95
        return f"win rate {self.win_rate:.2f}" + ("" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]")


def _locked(values: Any, dtype: type[Any]) -> np.ndarray:
    array = np.array(values, dtype)
    array.setflags(write=False)
    return array


def _plain(value: Any) -> Any:
    """A number, or lists of them, with None for what is not finite."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class MatchStats(EvalStats):
    """The games of one match, in order: `returns`, `infos` and rates are those of the first player.

    Episodes 2i and 2i + 1 are a pair: the same seed, played from side 0 and then from side 1. The interval of the win rate assumes
    independent games; the two games of a pair often are not, so where one side has an advantage the interval is conservative.
    """

    players: tuple[str, str] = ("first", "second")
    """Names of the two players."""
    replay: Mapping[str, Any] | None = None
    """The first game as plain data, if requested."""

    @property
    def sides(self) -> np.ndarray:
        """[episodes] i64, the first player's side: 0, 1, 0, 1, …"""
        return np.arange(self.episodes) % 2

    @property
    def wins(self) -> int:
        """Games that the first player won; 0 if the environment does not report `win`."""
        return int((self._info_values("win") == 1.0).sum())

    @property
    def losses(self) -> int:
        """Games that the second player won."""
        return int((self._info_values("win") == 0.0).sum())

    @property
    def draws(self) -> int:
        """Games with a `win` between 0 and 1."""
        values = self._info_values("win")
        return int(((values > 0.0) & (values < 1.0)).sum())

    def win_rate_on(self, side: int) -> float | None:
        """Return the win rate from one side; None if the environment does not report `win`."""
        values = self._info_values("win")[side::2]
        return float(np.nanmean(values)) if not np.isnan(values).all() else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a file: finite floats or None."""
        counts = {"wins": self.wins, "draws": self.draws, "losses": self.losses}
        return {"players": list(self.players), **super().to_dict(), **counts, "sides": self.sides.tolist()}

    def __str__(self) -> str:
        """One line, such as `win rate 0.83 [0.77, 0.88] (160 won, 12 drawn, 28 lost of 200 greedy episodes), health margin 0.31, …`."""
        if self._info_mean("win") is None:
            return super().__str__()
        kind = "greedy" if self.deterministic else "sampled"
        games = f"{self.wins:,} won, {self.draws:,} drawn, {self.losses:,} lost of {self.episodes:,} {kind} episodes"
        margin = "" if self.mean_hp_margin is None else f", health margin {self.mean_hp_margin:.3f}"
        rest = f"{self.return_text()}, mean length {self.mean_episode_length:.5g}{self.capped_text}"
        return f"{self.win_text} ({games}){margin}, {rest}"
