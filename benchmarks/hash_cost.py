"""What the hashes of `inchworm diff` cost: their share of the processor time of a training, on each work.

python benchmarks/hash_cost.py          (a minute; both times are of the same run, so a busy machine matters little)

The calls that hash and write a row are timed inside of a run that writes its files, as every run does.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from boundary_cost import WORKS, BoundaryWork
from inchworm import PPOTrainer
from inchworm.config.sections import EnvConfig, PolicyConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.train.stages import StageCallback

MLP, SHORT = PolicyConfig(), PPOConfig(rollout_steps=128, num_minibatches=4)
MORE = (
    BoundaryWork("CartPole, 1 lane, NumPy", "CartPole-v1", "numpy", MLP, PPOConfig(rollout_steps=2048, minibatch_size=64), 1, 3),
    BoundaryWork("CartPole, 256 lanes, NumPy", "CartPole-v1", "numpy", MLP, SHORT.replace(rollout_steps=32), 256, 12),
    BoundaryWork("CartPole, 8 lanes, torch", "CartPole-v1", "torch", MLP, SHORT, 8, 12),
    BoundaryWork("LSTM, CartPole, 8 lanes, torch", "CartPole-v1", "torch", PolicyConfig(kind="lstm"), SHORT, 8, 3),
)


@dataclasses.dataclass
class Clock:
    """Processor seconds of this process spent in the timed calls, and their number."""

    seconds: float = 0.0
    calls: int = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time counted."""

        def watched(*arguments: Any) -> Any:
            began = time.process_time()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.process_time() - began
                self.calls += 1

        return watched


def measure(work: BoundaryWork) -> tuple[float, float, int]:
    """Seconds of hashing and of the whole training, both of processor time, and the bytes that were written per env step."""
    config = TrainingConfig(
        env=EnvConfig(num_envs=work.num_envs, num_workers=0),
        policy=work.policy,
        ppo=work.ppo,
        run=RunConfig(backend=work.backend, device="cpu", max_iterations=3, total_timesteps=10**9),  # type: ignore[arg-type]
    ).replace(evaluation=TrainingConfig().evaluation.replace(interval=0, final_episodes=0))
    env: Any = config.env.replace(id=work.env) if isinstance(work.env, str) else work.env
    clock, names = Clock(), ("on_rollout", "on_stage", "on_iteration")
    before = {name: getattr(StageCallback, name) for name in names}
    with tempfile.TemporaryDirectory() as directory, PPOTrainer(work.policy, env, config, run_dir=Path(directory) / "run") as trainer:
        trainer.train()  # first times are slow ones
        trainer.config = config.replace(run=config.run.replace(max_iterations=3 + 5 * work.iterations))
        try:
            for name, method in before.items():
                setattr(StageCallback, name, clock.timed(method))
            steps, began = trainer.total_timesteps, time.process_time()
            trainer.train()
            seconds = time.process_time() - began
        finally:
            for name, method in before.items():
                setattr(StageCallback, name, method)
        size = (Path(directory) / "run" / "hashes.jsonl").stat().st_size
        return clock.seconds, seconds, round(size / trainer.total_timesteps, 2) if steps else 0


def main() -> None:
    """Print a row for each work."""
    table = Table("work", "hashing, s", "training, s", "share", "bytes per env step")
    for work in (*WORKS, *MORE):
        spent, seconds, size = measure(work)
        table.add_row(work.name, f"{spent:.4f}", f"{seconds:.2f}", f"{spent / seconds:.2%}", f"{size}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
