"""What the presets reach: each over 5 seeds (3 where a run takes over ten minutes), beside rl-baselines3-zoo's published scores.

    python benchmarks/presets.py                                        # every run that is not there yet, then the table
    python benchmarks/presets.py --tasks Hopper-v5 Swimmer-v5 --seeds 2
    python benchmarks/presets.py --report                               # the table alone

A run trains with the preset as `inchworm train ENV` does, with one thread, and is scored by the mean return of greedy episodes of the
last policy. Runs of a preset that has changed since are measured again. The published scores are those of one training each, taken
from the zoo's benchmark.md; its MuJoCo and Box2D environments are of earlier versions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from figures import table
from inchworm.config.presets import PRESETS
from inchworm.config.sections import TrainingConfig
from seeds import half_interval
from variants import Case, Run, compare, kept_runs

PUBLISHED: dict[str, tuple[float, float, int, str]] = {
    "Acrobot-v1": (-73.5, 18.2, 1_000_000, "Acrobot-v1"),
    "Ant-v5": (1327.2, 451.6, 1_000_000, "Ant-v3"),
    "BipedalWalker-v3": (287.9, 2.4, 5_000_000, "BipedalWalker-v3"),
    "CartPole-v1": (500.0, 0.0, 100_000, "CartPole-v1"),
    "HalfCheetah-v5": (5819.1, 663.5, 1_000_000, "HalfCheetah-v3"),
    "Hopper-v5": (2410.4, 10.0, 1_000_000, "Hopper-v3"),
    "LunarLander-v3": (242.1, 31.8, 1_000_000, "LunarLander-v2"),
    "LunarLanderContinuous-v3": (270.9, 32.1, 1_000_000, "LunarLanderContinuous-v2"),
    "MountainCar-v0": (-110.4, 19.5, 1_000_000, "MountainCar-v0"),
    "MountainCarContinuous-v0": (88.3, 2.6, 20_000, "MountainCarContinuous-v0"),
    "Pendulum-v1": (-172.2, 104.2, 100_000, "Pendulum-v1"),
    "Swimmer-v5": (281.6, 9.7, 1_000_000, "Swimmer-v3"),
    "Walker2d-v5": (3478.8, 821.7, 1_000_000, "Walker2d-v3"),
}
"""Environment -> the zoo's mean return of PPO, its deviation over episodes, the env steps, and the version it was measured on."""
BELOW = {
    "LunarLanderContinuous-v3": (
        "the zoo's is one training on version 2 of the environment; the settings are the same, and linear schedules of learning rate and "
        "entropy made it worse"
    ),
}
"""Why the interval of a preset's mean is below the published score."""
SLOW = frozenset({"BipedalWalker-v3", "HalfCheetah-v5"})
"""Where a run takes over ten minutes: 3 seeds."""


def settings_hash(env_id: str) -> str:
    """A short name for the preset's current settings, as far as they are not defaults: a new setting changes none of the names.

    The target that a preset names changes no training.
    """
    config, default = PRESETS[env_id].config.to_dict(), TrainingConfig().to_dict()
    sections = [section for section in config if section != "convergence"]
    changed = [(section, name, value) for section in sections for name, value in config[section].items() if value != default[section][name]]
    return hashlib.blake2b(json.dumps(changed, sort_keys=True).encode(), digest_size=4).hexdigest()


def train(env_id: str, settings: str, seed: int, scale: float) -> dict[str, Any]:
    """One training with its curve, and the mean returns of greedy and of sampled episodes."""
    from inchworm import config_for
    from inchworm_side import train_and_score

    assert settings == settings_hash(env_id)
    config = config_for(env_id)
    config = config.replace(
        env=config.env.replace(num_workers=0),
        evaluation=config.evaluation.replace(interval=0, final_episodes=0, seed=10_000 + seed),
        run=config.run.replace(seed=seed, total_timesteps=round(scale * config.run.total_timesteps), threads=1, device="cpu"),
    )
    return train_and_score(config, 100)


def case_of(env_id: str) -> Case:
    """The preset's current settings, as a variant of their own."""
    settings = settings_hash(env_id)
    arguments = {"env_id": env_id, "settings": settings}
    return Case(env_id, settings, settings, "presets:train", arguments, seeds=3 if env_id in SLOW else 5)


CASES = [case_of(env_id) for env_id in PRESETS]


def report(cases: Sequence[Case], runs: Sequence[Run]) -> list[str]:
    """Markdown: a row for each preset that was measured with its current settings."""
    rows, below = [], []
    for case in cases:
        own = [run for run in runs if (run["task"], run["variant"]) == (case.task, case.variant)]
        if not own:
            continue
        scores = [run["greedy score"] for run in own]
        score, deviation, steps, version = PUBLISHED.get(case.task, (None, None, None, ""))
        half = half_interval(scores) if len(scores) > 1 else 0.0
        if score is not None and fmean(scores) < score:
            why = "within the interval" if fmean(scores) + half >= score else BELOW.get(case.task, "unexplained")
            below.append(f"- {case.task} is below the published score: {why}.")
        zoo = "–" if score is None else f"{score:,.1f} ± {deviation:.1f}, {steps:,} steps, {version}"
        mean = f"{fmean(scores):,.1f}" + (f" ± {half:,.1f}" if len(scores) > 1 else "")
        each = ", ".join(f"{score:,.0f}" for score in scores)
        sampled = f"{fmean(run['sampled score'] for run in own):,.1f}"
        rows.append([case.task, f"{own[0]['steps']:,}", mean, each, sampled, f"{fmean(run['seconds'] for run in own) / 60:.1f}", zoo])
    return [
        "What `inchworm train ENV` reaches with the preset of the environment: mean return of 100 greedy episodes of the last policy, mean",
        "over seeds ± half of its 95 % interval (Student's t), each seed, and the mean of sampled episodes. Minutes are those of one core",
        "of a machine on which other trainings ran. The last column is the score that rl-baselines3-zoo publishes for PPO with its tuned",
        "settings: one training, mean ± deviation over episodes, on the version of the environment that is named.",
        "",
        *table(["environment", "env steps", "greedy", "each seed", "sampled", "minutes", "rl-baselines3-zoo"], rows),
        *below,
    ]


def section() -> list[str]:
    """The part of docs/results.md, from the runs that are kept."""
    return ["## Presets", "", *report(CASES, kept_runs("presets"))]


if __name__ == "__main__":
    compare("presets", __doc__, CASES, seeds=5, report=report)
