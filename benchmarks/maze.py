"""A maze with one reward: plain PPO, with the best of several entropy coefficients and twice the env steps, beside a curriculum.

    python benchmarks/maze.py                 # 3 seeds of each; kept
    python benchmarks/maze.py --seeds 1       # a quick look; nothing is kept

The maze is `Maze-v0` with 9 x 9 cells; the score is the success of 100 sampled episodes that begin as far from the goal as the highest
of 12 difficulties says. The entropy coefficient of plain PPO is the one with the best mean success over the seeds, that of the
curriculum is the default. Each run is a separate process with one thread.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jobs
import results
from figures import Section, Target, table

LEVELS, EPISODES, SEEDS = 12, 100, 3
STEPS = 400_000
"""Of the curriculum; plain PPO has twice as many."""
ENTROPIES = (0.003, 0.01, 0.03)
SOLVED, UNSOLVED = 0.9, 0.2


def train(mode: str, seed: int, ent_coef: float, steps: int, size: int = 9, levels: int = LEVELS) -> dict[str, Any]:
    """One training: its steps, seconds, and success at the highest difficulty."""
    from inchworm import CurriculumConfig, EnvConfig, EvalConfig, PolicyConfig, PPOConfig, PPOTrainer, RunConfig, TrainingConfig

    config = TrainingConfig(
        env=EnvConfig(id="Maze-v0", num_envs=16, num_workers=0, kwargs={"size": size, "levels": levels}),
        policy=PolicyConfig(hidden_sizes=(64, 64)),
        ppo=PPOConfig(learning_rate=1e-3, rollout_steps=128, num_minibatches=4, update_epochs=4, gae_lambda=0.98, ent_coef=ent_coef),
        curriculum=CurriculumConfig(mode=mode, max_level=levels, window=30),  # type: ignore[arg-type]
        evaluation=EvalConfig(interval=0, final_episodes=0, deterministic=False, seed=1_000 + seed),
        run=RunConfig(seed=seed, total_timesteps=steps, threads=1, device="cpu"),
    )
    with PPOTrainer(config.policy, config.env, config) as trainer:
        start = time.perf_counter()
        history = trainer.train()
        seconds = time.perf_counter() - start
        success = trainer.evaluate(EPISODES).success_rate
    level = history.get("curriculum/level", [float("nan")])[-1]
    first = next((int(at) for at, now in zip(history["timesteps"], history.get("curriculum/level", ())) if now == levels), None)
    return {"steps": trainer.total_timesteps, "seconds": seconds, "success": success, "level": level, "reached": first}


def best_entropy(plain: list[dict[str, Any]]) -> float:
    """The entropy coefficient with which plain PPO succeeds most; the default, 0.01, if all are alike."""
    means = {each: sum(run["success"] for run in plain if run["ent_coef"] == each) for each in {run["ent_coef"] for run in plain}}
    return max(means, key=lambda each: (means[each], each == 0.01))


def section(data: dict[str, Any]) -> Section:
    """The page's section."""
    plain, taught = (([run for run in data["runs"] if (run["mode"] == "none") == is_plain]) for is_plain in (True, False))
    chosen = best_entropy(plain)
    rows = []
    for name, runs in (("curriculum", taught), *((f"plain, ent_coef {each:g}", plain) for each in sorted({r["ent_coef"] for r in plain}))):
        own = [run for run in runs if name == "curriculum" or name == f"plain, ent_coef {run['ent_coef']:g}"]
        reached = ", ".join("–" if run["reached"] is None else f"{run['reached']:,}" for run in own)
        cells = [" ".join(f"{run['success']:.2f}" for run in own), reached, f"{own[0]['steps']:,}", f"{sum(r['seconds'] for r in own):.0f}"]
        rows.append([name, *cells])
    lines = [
        "9 x 9 cells, the longest way 59 steps, reward 1 at the goal and nothing else. The curriculum is `curriculum.mode=adaptive` with",
        f"{LEVELS} levels; plain PPO always begins far from the goal and has twice the env steps, and its entropy coefficient is the best",
        f"of {len(ENTROPIES)}, here {chosen:g}. Success of {EPISODES} sampled episodes at the highest level, seed by seed:",
        "",
        *table(["", "success", "highest level reached after (env steps)", "env steps", "seconds, all seeds"], rows),
    ]
    worst = min(run["success"] for run in taught)
    best = max(run["success"] for run in plain if run["ent_coef"] == chosen)
    targets = [
        Target("maze, curriculum's success, worst seed", worst, SOLVED, unit=""),
        Target("maze, plain PPO's success, best seed", best, UNSOLVED, at_least=False, unit=""),
    ]
    return Section("A maze that needs a curriculum", lines, targets)


def main() -> None:
    """Train all, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    options = parser.parse_args()
    variants = [("adaptive", 0.01, STEPS), *(("none", each, 2 * STEPS) for each in ENTROPIES)]

    def measure(given: dict[str, Any]) -> dict[str, Any]:
        run = {**given, **jobs.run("maze:train", given)}
        print(run, flush=True)
        return run

    names = ("mode", "ent_coef", "steps")
    wanted = [{**dict(zip(names, variant)), "seed": seed} for seed in range(options.seeds) for variant in variants]
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = list(pool.map(measure, wanted))
    shown = section({"runs": runs})
    print("\n".join([*shown.lines, *(target.row() for target in shown.targets)]))
    if options.seeds >= SEEDS:
        results.save("maze", {"runs": runs})


if __name__ == "__main__":
    main()
