"""Symbolic discovery: how many of five small laws of physics PPO finds from 40 points each, and random search with as many steps.

    python benchmarks/symbolic.py                 # kept
    python benchmarks/symbolic.py --laws lenses   # a quick look; nothing is kept

A law is found when an expression is right up to a constant factor (error below 1e-6 standard deviations). A training ends there, or after
its budget of env steps. All run one after another in one process with one thread; the time is that of all five.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jobs
import results
from figures import Section, Target, table

CHOSEN = ("gravitation", "pendulum", "lenses", "lorentz_factor", "projectile")
STEPS, ENOUGH, MINUTES = 400_000, 3, 5.0


def discover(law: str, steps: int = STEPS, seed: int = 0, learning_rate: float = 1e-3) -> dict[str, Any]:
    """One search: the steps and seconds it took, and the best expression."""
    from inchworm import EnvConfig, PolicyConfig, PPOConfig, PPOTrainer

    env = EnvConfig(id="Symbolic-v0", num_envs=32, num_workers=0, kwargs={"law": law})
    config = PPOConfig(learning_rate=learning_rate, rollout_steps=64, num_minibatches=4, ent_coef=0.03, gamma=1.0)

    def unfinished(_: Any, metrics: Any) -> bool:
        return bool(metrics.get("episode/is_success", 0.0) == 0.0)

    start = time.perf_counter()
    with PPOTrainer(PolicyConfig(hidden_sizes=(64,)), env, config, seed=seed, device="cpu") as trainer:
        trainer.train(total_timesteps=steps, callback=unfinished)
        best = max(trainer.env.call("best_expression", at_reset=False))  # type: ignore[attr-defined]
        used = trainer.total_timesteps
    return {"law": law, "steps": used, "seconds": time.perf_counter() - start, "score": best[0], "expression": best[1]}


def search_all(laws: Sequence[str], steps: int, learning_rate: float) -> list[dict[str, Any]]:
    """All laws, one after another."""
    return [discover(law, steps, learning_rate=learning_rate) for law in laws]


def is_found(run: dict[str, Any]) -> bool:
    """Whether a law is right: its error e, of which the score is 1 / (1 + e), is below 1e-6."""
    return bool(run["score"] > 1 / (1 + 1e-6))


def section(data: dict[str, Any]) -> Section:
    """The page's section."""
    rows = [
        [
            run["law"], "yes" if is_found(run) else "no", f"`{run['expression']}`", f"{run['steps']:,}", f"{run['seconds']:.0f}",
            f"{other['steps']:,}" if is_found(other) else "not found",
        ]
        for run, other in zip(data["ppo"], data["random"])
    ]  # fmt: skip
    lines = [
        f"40 points of each law, expressions of at most 11 tokens, at most {STEPS:,} env steps for each law. Random search is the same",
        "with a learning rate of 0.",
        "",
        *table(["law", "found", "best expression, up to a factor", "env steps", "seconds", "env steps of random search"], rows),
    ]
    found, seconds = sum(map(is_found, data["ppo"])), sum(run["seconds"] for run in data["ppo"])
    targets = [
        Target(f"laws found from data, of {len(rows)}", found, ENOUGH, unit=""),
        Target("minutes for all laws, one thread", seconds / 60, MINUTES, at_least=False, unit="minutes"),
    ]
    return Section("Laws found from data", lines, targets)


def main() -> None:
    """Search all, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--laws", nargs="+", default=list(CHOSEN))
    options = parser.parse_args()
    given = {"laws": options.laws, "steps": STEPS}
    found = {name: jobs.run("symbolic:search_all", {**given, "learning_rate": rate}) for name, rate in (("ppo", 1e-3), ("random", 0.0))}
    shown = section(found)
    print("\n".join([*shown.lines, *(target.row() for target in shown.targets)]))
    if options.laws == list(CHOSEN):
        results.save("symbolic", found)


if __name__ == "__main__":
    main()
