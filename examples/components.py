"""Train without `PPOTrainer`: a vector environment, a policy, a collector, an optimiser, and an explicit loop.

python examples/components.py [STEPS]
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from inchworm import (
    NumpyPolicy,
    PolicyConfig,
    PolicySpec,
    PPOConfig,
    PPOOptimizer,
    RolloutCollector,
    TorchPolicy,
    evaluate_policy,
    make_vector_env,
)


def main(steps: int = 20_000) -> float:
    torch.set_num_threads(1)  # small networks learn faster on one thread; PPOTrainer sets this by run.threads
    config = PPOConfig(learning_rate=1e-3, gamma=0.98, gae_lambda=0.8, rollout_steps=32, update_epochs=20, minibatch_size=256, ent_coef=0.0)
    env = make_vector_env("CartPole-v1", num_envs=8, seed=0)
    spec = PolicySpec(env.observation_space, env.action_space, PolicyConfig())

    policy = TorchPolicy(spec, seed=0)  # learns
    actor = NumpyPolicy(spec, policy.get_weights())  # acts: the same network in NumPy
    collector = RolloutCollector(env, actor, seed=0)
    optimizer = PPOOptimizer(policy, config)

    while collector.env_steps < steps:
        rollout = collector.collect(config.rollout_steps)
        stats = optimizer.update(rollout)
        collector.set_weights(policy.get_weights())
        if optimizer.updates % 20 == 0:
            returns = [episode.episode_return for episode in collector.recent]
            print(
                f"{collector.env_steps:6} steps  mean return {np.mean(returns):6.1f}  loss {stats['loss']:.3f}  kl {stats['approx_kl']:.4f}"
            )
    collector.close()

    score = evaluate_policy(actor, "CartPole-v1", episodes=20)
    print(score)
    return score.mean_return


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
