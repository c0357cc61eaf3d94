"""Two ways to learn to adapt: a policy conditioned on earlier trajectories, and a policy with memory in trials (RL²).

    python examples/meta_learning.py [STEPS]

The tasks are goals in a plane that are not observed: the first episode finds out where the goal is, the next ones go there.
"""

from __future__ import annotations

import sys

from inchworm import MetaLearningPPOTrainer, PolicyConfig, PPOConfig, PPOTrainer, TrialEnv, evaluate_adaptation
from inchworm.worlds.tasks import PointWorld, point_goals

TASKS, LENGTH, EPISODES = point_goals(), PointWorld.STEPS, 3


def with_context(steps: int) -> list[float]:
    """Collect without context, then with it; the encoder of the context is trained with the policy."""
    config = PPOConfig(
        learning_rate=3e-3, rollout_steps=LENGTH, num_minibatches=4, update_epochs=6, ent_coef=0.03, gamma=0.9, scale_rewards=True
    )  # the entropy bonus keeps the first episode exploring
    with MetaLearningPPOTrainer(
        PolicyConfig(log_std_init=-0.5), PointWorld, config, tasks=TASKS, adaptations=EPISODES - 1, num_envs=32, num_workers=0, seed=0
    ) as trainer:
        trainer.train(total_timesteps=steps)
        found = trainer.evaluate_adaptation(episodes=EPISODES - 1)
    print(f"with context: {found}")
    return found.means


def make_trials() -> TrialEnv:
    return TrialEnv(PointWorld(), EPISODES, TASKS)


def with_memory(steps: int) -> list[float]:
    """Train a GRU on trials; nothing here is special but the environment."""
    steps_of_trial = EPISODES * LENGTH
    config = PPOConfig(
        learning_rate=3e-3, rollout_steps=steps_of_trial, sequence_length=steps_of_trial, num_minibatches=4, ent_coef=0.003, gamma=0.9,
        gae_lambda=0.9,
    )  # fmt: skip
    policy = PolicyConfig(kind="gru", hidden_sizes=(64,), log_std_init=-0.5, normalize_values=True)
    with PPOTrainer(policy, make_trials, config, num_envs=32, num_workers=0, seed=0) as trainer:
        trainer.train(total_timesteps=steps)
        found = evaluate_adaptation(trainer.policy, make_trials, TASKS.held_out(), EPISODES - 1, steps=steps_of_trial)
    print(f"with memory: {found}")
    return found.means


def main(steps: int = 300_000) -> list[list[float]]:
    return [with_context(steps), with_memory(steps)]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
