"""What checkpoints cost: the share of a run's profiled time at one checkpoint a minute, on each work and with images.

python benchmarks/checkpoint_cost.py

*state*: taking all state and copying it, which is all that training waits for when a background thread writes. *save*: taking,
writing, hashing, syncing and committing, in this thread, which is the most that it can cost. *rows*: syncing the rows of metrics,
a part of that. *watch*: the share of the snapshots for Ctrl-C and of looking after saves, without any save.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from works import SPEED

MINUTE = 60.0
ITERATIONS = {"W1": 120, "W2": 8, "W3": 120, "W4": 6, "W5": 20, "images": 12}
SAVES = 9


def image_config() -> Any:
    """A convolutional network on small images: the largest state of the built-in kinds."""
    from inchworm import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, RunConfig, TrainingConfig

    return TrainingConfig(
        env=EnvConfig(num_envs=8),
        policy=PolicyConfig(kind="cnn"),
        ppo=PPOConfig(rollout_steps=32, minibatch_size=64, update_epochs=2),
        evaluation=EvalConfig(interval=0, final_episodes=0),
        run=RunConfig(backend="torch"),
    )


def make_images() -> Any:
    """Frames of 84 x 84 that hold nothing: only their size matters here."""
    import gymnasium as gym
    import numpy as np

    class Frames(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
        action_space = gym.spaces.Discrete(6)

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            super().reset(seed=seed, options=options)
            self.steps = 0
            return np.zeros((84, 84, 4), np.uint8), {}

        def step(self, action: Any) -> Any:
            del action
            self.steps += 1
            return np.full((84, 84, 4), self.steps % 255, np.uint8), 0.0, self.steps >= 200, False, {}

    return Frames()


def measure(name: str, iterations: int, saves: int = SAVES) -> dict[str, float]:
    """The figures of one work, as seconds, bytes and shares."""
    from inchworm import PPOTrainer
    from inchworm.train.profile import Profile
    from inchworm_side import config_of

    if name == "images":
        config, env = image_config(), make_images
    else:
        config, env = config_of(SPEED[name], 0, 1, "numpy"), SPEED[name].env_id
    steps = iterations * config.env.num_envs * config.ppo.rollout_steps
    config = config.replace(run=dataclasses.replace(config.run, checkpoint_interval=0))
    profile = Profile()
    with tempfile.TemporaryDirectory() as directory, PPOTrainer(config.policy, env, config, run_dir=Path(directory)) as trainer:
        trainer.train(steps)  # warm, and its save at the end is not profiled
        watch = _watching(trainer, profile, 2 * steps)
        path = trainer.save_checkpoint()
        size = sum(file.stat().st_size for file in path.iterdir())
        rows: Any = trainer.trackers[0]
        state = _median(trainer.full_state, saves)
        save = _median(trainer.save_checkpoint, saves)
        synced = _median(lambda: (rows.log({"loss": 1.0, "timing/x": 1.0}, 1), rows.sync()), saves)
    return {"bytes": size, "state": state, "save": save, "rows": synced, "watch": watch, "share": watch + save / MINUTE}


def _watching(trainer: Any, profile: Any, steps: int) -> float:
    """The share of everything about checkpoints but the save itself, which is taken out of the profile."""
    saving: list[float] = []
    save = trainer.saver.prepare

    def timed(taken: Any, directory: Any = None) -> Callable[[], Path]:
        began = time.perf_counter()
        job = save(taken, directory)
        saving.append(time.perf_counter() - began)

        def run() -> Path:
            began = time.perf_counter()
            path: Path = job()
            saving.append(time.perf_counter() - began)
            return path

        return run

    trainer.saver.prepare = timed
    trainer.train(steps, profile=profile)
    del trainer.saver.prepare
    seconds = {section: spent for section, spent, _, _ in profile.rows()}
    return max(0.0, seconds.get("checkpoints", 0.0) - sum(saving)) / sum(seconds.values())


def _median(call: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    """Measure each work and print a row for it."""
    print(f"{'work':<8}{'MB':>8}{'state ms':>10}{'save ms':>10}{'rows ms':>10}{'watch':>9}{'share':>9}")
    for name, iterations in ITERATIONS.items():
        row = measure(name, iterations)
        print(
            f"{name:<8}{row['bytes'] / 1e6:>8.2f}{1e3 * row['state']:>10.2f}{1e3 * row['save']:>10.2f}{1e3 * row['rows']:>10.2f}"
            f"{row['watch']:>9.2%}{row['share']:>9.2%}"
        )


if __name__ == "__main__":
    main()
