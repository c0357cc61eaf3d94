"""The style of a trainer that counts episodes: agent, environment, `max_episodes`, `target_reward`, a callback per episode.

    python examples/episode_trainer.py [STEPS]

`EpisodeTrainer` is what such a program needs around `PPOTrainer`: its settings keep their names, its callback gets a dict per ended
episode, and `train` returns one with the final evaluation and whether, when and why the training converged.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from inchworm import EvalStats, PolicyConfig, PPOTrainer, Rollout, TrainingConfig, TrainingState
from inchworm.train.callbacks import BaseCallback

EpisodeMetrics = dict[str, Any]
"""`episode`, its number from 1; `step_metrics`, those of the iteration and the episode; `eval_metrics`, or None without an evaluation."""


class EpisodeCallback(BaseCallback):
    """Calls a function once for every episode that ended, after the update that used it; False stops the training."""

    def __init__(self, function: Callable[[EpisodeMetrics], bool | None]) -> None:
        self.function = function
        self.rollout: Rollout | None = None

    def on_rollout(self, state: TrainingState, rollout: Rollout) -> None:
        """Keep the episodes that ended in this rollout."""
        self.rollout = rollout

    def on_iteration(self, state: TrainingState, metrics: Mapping[str, float]) -> bool:
        """Pass them on, in the order in which they were recorded."""
        assert self.rollout is not None
        ended = self.rollout.episodes
        evaluated = bool(state.evaluations) and state.evaluations[-1]["iteration"] == state.iteration
        answers = []
        for number, episode in enumerate(ended, state.episodes - len(ended) + 1):
            own = {"episode_reward": episode.episode_return, "episode_length": episode.length}
            step_metrics = {**metrics, **own, "avg_reward": metrics["mean_return"]}
            eval_metrics = state.evaluations[-1] if evaluated else None
            answers.append(self.function({"episode": number, "step_metrics": step_metrics, "eval_metrics": eval_metrics}))
        return False not in answers


class EpisodeTrainer:
    """Trains an agent, which is anything that `PPOTrainer` takes as a policy, until its target or `max_episodes`."""

    def __init__(self, agent: Any, env: Any, *, run_dir: str | None = None, **settings: Any) -> None:
        """`settings` are those of the table in docs/migration.md, and any setting without a name here is refused."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each name of an older trainer is reported
            config = TrainingConfig.from_dict(settings)
        self.trainer = PPOTrainer(agent, env, config, run_dir=run_dir)

    def train(self, callback: Callable[[EpisodeMetrics], bool | None] | None = None) -> dict[str, Any]:
        """Train; the results contain the final evaluation, also after an early stop."""
        history = self.trainer.train(callback=EpisodeCallback(callback) if callback is not None else None)
        final = history.evaluations[-1]
        convergence = history.convergence or {"converged": False}
        return {
            "episodes": self.trainer.state.episodes,
            "stop_reason": history.stop_reason,
            "converged": convergence["converged"],
            "converged_at_step": convergence.get("env_steps"),
            "best_avg_reward": convergence.get("best_mean_return"),
            "final_evaluation": {"avg_reward": final["mean_return"], "std_reward": final["std_return"], "episodes": final["episodes"]},
            "history": history,
        }

    def evaluate(self, num_episodes: int = 100) -> dict[str, float]:
        """Only evaluate, before, after or without training."""
        stats: EvalStats = self.trainer.evaluate(episodes=num_episodes)
        rewards = {"min_reward": float(stats.returns.min()), "max_reward": float(stats.returns.max())}
        return {"avg_reward": stats.mean_return, "std_reward": stats.std_return, **rewards}

    def close(self) -> None:
        """Close the environments."""
        self.trainer.close()


def main(steps: int = 60_000) -> dict[str, Any]:
    trainer = EpisodeTrainer(
        PolicyConfig(hidden_sizes=(64, 64)),
        "CartPole-v1",
        max_episodes=1000,
        max_steps_per_episode=500,
        total_timesteps=steps,
        target_reward=475.0,  # 195 is that of CartPole-v0, whose episodes end after 200 steps
        convergence_window=20,
        early_stopping_patience=3,
        eval_frequency=10,
        eval_episodes=10,
        learning_rate=1e-3,
        epochs_per_update=10,
        batch_size=256,
        minibatch_size=64,
    )
    print(f"before: {trainer.evaluate(num_episodes=10)['avg_reward']:.1f}")

    def show(metrics: EpisodeMetrics) -> None:
        if metrics["episode"] % 50 == 0:
            print(f"episode {metrics['episode']}: average reward {metrics['step_metrics']['avg_reward']:.1f}")

    results = trainer.train(callback=show)
    final = results["final_evaluation"]
    print(f"{results['stop_reason']} after {results['episodes']} episodes: {final['avg_reward']:.1f} ± {final['std_reward']:.1f}")
    trainer.close()
    return results


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
