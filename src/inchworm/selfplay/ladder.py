"""Serves step 2 of 9: a heuristic whose skill is raised as the policy wins. A source of opponents with one player at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from inchworm.errors import ConfigError
from inchworm.protocols import Actor
from inchworm.selfplay.sampling import Score

STEP, GAMES = 0.1, 20
"""How far the skill is raised at a time, and how many games of one skill are played at least."""


class SkillLadder:
    """Begins at skill `start` and climbs to `top`; a copy meets the skill that holds when its episode begins."""

    def __init__(self, make: Callable[[float], Actor], *, start: float, top: float = 1.0, threshold: float = 0.6) -> None:
        self._make, self._top, self._threshold = make, top, threshold
        self.skill, self._score, self._played = start, Score(), 0
        self._actors: dict[str, Actor] = {}

    @property
    def name(self) -> str:
        """Of the player whom the next episode meets."""
        return f"heuristic:{self.skill:.6g}"

    def draw(self, copy: int, rng: np.random.Generator) -> str:  # noqa: ARG002 - there is no choice
        """The heuristic at today's skill."""
        return self.name

    def actor(self, name: str) -> Actor:
        """The heuristic of that name."""
        if name not in self._actors:
            kind, _, skill = name.partition(":")
            if kind != "heuristic":
                raise ConfigError(
                    f"a saved game is against {name}, but the opponent here is a heuristic; give the opponent that it began with"
                )
            self._actors[name] = self._make(float(skill))
        return self._actors[name]

    def record(self, name: str, win: float) -> None:
        """Count a game of today's skill, and raise it if it has become too easy."""
        if name != self.name:
            return  # begun before the last step up
        self._score.add(win)
        self._played += 1
        if self.skill < self._top and self._played >= GAMES and self._score.win_rate >= self._threshold:
            self.skill = min(self._top, round(self.skill + STEP, 6))
            self._score, self._played = Score(), 0

    def metrics(self) -> dict[str, float]:
        """For the run's rows."""
        return {"opponent/skill": self.skill, "opponent/win_rate": self._score.win_rate}

    def state_dict(self) -> dict[str, Any]:
        """The skill and the games at it."""
        return {"skill": self.skill, "wins": self._score.wins, "games": self._score.games, "played": self._played}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.skill, self._played = float(state["skill"]), int(state["played"])
        self._score = Score(float(state["wins"]), float(state["games"]))
