"""One run of one side, in a process of its own, so that no side inherits anything from another. Used by `learning.py` and `compare.py`.

python benchmarks/side.py '{"side": "inchworm", "group": "speed", "work": "W1", "seed": 0,
                           "scale": 0.1, "evaluate": false, "out": "a.json"}'
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from works import LEARNING, SPEED, Work

SIDES = ("inchworm", "stable-baselines3")
PRESET = "cartpole"
"""The work that is no comparison: the CartPole-v1 preset as `make train` uses it."""
PRESET_STEPS = 60_000


def run_side(**job: Any) -> dict[str, Any]:
    """Run a job in a fresh process with one thread and return what it wrote."""
    out = Path(job["out"])
    out.parent.mkdir(parents=True, exist_ok=True)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), json.dumps({**job, "out": str(out.resolve())})],
        env={**os.environ, **threads},
        cwd=tempfile.gettempdir(),  # simulators leave logs where they run
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{job['side']} {job['work']} seed {job['seed']} failed:\n{done.stdout}{done.stderr}")
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result


def scaled(work: Work, scale: float) -> Work:
    """The work with a part of its steps, but at least two rollouts."""
    least = 2 * work.rollout_steps * work.num_envs
    return dataclasses.replace(work, total_timesteps=max(least, round(work.total_timesteps * scale)))


def train_preset(seed: int, scale: float) -> dict[str, Any]:
    """CartPole-v1 with its preset, in whole iterations within 60,000 steps, scored by its own final evaluation of 100 episodes."""
    from inchworm import PPOTrainer, config_for
    from inchworm_side import Curve

    config = config_for("CartPole-v1")
    batch = config.ppo.rollout_steps * config.env.num_envs
    steps = max(1, round(PRESET_STEPS * scale) // batch) * batch
    config = config.replace(
        run=config.run.replace(seed=seed, total_timesteps=min(steps, config.run.total_timesteps // batch * batch), device="cpu"),
        evaluation=config.evaluation.replace(final_episodes=100, deterministic=True),
    )
    curve = Curve()
    with PPOTrainer(config.policy, config.env, config, callbacks=[curve]) as trainer:
        trainer.train()
        last = trainer.state.evaluations[-1]
        seconds = sum(trainer.state.history["timing/seconds"])
        known = {"steps": trainer.total_timesteps, "seconds": seconds, "learn_seconds": curve.learn_seconds, "curve": curve.points}
    return {"side": "inchworm", "work": PRESET, "seed": seed, **known, "returns": last["returns"], "score": last["mean_return"]}


def train_work(side: str, group: str, name: str, seed: int, scale: float, evaluate: bool) -> dict[str, Any]:
    """One run of a side on a work of `works.py`."""
    work = scaled((SPEED if group == "speed" else LEARNING)[name], scale)
    if side == "inchworm":
        import inchworm_side

        return dict(inchworm_side.train(work, seed, evaluate=evaluate))
    import sb3_side

    return dict(sb3_side.train(work, seed, evaluate=evaluate))


def main() -> None:
    """Do the job that the first argument describes, and write its result whole or not at all."""
    job = json.loads(sys.argv[1])
    if job["work"] == PRESET:
        result = train_preset(job["seed"], job["scale"])
    else:
        result = train_work(job["side"], job["group"], job["work"], job["seed"], job["scale"], job["evaluate"])
    out = Path(job["out"])
    unfinished = out.with_suffix(".part")
    unfinished.write_text(json.dumps(result), encoding="utf-8")
    unfinished.rename(out)


if __name__ == "__main__":
    main()
