"""inchworm's side of a benchmark: the same work, the same figures as the peers' sides report."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Literal

import numpy as np

import memory
from inchworm import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, PPOTrainer, Rollout, RunConfig, TrainingConfig, TrainingState
from inchworm.train.callbacks import BaseCallback
from jobs import since_start
from works import Work, find, scaled

Backend = Literal["numpy", "torch", "jax"]
Compile = Literal["off", "on", "auto"]


class Clock(BaseCallback):
    """The time that learning took; None where collecting and learning are one program."""

    sees_every = 0  # it reads metrics only, so a compiled loop may compute many iterations in one call

    def __init__(self) -> None:
        self.learn_seconds: float | None = 0.0

    def on_iteration(self, state: TrainingState, metrics: object) -> None:
        """Add up the time of learning."""
        del metrics
        own = state.metrics.get("timing/learn_seconds")
        self.learn_seconds = None if own is None or self.learn_seconds is None else self.learn_seconds + own


class Curve(Clock):
    """Finished episodes as (env steps, return), the raw material of a learning curve; and the time that learning took."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[int, float]] = []

    def on_rollout(self, state: TrainingState, rollout: Rollout) -> None:
        """Date each finished episode to the step that ended it; a rollout lists them in that order."""
        ends = np.argwhere(rollout.terminated | rollout.truncated)[:, 0]  # [episodes] the row of each end
        before = state.env_steps - rollout.num_valid  # the state counts what has just been collected
        dates = before + (ends + 1) * rollout.num_lanes
        self.points += [(int(date), episode.episode_return) for date, episode in zip(dates, rollout.episodes, strict=True)]


def config_of(work: Work, seed: int, threads: int = 1, backend: Backend = "torch", compile_step: Compile = "off") -> TrainingConfig:
    """The work's hyper-parameters as a config; advantages normalised per minibatch, as the peer does."""
    schedule: Literal["linear", "constant"] = "linear" if work.linear else "constant"
    return TrainingConfig(
        env=EnvConfig(id=work.env_id, num_envs=work.num_envs),
        policy=PolicyConfig(hidden_sizes=(64, 64), activation="tanh"),
        ppo=PPOConfig(
            learning_rate=work.learning_rate,
            gamma=work.gamma,
            gae_lambda=work.gae_lambda,
            clip_coef=work.clip_coef,
            vf_coef=work.vf_coef,
            ent_coef=work.ent_coef,
            clip_vloss=work.clip_vloss,
            max_grad_norm=work.max_grad_norm,
            update_epochs=work.update_epochs,
            rollout_steps=work.rollout_steps,
            minibatch_size=work.minibatch_size,
            normalize_advantages="minibatch",
            adam_eps=1e-5,
            learning_rate_schedule=schedule,
            clip_schedule=schedule,
            compile=compile_step,
        ),
        evaluation=EvalConfig(interval=0, final_episodes=0, seed=10_000 + seed),
        run=RunConfig(seed=seed, total_timesteps=work.total_timesteps, threads=threads, backend=backend, device="cpu"),
    )


def train(
    group: str,
    name: str,
    seed: int,
    scale: float = 1.0,
    *,
    evaluate: bool = False,
    threads: int = 1,
    warmup: int = 0,
    backend: Backend = "torch",
    compile_step: Compile = "off",
    host: bool = False,
) -> dict[str, Any]:
    """One run: seconds after some iterations of warm-up, memory, and either the last returns or the whole learning curve and score.

    With `host` the environments are stepped as for the other backends, also where JAX has a world of its own.
    """
    work = scaled(find(group, name), scale)
    work = dataclasses.replace(work, total_timesteps=work.total_timesteps + warmup * work.batch)
    clock = Curve() if evaluate else Clock()
    config = config_of(work, seed, threads, backend, compile_step)
    if host:
        config = config.replace(env=config.env.replace(jax_native=False))
    with PPOTrainer("mlp", config.env, config, callbacks=[clock]) as trainer:
        trainer.learner  # noqa: B018 - made before the clock starts, as the peers' optimisers are
        ready, base = since_start(), memory.resident()
        began, cpu_began = time.perf_counter(), time.process_time()
        if warmup:
            trainer.train(warmup * work.batch)
        start, cpu_start, before, clock.learn_seconds = time.perf_counter(), time.process_time(), trainer.total_timesteps, 0.0
        trainer.train()
        result = {
            "steps": trainer.total_timesteps - before,
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu_start,
            "warmup_cpu_seconds": cpu_start - cpu_began,
            "learn_seconds": clock.learn_seconds,
            "warmup_steps": before,
            "warmup_seconds": start - began,
            "startup_seconds": ready,
            "base_bytes": base,
            "peak_bytes": memory.peak(),
            "last_return": float(np.mean(trainer.episode_rewards)) if trainer.episode_rewards else None,
        }
        if isinstance(clock, Curve):
            returns = trainer.evaluate(work.eval_episodes).returns.tolist()
            sampled = trainer.evaluate(work.eval_episodes, deterministic=False).mean_return
            result |= {"curve": clock.points, "returns": returns, "score": sum(returns) / len(returns), "sampled_score": sampled}
    return result


def train_and_score(config: TrainingConfig, episodes: int) -> dict[str, Any]:
    """One training with its curve, and the mean returns of greedy and of sampled episodes: a run of `variants.py`."""
    curve, began = Curve(), time.perf_counter()
    with PPOTrainer(config.policy, config.env, config, callbacks=[curve]) as trainer:
        trainer.train()
        seconds = time.perf_counter() - began
        greedy, sampled = (trainer.evaluate(episodes, deterministic=flag).mean_return for flag in (True, False))
        return {
            "steps": trainer.total_timesteps, "seconds": seconds, "curve": curve.points, "score": greedy, "sampled_score": sampled,
        }  # fmt: skip
