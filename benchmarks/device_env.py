"""Simulators on a device: collecting in torch against the NumPy path, and training against rsl_rl's PPO, in turns.

    python3.11 -m venv ENVS/rsl_rl && ENVS/rsl_rl/bin/pip install torch==2.13.0 rsl-rl-lib==5.5.1 -e .
    python benchmarks/device_env.py --rsl-rl-python ENVS/rsl_rl/bin/python
    python benchmarks/device_env.py --repeats 1 --iterations 3 --dry       # a quick look without rsl_rl; keeps nothing

Each run is a process of its own, and its first two rollouts or iterations are not timed. Collecting is compared on CartPole with two
actions: a tensor simulator, the same one through NumPy arrays, and inchworm's CartPole-v1 on the ordinary NumPy path, which steps all
copies together. All act with the same weights: those of an untrained policy, then those of a trained one. rsl_rl has no discrete actions,
so training is compared on a tensor CartPole whose action is the force.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import jobs
import results
from figures import Section, Target, median_range, table

sys.path.insert(0, str(Path(__file__).parents[1]))

DEVICE, HOST, NUMPY = "tensors", "the same simulator through NumPy arrays", "CartPole-v1 on the NumPy path"
PATHS = {DEVICE: "device", HOST: "host", NUMPY: "numpy"}
COMPILED, EAGER, PEER = "inchworm, ppo.compile=on", "inchworm, ppo.compile=off", "rsl_rl"
POLICIES = ("untrained", "trained")
WARM_UP = 2
"""Rollouts or iterations of each side that are not timed."""


def make_trainer(settings: dict[str, Any], env: Any, *, compiled: bool = False, threads: int = 1, copies: int | None = None) -> Any:
    """inchworm's side with the settings of all."""
    from device_work import Settings
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
    return PPOTrainer(policy, env, config, num_envs=copies)


def train(settings: dict[str, Any], iterations: int, *, compiled: bool, threads: int = 1) -> dict[str, Any]:
    """The times of each iteration after the first ones, on the work that rsl_rl does."""
    from device_work import Settings, make_env

    own = Settings(**settings)
    with make_trainer(settings, make_env(own), compiled=compiled, threads=threads) as trainer:
        history = trainer.train(total_timesteps=(iterations + WARM_UP) * own.num_envs * own.rollout_steps)
    rows = [{"collect": c, "learn": u} for c, u in zip(history["timing/collect_seconds"], history["timing/learn_seconds"])]
    return {"rows": rows[WARM_UP:]}


def save_trained(settings: dict[str, Any], iterations: int, path: str, *, threads: int = 1) -> None:
    """Save the weights of a policy that balances the pole for some time."""
    from device_work import Settings
    from examples.device_env import TensorCartPole

    own = Settings(**settings)
    with make_trainer(settings, TensorCartPole(own.num_envs), threads=threads) as trainer:
        trainer.train(total_timesteps=iterations * own.num_envs * own.rollout_steps)
        np.savez(path, **trainer.policy.get_weights())


def collect(settings: dict[str, Any], path: str, rollouts: int, weights: str, *, threads: int = 1) -> dict[str, Any]:
    """The seconds of a rollout and the episodes that end in it, of the untrained policy and of the one with saved weights."""
    from device_work import Settings
    from examples.device_env import TensorCartPole

    own = Settings(**settings)
    if path == "host":
        import inchworm.backends.torch.backend as backend

        backend.make_native_collector = lambda *_, **__: None  # type: ignore[assignment]
    env, copies = ("CartPole-v1", own.num_envs) if path == "numpy" else (TensorCartPole(own.num_envs), None)
    found: dict[str, Any] = {}
    with make_trainer(settings, env, threads=threads, copies=copies) as trainer:
        for name in POLICIES:
            if name == "trained":
                trainer.policy.set_weights(np.load(weights))
            seconds, ended = [], []
            for _ in range(WARM_UP + rollouts):
                began = time.perf_counter()
                rollout = trainer.collector.collect(own.rollout_steps)
                seconds.append(time.perf_counter() - began)
                ended.append(len(rollout.episodes))
            found[name] = {"seconds": median(seconds[WARM_UP:]), "episodes": median(ended[WARM_UP:])}
    return found


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Every side, one entry per repeat."""
    from device_work import Settings

    own = dataclasses.replace(Settings(), num_envs=options.num_envs)
    shared = {"settings": dataclasses.asdict(own), "threads": options.threads}
    weights = str(scratch / "trained.npz")
    jobs.run("device_env:save_trained", {**shared, "iterations": options.trained_for, "path": weights}, threads=options.threads)
    trainings: dict[str, tuple[str, dict[str, Any], str]] = {
        name: ("device_env:train", {"compiled": name == COMPILED}, sys.executable) for name in (COMPILED, EAGER)
    }
    if options.rsl_rl_python is not None:
        trainings[PEER] = ("rsl_rl_side:train", {}, str(options.rsl_rl_python.absolute()))
    else:
        print(f"without {PEER}: give --rsl-rl-python")
    collecting: dict[str, list[dict[str, Any]]] = {name: [] for name in PATHS}
    training: dict[str, list[dict[str, float]]] = {name: [] for name in trainings}
    version = None
    for repeat in range(options.repeats):
        for name, path in PATHS.items():
            job = {**shared, "path": path, "rollouts": options.rollouts, "weights": weights}
            collecting[name].append(jobs.run("device_env:collect", job, threads=options.threads))
            print(repeat, name, collecting[name][-1], flush=True)
        for name, (call, arguments, python) in trainings.items():
            job = {**shared, "iterations": options.iterations, **arguments}
            result = jobs.run(call, job, threads=options.threads, python=python)
            version = result.get("version", version)
            row = {part: median(each[part] for each in result["rows"]) for part in ("collect", "learn")}
            training[name].append({**row, "whole": row["collect"] + row["learn"]})
            print(repeat, name, training[name][-1], flush=True)
    kept = {name: getattr(options, name) for name in ("repeats", "threads", "trained_for")}
    facts = {"settings": shared["settings"], "load": os.getloadavg()[0], "rsl_rl": version}
    return {**kept, **facts, "collecting": collecting, "training": training}


def section(data: dict[str, Any]) -> Section:
    """The page's section."""
    own, collecting, training = data["settings"], data["collecting"], data["training"]
    steps = own["num_envs"] * own["rollout_steps"]
    network = f"{'x'.join(map(str, own['hidden_sizes']))} ({own['activation']})"
    lines = [
        f"{own['num_envs']:,} copies of CartPole on the CPU, {own['rollout_steps']} steps a rollout, a dense network {network},",
        f"{data['threads']} thread, {data['repeats']} repeats in turns with a load of {data['load']:.1f} on the machine at the end.",
        "Median and range, ratios within each repeat.",
        "",
        "Collecting with the same weights on each side. The NumPy path begins each episode with Gymnasium's bits, one at a time, so the",
        "ratio depends on how many episodes end. Where few do, the network takes most of the time of each side, and costs all the same.",
        f"The trained policy is that of {data['trained_for']} iterations. The target is held against CartPole-v1 on the NumPy path, which",
        "is what there is for this task without a tensor simulator; the second row shares the simulator and differs in collecting only.",
        "",
    ]
    rows, targets = [], []
    for policy in POLICIES:
        for name, found in collecting.items():
            seconds = [one[policy]["seconds"] for one in found]
            ratios = [each / mine[policy]["seconds"] for each, mine in zip(seconds, collecting[DEVICE], strict=True)]
            length = steps / max(1, median(one[policy]["episodes"] for one in found))
            speeds = median_range([steps / each / 1e6 for each in seconds], ".2f")
            rows.append([policy, name, f"{length:.0f}", speeds, median_range(ratios, ".2f")])
            if name == NUMPY:
                what = f"collecting tensors with the {policy} policy, as fast as the NumPy path"
                targets.append(Target(what, median(ratios), 3.0))
    lines += table(["policy", "side", "steps per episode", "million steps per second", "its time / that of tensors"], rows)
    lines += [
        f"Training on the tensor CartPole whose action is the force, {own['update_epochs']} epochs of {own['num_minibatches']}",
        f"minibatches, with the same settings. rsl_rl {data['rsl_rl'] or '(not measured)'} computes the values while it collects.",
        "",
    ]
    rows = []
    for name, found in training.items():
        times = [median_range([1e3 * one[part] for one in found], ".1f") for part in ("collect", "learn", "whole")]
        ratios = [one["whole"] / other["whole"] for one, other in zip(found, training.get(PEER, ()))]
        rows.append([name, *times, median_range(ratios, ".2f")])
        if name != PEER:
            targets.append(Target(f"an iteration of {name}, of rsl_rl's time", median(ratios) if ratios else None, 1.0, at_least=False))
    lines += table(["side", "collect, ms", "learn, ms", "both, ms", "both / rsl_rl"], rows)
    return Section("Simulators on a device", lines, targets)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rsl-rl-python", type=Path, help="interpreter of the environment that has rsl_rl")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=10, help="timed iterations of training")
    parser.add_argument("--rollouts", type=int, default=10, help="timed rollouts of collecting")
    parser.add_argument("--trained-for", type=int, default=20, help="iterations of the trained policy")
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dry", action="store_true", help="keep nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data = measure(options, Path(scratch))
    print("\n".join(section(data).lines))
    if not options.dry:
        results.save("device_env", data)


if __name__ == "__main__":
    main()
