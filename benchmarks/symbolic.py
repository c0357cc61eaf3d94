"""Symbolic discovery: how many of five small laws of physics PPO finds from 40 points each, and random search with as many steps.

    python benchmarks/symbolic.py                 # kept
    python benchmarks/symbolic.py --sides ppo     # one side, kept beside the other
    python benchmarks/symbolic.py --laws lenses   # a quick look; nothing is kept

A law is found when an expression is right up to a constant factor (error below 1e-6 standard deviations). A search ends there, or after
its budget of env steps. A policy soon prefers one form of expression, right or wrong, so a new one begins whenever some env steps have
found nothing. The laws of a seed run one after another in one process with one thread; the time is that of all five.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import jobs
import results
from figures import Section, Target, table

CHOSEN = ("gravitation", "pendulum", "lenses", "lorentz_factor", "projectile")
SEEDS = (0, 1, 2)
STEPS, ATTEMPT = 1_000_000, 100_000
"""Env steps of a search, and those after which a new policy begins."""
ENOUGH, MINUTES = 3, 5.0
SIDES = {"ppo": 1e-3, "random": 0.0}
"""The learning rates."""


def discover(law: str, steps: int = STEPS, seed: int = 0, learning_rate: float = 1e-3) -> dict[str, Any]:
    """One search: the steps and seconds it took, and the best expression."""
    from inchworm import EnvConfig, PolicyConfig, PPOConfig, PPOTrainer

    env = EnvConfig(id="Symbolic-v0", num_envs=32, num_workers=0, kwargs={"law": law})
    config = PPOConfig(learning_rate=learning_rate, rollout_steps=64, num_minibatches=4, ent_coef=0.1, gamma=1.0)

    def unfinished(_: Any, metrics: Any) -> bool:
        return bool(metrics.get("episode/is_success", 0.0) == 0.0)

    start = time.perf_counter()
    found: dict[str, Any] = {"law": law, "steps": 0, "attempts": 0, "score": -1.0}
    while found["steps"] < steps and not is_found(found):
        attempt = 1000 * seed + found["attempts"]
        with PPOTrainer(PolicyConfig(hidden_sizes=(64,)), env, config, seed=attempt, device="cpu") as trainer:
            trainer.train(total_timesteps=min(ATTEMPT, steps - found["steps"]), callback=unfinished)
            score, expression = max(trainer.env.call("best_expression", at_reset=False))  # type: ignore[attr-defined]
            found["steps"] += trainer.total_timesteps
        found["attempts"] += 1
        if score > found["score"]:
            found |= {"score": score, "expression": expression}
    return {**found, "seconds": time.perf_counter() - start}


def search_all(laws: Sequence[str], steps: int, seed: int, learning_rate: float) -> list[dict[str, Any]]:
    """All laws, one after another."""
    return [discover(law, steps, seed, learning_rate) for law in laws]


def is_found(run: dict[str, Any]) -> bool:
    """Whether a law is right: its error e, of which the score is 1 / (1 + e), is below 1e-6."""
    return bool(run["score"] > 1 / (1 + 1e-6))


def section(data: dict[str, Any]) -> Section:
    """The page's section; a side has a list of searches, law by law, for each seed."""

    def steps(runs: Sequence[dict[str, Any]]) -> str:
        return ", ".join(f"{run['steps']:,}" if is_found(run) else "–" for run in runs) or "not measured"

    ppo, random = (list(zip(*data[side])) if side in data else [()] * len(data["ppo"][0]) for side in SIDES)  # by law
    rows = [
        [runs[0]["law"], f"{sum(map(is_found, runs))} of {len(runs)}", f"`{max(runs, key=itemgetter('score'))['expression']}`", steps(runs),
         steps(others)]
        for runs, others in zip(ppo, random)
    ]  # fmt: skip
    lines = [
        f"40 points of each law, expressions of at most 11 tokens, at most {STEPS:,} env steps for each law, and a new policy after every",
        f"{ATTEMPT:,} that found nothing. Random search is the same with a learning rate of 0. The env steps after which each of",
        f"{len(data['ppo'])} seeds found a law, or –:",
        "",
        *table(["law", "found", "best expression, up to a factor", "env steps", "env steps of random search"], rows),
    ]
    if "random" in data:
        totals = [sum(is_found(run) for runs in data[side] for run in runs) for side in SIDES]
        better = "PPO finds more" if totals[0] > totals[1] else "nothing is gained from learning here"
        lines += [
            "",
            f"Of {len(rows) * len(data['ppo'])} searches, PPO found {totals[0]} laws and random search {totals[1]}: {better}.",
            "",
        ]
    found = [sum(map(is_found, runs)) for runs in data["ppo"]]
    seconds = [sum(run["seconds"] for run in runs) for runs in data["ppo"]]
    targets = [
        Target(f"laws found from data, of {len(rows)}, worst seed of {len(found)}", min(found), ENOUGH, unit=""),
        Target("minutes for all laws, one thread, longest seed", max(seconds) / 60, MINUTES, at_least=False, unit="minutes"),
    ]
    return Section("Laws found from data", lines, targets)


def main() -> None:
    """Search all, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--laws", nargs="+", default=list(CHOSEN))
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    options = parser.parse_args()
    kept = options.laws == list(CHOSEN)
    data: dict[str, Any] = (results.load("symbolic") or {"data": {}})["data"] if kept else {}
    if "ppo" not in {*data, *options.sides}:
        parser.error("random search is shown beside PPO: measure --sides ppo first")
    for side in options.sides:
        given = [{"laws": options.laws, "steps": STEPS, "seed": seed, "learning_rate": SIDES[side]} for seed in SEEDS]
        data[side] = [jobs.run("symbolic:search_all", one) for one in given]
    shown = section(data)
    print("\n".join([*shown.lines, *(target.row() for target in shown.targets)]))
    if kept:
        results.save("symbolic", data)


if __name__ == "__main__":
    main()
