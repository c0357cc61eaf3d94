"""Run directories written by hand, for what reads them: any length, any names."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inchworm.config.sections import EnvConfig, RunConfig, TrainingConfig
from inchworm.run.directory import CONFIG, OUTCOME, VERSIONS

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance", "grad_norm", "learning_rate", "loss")
HOSTILE = """<script>window.pwned=1</script>"onload="window.pwned=1' {{7*7}}</style></svg><img src=x onerror=window.pwned=1>\u2028"""


def write_run(
    path: Path, *, rows: int = 20, steps: int = 512, seed: int = 0, env: str = "CartPole-v1", outcome: str | None = "finished", **more: Any
) -> Path:
    """A run of `rows` iterations whose return rises from 20 to 200; `more` are metrics of every row."""
    path.mkdir(parents=True)
    run = RunConfig(total_timesteps=rows * steps, seed=seed)
    (path / CONFIG).write_text(TrainingConfig(env=EnvConfig(id=env), run=run).to_yaml(), encoding="utf-8")
    (path / VERSIONS).write_text(json.dumps({"python": "3.11", "torch": None}), encoding="utf-8")
    if outcome is not None:
        (path / OUTCOME).write_text(json.dumps({"outcome": outcome, "reason": "total_timesteps"}), encoding="utf-8")
    metrics, timing = [], []
    for number in range(1, rows + 1):
        head = {"iteration": number, "env_steps": number * steps}
        part = number / rows
        values = {name: 0.01 * (index + 1) * (1.5 + math.sin(number * (index + 1))) for index, name in enumerate(METRICS)}
        row: dict[str, Any] = {
            **head,
            **values,
            "explained_variance": part,
            "learning_rate": 3e-4,
            "mean_return": 20 + 180 * part + 5 * seed,
        }
        row |= {"episodes": 4.0 * number, "mean_length": 20 + 180 * part, **more}
        if number % max(1, rows // 8) == 0:
            mean = 30 + 170 * part + seed
            names = {"mean_return": mean, "interval95_low": mean - 10, "interval95_high": mean + 10, "std_return": 20.0, "episodes": 20.0}
            row |= {f"evaluation/{name}": value for name, value in names.items()}
        metrics.append(row)
        timing.append(
            {**head, "seconds": 0.5, "collect_seconds": 0.2, "env_seconds": 0.1, "learn_seconds": 0.3, "steps_per_second": 1_000.0}
        )
    for name, table in (("metrics.jsonl", metrics), ("timing.jsonl", timing)):
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in table), encoding="utf-8")
    return path


def write_pairs(path: Path, scores: Mapping[str, Sequence[float | None]]) -> None:
    """The finished runs of a comparison: the returns of seed s rise from 20 + 5 s to 200 + 5 s in both settings."""
    for name, column in scores.items():
        rows = [{"seed": seed, "status": "done", "score": score} for seed, score in enumerate(column)]
        for seed in range(len(column)):
            write_run(path / name / f"seed-{seed}", seed=seed)
        (path / name / "summary.json").write_text(json.dumps({"seeds": rows}), encoding="utf-8")
