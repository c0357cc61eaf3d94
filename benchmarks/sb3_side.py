"""Stable-Baselines3's side of a benchmark: the same work, its own code."""

from __future__ import annotations

import time

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

from works import Work


class Curve(BaseCallback):
    """Finished episodes as (env steps, return), the raw material of a learning curve; and the time that learning took."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[int, float]] = []
        self.learn_seconds = 0.0
        self._collected: float | None = None

    def _on_rollout_start(self) -> None:
        self._add_learning()

    def _on_rollout_end(self) -> None:
        self._collected = time.perf_counter()

    def _on_training_end(self) -> None:
        self._add_learning()

    def _add_learning(self) -> None:
        """Learning lies between the end of one rollout and the beginning of the next, or of nothing."""
        if self._collected is not None:
            self.learn_seconds += time.perf_counter() - self._collected
        self._collected = None

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                self.points.append((self.num_timesteps, float(info["episode"]["r"])))
        return True


def build(work: Work, seed: int) -> PPO:
    """The model with the work's hyper-parameters; its value loss has no ½, so its coefficient is half of ours."""
    return PPO(
        "MlpPolicy",
        make_vec_env(work.env_id, n_envs=work.num_envs, seed=seed),
        learning_rate=work.learning_rate,
        n_steps=work.rollout_steps,
        batch_size=work.minibatch_size,
        n_epochs=work.update_epochs,
        gamma=work.gamma,
        gae_lambda=work.gae_lambda,
        clip_range=work.clip_coef,
        ent_coef=work.ent_coef,
        vf_coef=work.vf_coef / 2,
        max_grad_norm=work.max_grad_norm,
        seed=seed,
        device="cpu",
    )


def train(work: Work, seed: int, *, evaluate: bool = True, threads: int = 1) -> dict[str, object]:
    """One run: seconds of training, the learning curve, and the greedy score of the last policy."""
    torch.set_num_threads(threads)
    model = build(work, seed)
    curve = Curve()
    start = time.perf_counter()
    model.learn(work.total_timesteps, callback=curve)
    seconds = time.perf_counter() - start
    returns: list[float] = []
    if evaluate:
        env = Monitor(gym.make(work.env_id))
        env.reset(seed=10_000 + seed)
        returns, _ = evaluate_policy(model, env, work.eval_episodes, deterministic=True, return_episode_rewards=True)
    return {
        "side": "stable-baselines3",
        "work": work.name,
        "seed": seed,
        "steps": int(model.num_timesteps),
        "seconds": seconds,
        "learn_seconds": curve.learn_seconds,
        "curve": curve.points,
        "returns": [float(r) for r in returns],
        "score": float(np.mean(returns)) if returns else None,
    }
