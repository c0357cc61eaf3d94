"""Skirmish 3 v 3: does a team learn to beat the heuristic, and does self-play climb?

    python benchmarks/combat.py                        # both, two seeds against the heuristic; kept
    python benchmarks/combat.py --what heuristic --seeds 0
    python benchmarks/combat.py --steps 200000         # a quick look; nothing is kept

Against the heuristic: the preset of Skirmish-v0 as `inchworm train Skirmish-v0` runs it, each seed in a separate process, one after
another; then 200 games against the heuristic at full strength, 100 seeds from either side, greedy and sampled. Self-play: the same network
against its own past, rated against fixed players that never move; it never trains against the heuristic.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jobs
import results
from figures import Section, Target, table

EPISODES, SEEDS = 200, (0, 1)
ENOUGH, MINUTES = 0.8, 20.0
SELF_PLAY_STEPS = 3_000_000


def against_heuristic(seed: int, steps: int | None = None) -> dict[str, Any]:
    """One run of the preset: its minutes, and 200 paired games at its end."""
    from inchworm import PPOTrainer, config_for, evaluate_vs_heuristic

    config = config_for("Skirmish-v0")
    run = config.run.replace(seed=seed, **({} if steps is None else {"total_timesteps": steps}))
    config = config.replace(run=run, evaluation=config.evaluation.replace(interval=0, final_episodes=0))
    curve: list[tuple[int, float, float]] = []
    start = time.perf_counter()

    def watch(state: Any, metrics: Any) -> None:
        if state.iteration % 25 == 0 and "episode/win" in metrics:
            won = sum(episode.info["win"] for episode in state.recent) / len(state.recent)
            curve.append((state.env_steps, time.perf_counter() - start, won))

    with PPOTrainer(config.policy, config.env, config, callbacks=[watch]) as trainer:
        trainer.train()
        minutes = (time.perf_counter() - start) / 60
        found: dict[str, Any] = {"seed": seed, "steps": trainer.total_timesteps, "minutes": minutes, "curve": curve}
        for name, deterministic in (("greedy", True), ("sampled", False)):
            stats, _ = evaluate_vs_heuristic(trainer.collector.policy, config.env, EPISODES, deterministic=deterministic, num_envs=50)
            found[name] = {"win_rate": stats.win_rate, "interval95": stats.win_interval95, "hp_margin": stats.mean_hp_margin}
            found[name]["length"] = stats.mean_episode_length
    return found


def self_play(seed: int, steps: int) -> dict[str, Any]:
    """A run of self-play: its ratings against the fixed players."""
    from inchworm import PPOTrainer, config_for

    config = config_for("Skirmish-v0")
    config = config.replace(
        opponent=config.opponent.replace(mode="self_play", snapshot_interval=10, rating_interval=25, rating_episodes=40),
        run=config.run.replace(seed=seed, total_timesteps=steps),
        evaluation=config.evaluation.replace(interval=0, final_episodes=0),
    )
    with PPOTrainer(config.policy, config.env, config) as trainer:
        trainer.train()
        book = trainer.env.opponent.book  # type: ignore[attr-defined]
        rows = [
            {"steps": entry.env_steps, "mu": entry.rating.mu, "sigma": entry.rating.sigma, "wins": dict(entry.win_rates)}
            for entry in book.history
        ]
        return {"seed": seed, "anchors": {name: rating.mu for name, rating in book.anchors.items()}, "ratings": rows}


def section(data: dict[str, Any]) -> Section:
    """The page's section."""
    lines = [
        f"Three units against three. The preset of Skirmish-v0 learns against the heuristic at full strength; then {EPISODES} games,",
        "each seed once from either side, against the same heuristic (win rate with its 95 % interval; one run at a time on this machine):",
        "",
        *table(["seed", "env steps", "minutes", "greedy", "health margin", "sampled", "steps a game"], map(_row, data["heuristic"])),
    ]
    played = data["self_play"]
    anchors = ", ".join(f"{name} {level:.1f}" for name, level in played["anchors"].items())
    lines += [
        "Self-play from nothing, the same network against its own past selves; it never trains against the heuristic. Ratings (OpenSkill)",
        f"come from games of their own against fixed players, rated among themselves at the start, who never move ({anchors}):",
        "",
        *table(["env steps", "rating", "± 2 sigma", *(f"wins against {name}" for name in played["anchors"])], _rating_rows(played)),
    ]
    return Section("Skirmish: learning to win", lines, _targets(data))


def _row(run: dict[str, Any]) -> list[str]:
    greedy, sampled = (f"{run[how]['win_rate']:.3f} [{_ends(run[how])}]" for how in ("greedy", "sampled"))
    margin, length = run["greedy"]["hp_margin"], run["greedy"]["length"]
    return [str(run["seed"]), f"{run['steps']:,}", f"{run['minutes']:.1f}", greedy, f"{margin:+.2f}", sampled, f"{length:.0f}"]


def _ends(found: dict[str, Any]) -> str:
    return ", ".join(f"{end:.3f}" for end in found["interval95"])


def _rating_rows(played: dict[str, Any]) -> list[list[str]]:
    shown = played["ratings"][:: max(1, len(played["ratings"]) // 10)]
    shown = shown if shown[-1] is played["ratings"][-1] else [*shown, played["ratings"][-1]]
    return [
        [f"{row['steps']:,}", f"{row['mu']:.1f}", f"{2 * row['sigma']:.1f}", *(f"{row['wins'][name]:.2f}" for name in played["anchors"])]
        for row in shown
    ]


def _targets(data: dict[str, Any]) -> list[Target]:
    runs, ratings = data["heuristic"], data["self_play"]["ratings"]
    worst = min(run["greedy"]["win_rate"] for run in runs)
    slowest = max(run["minutes"] for run in runs)
    rise = ratings[-1]["mu"] - ratings[0]["mu"]
    spread = 2 * (ratings[-1]["sigma"] ** 2 + ratings[0]["sigma"] ** 2) ** 0.5
    return [
        Target("Skirmish 3 v 3, wins against the full heuristic, worst seed", worst, ENOUGH, unit=""),
        Target("Skirmish 3 v 3, minutes of training, slowest seed", slowest, MINUTES, at_least=False, unit="minutes"),
        Target("self-play, rise of the rating, in 2 sigma of the difference", rise / spread, 1.0, unit=""),
    ]


def main() -> None:
    """Train, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("both", "heuristic", "self_play"), default="both")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=None, help="env steps of each run; the preset's by default")
    options = parser.parse_args()
    kept = (results.load("combat") or {"data": {}})["data"]
    if options.what != "self_play":
        kept["heuristic"] = [jobs.run("combat:against_heuristic", {"seed": seed, "steps": options.steps}) for seed in options.seeds]
        print(*kept["heuristic"], sep="\n", flush=True)
    if options.what != "heuristic":
        kept["self_play"] = jobs.run("combat:self_play", {"seed": 0, "steps": options.steps or SELF_PLAY_STEPS})
        print(kept["self_play"], flush=True)
    if {"heuristic", "self_play"} <= kept.keys():
        found = section(kept)
        print("\n".join([*found.lines, *(target.row() for target in found.targets)]))
        if options.steps is None and tuple(options.seeds) == SEEDS:
            results.save("combat", kept)


if __name__ == "__main__":
    main()
