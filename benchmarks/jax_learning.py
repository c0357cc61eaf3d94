"""Does the JAX backend learn as the NumPy backend does? CartPole, Acrobot and Pendulum on host environments, ten seeds or more.

    python benchmarks/jax_learning.py                                      # everything that is not there yet, then the table
    python benchmarks/jax_learning.py --tasks Pendulum-v1 --seeds 2 --scale 0.1 --out /tmp/quick.jsonl
    python benchmarks/jax_learning.py --report                             # the table alone

Both step the same environments and have the same random numbers, so that only rounding makes them differ, seed by seed; it grows to a
different run within some iterations. (The memory corridor with a GRU on JAX is in `corridor.py`.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from curves import COMPARED
from figures import Target, table
from seeds import half_interval
from variants import Case, Run, compare, kept_runs, paired_report
from works import LEARNING, SPEED, scaled

WORKS = {
    work.env_id: work for work in (dataclasses.replace(SPEED["W3"], total_timesteps=102_400), LEARNING["acrobot"], LEARNING["pendulum"])
}
SEEDS = {"CartPole-v1": 100, "Acrobot-v1": 10, "Pendulum-v1": 30}
"""With ten seeds of CartPole-v1 the interval of the difference was 15 % to either side."""
NUMPY, JAX = "numpy", "jax"
FLOOR = -5.0
"""Per cent of the NumPy backend's area under the curve, which the interval of the difference must lie above."""


def train(env_id: str, backend: str, seed: int, scale: float) -> dict[str, Any]:
    """One training with its curve, and the mean returns of greedy and of sampled episodes."""
    from inchworm_side import config_of, train_and_score

    work = scaled(WORKS[env_id], scale)
    config = config_of(work, seed, backend=backend)  # type: ignore[arg-type]
    return train_and_score(config.replace(env=config.env.replace(jax_native=False)), work.eval_episodes)


CASES = [
    Case(task, backend, NUMPY, "jax_learning:train", {"env_id": task, "backend": backend}, seeds=SEEDS[task])
    for task in WORKS
    for backend in (NUMPY, JAX)
]


def relative_differences(runs: Sequence[Run], task: str, name: str = COMPARED[0]) -> list[float]:
    """Per cent of the NumPy backend's mean by which JAX is above it, seed by seed."""
    of = {backend: {run["seed"]: run[name] for run in runs if (run["task"], run["variant"]) == (task, backend)} for backend in (NUMPY, JAX)}
    both = sorted(of[NUMPY].keys() & of[JAX].keys())
    if not both:
        return []
    size = abs(fmean(of[NUMPY][seed] for seed in both))
    return [100 * (of[JAX][seed] - of[NUMPY][seed]) / size for seed in both]


def targets(runs: Sequence[Run]) -> list[Target]:
    """The low end of the 95 % interval of the difference in area, for each task."""
    found = []
    for task in WORKS:
        paired = relative_differences(runs, task)
        low = fmean(paired) - half_interval(paired) if len(paired) > 1 else None
        found.append(Target(f"{task}: JAX's area under the curve over NumPy's, low end of the 95 % interval", low, FLOOR, unit="%"))
    return found


def report(cases: Sequence[Case], runs: Sequence[Run]) -> list[str]:
    """The figures and differences of every case, and the difference in area in per cent against its target."""
    lines = [*paired_report(cases, runs), "", "| what | measured | target | |", "|---|---|---|---|"]
    lines += [*(target.row() for target in targets(runs)), ""]
    differences = {task: relative_differences(runs, task) for task in WORKS}
    rows = [[task, f"{fmean(own):+.2f} ± {half_interval(own):.2f}"] for task, own in differences.items() if len(own) > 1]
    return [*lines, *table(["task", "JAX's area above NumPy's, %"], rows)]


def section() -> list[str]:
    """The part of docs/results.md, from the runs that are kept."""
    if not (runs := kept_runs("jax_learning")):
        return []
    return [
        "## The JAX backend and the NumPy backend",
        "",
        "The same works on host environments with the same seeds; the backends differ by rounding, which grows to a different run.",
        "",
        *report(CASES, runs),
        "",
    ]


if __name__ == "__main__":
    compare("jax_learning", __doc__, CASES, seeds=max(SEEDS.values()), report=report)
