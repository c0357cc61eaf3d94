"""Somebody's PettingZoo environment: played, and left open for them. Serves evaluation; imported only where there is such a one."""

from __future__ import annotations

from typing import Any

from pettingzoo.utils import BaseParallelWrapper

from inchworm.env.teams import Team, as_team


class _Borrowed(BaseParallelWrapper):  # type: ignore[misc]
    def close(self) -> None:
        """Not ours to close."""


def borrowed_team(env: Any) -> Team:
    """The environment as a team that stays open."""
    team = as_team(env)
    return Team(_Borrowed(team.env), team.max_steps)
