"""The works that the benchmarks measure: one table of hyper-parameters, read by inchworm's side and by each peer's.

`vf_coef` is in inchworm's units (the value loss has its ½); Stable-Baselines3, whose loss has none, gets half of it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Work:
    """One task with everything that both sides must agree on. Networks: separate 64x64 tanh, Adam with eps 1e-5."""

    name: str
    env_id: str
    num_envs: int
    rollout_steps: int
    minibatch_size: int
    update_epochs: int
    learning_rate: float
    gamma: float
    gae_lambda: float
    ent_coef: float
    total_timesteps: int
    eval_episodes: int = 100
    seeds: int = 15
    """How many seeds scores are compared with."""
    clip_coef: float = 0.2
    vf_coef: float = 1.0
    max_grad_norm: float = 0.5
    clip_vloss: bool = False
    """The value's move is bounded by clip_coef, too."""
    linear: bool = False
    """Learning rate and clip go linearly to 0 over total_timesteps."""

    @property
    def batch(self) -> int:
        """Steps of one iteration."""
        return self.num_envs * self.rollout_steps


def scaled(work: Work, scale: float) -> Work:
    """The work with a part of its steps, but at least two rollouts."""
    return dataclasses.replace(work, total_timesteps=max(2 * work.batch, round(work.total_timesteps * scale)))


LEARNING = {
    work.name: work
    for work in (
        Work(
            name="pendulum", env_id="Pendulum-v1", num_envs=4, rollout_steps=1024, minibatch_size=64, update_epochs=10,
            learning_rate=1e-3, gamma=0.9, gae_lambda=0.95, ent_coef=0.0, total_timesteps=100_000,
        ),
        Work(
            name="acrobot", env_id="Acrobot-v1", num_envs=16, rollout_steps=256, minibatch_size=64, update_epochs=4,
            learning_rate=3e-4, gamma=0.99, gae_lambda=0.94, ent_coef=0.0, total_timesteps=100_000,
        ),
        Work(
            name="lunarlander", env_id="LunarLander-v3", num_envs=16, rollout_steps=1024, minibatch_size=64, update_epochs=4,
            learning_rate=3e-4, gamma=0.999, gae_lambda=0.98, ent_coef=0.01, total_timesteps=300_000,
        ),
        Work(
            name="halfcheetah", env_id="HalfCheetah-v5", num_envs=1, rollout_steps=2048, minibatch_size=64, update_epochs=10,
            learning_rate=3e-4, gamma=0.99, gae_lambda=0.95, ent_coef=0.0, total_timesteps=300_000, eval_episodes=20, seeds=10,
        ),
    )
}  # fmt: skip
"""Where the scores are compared (`learning.py`)."""

SPEED = {
    work.name: work
    for work in (
        Work(
            name="W1", env_id="CartPole-v1", num_envs=8, rollout_steps=32, minibatch_size=256, update_epochs=20,
            learning_rate=1e-3, gamma=0.98, gae_lambda=0.8, ent_coef=0.0, total_timesteps=51_200,
        ),
        Work(
            name="W2", env_id="CartPole-v1", num_envs=1, rollout_steps=2048, minibatch_size=64, update_epochs=10,
            learning_rate=3e-4, gamma=0.99, gae_lambda=0.95, ent_coef=0.0, total_timesteps=40_960,
        ),
        Work(
            name="W3", env_id="CartPole-v1", num_envs=4, rollout_steps=128, minibatch_size=128, update_epochs=4,
            learning_rate=2.5e-4, gamma=0.99, gae_lambda=0.95, ent_coef=0.01, total_timesteps=61_440,
        ),
        Work(
            name="W4", env_id="HalfCheetah-v5", num_envs=1, rollout_steps=2048, minibatch_size=64, update_epochs=10,
            learning_rate=3e-4, gamma=0.99, gae_lambda=0.95, ent_coef=0.0, total_timesteps=20_480, eval_episodes=10,
        ),
        Work(
            name="W5", env_id="CartPole-v1", num_envs=64, rollout_steps=128, minibatch_size=2048, update_epochs=4,
            learning_rate=2.5e-4, gamma=0.99, gae_lambda=0.95, ent_coef=0.01, total_timesteps=262_144,
        ),
    )
}  # fmt: skip
"""Where the speed is compared (`compare.py`)."""

SOLVE = Work(
    name="solve", env_id="CartPole-v1", num_envs=8, rollout_steps=32, minibatch_size=256, update_epochs=20,
    learning_rate=1e-3, gamma=0.98, gae_lambda=0.8, ent_coef=0.0, total_timesteps=100_000, linear=True,
)  # fmt: skip
"""What is timed until CartPole-v1 is solved (`solve.py`): W1 with the schedules that RL Zoo gives it."""


NATIVE = {
    work.name: work
    for work in (
        Work(
            name=f"N{num_envs}", env_id="gymnax:CartPole-v1", num_envs=num_envs, rollout_steps=128, minibatch_size=num_envs * 32,
            update_epochs=4, learning_rate=2.5e-4, gamma=0.99, gae_lambda=0.95, ent_coef=0.01, vf_coef=0.5, clip_vloss=True,
            total_timesteps=iterations * num_envs * 128,
        )
        for num_envs, iterations in ((8, 200), (64, 40), (2048, 4))
    )
}  # fmt: skip
"""Where whole loops compiled by JAX are compared (`jax_native.py`): PureJaxRL's own settings with a constant learning rate."""

GROUPS = {"speed": SPEED, "learning": LEARNING, "native": NATIVE, "solve": {SOLVE.name: SOLVE}}


def find(group: str, name: str) -> Work:
    """A work by its group ("speed", "learning", "native" or "solve") and name."""
    return GROUPS[group][name]
