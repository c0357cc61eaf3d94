"""PPOTrainer in the training function of Ray Train's TorchTrainer: two ranks on this machine."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inchworm import PPOConfig, PPOTrainer


@pytest.mark.by_hand
def test_two_workers_of_ray_train_learn_as_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an update of 8 copies x 32 steps the weights of both ranks are equal, and those of one process to 1e-5."""
    pytest.importorskip("pyarrow", reason='Ray Train needs: pip install "ray[train]"')
    ray = pytest.importorskip("ray")
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def learn(settings: dict[str, Any]) -> None:
        with PPOTrainer("mlp", "CartPole-v1", PPOConfig(rollout_steps=32, num_minibatches=2), num_envs=8, backend="torch") as trainer:
            trainer.train(total_timesteps=256)
            rank = os.environ.get("RANK", "one")
            np.savez(Path(settings["out"]) / f"{rank}.npz", **trainer.policy.get_weights())

    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        scaling, run = ScalingConfig(num_workers=2), RunConfig(storage_path=str(tmp_path / "storage"))
        TorchTrainer(learn, train_loop_config={"out": str(tmp_path)}, scaling_config=scaling, run_config=run).fit()
    finally:
        ray.shutdown()
    learn({"out": str(tmp_path)})
    zero, one, alone = (dict(np.load(tmp_path / f"{name}.npz")) for name in ("0", "1", "one"))
    for name, weights in alone.items():
        np.testing.assert_array_equal(zero[name], one[name])
        np.testing.assert_allclose(zero[name], weights, rtol=0, atol=1e-5)
