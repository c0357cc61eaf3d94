"""The sides that train a work: inchworm in its four ways, its peers, and a C program as an estimate of what the machine can do.

`learning.py` compares scores and knows two sides, `SIDES`; `compare.py` compares speed and knows all of `SPEED_SIDES`.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import jobs
from works import SPEED, Work

SIDES = ("inchworm", "stable-baselines3")
PRESET = "cartpole"
"""The work that is not a comparison: the CartPole-v1 preset as `make train` uses it."""
PRESET_STEPS = 60_000

PEER = "stable-baselines3"
LIMIT = "c"
SPEED_SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "inchworm-numpy": ("inchworm_side:train", {"backend": "numpy"}),
    "inchworm-torch": ("inchworm_side:train", {"backend": "torch"}),
    "inchworm-compiled": ("inchworm_side:train", {"backend": "torch", "compile_step": "on"}),
    "inchworm-jax": ("inchworm_side:train", {"backend": "jax", "host": True}),
    PEER: ("sb3_side:train", {}),
    "sbx": ("sb3_side:train", {"package": "sbx"}),
    LIMIT: ("limit:train", {}),
}
"""Name -> the function that trains, and what it is given besides the work."""
_NEEDS = {PEER: ("stable_baselines3", "bench"), "sbx": ("sbx", "bench"), "inchworm-jax": ("jax", "jax")}
"""Side -> the package that it needs, and the extra that has it."""


def missing(side: str) -> str | None:
    """Why a side cannot run here, or None."""
    package, extra = _NEEDS.get(side, (None, None))
    if package is not None and importlib.util.find_spec(package) is None:
        return f"{package} is not installed; type: pip install -e '.[{extra}]'"
    if side == LIMIT and shutil.which("cc") is None:
        return "there is no C compiler; install one that answers to cc"
    return None


def train_speed(side: str, work: str, *, seed: int, scale: float, threads: int, environment: dict[str, str] | None = None) -> Any:
    """One timed run of a side on a work of `works.SPEED`, in a separate process, warmed up for two iterations."""
    call, extra = SPEED_SIDES[side]
    arguments = {"group": "speed", "name": work, "seed": seed, "scale": scale, "threads": threads, "warmup": 2, **extra}
    return jobs.run(call, arguments, threads=threads, environment=environment)


def run_side(*, side: str, group: str, work: str, seed: int, scale: float, evaluate: bool, out: Path) -> dict[str, Any]:
    """One run for the scores, in a separate process with one thread; the result is written whole or not at all."""
    call, arguments = "side:train_preset", {"seed": seed, "scale": scale}
    if work != PRESET:
        call = "inchworm_side:train" if side == "inchworm" else "sb3_side:train"
        arguments |= {"group": group, "name": work, "evaluate": evaluate}
        if side == "inchworm":
            arguments["backend"] = "numpy"  # the backends agree; this one is done sooner
    result: dict[str, Any] = {"side": side, "work": work, "seed": seed} | jobs.run(call, arguments)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_suffix(".part")
    unfinished.write_text(json.dumps(result), encoding="utf-8")
    unfinished.rename(out)
    return result


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
    return {**known, "returns": last["returns"], "score": last["mean_return"]}


def smallest(work: str) -> float:
    """The scale at which a work is its warm-up's length: two iterations."""
    chosen: Work = SPEED[work]
    return 2 * chosen.batch / chosen.total_timesteps
