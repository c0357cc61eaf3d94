"""The limit: what one core can do with the same work. `limit.c` on CartPole-v1; elsewhere the environment alone, without any learning.

python benchmarks/limit.py --works W1 W3
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from works import SPEED, Work, find, scaled

SOURCE = Path(__file__).with_name("limit.c")
FLAGS = ("-O3", "-march=native", "-ffast-math")


def compile_limit(directory: Path) -> Path:
    """The program, compiled for this machine into `directory`."""
    if shutil.which("cc") is None:
        raise SystemExit("the C limit needs a compiler that answers to cc; install gcc or clang, or leave the side c out (--sides)")
    program = directory / "limit"
    done = subprocess.run(["cc", *FLAGS, str(SOURCE), "-lm", "-o", str(program)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{SOURCE.name} does not compile:\n{done.stderr}")
    return program


def train(group: str, name: str, seed: int, scale: float = 1.0, *, threads: int = 1, warmup: int = 0) -> dict[str, Any]:
    """One run, as the other sides report it. It has one thread and needs no warm-up; these options are ignored."""
    del threads, warmup
    work = scaled(find(group, name), scale)
    return run_program(work, seed) if work.env_id == "CartPole-v1" else step_alone(work, seed)


def run_program(work: Work, seed: int) -> dict[str, Any]:
    """The C program on the work's hyper-parameters."""
    sizes = (work.num_envs, work.rollout_steps, work.minibatch_size, work.update_epochs)
    rates = (work.learning_rate, work.gamma, work.gae_lambda, work.ent_coef)
    with tempfile.TemporaryDirectory(prefix="inchworm-limit-") as directory:
        command = [compile_limit(Path(directory)), *sizes, *rates, work.total_timesteps, seed]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def step_alone(work: Work, seed: int) -> dict[str, Any]:
    """The environment alone, stepped in Python with random actions."""
    import gymnasium as gym
    import numpy as np

    env = gym.make(work.env_id, disable_env_checker=True)
    env.reset(seed=seed)
    low, high = env.action_space.low, env.action_space.high  # type: ignore[attr-defined]
    actions = np.random.default_rng(seed).uniform(low, high, (1024, *low.shape)).astype(np.float32)  # [1024, *act]
    start = time.perf_counter()
    for index in range(work.total_timesteps):
        _, _, terminated, truncated, _ = env.step(actions[index % 1024])
        if terminated or truncated:
            env.reset()
    seconds = time.perf_counter() - start
    env.close()
    return {"steps": work.total_timesteps, "seconds": seconds, "learn_seconds": None, "last_return": None}


def main() -> None:
    """Print each work's speed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", default=list(SPEED), choices=list(SPEED))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in options.works:
        run = train("speed", name, options.seed)
        what = "environment alone" if run["last_return"] is None else f"return {run['last_return']:.0f}"
        print(f"{name}: {run['steps'] / run['seconds']:,.0f} steps/s, {what}")


if __name__ == "__main__":
    main()
