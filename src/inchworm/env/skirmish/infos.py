"""Serves step 1: what is told of a game of Skirmish when it is over, as numbers for each unit."""

from __future__ import annotations

from inchworm.env.skirmish.config import SkirmishConfig
from inchworm.env.skirmish.layout import COMPONENTS
from inchworm.env.skirmish.state import NOBODY, REASONS, ArenaState


def episode_infos(config: SkirmishConfig, state: ArenaState, arena: int) -> list[dict[str, float]]:
    """One dict for each unit, the first team's first.

    win is 1, 0, or 0.5 for a draw; hp_margin the mean share of health that the own units have left less the enemies'; zone_score and
    enemy_zone_score in steps; one of ended_elimination, ended_zone and ended_time is 1; reward/<component> are sums over the game.
    """
    winner, reason = int(state.winners[arena]), int(state.reasons[arena])
    blue, red = (_mean_share(config, health) for health in state.health[..., arena].tolist())
    scores = state.scores[:, arena].tolist()
    sums = state.reward_sums[..., arena].reshape(len(COMPONENTS), -1).T.tolist()
    ended = {f"ended_{name}": float(reason == index) for index, name in enumerate(REASONS) if name}
    infos = []
    for unit, parts in enumerate(sums):
        team = unit // config.team_size
        info = {"win": 0.5 if winner == NOBODY else float(winner == team), "hp_margin": (red - blue) if team else (blue - red)}
        info |= {"zone_score": scores[team], "enemy_zone_score": scores[1 - team], **ended}
        infos.append(info | {f"reward/{name}": part for name, part in zip(COMPONENTS, parts)})
    return infos


def _mean_share(config: SkirmishConfig, health: list[float]) -> float:
    """The mean over a team's units of the share of health that is left; 0 for the dead."""
    return sum(left / kind.health for left, kind in zip(health, config.classes)) / config.team_size
