"""RLlib's side of `ray_scaling.py`: its env runner as an actor. Runs in an environment of its own, without inchworm."""

from __future__ import annotations

import os
import time
from pathlib import Path


def start_runners(starts: int) -> list[dict[str, float]]:
    """Seconds from creating a runner until it has sampled a step, and its resident megabytes after some more."""
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    class Runner(SingleAgentEnvRunner):  # type: ignore[misc]
        def resident(self) -> float:
            status = Path(f"/proc/{os.getpid()}/status").read_text(encoding="utf-8")
            return float(status.partition("VmRSS:")[2].split()[0]) / 1e3

    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    config = PPOConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=1)
    found = []
    for _ in range(starts):
        began = time.perf_counter()
        runner = ray.remote(num_cpus=0.1)(Runner).remote(config=config)
        ray.get(runner.sample.remote(num_timesteps=1, random_actions=False))
        seconds = time.perf_counter() - began
        ray.get(runner.sample.remote(num_timesteps=64, random_actions=False))
        found.append({"seconds": seconds, "megabytes": ray.get(runner.resident.remote())})
        ray.kill(runner)
    ray.shutdown()
    return found
