"""Simulators on a device: collecting in torch against the NumPy path and against rsl_rl's PPO, on the same tensor CartPole, in turns.

    python3.11 -m venv ENVS/rsl_rl && ENVS/rsl_rl/bin/pip install rsl-rl-lib==5.5.1 -e .
    python benchmarks/device_env.py --rsl-rl-python ENVS/rsl_rl/bin/python
    python benchmarks/device_env.py --repeats 1 --iterations 3        # a quick look without rsl_rl

Each run is a process of its own. The first two iterations are not timed. The ordinary NumPy path steps inchworm's CartPole-v1, all copies
together, and acts in NumPy; it is compared with the tensor CartPole with the same two actions. rsl_rl has no discrete actions, so it is
compared with one whose action is the force. All learn in torch. Steps per second are those of collecting, and of collecting and learning
together.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from statistics import median
from typing import Any

import jobs

sys.path.insert(0, str(Path(__file__).parents[1]))

DEVICE, PEER, HOST = "on the device", "rsl_rl", "the same simulator through NumPy arrays"
DISCRETE, NUMPY = "on the device, discrete", "CartPole-v1 on the NumPy path"
PAIRS = {DEVICE: (PEER, HOST), DISCRETE: (NUMPY,)}
"""What is compared with which."""


def train(settings: dict[str, Any], iterations: int, *, path: str = "device", compiled: bool = True, threads: int = 1) -> dict[str, Any]:
    """inchworm's side: the times of each iteration after the first two."""
    from device_work import Settings, make_env
    from examples.device_env import TensorCartPole
    from inchworm import PolicyConfig, PPOConfig, PPOTrainer, RunConfig, TrainingConfig

    own = Settings(**settings)
    ppo = PPOConfig(
        learning_rate=1e-3,
        rollout_steps=own.rollout_steps,
        update_epochs=own.update_epochs,
        num_minibatches=own.num_minibatches,
        vf_coef=2.0,  # half the squared error here, the whole there
        clip_vloss=True,
        max_grad_norm=1.0,
        gae_lambda=0.95,
        compile="on" if compiled else "off",
    )
    policy = PolicyConfig(hidden_sizes=own.hidden_sizes, activation=own.activation)
    config = TrainingConfig(policy=policy, ppo=ppo, run=RunConfig(threads=threads, backend="torch"))
    config = config.replace(evaluation=config.evaluation.replace(interval=0, final_episodes=0))

    env: Any = TensorCartPole(own.num_envs) if path == "discrete" else make_env(own)
    count = None
    if path == "numpy":
        env, count = "CartPole-v1", own.num_envs
    if path == "host":
        import inchworm.backends.torch.backend as backend

        backend.make_native_collector = lambda *_, **__: None  # type: ignore[assignment]
    with PPOTrainer(policy, env, config, num_envs=count) as trainer:
        history = trainer.train(total_timesteps=(iterations + 2) * own.num_envs * own.rollout_steps)
    columns = zip(history["timing/collect_seconds"], history["timing/learn_seconds"])
    rows = [{"collect": collect, "learn": learn} for collect, learn in columns]
    return {"rows": rows[2:], "mean_return": history["mean_reward"][-1]}


def measure(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """The seconds per iteration of every side, one entry per repeat."""
    from device_work import Settings

    settings = dataclasses.asdict(dataclasses.replace(Settings(), num_envs=options.num_envs))
    paths = {DEVICE: "device", HOST: "host", DISCRETE: "discrete", NUMPY: "numpy"}
    sides: dict[str, tuple[str, dict[str, Any], str]] = {
        name: ("device_env:train", {"path": path, "compiled": not options.eager}, sys.executable) for name, path in paths.items()
    }
    if options.rsl_rl_python is not None:
        sides[PEER] = ("rsl_rl_side:train", {}, str(options.rsl_rl_python.absolute()))
    else:
        print(f"without {PEER}: give --rsl-rl-python")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(options.repeats):
        for name, (call, arguments, python) in sides.items():
            job = {"settings": settings, "iterations": options.iterations, "threads": options.threads, **arguments}
            result = jobs.run(call, job, threads=options.threads, python=python)
            row = {part: median(each[part] for each in result["rows"]) for part in ("collect", "learn")}
            found[name].append({**row, "whole": row["collect"] + row["learn"]})
            print(f"{name}: {row['collect'] * 1e3:.1f} ms collecting, {row['learn'] * 1e3:.1f} ms learning", flush=True)
    return found


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rsl-rl-python", type=Path, help="interpreter of the environment that has rsl_rl")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="inchworm without ppo.compile=on")
    options = parser.parse_args()
    found = measure(options)
    steps = options.num_envs * 24
    for part in ("collect", "whole"):
        for ours, others in PAIRS.items():
            for name in (ours, *(other for other in others if other in found)):
                seconds = sorted(row[part] for row in found[name])
                ratios = sorted(row[part] / own[part] for row, own in zip(found[name], found[ours]))
                speed, spread = steps / median(seconds), f"{steps / seconds[-1]:,.0f} to {steps / seconds[0]:,.0f}"
                print(
                    f"{part}: {name} {speed:,.0f} steps/s ({spread}), {median(ratios):.2f}x the time ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                )


if __name__ == "__main__":
    main()
