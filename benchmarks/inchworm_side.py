"""inchworm's side of a benchmark: the same work, the same figures as the peers' sides report."""

from __future__ import annotations

import time

import numpy as np

from inchworm import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, PPOTrainer, Rollout, RunConfig, TrainingConfig, TrainingState
from inchworm.train.callbacks import BaseCallback
from works import Work


class Curve(BaseCallback):
    """Finished episodes as (env steps, return), the raw material of a learning curve; and the time that learning took."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self.learn_seconds = 0.0

    def on_rollout(self, state: TrainingState, rollout: Rollout) -> None:
        """Date each finished episode to the step that ended it; a rollout lists them in that order."""
        ends = np.argwhere(rollout.terminated | rollout.truncated)[:, 0]  # [episodes] the row of each end
        before = state.env_steps - rollout.num_valid  # the state counts what has just been collected
        dates = before + (ends + 1) * rollout.num_lanes
        self.points += [(int(date), episode.episode_return) for date, episode in zip(dates, rollout.episodes, strict=True)]

    def on_iteration(self, state: TrainingState, metrics: object) -> None:
        """Add up the time of learning."""
        del metrics
        self.learn_seconds += state.metrics["timing/learn_seconds"]


def config_of(work: Work, seed: int, threads: int = 1) -> TrainingConfig:
    """The work's hyper-parameters as a config; advantages normalised per minibatch, as the peer does."""
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
            max_grad_norm=work.max_grad_norm,
            update_epochs=work.update_epochs,
            rollout_steps=work.rollout_steps,
            minibatch_size=work.minibatch_size,
            normalize_advantages="minibatch",
            adam_eps=1e-5,
        ),
        evaluation=EvalConfig(interval=0, final_episodes=0, seed=10_000 + seed),
        run=RunConfig(seed=seed, total_timesteps=work.total_timesteps, threads=threads, device="cpu"),
    )


def train(work: Work, seed: int, *, evaluate: bool = True, threads: int = 1) -> dict[str, object]:
    """One run: seconds of training, the learning curve, and the greedy score of the last policy."""
    curve = Curve()
    with PPOTrainer("mlp", work.env_id, config_of(work, seed, threads), callbacks=[curve]) as trainer:
        trainer.learner  # noqa: B018 - made before the clock starts, as the peers' optimisers are
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        returns = trainer.evaluate(work.eval_episodes).returns.tolist() if evaluate else []
        steps = trainer.total_timesteps
    return {
        "side": "inchworm",
        "work": work.name,
        "seed": seed,
        "steps": steps,
        "seconds": seconds,
        "learn_seconds": curve.learn_seconds,
        "curve": curve.points,
        "returns": returns,
        "score": sum(returns) / len(returns) if returns else None,
    }
