"""The knobs of opponents and self-play, and how an opponent is spelled: random, heuristic, heuristic:0.5. Serves `config`."""

from __future__ import annotations

import math
from typing import Literal

from pydantic.dataclasses import dataclass

from inchworm.config_base import STRICT, ConfigBase, check_path, check_positive, check_range, in_words
from inchworm.errors import ConfigError

_MOST = 100_000


@in_words
@dataclass(frozen=True, kw_only=True, config=STRICT)
class OpponentConfig(ConfigBase):
    """Who plays the other team, in a world that has two."""

    mode: Literal["none", "random", "heuristic", "pool", "self_play"] = "none"
    """none: the policy plays every lane. pool draws from anchors and policies, self_play from the policy's own past."""
    skill: float = 1.0
    """Of the heuristic, from 0 to 1."""
    skill_start: float | None = None
    """Begin with this skill and raise it to skill, a tenth at a time, as the policy wins; none begins with skill."""
    skill_threshold: float = 0.6
    """Win rate over the last games, 20 at least, at which the heuristic's skill is raised."""
    sides: Literal["alternate", "first", "second"] = "alternate"
    """Which team is ours: the first in even copies and the second in odd ones, or the same one in all."""
    pool_size: int = 10
    """Past selves that are kept; beyond it the one that is beaten most often leaves, never the newest."""
    snapshot_interval: int = 20
    """Iterations after which the policy joins its past selves."""
    pfsp_power: float = 2.0
    """Members are drawn by (1 - win rate) to this power: 0 draws all alike, more prefers those that win."""
    latest_share: float = 0.5
    """Share of self-play games against the newest past self."""
    anchor_share: float = 0.0
    """Share of self-play games against the anchors."""
    anchors: tuple[str, ...] = ()
    """Fixed players: random, heuristic, heuristic:0.5. None given: random, and the heuristic at 0.5 and 1 where the world has one."""
    policies: tuple[str, ...] = ()
    """Policy files that are fixed players, too."""
    rating_interval: int = 20
    """Iterations between ratings against the fixed players, in pool and self_play; 0 rates nobody."""
    rating_episodes: int = 20
    """Episodes of a rating against each fixed player, half of them from either side (an odd number is rounded up)."""

    def __post_init__(self) -> None:
        for name in ("skill", "skill_start", "skill_threshold", "latest_share", "anchor_share"):
            check_range(self, name, 0.0, 1.0)
        check_range(self, "pool_size", 1, _MOST)
        check_range(self, "snapshot_interval", 1, None)
        check_range(self, "pfsp_power", 0.0, 100.0)
        check_range(self, "rating_interval", 0, None)
        check_range(self, "rating_episodes", 1, _MOST)
        check_positive(self, "skill_threshold")
        if self.skill_start is not None and self.skill_start > self.skill:
            raise ConfigError(
                f"opponent.skill_start={self.skill_start} is above opponent.skill={self.skill}; begin with {self.skill} or less"
            )
        if self.latest_share + self.anchor_share > 1.0:
            raise ConfigError(
                f"opponent.latest_share={self.latest_share} and opponent.anchor_share={self.anchor_share} are more than 1 together"
            )
        for index, name in enumerate(self.anchors):
            try:
                read_opponent(name)
            except ConfigError as error:
                raise ConfigError(f"opponent.anchors[{index}]: {error}") from None
        for index, path in enumerate(self.policies):
            check_path(path, f"opponent.policies[{index}]")


def read_opponent(name: str) -> tuple[Literal["random", "heuristic"], float]:
    """The kind and the skill that a name means."""
    kind, colon, text = name.partition(":")
    if name == "random":
        return "random", 0.0
    if kind != "heuristic":
        raise ConfigError(f"there is no opponent called {name!r:.80}; use random, heuristic, or heuristic:0.5 for one of that skill")
    try:
        skill = float(text) if colon else 1.0
    except ValueError:
        skill = math.nan
    if not 0.0 <= skill <= 1.0:
        raise ConfigError(f"{name!s:.80} has no skill from 0 to 1; write heuristic:0.5")
    return "heuristic", skill
