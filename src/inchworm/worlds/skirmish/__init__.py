"""Step 1 of 9: Skirmish, a team-combat environment with partial observations, action masks and deaths. See docs/skirmish.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inchworm.config.presets import Preset
from inchworm.config.sections import EnvConfig, EvalConfig, OpponentConfig, PolicyConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.env.registry import World
from inchworm.worlds.skirmish.heuristic import HeuristicPolicy
from inchworm.worlds.skirmish.state import SkirmishConfig
from inchworm.worlds.skirmish.vector import SkirmishVectorEnv
from inchworm.worlds.skirmish.world import SkirmishWorld

if TYPE_CHECKING:
    from inchworm.worlds.skirmish.pettingzoo import SkirmishParallelEnv

__all__ = ["WORLD", "HeuristicPolicy", "SkirmishConfig", "SkirmishVectorEnv", "SkirmishWorld", "parallel_env"]


def parallel_env(*, render_mode: str | None = None, **config: Any) -> SkirmishParallelEnv:
    """Create one arena as a PettingZoo parallel environment; keywords are the fields of `SkirmishConfig`."""
    from inchworm.worlds.skirmish.pettingzoo import SkirmishParallelEnv  # PettingZoo is an extra

    return SkirmishParallelEnv(SkirmishConfig.from_dict(config), render_mode=render_mode)


def _make_vector(config: EnvConfig, *, global_state: bool = False, **options: Any) -> SkirmishVectorEnv:
    return SkirmishVectorEnv(config.kwargs, config.num_envs, global_state=global_state, **options)


def _kwargs_of(rules: Any) -> Mapping[str, Any] | None:
    if isinstance(rules, Mapping):
        rules = SkirmishConfig.from_dict(rules)
    return rules.to_dict() if isinstance(rules, SkirmishConfig) else None


WORLD = World(
    make_copy="inchworm.worlds.skirmish.pettingzoo:make_arena",
    make_vector=_make_vector,
    vector_fits=lambda config: config.max_episode_steps is None,
    check_kwargs=SkirmishConfig.from_dict,
    kwargs_of=_kwargs_of,
    make_heuristic=lambda kwargs, skill: HeuristicPolicy(SkirmishConfig.from_dict(kwargs), skill=skill),
    has_teams=True,
    preset=Preset(
        TrainingConfig(
            env=EnvConfig(id="Skirmish-v0", num_envs=64),
            policy=PolicyConfig(hidden_sizes=(128, 128)),
            ppo=PPOConfig(
                learning_rate=5e-4, learning_rate_schedule="linear", gamma=0.99, gae_lambda=0.95, ent_coef=0.01, update_epochs=4,
                rollout_steps=64, num_minibatches=6,
            ),
            opponent=OpponentConfig(mode="heuristic"),
            evaluation=EvalConfig(interval=50, episodes=64, final_episodes=200, num_envs=64),
            run=RunConfig(total_timesteps=5_000_000, log_interval=5),
        ),
        score="0.92 and 0.98 of 200 games won against the heuristic at full strength, after 5,003,634 and 5,004,563 steps, seeds 0 and 1",
    ),
)  # fmt: skip
"""Skirmish as `env/registry` knows it."""
