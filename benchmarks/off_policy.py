"""What do the corrections for old data give? PPO, V-trace and the decoupled objective on rollouts that are 1, 4 and 16 updates old.

    python benchmarks/off_policy.py                                          # everything that is not there yet, then the table
    python benchmarks/off_policy.py --tasks "CartPole-v1, 4 updates old" --seeds 2 --scale 0.1 --out /tmp/quick.jsonl
    python benchmarks/off_policy.py --report                                 # the table alone

Every update learns from the rollout that was collected so many updates before it; the first ones learn from the first rollout.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import fmean
from typing import Any

from seeds import half_interval
from variants import Case, Run, compare, curve_images, kept_runs, paired_report

AGES = (1, 4, 16)
SEEDS = 5
STEPS = 60_000
"""Fixed before the first run, as are the margin and the seeds."""
MARGIN = 0.9
"""A correction holds at an age if the low end of the interval of its area, as a share of plain PPO's there, is above this."""
PLAIN = "PPO"
VARIANTS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "V-trace": {"correction": "vtrace"},
    "decoupled": {"proximal_decay": 0.0},
    "decoupled, average of weights": {"proximal_decay": 0.8},
    "V-trace and decoupled": {"correction": "vtrace", "proximal_decay": 0.0},
}


def train(age: int, settings: dict[str, Any], seed: int, scale: float) -> dict[str, Any]:
    """One training with delayed rollouts: its curve, of fresh episodes, and the mean returns of greedy and of sampled episodes."""
    from inchworm import EnvConfig, EvalConfig, PPOConfig, PPOTrainer, Rollout, RunConfig, TrainingConfig, TrainingState
    from inchworm.train.callbacks import BaseCallback
    from inchworm_side import Curve

    class Delay(BaseCallback):
        """Learns from the rollout that was collected `age` iterations ago."""

        def __init__(self) -> None:
            self.waiting: deque[Rollout] = deque(maxlen=age + 1)

        def on_rollout(self, state: TrainingState, rollout: Rollout) -> Rollout:
            """Keep the new one, return the oldest."""
            del state
            self.waiting.append(rollout)
            return self.waiting[0]

    ppo = PPOConfig(
        learning_rate=1e-3, gamma=0.98, gae_lambda=0.9, ent_coef=0.0, rollout_steps=64, minibatch_size=128, update_epochs=6,
        max_staleness=age, **settings,
    )  # fmt: skip
    config = TrainingConfig(
        env=EnvConfig(id="CartPole-v1", num_envs=8, num_workers=0),
        ppo=ppo,
        evaluation=EvalConfig(interval=0, final_episodes=0, seed=10_000 + seed),
        run=RunConfig(seed=seed, total_timesteps=max(512, int(STEPS * scale)), threads=1, backend="numpy"),
    )
    curve, began = Curve(), time.perf_counter()
    with PPOTrainer(config.policy, config.env, config, callbacks=[curve, Delay()]) as trainer:
        trainer.train()
        seconds = time.perf_counter() - began
        greedy, sampled = (trainer.evaluate(50, deterministic=flag).mean_return for flag in (True, False))
        return {
            "steps": trainer.total_timesteps, "seconds": seconds, "curve": curve.points, "score": greedy, "sampled_score": sampled,
        }  # fmt: skip


def task_of(age: int) -> str:
    """The name of the work with rollouts of an age."""
    return f"CartPole-v1, {age} update{'' if age == 1 else 's'} old"


CASES = [
    Case(task_of(age), name, PLAIN, "off_policy:train", {"age": age, "settings": settings})
    for age in AGES
    for name, settings in VARIANTS.items()
]


def verdicts(runs: list[Run]) -> list[str]:
    """A table of every correction's area as a share of plain PPO's of the same seed."""
    areas = {(run["task"], run["variant"], run["seed"]): run["area under the curve"] for run in runs}
    lines = ["", "| area, as a share of PPO's of the same seed | " + " | ".join(map(task_of, AGES)) + " |", "|---" * (len(AGES) + 1) + "|"]
    for name in VARIANTS:
        cells = []
        for age in AGES:
            own, base = (
                {seed: area for (task, variant, seed), area in areas.items() if (task, variant) == (task_of(age), kind)}
                for kind in (name, PLAIN)
            )
            shares = [area / base[seed] for seed, area in own.items() if seed in base]
            if name == PLAIN or len(shares) < 2:
                cells.append("")
                continue
            mean, half = fmean(shares), half_interval(shares)
            verdict = ", better" if mean - half > 1 else "" if mean - half > MARGIN else ", not shown to hold"
            cells.append(f"{mean:.2f} ± {half:.2f}{verdict}")
        if any(cells):
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def report(cases: list[Case], runs: list[Run]) -> list[str]:
    """The figures of every case, and the shares."""
    return [*paired_report(cases, runs), *verdicts(runs)]


def section() -> list[str]:
    """The part of docs/results.md, from the runs that are kept."""
    if not (runs := kept_runs("off_policy")):
        return []
    return [
        "## Learning from old rollouts",
        "",
        "What `ppo.correction` and `ppo.proximal_decay` give where every update learns from the rollout that was collected 1, 4 or 16",
        "updates before it (`benchmarks/off_policy.py`). “Better”: the interval is above 1; “not shown to hold”: it reaches below",
        f"{MARGIN}.",
        "",
        *report(CASES, runs),
        "",
        *curve_images("off-policy", CASES, runs),
    ]


if __name__ == "__main__":
    compare("off_policy", __doc__, CASES, seeds=SEEDS, report=report)  # type: ignore[arg-type]
