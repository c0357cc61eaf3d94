"""rsl_rl's side of a benchmark of simulators on a device. It runs in a virtual environment of its own, through `jobs.run(python=…)`.

rsl_rl computes the values while it collects, and bootstraps truncated rows from the observation before them.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from device_work import Settings, make_env


def train(settings: dict[str, Any], iterations: int, *, threads: int = 1) -> dict[str, Any]:
    """The times of each iteration after the first two."""
    from rsl_rl.env import VecEnv  # type: ignore[import-not-found]
    from rsl_rl.runners import OnPolicyRunner  # type: ignore[import-not-found]
    from tensordict import TensorDict  # type: ignore[import-not-found]

    torch.set_num_threads(threads)
    own = Settings(**settings)
    simulator = make_env(own)

    class Lanes(VecEnv):  # type: ignore[misc]
        """The simulator as rsl_rl asks for it."""

        num_envs, num_actions, max_episode_length, device, cfg = own.num_envs, 1, simulator.max_episode_steps, "cpu", {}

        def __init__(self) -> None:
            self.episode_length_buf = torch.zeros(own.num_envs, dtype=torch.int64)
            self.observations = simulator.reset(seed=0)[0]

        def get_observations(self) -> Any:
            """What to act on next."""
            return TensorDict({"policy": self.observations}, batch_size=[own.num_envs])

        def step(self, actions: torch.Tensor) -> Any:
            """One step of all lanes."""
            self.observations, rewards, terminated, truncated, _ = simulator.step(actions)
            return self.get_observations(), rewards, (terminated | truncated).long(), {"time_outs": truncated}

    model = {"class_name": "MLPModel", "hidden_dims": list(own.hidden_sizes), "activation": own.activation, "obs_normalization": False}
    config = {
        "num_steps_per_env": own.rollout_steps,
        "save_interval": 10**9,
        "check_for_nan": True,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**model, "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "log"}},
        "critic": dict(model),
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": own.update_epochs,
            "num_mini_batches": own.num_minibatches,
            "clip_param": 0.2,
            "gamma": 0.99,
            "lam": 0.95,
            "value_loss_coef": 1.0,
            "entropy_coef": 0.01,
            "learning_rate": 1e-3,
            "max_grad_norm": 1.0,
            "use_clipped_value_loss": True,
            "schedule": "fixed",
            "desired_kl": 0.01,
        },
        "multi_gpu": None,
    }
    runner = OnPolicyRunner(Lanes(), config, log_dir=None, device="cpu")
    rows: list[dict[str, float]] = []
    runner.logger.log = lambda **row: rows.append({"collect": row["collect_time"], "learn": row["learn_time"]})
    runner.learn(iterations + 2)
    return {"rows": rows[2:], "version": importlib.metadata.version("rsl-rl-lib")}
