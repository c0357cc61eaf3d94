"""What collecting while learn runs gains on one machine: whole trainings in turns and asynchronous, where both halves take equal time.

python benchmarks/async_collection.py [--seeds 5] [--timesteps 60000]

The environment's step is made as long as learn takes for it, measured first. Both sides train the same number of steps with the same
settings and seeds; time is from the first iteration to the last, and the policies are evaluated on the same episodes.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import results
from figures import Section, Target, median_range, table
from inchworm import CollectConfig, EnvConfig, EvalConfig, PPOConfig, PPOTrainer, RunConfig, TrainingConfig
from inchworm.core.protocols import BaseCallback
from inchworm.train.loop import TrainingState
from seeds import half_interval
from slow_worlds import cartpole

COPIES, STEPS, EPISODES = 8, 128, 50


class Clock(BaseCallback):
    """Seconds from the end of the first iteration to the end of the last."""

    def on_iteration(self, state: TrainingState, metrics: Any) -> None:
        """Look at the clock."""
        del metrics
        if state.iteration == 1:
            self.began = time.perf_counter()
        self.seconds, self.iterations = time.perf_counter() - self.began, state.iteration - 1


def settings(engine: str, seed: int, timesteps: int) -> TrainingConfig:
    """One side's config."""
    return TrainingConfig(
        env=EnvConfig(num_envs=COPIES, num_workers=0),
        ppo=PPOConfig(rollout_steps=STEPS, num_minibatches=4, learning_rate=1e-3, update_epochs=10),
        collect=CollectConfig(engine=engine),
        evaluation=EvalConfig(interval=0, final_episodes=0),
        run=RunConfig(seed=seed, total_timesteps=timesteps, backend="numpy"),
    )


def train(engine: str, seed: int, timesteps: int, seconds: float) -> dict[str, float]:
    """Train one side; milliseconds per iteration and of its halves, the return of the policy, and the collector's process."""
    clock = Clock()
    with PPOTrainer(
        "mlp", partial(cartpole, seconds), settings(engine, seed, timesteps), eval_env="CartPole-v1", callbacks=[clock]
    ) as made:
        history = made.train()
        found = {
            "ms": 1e3 * clock.seconds / clock.iterations,
            "collect": 1e3 * statistics.median(history["timing/collect_seconds"]),
            "learn": 1e3 * statistics.median(history["timing/learn_seconds"]),
            "staleness": max(history["staleness"]),
            "return": made.evaluate(EPISODES).mean_return,
        }
        if engine == "async":
            collector: Any = made.collector
            process = Path("/proc") / re.findall(r"\d+", collector.processes[0])[0]
            found["megabytes"] = float((process / "status").read_text().partition("VmRSS:")[2].split()[0]) / 1e3
            found["frameworks"] = float(bool(re.search("libtorch|jaxlib", (process / "maps").read_text())))
    return found


def measure(seeds: int, timesteps: int) -> dict[str, Any]:
    """Find the step time, then train every seed on both sides, in turns."""
    bare = train("local", 0, min(timesteps, 16 * COPIES * STEPS), 0.0)
    seconds = max(0.0, bare["learn"] - bare["collect"]) / 1e3 / (COPIES * STEPS)
    print(
        f"learn {bare['learn']:.1f} ms, collect {bare['collect']:.1f} ms without waiting: a step takes {1e6 * seconds:.0f} µs more",
        flush=True,
    )
    runs: dict[str, list[dict[str, float]]] = {"local": [], "async": []}
    for seed in range(seeds):
        for engine in ("local", "async") if seed % 2 == 0 else ("async", "local"):
            runs[engine].append(train(engine, seed, timesteps, seconds))
            print(seed, engine, {name: round(value, 1) for name, value in runs[engine][-1].items()}, flush=True)
    return {"seeds": seeds, "timesteps": timesteps, "step_seconds": seconds, "load": os.getloadavg()[0], "runs": runs}


def section(data: dict[str, Any]) -> Section:
    """The page's section."""
    runs = data["runs"]
    gains = [one["ms"] / other["ms"] for one, other in zip(runs["local"], runs["async"])]
    differences = [other["return"] - one["return"] for one, other in zip(runs["local"], runs["async"])]
    half = half_interval(differences) if len(differences) > 1 else math.nan
    rows = [
        [name, *(median_range([run[key] for run in runs[engine]], ".1f") for key in ("ms", "collect", "learn", "return"))]
        for name, engine in (("in turns (local)", "local"), ("asynchronous (async)", "async"))
    ]
    memory = max(run["megabytes"] for run in runs["async"])
    lines = [
        f"CartPole-v1 whose step takes {1e6 * data['step_seconds']:.0f} µs more, so that collecting takes as long as learning;",
        f"{COPIES} copies, {STEPS} steps,",
        f"{data['timesteps']:,} env steps, {data['seeds']} seeds on both sides in turns, load of {data['load']:.1f} on the machine",
        "at the end. One collector, and one",
        "thread on each side; median and range. In the asynchronous rows, collect is what the learner still waits for.",
        "",
        *table(["side", "ms per iteration", "collect, ms", "learn, ms", f"return, {EPISODES} episodes"], rows),
        "",
        f"The difference of the returns, seed by seed, is {statistics.mean(differences):+.1f} ± {half:.1f} (95 % interval).",
        "The collector's process takes up to",
        f"{memory:.0f} MB and has {'a' if any(run['frameworks'] for run in runs['async']) else 'no'} learning framework loaded.",
        "",
    ]
    same = float(abs(statistics.mean(differences)) <= half)
    targets = [
        Target("asynchronous collection, as fast as in turns", statistics.median(gains), 1.4),
        Target("no difference in return outside of the interval (1: none)", same, 1.0),
        Target("a collector's process", memory, 150.0, at_least=False, unit="MB"),
    ]
    return Section("Asynchronous collection on one machine", lines, targets)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--timesteps", type=int, default=60_000)
    parser.add_argument("--dry", action="store_true", help="keep nothing")
    options = parser.parse_args()
    data = measure(options.seeds, options.timesteps)
    for line in section(data).lines:
        print(line)
    if not options.dry:
        results.save("async_collection", data)


if __name__ == "__main__":
    main()
