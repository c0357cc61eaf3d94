"""The memory corridor: a cue at the start, a choice 20 steps later. Who remembers succeeds; who does not stays at chance.

    python benchmarks/corridor.py                        # both corridors, lstm, gru, mlp and gru with jax, 3 seeds each; kept
    python benchmarks/corridor.py --seeds 1 --kinds lstm # a quick look; nothing is kept

"plain" is `MemoryCorridor`; "mixed" has masks, dict observations and hybrid actions together. Each run is a separate process
with one thread. Success is the share of right turns in 200 episodes after training, acting greedily and by sampling.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import jobs
import results
from figures import Section, Target, table

CORRIDORS = {"plain": "MemoryCorridor", "mixed": "MixedMemoryCorridor"}
KINDS = {"lstm": "auto", "gru": "auto", "mlp": "auto", "gru on jax": "jax"}
"""Policy, and the backend that trains it."""
LANES, ROLLOUT = 16, 63
"""A rollout is three whole episodes of 21 steps in each lane, and one sequence."""
STEPS, EPISODES, SEEDS = 40 * LANES * ROLLOUT, 200, 3
ENOUGH, MINUTES = 0.95, 2.0


def train(corridor: str, kind: str, seed: int, steps: int = STEPS) -> dict[str, Any]:
    """One training: its seconds (with JAX's compiling), and the success of 200 greedy and 200 sampled episodes."""
    from inchworm import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, PPOTrainer, RunConfig, TrainingConfig

    config = TrainingConfig(
        env=EnvConfig(id=f"inchworm.worlds.toys:{CORRIDORS[corridor]}", num_envs=LANES, num_workers=0),
        policy=PolicyConfig(kind=kind.partition(" ")[0], hidden_sizes=(32,), memory_size=32, log_std_init=-1.0),  # type: ignore[arg-type]
        ppo=PPOConfig(
            rollout_steps=ROLLOUT, sequence_length=ROLLOUT, num_minibatches=4, update_epochs=4, learning_rate=3e-3, ent_coef=0.01,
            gamma=0.99, gae_lambda=0.95,
        ),
        evaluation=EvalConfig(interval=0, final_episodes=0, seed=1_000 + seed),
        run=RunConfig(seed=seed, total_timesteps=steps, threads=1, backend=KINDS[kind], device="cpu"),
    )  # fmt: skip
    with PPOTrainer(config.policy, config.env, config) as trainer:
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        greedy, sampled = (trainer.evaluate(EPISODES, deterministic=flag) for flag in (True, False))
        found = {"steps": trainer.total_timesteps, "seconds": seconds, "return": greedy.mean_return}
    return {**found, "seed": seed, "greedy": greedy.success_rate, "sampled": sampled.success_rate}


def half_width(share: float, count: int = EPISODES) -> float:
    """Half of the 95 % interval of a share, by its normal approximation."""
    return 1.96 * math.sqrt(share * (1 - share) / count)


def section(data: dict[str, Any]) -> Section:
    """The page's section."""
    rows = []
    for run in data["runs"]:
        shares = [f"{run[how]:.3f} ± {half_width(run[how]):.3f}" for how in ("greedy", "sampled")]
        rows.append([run["corridor"], run["kind"], str(run["seed"]), *shares, f"{run['return']:.2f}", f"{run['seconds']:.0f}"])
    lines = [
        "A cue at the start, a choice 20 steps later, nothing in between; half of the choices are right by chance. Mixed: with masks,",
        f"dict observations and hybrid actions together. {STEPS:,} env steps, one thread, success of {EPISODES} episodes (95 % interval):",
        "",
        *table(["corridor", "policy", "seed", "greedy", "sampled", "return", "seconds"], rows),
    ]
    return Section("Memory corridor", lines, _targets(data["runs"]))


def _targets(runs: list[dict[str, Any]]) -> list[Target]:
    found = []
    for corridor in CORRIDORS:
        here = [run for run in runs if run["corridor"] == corridor]
        remembering = [run for run in here if run["kind"] == "lstm"]
        blind = [run for run in here if run["kind"] == "mlp"]
        if remembering:
            worst = min(run["greedy"] for run in remembering)
            found.append(Target(f"{corridor} corridor, lstm's success, worst seed", worst, ENOUGH, unit=""))
            slowest = max(run["seconds"] for run in remembering) / 60
            found.append(Target(f"{corridor} corridor, minutes of the slowest seed", slowest, MINUTES, at_least=False, unit="minutes"))
        if jax := [run for run in here if run["kind"] == "gru on jax"]:
            solved = sum(run["greedy"] >= ENOUGH for run in jax)
            found.append(Target(f"{corridor} corridor, gru on jax, seeds solved of {len(jax)}", solved, len(jax), unit=""))
        if blind:
            off = max(abs(run["greedy"] - 0.5) for run in blind)
            chance = Target(f"{corridor} corridor without memory, distance from 0.5", off, 2 * half_width(0.5), at_least=False, unit="")
            found.append(chance)
    return found


def main() -> None:
    """Train all, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--corridors", nargs="+", choices=list(CORRIDORS), default=list(CORRIDORS))
    options = parser.parse_args()
    runs = []
    for corridor in options.corridors:
        for kind in options.kinds:
            for seed in range(options.seeds):
                result = jobs.run("corridor:train", {"corridor": corridor, "kind": kind, "seed": seed})
                runs.append({"corridor": corridor, "kind": kind, **result})
                print(f"{corridor}, {kind}, seed {seed}: {result}", flush=True)
    shown = section({"runs": runs})
    print("\n".join([*shown.lines, *(target.row() for target in shown.targets)]))
    if options.seeds >= SEEDS and options.kinds == list(KINDS) and options.corridors == list(CORRIDORS):
        results.save("corridor", {"runs": runs})


if __name__ == "__main__":
    main()
