"""How long until CartPole-v1 is solved with JAX, compiling included? A greedy mean of 475 over 100 episodes, from the start of the process.

    python benchmarks/jax_solve.py --rejax-python ENVS/rejax/bin/python \\
        --purejaxrl ENVS/purejaxrl-src --purejaxrl-python ENVS/purejaxrl/bin/python         # 5 seeds; see jax_peers.py
    python benchmarks/jax_solve.py --seeds 1                                                # a quick look; nothing is kept

All have the hyper-parameters of `works.SOLVE` and are evaluated every 20 iterations on 100 environments at a time, except PureJaxRL, whose
training cannot be stopped on the way: it is given the number of steps that suffices, the least of 25,600 times a power of two, and
evaluated once. Every JAX side runs twice for each seed: with an empty cache of compiled programs, and with a filled one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import jobs
import results
from figures import Section, Target, table
from jax_measures import EPISODES, SOLVED
from jax_peers import OURS, PUREJAXRL, REJAX, JaxSide, add_options, sides
from works import SOLVE

INTERVAL = 20
PUREJAXRL_STEPS = 51_200
NUMPY = "inchworm-numpy"

Runs = dict[str, list[dict[str, Any]]]


def solve(seed: int, interval: int, backend: str = "jax") -> dict[str, Any]:
    """inchworm until its own check of convergence ends the run."""
    from inchworm import PPOTrainer
    from inchworm_side import config_of

    config = config_of(SOLVE, seed, backend=backend)  # type: ignore[arg-type]
    config = config.replace(
        evaluation=config.evaluation.replace(interval=interval, episodes=EPISODES, num_envs=EPISODES),
        convergence=config.convergence.replace(target=SOLVED, window=EPISODES),
    )
    with PPOTrainer("mlp", SOLVE.env_id, config) as trainer:
        history = trainer.train()
        seconds = jobs.since_start()
        solved = history.stop_reason == "converged"
        score = trainer.state.evaluations[-1]["mean_return"]
        return {"steps": trainer.total_timesteps if solved else None, "seconds": seconds, "evaluating": 0.0, "score": score}


def whole(runs: list[dict[str, Any]]) -> float:
    """Median seconds with evaluations; a seed that was not solved took longer than any."""
    return float(median(run["seconds"] + run["evaluating"] if run["steps"] is not None else float("inf") for run in runs))


def run(side: JaxSide, seed: int, threads: int, cache: Path) -> dict[str, Any]:
    """One run of a side."""
    arguments: dict[str, Any] = {"seed": seed} | ({"steps": PUREJAXRL_STEPS} if side.name == PUREJAXRL else {"interval": INTERVAL})
    return side.run("solve", arguments, threads, cache)


def measure(found: list[JaxSide], seeds: int, threads: list[int], directory: Path) -> dict[str, Any]:
    """All runs, seed by seed, in turns, each side with the thread setting that was the quicker one for the first seed."""
    counts = [count for count in threads if count <= len(os.sched_getaffinity(0))] or [1]
    chosen = {}
    for side in found:
        tried = {count: run(side, 0, count, directory / f"{side.name}-threads-{count}") for count in counts} if len(counts) > 1 else {}
        chosen[side.name] = min(tried, key=lambda count: whole([tried[count]])) if tried else counts[0]
    runs: Runs = {NUMPY: []}
    for seed in range(seeds):
        runs[NUMPY].append(jobs.run("jax_solve:solve", {"seed": seed, "interval": INTERVAL, "backend": "numpy"}))
        print(f"{NUMPY} seed {seed}: {runs[NUMPY][-1]}", flush=True)
        for side in found:
            for kind in ("empty cache", "filled cache"):
                result = run(side, seed, chosen[side.name], directory / f"{side.name}-{seed}")
                runs.setdefault(f"{side.name}, {kind}", []).append(result)
                print(f"{side.name}, {kind}, seed {seed}: {result}", flush=True)
    return {"threads": chosen, "runs": runs}


def targets(data: dict[str, Any]) -> list[Target]:
    """Below every peer with compiling, and near the NumPy backend with a filled cache."""
    runs: Runs = data["runs"]
    cold, warm = (runs.get(f"{OURS}, {kind}") for kind in ("empty cache", "filled cache"))
    if cold is None or warm is None:
        return []
    found = [
        Target(f"CartPole solved with JAX, empty cache: seconds over {peer}'s", _over(whole(cold), whole(theirs)), 1.0, at_least=False)
        for peer in (REJAX, PUREJAXRL)
        if (theirs := runs.get(f"{peer}, empty cache")) is not None
    ]
    return [
        *found,
        Target(
            "CartPole solved with JAX, filled cache: seconds over the NumPy backend's", _over(whole(warm), whole(runs[NUMPY])), 1.5, False
        ),
    ]


def _over(ours: float, theirs: float) -> float:
    return float("nan") if ours == float("inf") else ours / theirs


def section(data: dict[str, Any]) -> Section:
    """The page's section."""
    rows = []
    for name, runs in data["runs"].items():
        solved = sum(run["steps"] is not None for run in runs)
        steps = " ".join("–" if run["steps"] is None else f"{run['steps']:,}" for run in runs)
        count = data["threads"].get(name.partition(",")[0], 1)
        rows.append([name, str(count), f"{solved} of {len(runs)}", f"{whole(runs):.1f}", steps])
    lines = [
        f"CartPole-v1 until a greedy evaluation over {EPISODES} episodes has a mean of {SOLVED:.0f} or more, from the start of the",
        "process: imports, compiling, training, evaluations. The hyper-parameters are those of `works.SOLVE`, an evaluation every",
        f"{INTERVAL} iterations on {EPISODES} environments at a time. PureJaxRL cannot be stopped on the way: it trains for",
        f"{PUREJAXRL_STEPS:,} steps, the least of 25,600 times a power of two that suffices, and is evaluated once.",
        "",
        *table(["side", "threads", "solved", "seconds", "env steps, seed by seed"], rows),
    ]
    return Section("CartPole solved with JAX", lines, targets(data))


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread settings to choose from")
    add_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="inchworm-jax-solve-") as directory:
        data = measure(sides(options, "jax_solve"), options.seeds, options.threads, Path(directory))
    shown = section(data)
    print("\n".join([*shown.lines, *(target.row() for target in shown.targets)]))
    if options.seeds >= 5 and shown.targets:
        results.save("jax_solve", data)


if __name__ == "__main__":
    main()
