"""Does cost stay what it was? Time and memory of a long run, GAE's share of an iteration, and the memory of W5 compared with a peer.

    python benchmarks/steady.py
    python benchmarks/steady.py --iterations 60 --backend torch     # a quick look; nothing is kept

The long run has a learning rate of 0, so that the policy, and with it the data it sees, stays the same.
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
from figures import Section, Target, known_median, table
from side import PEER, missing, smallest, train_speed
from works import SPEED

SHAPES = {"T = 2048, B = 1": (2048, 1), "T = 128, B = 4096": (128, 4096)}
ITERATIONS = 1000


def long_run(iterations: int, backend: str) -> dict[str, list[float]]:
    """Seconds and resident bytes of each iteration of W3 at a learning rate of 0."""
    from inchworm import PPOTrainer, TrainingState
    from inchworm_side import config_of

    base = SPEED["W3"]
    work = dataclasses.replace(base, learning_rate=0.0, total_timesteps=iterations * base.batch)
    held: list[float] = []

    def note(state: TrainingState, metrics: object) -> None:
        del state, metrics
        held.append(memory.resident())

    with PPOTrainer("mlp", work.env_id, config_of(work, 0, backend=backend)) as trainer:  # type: ignore[arg-type]
        history = trainer.train(callback=note)
    return {"seconds": history["timing/seconds"], "bytes": held}


def gae(steps: int, lanes: int, backend: str) -> dict[str, float]:
    """Least seconds of the recursion, and median seconds of an iteration around it, W2's for one lane and W5's for many."""
    import numpy as np

    from inchworm import PPOTrainer
    from inchworm_side import config_of

    base = SPEED["W2"] if lanes == 1 else SPEED["W5"]
    work = dataclasses.replace(base, num_envs=lanes, rollout_steps=steps, total_timesteps=3 * steps * lanes)
    with PPOTrainer("mlp", work.env_id, config_of(work, 0, backend=backend)) as trainer:  # type: ignore[arg-type]
        iteration = median(trainer.train()["timing/seconds"][1:])
    rng = np.random.default_rng(0)
    rewards, values, following = (rng.standard_normal((steps, lanes), np.float32) for _ in range(3))  # [T, B] each
    terminated, truncated = rng.random((2, steps, lanes)) < 0.02  # [T, B] each
    times = []
    for _ in range(7):
        began = time.perf_counter()
        _compute(backend, rewards, values, following, terminated, truncated)
        times.append(time.perf_counter() - began)
    return {"gae_seconds": min(times), "iteration_seconds": iteration}


def _compute(backend: str, *arrays: Any) -> None:
    if backend == "numpy":
        from inchworm.backends.numpy.gae import compute_gae

        compute_gae(*arrays, 0.99, 0.95)
        return
    import torch

    from inchworm.backends.torch.gae import compute_gae as compute_in_torch

    compute_in_torch(*(torch.from_numpy(array) for array in arrays), 0.99, 0.95)


def memory_of_w5(sides: list[str], repeats: int) -> dict[str, dict[str, float]]:
    """Base and peak of a short W5 on each side, and the bytes of its rollout."""
    scale = 2 * smallest("W5")
    found: dict[str, dict[str, float]] = {}
    for side in sides:
        runs = [train_speed(side, "W5", seed=repeat, scale=scale, threads=1) for repeat in range(repeats)]
        found[side] = {name: known_median(run[name] for run in runs) or 0.0 for name in ("base_bytes", "peak_bytes")}
    return found


def tenths(values: list[float]) -> tuple[float, float]:
    """Medians of the second and of the last tenth."""
    size = len(values) // 10
    return median(values[size : 2 * size]), median(values[-size:])


def typical(runs: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The run whose growth is the median one: whatever else the machine does for a while falls on one tenth only."""

    def growth(run: dict[str, list[float]]) -> float:
        early, late = tenths(run["seconds"])
        return late / early

    return sorted(runs, key=growth)[len(runs) // 2]


def targets(data: dict[str, Any]) -> list[Target]:
    """Linear in steps, flat in memory, cheap GAE, small peak."""
    early, late = tenths(data["long"]["seconds"])
    held_early, held_late = tenths(data["long"]["bytes"])
    found = [
        Target("median iteration of a long run's last tenth over its second tenth", late / early, 1.1, at_least=False),
        Target("memory of a long run in its last tenth over its second tenth", held_late / held_early, 1.02, at_least=False),
    ]
    for name, times in data["gae"].items():
        share = 100 * times["gae_seconds"] / times["iteration_seconds"]
        found.append(Target(f"GAE's share of an iteration, {name}", share, 1.0, at_least=False, unit="%"))
    for side, held in data["memory"].items():
        if side != PEER:
            allowed = held["base_bytes"] + data["rollout_bytes"]
            found.append(Target(f"peak memory of W5, {side}, over base + rollout", held["peak_bytes"] / allowed, 1.5, at_least=False))
            if PEER in data["memory"]:
                over = held["peak_bytes"] / data["memory"][PEER]["peak_bytes"]
                found.append(Target(f"peak memory of W5, {side}, over Stable-Baselines3's", over, 1.0, at_least=False))
    return found


def section(data: dict[str, Any]) -> Section:
    """The page's section."""
    (early, late), (held_early, held_late) = tenths(data["long"]["seconds"]), tenths(data["long"]["bytes"])
    gae_rows = ([name, f"{1e3 * one['gae_seconds']:.2f}", f"{1e3 * one['iteration_seconds']:,.0f}"] for name, one in data["gae"].items())
    memory_rows = ([side, *(f"{held[name] / 1e6:,.0f}" for name in ("base_bytes", "peak_bytes"))] for side, held in data["memory"].items())
    lines = [
        f"{len(data['long']['seconds']):,} iterations of W3 at a learning rate of 0 ({data['backend']} backend): a median iteration takes",
        f"{1e3 * early:.2f} ms in the second tenth and {1e3 * late:.2f} ms in the last,",
        f"and the process holds {held_early / 1e6:.1f} and {held_late / 1e6:.1f} MB (of several runs, the one with the median growth).",
        "",
        "GAE alone, and the iteration that it is part of, in milliseconds:",
        "",
        *table(["shape", "GAE", "iteration"], gae_rows),
        f"Memory of W5 in megabytes, where a rollout has {data['rollout_bytes'] / 1e6:.2f}:",
        "",
        *table(["side", "base", "peak"], memory_rows),
    ]
    return Section("Steady cost and memory", lines, targets(data))


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--repeats", type=int, default=3, help="of the long run, and of W5 for its memory")
    parser.add_argument("--backend", default="numpy", choices=("numpy", "torch"))
    options = parser.parse_args()
    backend = options.backend
    arguments = {"iterations": options.iterations, "backend": backend}
    ours = [f"inchworm-{backend}"] if backend == "torch" else ["inchworm-numpy", "inchworm-torch"]
    w5 = jobs.run("scaling:measure", {"num_envs": SPEED["W5"].num_envs, "backend": backend, "seconds": 0.0})
    data = {
        "backend": backend,
        "long": typical([jobs.run("steady:long_run", arguments) for _ in range(options.repeats)]),
        "gae": {name: jobs.run("steady:gae", {"steps": t, "lanes": b, "backend": backend}) for name, (t, b) in SHAPES.items()},
        "memory": memory_of_w5([*ours, *([] if missing(PEER) else [PEER])], options.repeats),
        "rollout_bytes": w5["rollout_bytes"],
    }
    for target in targets(data):
        print(target.row())
    if options.iterations >= ITERATIONS:
        results.save("steady", data)


if __name__ == "__main__":
    main()
