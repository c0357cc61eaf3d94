"""Step 1 of 9: Skirmish, a team-combat environment with partial observations, action masks and deaths. See docs/skirmish.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inchworm.worlds.skirmish.config import SkirmishConfig
from inchworm.worlds.skirmish.heuristic import HeuristicPolicy
from inchworm.worlds.skirmish.vector import SkirmishVectorEnv
from inchworm.worlds.skirmish.world import SkirmishWorld

if TYPE_CHECKING:
    from inchworm.worlds.skirmish.pettingzoo import SkirmishParallelEnv

__all__ = ["HeuristicPolicy", "SkirmishConfig", "SkirmishVectorEnv", "SkirmishWorld", "parallel_env"]


def parallel_env(*, render_mode: str | None = None, **config: Any) -> SkirmishParallelEnv:
    """Create one arena as a PettingZoo parallel environment; keywords are the fields of `SkirmishConfig`."""
    from inchworm.worlds.skirmish.pettingzoo import SkirmishParallelEnv  # PettingZoo is an extra

    return SkirmishParallelEnv(SkirmishConfig.from_dict(config), render_mode=render_mode)
