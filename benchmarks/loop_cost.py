"""What it costs that `train` is put together from parts: its time against a bare loop over the same parts, in turns.

python benchmarks/loop_cost.py [--repeats 15] [--steps 100000]

Both sides collect and learn with the same seeds, and end with the same weights, bit for bit; the first repeat checks it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import closing
from typing import Any

import numpy as np

import results
from figures import Section, Target, table
from inchworm import EvalConfig, PPOTrainer, TrainingConfig
from inchworm.backends.registry import learning_threads
from inchworm.config.presets import PRESETS

LIMIT = 1.02
"""What `train` may take, relative to the bare loop."""


def config_of(backend: str, steps: int) -> TrainingConfig:
    """The preset of CartPole-v1 without evaluations, its environments stepped in this process."""
    preset = PRESETS["CartPole-v1"].config
    return preset.replace(
        env=preset.env.replace(num_workers=0, jax_native=False),
        run=preset.run.replace(total_timesteps=steps, backend=backend, threads=1),
        evaluation=EvalConfig(interval=0, final_episodes=0),
    )


def trainer_of(config: TrainingConfig) -> PPOTrainer:
    """The parts, made before the clock starts."""
    trainer = PPOTrainer(config.policy, config.env, config)
    trainer.learner.total_timesteps = config.run.total_timesteps
    return trainer


def train(config: TrainingConfig) -> tuple[dict[str, float], np.ndarray]:
    """The loop of `PPOTrainer.train`."""
    with closing(trainer_of(config)) as trainer:
        began, busy = time.perf_counter(), time.process_time()
        trainer.train()
        return _figures(trainer, began, busy)


def bare_loop(config: TrainingConfig) -> tuple[dict[str, float], np.ndarray]:
    """Collect, update, and hand over the weights, until as many steps are taken."""
    with closing(trainer_of(config)) as trainer, learning_threads(config.run.threads, config.run.backend):  # as many as `train` uses
        collector, learner, ppo = trainer.collector, trainer.learner, config.ppo
        began, busy = time.perf_counter(), time.process_time()
        while collector.env_steps < config.run.total_timesteps:
            rollout = collector.collect(ppo.warm_up_steps if learner.warming_up else ppo.rollout_steps)
            learner.env_steps = collector.env_steps - rollout.num_valid
            learner.update(rollout)
        return _figures(trainer, began, busy)


def _figures(trainer: PPOTrainer, began: float, busy: float) -> tuple[dict[str, float], np.ndarray]:
    figures = {"seconds": time.perf_counter() - began, "busy": time.process_time() - busy, "steps": float(trainer.total_timesteps)}
    weights = trainer.policy.get_weights()
    return figures, np.concatenate([weights[name].reshape(-1) for name in sorted(weights) if "." in name])


def measure(repeats: int, steps: int, backends: tuple[str, ...] = ("numpy", "torch")) -> dict[str, Any]:
    """Every repeat of both sides, one after the other, in alternating order."""
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    for backend in backends:
        config = config_of(backend, steps)
        runs[backend] = {"train": [], "bare loop": []}
        for repeat in range(repeats + 1):
            sides = [("train", train), ("bare loop", bare_loop)]
            found = {name: side(config) for name, side in (sides if repeat % 2 == 0 else sides[::-1])}
            (first, own), (second, other) = found["train"], found["bare loop"]
            if first["steps"] != second["steps"] or not np.array_equal(own, other):
                raise AssertionError(f"{backend}: the two loops did not do the same work")
            if repeat:  # the first is a warm-up
                runs[backend]["train"].append(first)
                runs[backend]["bare loop"].append(second)
    return {"steps": steps, "repeats": repeats, "load": os.getloadavg()[0], "runs": runs}


def section(data: dict[str, Any]) -> Section:
    """The page's section."""
    lines = [
        "`train` against a loop that calls `collect` and `update` of the same parts and does nothing else: CartPole-v1,",
        f"{data['steps']:,} steps, {data['repeats']} repeats in turns, with a load of {data['load']:.1f} on the machine. Both end with the",
        "same weights, bit for bit. Time of the process, ratio within each repeat: median and quartiles.",
        "",
    ]
    rows, targets = [], []
    for backend, sides in data["runs"].items():
        for kind, name in (("busy", "processor time"), ("seconds", "wall time")):
            ratios = [own[kind] / bare[kind] for own, bare in zip(sides["train"], sides["bare loop"], strict=True)]
            middle = statistics.median(ratios)
            low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (middle, middle, middle)
            per_step = 1e6 * statistics.median(bare[kind] / bare["steps"] for bare in sides["bare loop"])
            rows.append([backend, name, f"{middle:.3f} ({low:.3f} to {high:.3f})", f"{per_step:.2f} µs"])
            if kind == "busy":
                targets.append(Target(f"{backend}: `train`, of a bare loop over the same parts", middle, LIMIT, at_least=False))
    lines += table(["backend", "time", "train / bare loop", "bare loop, per env step"], rows)
    return Section("The cost of separate parts", lines, targets)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    data = measure(options.repeats, options.steps)
    print("\n".join(section(data).lines))
    if not options.no_save:
        results.save("loop_cost", data)


if __name__ == "__main__":
    main()
