"""Where the time goes on each work, by inchworm's own profile (`--profile`): what a missed target is made of.

python benchmarks/profiles.py
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jobs
import results
from figures import Section, table
from works import SPEED

ITERATIONS = {"W1": 60, "W2": 5, "W3": 60, "W4": 4, "W5": 12}
BACKENDS = ("numpy", "torch")


def profiled(name: str, backend: Any) -> dict[str, float]:
    """Each section's share of a short run after as long a warm-up, one thread, eager."""
    from inchworm import PPOTrainer
    from inchworm.train.profile import Profile
    from inchworm_side import config_of

    work = SPEED[name]
    steps = ITERATIONS[name] * work.rollout_steps * work.num_envs
    config = config_of(dataclasses.replace(work, total_timesteps=steps), 0, 1, backend)
    profile = Profile()
    with PPOTrainer("mlp", work.env_id, config) as trainer:
        trainer.train()
        trainer.train(total_timesteps=2 * steps, profile=profile)
    return {section: share for section, _, share, _ in profile.rows()}


def section(data: dict[str, dict[str, dict[str, float]]]) -> Section:
    """The page's section: a table for each backend."""
    lines = [
        "Shares of a run's time by its own profile (`inchworm train … --profile`), eager, one thread. *env* is the environment's own",
        "step and what a vector env adds; *write* is the rest of collecting; *other* is the loop, checks and metrics.",
        "",
    ]
    for backend, works in data.items():
        names = list(dict.fromkeys(name for shares in works.values() for name in shares))
        rows = ([name, *(f"{shares.get(name, 0.0):.1%}" for shares in works.values())] for name in names)
        lines += table([backend, *works], rows)
    return Section("Where the time goes", lines, [])


def main() -> None:
    """Measure, keep."""
    results.save("profiles", {b: {name: jobs.run("profiles:profiled", {"name": name, "backend": b}) for name in SPEED} for b in BACKENDS})


if __name__ == "__main__":
    main()
