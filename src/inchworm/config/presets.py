"""Tuned configs by environment, each with the score it reaches; and configs of three sizes for any environment.

The value loss includes a factor of ½, so `vf_coef=1.0` equals 0.5 in trainers without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inchworm.config.sections import ConvergenceConfig, EnvConfig, EvalConfig, PolicyConfig, PPOConfig, RunConfig, TrainingConfig


@dataclass(frozen=True, slots=True)
class Preset:
    """A tuned config and the score it reaches."""

    config: TrainingConfig
    score: str
    """Greedy mean return of the final evaluation, with the seeds; empty if not measured."""


def small_fast_config(env_id: str = "CartPole-v1") -> TrainingConfig:
    """Return the config of a run of seconds, 20,000 steps, for trying things out."""
    return TrainingConfig(
        env=EnvConfig(id=env_id, num_envs=8),
        ppo=_CARTPOLE,
        evaluation=EvalConfig(interval=0, episodes=10, final_episodes=20),
        run=RunConfig(total_timesteps=20_000, checkpoint_interval=20),
    )


def medium_config(env_id: str = "CartPole-v1") -> TrainingConfig:
    """Return the config of a run of minutes, a million steps, with normalised observations and rewards."""
    return _sized(env_id, num_envs=16, hidden_size=128, rollout_steps=256, minibatch_size=256, total_timesteps=1_000_000)


def large_config(env_id: str = "CartPole-v1") -> TrainingConfig:
    """Return the config of a run of hours on many cores or a GPU, 20 million steps: 64 copies, and a network of 256 units."""
    return _sized(env_id, num_envs=64, hidden_size=256, rollout_steps=256, minibatch_size=1024, total_timesteps=20_000_000)


def _sized(
    env_id: str, *, num_envs: int, hidden_size: int, rollout_steps: int, minibatch_size: int, total_timesteps: int
) -> TrainingConfig:
    """A config that is evaluated and saved 20 times, with what the tuned presets of environments with uneven scales share."""
    interval = max(1, total_timesteps // (num_envs * rollout_steps) // 20)
    return TrainingConfig(
        env=EnvConfig(id=env_id, num_envs=num_envs),
        policy=PolicyConfig(hidden_sizes=(hidden_size, hidden_size), normalize_observations=True),
        ppo=PPOConfig(
            learning_rate=3e-4, learning_rate_schedule="linear", vf_coef=1.0, ent_coef=0.0, update_epochs=5, rollout_steps=rollout_steps,
            minibatch_size=minibatch_size, normalize_advantages="minibatch", scale_rewards=True,
        ),
        evaluation=EvalConfig(interval=interval),
        run=RunConfig(total_timesteps=total_timesteps, checkpoint_interval=interval),
    )  # fmt: skip


SIZES = {"small": small_fast_config, "medium": medium_config, "large": large_config}
"""Configs for any environment by their names on the command line. None is tuned for it, as the presets below are."""


_CARTPOLE = PPOConfig(
    learning_rate=1e-3,
    learning_rate_schedule="linear",
    clip_schedule="linear",
    gamma=0.98,
    gae_lambda=0.9,
    vf_coef=1.0,
    ent_coef=0.0,
    update_epochs=10,
    rollout_steps=64,
    minibatch_size=128,
)


_NORMALIZED = PolicyConfig(normalize_observations=True)
"""Used with `scale_rewards` instead of `normalize_values`: see docs/decisions/0021."""


def _reported(target: float | None, episodes: int) -> ConvergenceConfig:
    """The target of a preset, the mean return at which Gymnasium calls the environment solved: reported, but it ends no run."""
    return ConvergenceConfig() if target is None else ConvergenceConfig(target=target, window=episodes, stop=False)


def _tuned(
    env_id: str,
    score: str,
    *,
    num_envs: int,
    run: RunConfig,
    policy: PolicyConfig | None = None,
    episodes: tuple[int, int] = (20, 100),
    target: float | None = None,
    **ppo: Any,
) -> Preset:
    """A preset with the settings that most environments share; it is evaluated whenever it is saved."""
    config = TrainingConfig(
        env=EnvConfig(id=env_id, num_envs=num_envs),
        policy=policy or PolicyConfig(),
        ppo=PPOConfig(vf_coef=1.0, minibatch_size=64, normalize_advantages="minibatch", **ppo),
        evaluation=EvalConfig(interval=run.checkpoint_interval, episodes=episodes[0], final_episodes=episodes[1]),
        convergence=_reported(target, episodes[0]),
        run=run,
    )
    return Preset(config, score)


def _mujoco(env_id: str, score: str) -> Preset:
    return _tuned(
        env_id, score, num_envs=1, policy=_NORMALIZED, scale_rewards=True, learning_rate=3e-4, learning_rate_schedule="linear", gamma=0.99,
        gae_lambda=0.95, ent_coef=0.0, update_epochs=10, rollout_steps=2048, episodes=(10, 20),
        run=RunConfig(total_timesteps=1_000_000, checkpoint_interval=25),
    )  # fmt: skip


def _lunar_lander(env_id: str, score: str) -> Preset:
    return _tuned(
        env_id, score, num_envs=16, target=200.0, learning_rate=3e-4, gamma=0.999, gae_lambda=0.98, ent_coef=0.01, update_epochs=4,
        rollout_steps=1024, run=RunConfig(total_timesteps=1_000_000, checkpoint_interval=5),
    )  # fmt: skip


_ALL = (
    Preset(
        TrainingConfig(
            env=EnvConfig(id="CartPole-v1", num_envs=8),
            ppo=_CARTPOLE,
            evaluation=EvalConfig(interval=50, episodes=20),
            convergence=_reported(475.0, 20),
            run=RunConfig(total_timesteps=59_904),  # 117 whole iterations within 60,000
        ),
        score="500.0 after 59,904 steps, seeds 0 to 4",
    ),
    _tuned(
        "Acrobot-v1", "-72.7 ± 2.0 after 1,003,712 steps, seeds 0 to 4", num_envs=16, target=-100.0, policy=_NORMALIZED, scale_rewards=True,
        learning_rate=3e-4, gamma=0.99, gae_lambda=0.94, ent_coef=0.0, update_epochs=4, rollout_steps=256,
        run=RunConfig(total_timesteps=1_000_000, checkpoint_interval=50),
    ),
    _tuned(
        "MountainCar-v0", "-113.4 ± 7.8 after 1,000,000 steps, seeds 0 to 4", num_envs=16, target=-110.0, policy=_NORMALIZED,
        scale_rewards=True, learning_rate=3e-4, gamma=0.99, gae_lambda=0.98, ent_coef=0.0, update_epochs=4, rollout_steps=16,
        run=RunConfig(total_timesteps=1_000_000, checkpoint_interval=200, log_interval=10),
    ),
    _tuned(
        "Pendulum-v1", "-174.1 ± 24.3 after 102,400 steps, seeds 0 to 4", num_envs=4,
        learning_rate=1e-3, gamma=0.9, gae_lambda=0.95, ent_coef=0.0, update_epochs=10, rollout_steps=1024,
        run=RunConfig(total_timesteps=100_000, checkpoint_interval=5),
    ),
    _lunar_lander("LunarLander-v3", "258.9 ± 5.2 after 1,015,808 steps, seeds 0 to 4"),
    _lunar_lander("LunarLanderContinuous-v3", "261.2 ± 6.2 after 1,015,808 steps, seeds 0 to 4"),
    _tuned(
        "HalfCheetah-v5", "5,904 ± 1,190 after 1,000,473 steps, seeds 0 to 2", num_envs=1, episodes=(10, 20),
        policy=PolicyConfig(
            hidden_sizes=(256, 256), activation="relu", orthogonal_init=False, log_std_init=-2.0, normalize_observations=True,
        ),
        scale_rewards=True, learning_rate=2.06e-5, gamma=0.98, gae_lambda=0.92, clip_coef=0.1, ent_coef=0.0004, max_grad_norm=0.8,
        update_epochs=20, rollout_steps=512, run=RunConfig(total_timesteps=1_000_000, checkpoint_interval=100),
    ),
    _mujoco("Hopper-v5", "3,304 ± 510 after 1,001,574 steps, seeds 0 to 4"),
    _mujoco("Walker2d-v5", "4,148 ± 525 after 1,001,574 steps, seeds 0 to 4"),
)  # fmt: skip

PRESETS: dict[str, Preset] = {preset.config.env.id: preset for preset in _ALL}
"""Tuned configs by environment id. Worlds that come with their own preset have it in their description: see `find_preset`."""
