"""What the doctor finds in runs that did not set its thresholds: sick ones in another environment, and the presets, which are healthy.

python benchmarks/doctor.py [--steps 200000]         (20 minutes on one core)

The environment and the seeds were chosen before any of these runs was made, and the thresholds have not been changed since.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import results
from doubles.patients import HEALTHY, SICK, Patient, train_patient
from figures import Section, Target, table
from inchworm.analysis.doctor import diagnose
from inchworm.analysis.runs import RunRecord, read_run
from inchworm.config.presets import PRESETS
from inchworm.env.registry import config_for

ENV, SEED = "LunarLander-v3", 23
WORLDS = ("Skirmish-v0",)
"""Worlds with presets of their own."""


class NeverEnds(gym.Wrapper[Any, Any, Any, Any]):
    """Begins the next episode without a word."""

    def step(self, action: Any) -> Any:
        """Step, and reset instead of ending."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            observation, info = self.env.reset()
        return observation, reward, False, False, info


class Bait(gym.Wrapper[Any, Any, Any, Any]):
    """Action 0 earns 20 more at once, and all of that is taken back at the end."""

    _earned = 0.0

    def reset(self, **options: Any) -> Any:
        """Begin without a debt."""
        self._earned = 0.0
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        """Step, with the bait, or at the end with the debt."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        bait = 20.0 if int(action) == 0 else 0.0
        self._earned += bait
        final = self._earned if terminated or truncated else 0.0
        return observation, float(reward) + bait - final, terminated, truncated, info


ENDLESS = Patient(wrap=NeverEnds, wrap_eval=lambda env: env, iterations=32)
COLLAPSED = dataclasses.replace(SICK["entropy_collapse"][0], wrap=Bait, world=None)
PATIENTS = {**SICK, "endless_episodes": [ENDLESS], "entropy_collapse": [COLLAPSED]}
"""The patients of the tests, with those in worlds of their own brought to this environment."""


def findings(run: RunRecord) -> list[dict[str, Any]]:
    """What the doctor says of a run."""
    return [{"rule": found.rule, "note": found.note, "why": found.why} for found in diagnose(run)]


def train_preset(env_id: str, steps: int, directory: Path) -> RunRecord:
    """Train a preset as it is for the first `steps` env steps, or to its end if that is sooner."""
    config = config_for(env_id)
    iterations = max(50, steps // (config.env.num_envs * config.ppo.rollout_steps))  # of an environment with several agents more env steps
    where = [f"--run.directory={directory}", f"--run.name={env_id}", "--run.report=false", f"--run.max-iterations={iterations}"]
    command = [sys.executable, "-m", "inchworm", "train", env_id, *where, f"--run.seed={SEED}", "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read_run(directory / env_id)


def measure(steps: int) -> dict[str, Any]:
    """Train and diagnose every run once."""
    sick: list[dict[str, Any]] = []
    healthy: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rule, patients in PATIENTS.items():
            for number, patient in enumerate(patients):
                run = train_patient(patient, Path(name) / f"{rule}-{number}", env=ENV, seed=SEED)
                sick.append({"rule": rule, "found": findings(run)})
                print(rule, [one["rule"] for one in sick[-1]["found"]], flush=True)
        for kind, patient in HEALTHY.items():
            run = train_patient(patient, Path(name) / kind, env=ENV, seed=SEED)
            healthy.append({"run": f"{ENV}, {kind}", "steps": run.env_steps, "found": findings(run)})
            print(kind, healthy[-1], flush=True)
        for env_id in (*PRESETS, *WORLDS):
            run = train_preset(env_id, steps, Path(name))
            healthy.append({"run": f"preset {env_id}", "steps": run.env_steps, "found": findings(run)})
            print(env_id, healthy[-1], flush=True)
    return {"env": ENV, "seed": SEED, "sick": sick, "healthy": healthy}


def section(data: dict[str, Any]) -> Section:
    """The page's section."""
    rows, named = [], []
    for one in data["sick"]:
        found = [each["rule"] for each in one["found"]]
        named.append(one["rule"] in found)
        others = ", ".join(rule for rule in found if rule != one["rule"]) or "–"
        rows.append([one["rule"], "no" if not named[-1] else "first" if found[0] == one["rule"] else "later", others])
    causes = {one["rule"] for one in data["sick"]}
    left = causes - {one["rule"] for one, is_named in zip(data["sick"], named) if not is_named}
    healthy = [
        [one["run"], f"{one['steps']:,}", ", ".join(each["rule"] for each in one["found"] if not each["note"]) or "nothing"]
        for one in data["healthy"]
    ]
    presets, short = ([row for row in healthy if row[0].startswith("preset ") is wanted] for wanted in (True, False))
    lines = [
        f"{data['env']}, seed {data['seed']}: the environment and the seed were chosen before any of these runs was made, and no threshold",
        "was changed afterwards. The sick runs are those of the tests (`tests/doubles/patients.py`), of 12,288 steps or fewer.",
        "",
        *table(["made sick on purpose", "its cause is named", "also named"], rows),
        "",
        "Every preset as it is, with that seed, for its first env steps:",
        "",
        *table(["run", "env steps", "the doctor says"], presets),
        "",
        "The healthy runs of the tests, which are as short as the sick ones, in the same environment. They have hardly learned anything",
        "there: their critics do not explain the returns yet, and their greedy actions score far below sampled ones.",
        "Both is what the doctor says, so that naming `evaluation_gap` in the sick runs of this environment shows little.",
        "",
        *table(["run", "env steps", "the doctor says"], short),
    ]

    def share(what: str, count: int, of: int, bound: float) -> Target:
        return Target(f"{what}: {count} of {of}", count / of, bound, unit="of them")

    def quiet(found: list[list[str]]) -> int:
        return sum(says == "nothing" for *_, says in found)

    targets = [
        share("sick runs whose cause is named", sum(named), len(named), 12 / 14),
        share("causes that are named in each of their runs", len(left), len(causes), 12 / 14),
        share("presets of which nothing is said", quiet(presets), len(presets), 1.0),
        share("short healthy runs of which nothing is said", quiet(short), len(short), 1.0),
    ]
    return Section("The doctor", lines, targets)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200_000, help="of each preset")
    data = measure(parser.parse_args().steps)
    print("\n".join(section(data).lines))
    results.save("doctor", data)


if __name__ == "__main__":
    main()
