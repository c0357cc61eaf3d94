"""Stable-Baselines3's side of a benchmark: the same work, its own code. SBX, its JAX sister, has the same interface."""

from __future__ import annotations

import importlib
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

import memory
from jobs import since_start
from works import Work, find, scaled


class Clock(BaseCallback):
    """The time that learning took: it lies between the end of one rollout and the beginning of the next, or of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.learn_seconds = 0.0
        self._collected: float | None = None

    def _on_rollout_start(self) -> None:
        self._add_learning()

    def _on_rollout_end(self) -> None:
        self._collected = time.perf_counter()

    def _on_training_end(self) -> None:
        self._add_learning()

    def _add_learning(self) -> None:
        if self._collected is not None:
            self.learn_seconds += time.perf_counter() - self._collected
        self._collected = None

    def _on_step(self) -> bool:
        return True


class Curve(Clock):
    """Finished episodes as (env steps, return), the raw material of a learning curve; and the time that learning took."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[int, float]] = []

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                self.points.append((self.num_timesteps, float(info["episode"]["r"])))
        return True


def build(work: Work, seed: int, package: str = "stable_baselines3") -> Any:
    """The model with the work's hyper-parameters; its value loss has no ½, so its coefficient is half of ours."""
    algorithm: Any = importlib.import_module(package)
    return algorithm.PPO(
        "MlpPolicy",
        make_vec_env(work.env_id, n_envs=work.num_envs, seed=seed),
        learning_rate=_falling(work.learning_rate) if work.linear else work.learning_rate,
        n_steps=work.rollout_steps,
        batch_size=work.minibatch_size,
        n_epochs=work.update_epochs,
        gamma=work.gamma,
        gae_lambda=work.gae_lambda,
        clip_range=_falling(work.clip_coef) if work.linear else work.clip_coef,
        ent_coef=work.ent_coef,
        vf_coef=work.vf_coef / 2,
        max_grad_norm=work.max_grad_norm,
        seed=seed,
        device="cpu",
    )


def _falling(value: float) -> Any:
    return lambda remaining: remaining * value


def train(
    group: str,
    name: str,
    seed: int,
    scale: float = 1.0,
    *,
    evaluate: bool = False,
    threads: int = 1,
    warmup: int = 0,
    package: str = "stable_baselines3",
) -> dict[str, Any]:
    """One run: seconds after some iterations of warm-up, memory, and either the last returns or the whole learning curve and score."""
    importlib.import_module(package)
    base = memory.resident()
    torch.set_num_threads(threads)
    work = scaled(find(group, name), scale)
    model = build(work, seed, package)
    ready, began = since_start(), time.perf_counter()
    if warmup:
        model.learn(warmup * work.batch)
    before = int(model.num_timesteps)
    clock = Curve() if evaluate else Clock()
    start, cpu_start = time.perf_counter(), time.process_time()
    model.learn(work.total_timesteps, callback=clock, reset_num_timesteps=not warmup)
    result = {
        "steps": int(model.num_timesteps) - before,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu_start,
        "learn_seconds": clock.learn_seconds,
        "warmup_steps": before,
        "warmup_seconds": start - began,
        "startup_seconds": ready,
        "base_bytes": base,
        "peak_bytes": memory.peak(),
        "last_return": float(np.mean([episode["r"] for episode in model.ep_info_buffer])) if model.ep_info_buffer else None,
    }
    if isinstance(clock, Curve):
        returns, sampled = (_score(model, work, seed, deterministic=greedy) for greedy in (True, False))
        result |= {"curve": clock.points, "returns": returns, "score": float(np.mean(returns)), "sampled_score": float(np.mean(sampled))}
    return result


def _score(model: Any, work: Work, seed: int, *, deterministic: bool) -> list[float]:
    env = Monitor(gym.make(work.env_id))
    env.reset(seed=10_000 + seed)
    returns, _ = evaluate_policy(model, env, work.eval_episodes, deterministic=deterministic, return_episode_rewards=True)
    return [float(value) for value in np.asarray(returns)]
