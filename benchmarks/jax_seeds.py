"""Many seeds of one JAX-native training: all in one program (`vmap`), against processes, and against one after another, in one run.

    python benchmarks/jax_seeds.py                                    # 16 seeds of CartPole-v1, short and long runs
    python benchmarks/jax_seeds.py --seeds 4 --steps 20000            # a quick look

Each way is a process of its own with an empty cache of compiled programs, so that imports and compiling count. `computing` is the same
iterations in one process after compiling: the ratio of one program to single runs one after another.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

WAYS: dict[str, dict[str, Any]] = {
    "together": {"together": True},
    "processes": {"together": False},
    "one after another": {"together": False, "jobs": 1},
}


def config_of(num_envs: int, steps: int) -> Any:
    """The training of one seed."""
    from inchworm.config.sections import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, RunConfig, TrainingConfig

    return TrainingConfig(
        env=EnvConfig(id="CartPole-v1", num_envs=num_envs),
        policy=PolicyConfig(hidden_sizes=(64, 64)),
        ppo=PPOConfig(rollout_steps=64, minibatch_size=num_envs * 16, update_epochs=10, learning_rate=1e-3),
        evaluation=EvalConfig(interval=0, final_episodes=0),
        run=RunConfig(backend="jax", total_timesteps=steps, checkpoint_interval=0),
    )


def train(way: str, seeds: int, steps: int, num_envs: int) -> None:
    """One way to train all seeds, in this process: prints its seconds."""
    from inchworm import train_seeds

    config = config_of(num_envs, steps)
    with tempfile.TemporaryDirectory() as directory:
        train_seeds(config.policy, config.env, config, seeds=seeds, run_dir=Path(directory) / "many", **WAYS[way])


def computing(seeds: int, num_envs: int, iterations: int = 16) -> None:
    """The processor time of one program over that of single runs one after another, without compiling."""
    from inchworm import PPOTrainer
    from inchworm.backends.jax.fused import FusedTraining

    config = config_of(num_envs, 10**9)
    trainers = [PPOTrainer("mlp", config.env, config, seed=seed) for seed in range(seeds)]
    loops = [FusedTraining(trainer.collector, trainer.learner, config) for trainer in trainers]  # type: ignore[arg-type]
    seconds = dict[str, list[float]](single=[], together=[])
    for turn in range(4):  # the first compiles
        for name, groups in (("single", [[loop] for loop in loops]), ("together", [loops])):
            began = time.process_time()
            for group in groups:
                for loop in group:
                    loop._count = iterations
                FusedTraining.together(group, iterations)
            seconds[name] += [time.process_time() - began] if turn else []
    single, together = (min(each) for each in seconds.values())
    print(f"{num_envs} envs, {seeds} seeds, {iterations} iterations: {single:.2f} s one after another, {together:.2f} s together")
    print(f"one program is {single / together:.2f} times as fast")


def measure(way: str, arguments: list[str]) -> tuple[float, float]:
    """Seconds on the clock and of the processor, of a process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as cache:
        began = time.perf_counter()
        subprocess.run([sys.executable, __file__, "--way", way, *arguments], env={**os.environ, "INCHWORM_JAX_CACHE": cache}, check=True)
        seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure all ways in turns, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--steps", type=int, nargs="+", default=[50_000, 500_000])
    parser.add_argument("--way", choices=[*WAYS, "computing"])
    options = parser.parse_args()
    if options.way == "computing":
        computing(options.seeds, options.envs)
    elif options.way is not None:
        warnings.simplefilter("ignore")
        train(options.way, options.seeds, options.steps[0], options.envs)
    else:
        shared = ["--seeds", str(options.seeds), "--envs", str(options.envs)]
        for steps in options.steps:
            for way in WAYS:
                seconds, cpu = measure(way, [*shared, "--steps", str(steps)])
                print(f"{steps:,} steps, {options.seeds} seeds, {way}: {seconds:.1f} s, processor {cpu:.1f} s", flush=True)
        subprocess.run([sys.executable, __file__, "--way", "computing", *shared], check=True)


if __name__ == "__main__":
    main()
