"""How does it scale with the number of environments? CartPole-v1 with W5's network and minibatches, 1 to 4096 copies.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --envs 1 64 --seconds 0.3 --backend torch      # a quick look; nothing is kept

Each number of copies is a separate process with one thread. Steps per second of collecting, of learning and of both; the bytes of a
rollout; the peak of the process's memory; and where it stops getting faster, with the shares that say why.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from statistics import median
from typing import Any

import jobs
import memory
import results
from figures import Section, table
from works import SPEED

ENVS = [1, 4, 16, 64, 256, 1024, 4096]
NEAR = 0.9
"""Saturated: at least this part of the highest speed."""


def measure(num_envs: int, backend: str, seconds: float) -> dict[str, Any]:
    """Median seconds of collecting and learning, over at least two iterations after one of warm-up."""
    from inchworm import PPOTrainer
    from inchworm_side import config_of

    work = SPEED["W5"]
    batch = num_envs * work.rollout_steps
    work = dataclasses.replace(work, num_envs=num_envs, minibatch_size=min(work.minibatch_size, batch), total_timesteps=10**9)
    collect, learn = [], []
    with PPOTrainer("mlp", work.env_id, config_of(work, 0, backend=backend)) as trainer:  # type: ignore[arg-type]
        trainer.learner  # noqa: B018 - made before memory is looked at
        base, began = memory.resident(), time.perf_counter()
        size = 0
        while len(learn) < 3 or time.perf_counter() - began < seconds:
            start = time.perf_counter()
            rollout = trainer.collect_rollouts()
            collected = time.perf_counter()
            trainer.learn(rollout)
            collect.append(collected - start)
            learn.append(time.perf_counter() - collected)
            size = size or rollout_bytes(rollout)
            del rollout
    times = {"collect_seconds": median(collect[1:]), "learn_seconds": median(learn[1:])}
    return {"envs": num_envs, "steps": batch, **times, "rollout_bytes": size, "base_bytes": base, "peak_bytes": memory.peak()}


def rollout_bytes(rollout: Any) -> int:
    """Bytes of all arrays of a rollout."""
    import numpy as np
    import optree

    leaves = optree.tree_leaves(rollout.to_dict())  # type: ignore[arg-type]
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, np.ndarray))


def saturation(rows: list[dict[str, Any]]) -> str:
    """One sentence: from how many copies on it gets no faster, and what takes the time there."""
    speeds = [whole_speed(row) for row in rows]
    index = next(i for i, value in enumerate(speeds) if value >= NEAR * max(speeds))
    row = rows[index]
    share = row["learn_seconds"] / (row["collect_seconds"] + row["learn_seconds"])
    before = rows[0]
    collected = [1e6 * one["collect_seconds"] / one["steps"] for one in (before, row)]
    learned = 1e6 * row["learn_seconds"] / row["steps"]
    if share >= 0.5:
        why = f"learning takes {share:.0%} of the time there, {learned:.1f} µs a step that more copies do not lessen"
    else:
        why = f"collecting takes {1 - share:.0%} of the time there, {collected[1]:.1f} µs a step that more copies hardly lessen"
    return (
        f"It saturates at {row['envs']} copies ({speeds[index]:,.0f} steps/s; the highest is {max(speeds):,.0f}): {why}. "
        f"Collecting costs {collected[0]:.1f} µs a step with {before['envs']} and {collected[1]:.1f} with {row['envs']}, "
        "because one call acts and steps for all."
    )


def whole_speed(row: dict[str, Any]) -> float:
    """Env steps per second of collecting and learning."""
    return float(row["steps"] / (row["collect_seconds"] + row["learn_seconds"]))


def section(data: dict[str, Any]) -> Section:
    """The page's section."""
    work, rows = SPEED["W5"], []
    for row in data["rows"]:
        parts = [row["steps"] / row["collect_seconds"], row["steps"] / row["learn_seconds"], whole_speed(row)]
        sizes = [f"{row['rollout_bytes']:,}", f"{row['peak_bytes'] / 1e6:,.0f}"]
        rows.append([f"{row['envs']:,}", *(f"{value:,.0f}" for value in parts), *sizes])
    lines = [
        f"CartPole-v1 with W5's network, {work.rollout_steps} steps a copy, minibatches of {work.minibatch_size:,} (or the rollout),",
        f"{work.update_epochs} epochs; {data['backend']} backend, one thread. Env steps per second of each part,",
        "bytes of a rollout, megabytes of the process at its peak:",
        "",
        *table(["envs", "collect", "learn", "whole", "rollout bytes", "peak MB"], rows),
        saturation(data["rows"]),
        "",
    ]
    return Section("Scaling", lines)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, nargs="+", default=ENVS)
    parser.add_argument("--seconds", type=float, default=3.0, help="least time for each")
    parser.add_argument("--backend", default="numpy", choices=("numpy", "torch"))
    options = parser.parse_args()
    rows = []
    for envs in options.envs:
        rows.append(jobs.run("scaling:measure", {"num_envs": envs, "backend": options.backend, "seconds": options.seconds}))
        print(f"{envs} envs: {whole_speed(rows[-1]):,.0f} steps/s")
    print(saturation(rows))
    if options.envs == ENVS and options.seconds >= 3.0:
        results.save("scaling", {"backend": options.backend, "rows": rows})


if __name__ == "__main__":
    main()
