"""A policy's scores on suites: a number for each simulation, each group, and all of them. Serves the evaluator and the commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from inchworm.evaluate.stats import EvalStats

SCORE, OVERALL = "score", "overall"
"""The names of a group's own score, which no simulation may have, and of the score of all groups."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SimulationStats:
    """What a policy reached in one simulation."""

    stats: EvalStats
    """Every episode."""
    score_range: tuple[float, float] | None = None
    """The returns that score 0 and 1, if the suite gives them."""

    @property
    def measure(self) -> str:
        """What the score is: `win_rate` where the environment says who won, else `scaled_return` or `mean_return`."""
        if self.stats.win_rate is not None:
            return "win_rate"
        return "mean_return" if self.score_range is None else "scaled_return"

    @property
    def score(self) -> float:
        """The win rate where there is one; else the mean return, scaled if the suite gives a range."""
        if self.stats.win_rate is not None:
            return self.stats.win_rate
        low, high = self.score_range or (0.0, 1.0)
        return self.stats.mean_return if self.score_range is None else (self.stats.mean_return - low) / (high - low)

    @property
    def explained(self) -> str:
        """What the score is and how it came about; of a match the statistics begin with that already."""
        told = str(self.stats)
        measure = self.measure.replace("_", " ")
        return told if told.startswith(measure) else f"{measure}; {told}"


@dataclass(frozen=True, eq=False)
class SuiteStats(Mapping[str, float]):
    """A mapping of scores: `<group>/<simulation>`, `<group>/score` (the mean of its simulations) and `overall` (the mean of the groups).

    Every group counts the same, however many simulations it has.
    """

    groups: Mapping[str, Mapping[str, SimulationStats]]
    """group -> simulation -> what was found."""

    def group_score(self, group: str) -> float:
        """The mean score of a group's simulations."""
        return float(np.mean([simulation.score for simulation in self.groups[group].values()]))

    @property
    def overall(self) -> float:
        """The mean of the groups' scores."""
        return float(np.mean([self.group_score(group) for group in self.groups]))

    @property
    def scores(self) -> dict[str, float]:
        """All of them, in order."""
        found: dict[str, float] = {}
        for group, simulations in self.groups.items():
            found |= {f"{group}/{name}": simulation.score for name, simulation in simulations.items()}
            found[f"{group}/{SCORE}"] = self.group_score(group)
        return {**found, OVERALL: self.overall}

    @property
    def mixed(self) -> bool:
        """Whether returns were averaged with something else, so that the overall score says little: a suite's score_range mends it."""
        measures = [simulation.measure for simulations in self.groups.values() for simulation in simulations.values()]
        return "mean_return" in measures and len(measures) > 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a file: the scores, and everything about each simulation."""
        details = {
            group: {name: {"score": one.score, "measure": one.measure, **one.stats.to_dict()} for name, one in simulations.items()}
            for group, simulations in self.groups.items()
        }
        return {"scores": self.scores, "groups": details}

    def __getitem__(self, name: str) -> float:
        return self.scores[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.scores)

    def __len__(self) -> int:
        return len(self.scores)

    def __str__(self) -> str:
        """One line for each score: of each simulation, with what the score is and how it came about; of each group; and of all."""
        how = {f"{group}/{name}": one.explained for group, simulations in self.groups.items() for name, one in simulations.items()}
        how[OVERALL] = "a mean of returns of different kinds: give a score_range in the suite" if self.mixed else ""
        width = max(map(len, self.scores))
        rows = [(f"{name:<{width}}  {score:>7.4g}", how.get(name, "")) for name, score in self.scores.items()]
        return "\n".join(f"{score}  ({told})" if told else score for score, told in rows)
