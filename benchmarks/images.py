"""Image observations: Breakout through the usual preprocessing and the usual CNN, collecting and learning timed apart.

    python benchmarks/images.py                                           # 3 repeats of every setting
    python benchmarks/images.py --repeats 1 --settings "1 thread" --steps 16  # a quick look; nothing is kept

Both sides step the very same 8 environments, inchworm's `make_env`, and each gets its best setting: 1 or 2 threads with all environments in
its own process (Stable-Baselines3's `DummyVecEnv`), or 2 threads with the environments spread over processes (inchworm: one worker and its
own process, as `num_workers: auto` chooses on 2 cores; Stable-Baselines3: `SubprocVecEnv`). Both have the same network: convolutions of 32,
64 and 64 channels and a layer of 512, shared by actor and critic. A reset costs both about the same: inchworm's are seeded, but load
the game no more often than those without a seed (`env/atari.py`).
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import jobs
import results
from figures import Section, Target, median_range, table

ENVS, MINIBATCH, EPOCHS = 8, 256, 4
SIDES = {"inchworm": "images:ours", "stable-baselines3": "images:theirs"}
PARTS = ("collect", "learn", "whole")
SETTINGS = {"1 thread": (1, False), "2 threads": (2, False), "2 threads, processes": (2, True)}
"""Threads of the framework, and whether the environments are spread over processes."""

Figures = dict[str, float]


def world(*, spread: bool = False) -> Any:
    """84x84 grey frames, the last four of them, as bytes [4, 84, 84]."""
    from inchworm import EnvConfig

    return EnvConfig(id="ALE/Breakout-v5", num_envs=ENVS, num_workers=int(spread), help_workers=spread, atari=True, frame_stack=4)


def ours(seed: int, threads: int, spread: bool, steps: int, iterations: int) -> list[Figures]:
    """Seconds of each iteration's parts, after one of warm-up."""
    from inchworm import EvalConfig, PolicyConfig, PPOConfig, PPOTrainer, RunConfig, TrainingConfig

    ppo = PPOConfig(
        learning_rate=2.5e-4, clip_coef=0.1, vf_coef=1.0, rollout_steps=steps, minibatch_size=MINIBATCH, update_epochs=EPOCHS
    )  # fmt: skip
    config = TrainingConfig(
        env=world(spread=spread),
        policy=PolicyConfig(kind="cnn", hidden_sizes=()),
        ppo=ppo.replace(normalize_advantages="minibatch"),
        evaluation=EvalConfig(interval=0, final_episodes=0),
        run=RunConfig(seed=seed, threads=threads, device="cpu", total_timesteps=(iterations + 1) * steps * ENVS),
    )
    with PPOTrainer(config.policy, config.env, config) as trainer:
        history = trainer.train()
    collect, learn = history["timing/collect_seconds"][1:], history["timing/learn_seconds"][1:]
    return [{"collect": a, "learn": b, "whole": a + b} for a, b in zip(collect, learn)]


def theirs(seed: int, threads: int, spread: bool, steps: int, iterations: int) -> list[Figures]:
    """The same with Stable-Baselines3."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    from inchworm.env.make import make_env

    torch.set_num_threads(threads)
    env = (SubprocVecEnv if spread else DummyVecEnv)([lambda: make_env(world())] * ENVS)
    env.seed(seed)
    model: Any = PPO(
        "CnnPolicy", env, learning_rate=2.5e-4, clip_range=0.1, ent_coef=0.01, vf_coef=0.5, n_steps=steps, batch_size=MINIBATCH,
        n_epochs=EPOCHS, seed=seed, device="cpu",
    )  # fmt: skip
    clock = _make_clock()
    model.learn((iterations + 1) * steps * ENVS, callback=clock)
    env.close()
    return clock.iterations[1:]


def _make_clock() -> Any:
    from stable_baselines3.common.callbacks import BaseCallback

    class Clock(BaseCallback):
        """Notes when rollouts begin and end; learning lies between."""

        def __init__(self) -> None:
            super().__init__()
            self.iterations: list[Figures] = []
            self.began = self.collected = 0.0

        def _close(self) -> None:
            if self.collected:
                collect, learn = self.collected - self.began, time.perf_counter() - self.collected
                self.iterations.append({"collect": collect, "learn": learn, "whole": collect + learn})

        def _on_rollout_start(self) -> None:
            self._close()
            self.began = time.perf_counter()

        def _on_rollout_end(self) -> None:
            self.collected = time.perf_counter()

        def _on_training_end(self) -> None:
            self._close()

        def _on_step(self) -> bool:
            return True

    return Clock()


def main() -> None:
    """Measure in turns, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--steps", type=int, default=128, help="steps of a rollout")
    parser.add_argument("--iterations", type=int, default=2)
    options = parser.parse_args()
    runs: dict[str, dict[str, list[Figures]]] = {side: {setting: [] for setting in options.settings} for side in SIDES}
    for repeat in range(options.repeats):
        for setting in options.settings:
            threads, spread = SETTINGS[setting]
            for side in list(SIDES)[:: 1 if repeat % 2 == 0 else -1]:
                arguments = {"seed": repeat, "threads": threads, "spread": spread, "steps": options.steps, "iterations": options.iterations}
                parts = jobs.run(SIDES[side], arguments, threads=threads)
                runs[side][setting].append({part: median(one[part] for one in parts) for part in PARTS})
                print(f"{side}, {setting}, repeat {repeat}: {runs[side][setting][-1]}", flush=True)
    data = {"steps": options.steps * ENVS, "runs": runs}
    for target in section(data).targets:
        print(target.row())
    if options.steps == 128 and options.repeats >= 3:
        results.save("images", data)


def best_setting(settings: dict[str, list[Figures]]) -> str:
    """The setting with the shortest iteration."""
    return min(settings, key=lambda setting: median(run["whole"] for run in settings[setting]))


def part_ratios(data: dict[str, Any], part: str) -> list[float]:
    """How many times as fast as the peer, repeat by repeat, each with its best setting."""
    mine, peer = (data["runs"][side][best_setting(data["runs"][side])] for side in SIDES)
    return [theirs[part] / ours[part] for ours, theirs in zip(mine, peer, strict=True)]


def section(data: dict[str, Any]) -> Section:
    """The page's section."""
    rows = []
    for side, settings in data["runs"].items():
        for setting, runs in settings.items():
            mark = " (best)" if setting == best_setting(settings) else ""
            rows.append([side, f"{setting}{mark}", *(median_range([data["steps"] / run[part] for run in runs], ",.0f") for part in PARTS)])
    rows.append(["ratio", "best of each", *(median_range(part_ratios(data, part), ".2f") for part in PARTS)])
    lines = [
        f"Breakout (84×84×4 bytes), {ENVS} environments, {data['steps']:,} steps an iteration,",
        f"minibatches of {MINIBATCH}, {EPOCHS} epochs; the same environments and the same network on both sides.",
        "Env steps per second of each part:",
        "",
        *table(["side", "setting", *PARTS], rows),
        "inchworm runs the critic while learning, Stable-Baselines3 while collecting.",
        "",
    ]
    bounds = {"collect": 1.3, "learn": 1.0}
    found = [
        Target(f"Breakout, {part} against Stable-Baselines3", median(part_ratios(data, part)), bound) for part, bound in bounds.items()
    ]
    return Section("Images", lines, found)


if __name__ == "__main__":
    main()
