"""The functional training loop with a custom step: wrap the default step, add metrics, change the learning rate, stop early.

python examples/functional_loop.py [STEPS]
"""

from __future__ import annotations

import sys

from torch import Tensor

from inchworm import (
    EnvConfig,
    PolicySpec,
    PPOOptimizer,
    RunConfig,
    TorchPolicy,
    TrainingComponents,
    TrainingState,
    default_training_step,
    functional_training_loop,
    make_env,
    small_fast_config,
)


def quiet_logits(policy: TorchPolicy, observations: Tensor) -> Tensor:
    """Penalise large logits."""
    return 1e-4 * policy.network.action_outputs(observations.flatten(0, 1)).square().mean()


def step_until_solved(state: TrainingState, components: TrainingComponents) -> dict[str, float]:
    """Run one default iteration, then add a metric, adapt the learning rate and decide whether to stop."""
    metrics = default_training_step(state, components)
    metrics["clipped_too_much"] = float(metrics["clip_fraction"] > 0.3)  # any number; appears in the history under this name
    if metrics["clipped_too_much"] and isinstance(components.learner, PPOOptimizer):
        components.learner.learning_rate_scale *= 0.9
    if len(state.recent) == 100 and metrics["mean_return"] >= 195:
        state.should_stop = True
    return metrics


def main(steps: int = 30_000) -> TrainingState:
    config = small_fast_config()
    config = config.replace(env=EnvConfig(id="CartPole-v1", num_envs=8), run=RunConfig(total_timesteps=steps))
    env = make_env(config.env)
    policy = TorchPolicy(PolicySpec(env.observation_space, env.action_space, config.policy), seed=config.run.seed)
    state = functional_training_loop(config, policy, step_fn=step_until_solved, custom_losses=[quiet_logits])
    print(f"stopped after {state.iteration} iterations, {state.env_steps} steps, {state.episodes} episodes")
    print(f"mean return of the last {len(state.recent)} episodes: {state.metrics.get('mean_return', float('nan')):.1f}")
    print(f"the custom loss, first and last: {state.history['loss/quiet_logits'][0]:.2g}, {state.history['loss/quiet_logits'][-1]:.2g}")
    return state


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
