"""Several collectors with one learner: each has environments of its own, and their rollouts are joined along lanes.

python examples/collectors.py [STEPS]
"""

from __future__ import annotations

import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor

from inchworm import (
    NumpyPolicy,
    PolicyConfig,
    PolicySpec,
    PPOConfig,
    PPOOptimizer,
    RolloutCollector,
    TorchPolicy,
    combine_rollouts,
    evaluate_policy,
    make_vector_env,
)

CONFIG = PPOConfig(learning_rate=1e-3, gamma=0.98, gae_lambda=0.8, rollout_steps=32, update_epochs=10, minibatch_size=256)


def main(steps: int = 20_000, collectors: int = 3) -> float:
    with contextlib.ExitStack() as stack:
        envs = [
            stack.enter_context(contextlib.closing(make_vector_env("CartPole-v1", num_envs=4, seed=seed))) for seed in range(collectors)
        ]
        policy = TorchPolicy(PolicySpec(envs[0].observation_space, envs[0].action_space, PolicyConfig()), seed=0)
        learner = PPOOptimizer(policy, CONFIG)
        # An actor each: a copy of the weights, which acts in NumPy. It could as well be in another process or on another machine.
        actors = [NumpyPolicy(policy.spec, policy.get_weights()) for _ in envs]
        workers = [RolloutCollector(env, actor, seed=seed) for seed, (env, actor) in enumerate(zip(envs, actors))]
        pool = stack.enter_context(ThreadPoolExecutor(collectors))
        while sum(worker.env_steps for worker in workers) < steps:
            rollouts = list(pool.map(lambda worker: worker.collect(CONFIG.rollout_steps), workers))
            stats = learner.update(combine_rollouts(rollouts))
            for worker in workers:
                worker.set_weights(policy.get_weights())
        print(f"{learner.updates} updates, {collectors} collectors of {rollouts[0].num_lanes} lanes; kl {stats['approx_kl']:.4f}")
        score = evaluate_policy(actors[0], "CartPole-v1", episodes=20).mean_return
    print(f"mean return {score:.1f}")
    return score


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
