"""B6: secrets stay where they are."""

from __future__ import annotations

import os
import subprocess
import sys

from faults.programme import Outcome, Work, procedure

SECRETS = (
    "AWS_SECRET_ACCESS_KEY",
    "OPENAI_API_KEY",
    "WANDB_API_KEY",
    "GITHUB_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
    "DATABASE_URL",
    "HTTPS_PROXY",
    "PGPASSWORD",
)


@procedure(
    "B6", title="Secrets in the environment", must="0 found in checkpoints, configs, metrics, versions, dumps, output", full=1, test=0
)
def secrets(work: Work) -> Outcome:
    """Runs that end well, in a worker's error, and in a dump of bad numbers; then every file and every line of output is searched."""
    outcome = Outcome()
    marks = {name: f"canary-{number:04d}-{os.urandom(8).hex()}" for number, name in enumerate(SECRETS)}
    (work.scratch / "worlds.py").write_text(_WORLDS)
    environment = {**os.environ, **marks}
    small = [
        "--num-envs",
        "2",
        "--ppo.rollout-steps",
        "8",
        "--ppo.num-minibatches",
        "2",
        "--total-timesteps",
        "32",
        "--evaluation.final-episodes",
        "2",
    ]
    for backend in ("numpy", "torch"):
        for number, (world, extra) in enumerate(
            (("CartPole-v1", ["--num-workers", "1"]), ("worlds:breaks", ["--num-workers", "1"]), ("worlds:huge", ["--num-workers", "0"]))
        ):
            command = [
                sys.executable,
                "-m",
                "inchworm",
                "train",
                world,
                *small,
                *extra,
                "--backend",
                backend,
                "--run.name",
                f"{backend}{number}",
            ]
            ended = subprocess.run(command, cwd=work.scratch, env=environment, capture_output=True, timeout=180)
            found = [name for name, mark in marks.items() if mark.encode() in ended.stdout + ended.stderr]
            outcome.check(not found, f"{world} printed {found}")
            outcome.check(ended.returncode == (0 if number == 0 else 1), f"{world} ended with {ended.returncode}: {ended.stderr[-300:]!r}")
    files = [path for path in work.scratch.rglob("*") if path.is_file() and path.name != "worlds.py"]
    for path in files:
        content = path.read_bytes()
        found = [name for name, mark in marks.items() if mark.encode() in content]
        outcome.check(not found, f"{path.relative_to(work.scratch)} holds {found}")
    outcome.figures = {"files searched": str(len(files))}
    return outcome


_WORLDS = """
import gymnasium as gym

class Breaks(gym.Wrapper):
    def step(self, action):
        raise RuntimeError("broken on purpose")

class Huge(gym.RewardWrapper):
    def reward(self, reward):
        return 1e30

def breaks():
    return Breaks(gym.make("CartPole-v1"))

def huge():
    return Huge(gym.make("CartPole-v1"))
"""
