"""Adaptation to tasks that were not trained: by a task encoder, and by memory in trials (RL²), beside the same policies without context.

    python benchmarks/meta.py                  # 5 seeds of each; kept
    python benchmarks/meta.py --worlds point   # one of them; kept beside the others that are kept
    python benchmarks/meta.py --seeds 1        # a quick look; nothing is kept

The score is the mean return over the held-out tasks after one episode of adaptation; that of a policy without context is its return in any
episode. Each run is a separate process with one thread. The interval is that of the mean over seeds (95 %, Student's t).
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jobs
import results
from figures import Section, Target, table
from seeds import half_interval

SEEDS, EPISODES = 5, 3
STEPS = {"point": 300_000, "cartpole": 120_000, "trials": 350_000}
"""Env steps of each training, with and without context."""
MARGINS = {"point": 10.0, "cartpole": 30.0, "trials": 1.0}
"""By how much the return after one episode must be above that of the same policy without context."""
NAMES = {"point": "goals in a plane, task encoder", "cartpole": "CartPole physics, task encoder", "trials": "goals in a plane, RL²"}


def train(world: str, context: bool, seed: int, steps: int | None = None) -> dict[str, Any]:
    """One training: seconds, and the mean return on the held-out tasks after 0, 1, … episodes."""
    start, call = time.perf_counter(), with_memory if world == "trials" else with_encoder
    means = call(world, context, seed, steps or STEPS[world])
    return {"seconds": time.perf_counter() - start, "means": means}


def with_encoder(world: str, context: bool, seed: int, steps: int) -> list[float]:
    """`MetaLearningPPOTrainer`, whose encoder is never given anything without `context`."""
    from inchworm import MetaLearningPPOTrainer, PolicyConfig, PPOConfig
    from inchworm.worlds.tasks import PhysicsCartPole, PointWorld, cartpole_tasks, point_goals

    env, tasks, length, gamma, entropy = {
        "point": (PointWorld, point_goals(), PointWorld.STEPS, 0.9, 0.03),
        "cartpole": (PhysicsCartPole, cartpole_tasks(), 100, 0.98, 0.01),
    }[world]
    # The entropy bonus keeps the first episode exploring, which is all that later ones know of the task.
    config = PPOConfig(
        learning_rate=3e-3, learning_rate_schedule="linear", rollout_steps=length, num_minibatches=4, update_epochs=6, ent_coef=entropy,
        gamma=gamma, scale_rewards=True,
    )  # fmt: skip
    policy = PolicyConfig(hidden_sizes=(64, 64), log_std_init=-0.5)
    with MetaLearningPPOTrainer(
        policy, env, config, tasks=tasks, adaptations=EPISODES - 1, num_envs=32, num_workers=0, seed=seed, device="cpu", use_context=context
    ) as trainer:
        trainer.train(total_timesteps=steps)
        return trainer.evaluate_adaptation(episodes=EPISODES - 1).means


def with_memory(world: str, context: bool, seed: int, steps: int) -> list[float]:
    """A GRU in trials of three episodes, and without context in trials of one, in which nothing is remembered from another episode."""
    from inchworm import PolicyConfig, PPOConfig, PPOTrainer, TrialEnv, evaluate_adaptation
    from inchworm.worlds.tasks import PointWorld, point_goals

    del world
    count, tasks = EPISODES if context else 1, point_goals()
    length = count * PointWorld.STEPS

    def make() -> TrialEnv:
        return TrialEnv(PointWorld(), count, tasks)

    rollout = EPISODES * PointWorld.STEPS
    config = PPOConfig(
        learning_rate=3e-3, learning_rate_schedule="linear", rollout_steps=rollout, sequence_length=length, num_minibatches=4,
        ent_coef=0.003, gamma=0.9, gae_lambda=0.9,
    )  # fmt: skip
    policy = PolicyConfig(kind="gru", hidden_sizes=(64,), memory_size=64, log_std_init=-0.5, normalize_values=True)
    with PPOTrainer(policy, make, config, num_envs=32, num_workers=0, seed=seed, device="cpu") as trainer:
        trainer.train(total_timesteps=steps)
        return evaluate_adaptation(trainer.policy, make, tasks.held_out(), count - 1, steps=length).means


def scores(runs: list[dict[str, Any]], world: str, context: bool) -> list[float]:
    """The score of each seed: the return after one episode, or without context."""
    return [run["means"][1 if context else 0] for run in runs if run["world"] == world and run["context"] == context]


def section(data: dict[str, Any]) -> Section:
    """The page's section."""
    rows, targets = [], []
    for world in [each for each in NAMES if scores(data["runs"], each, True) and scores(data["runs"], each, False)]:
        own, other = (scores(data["runs"], world, context) for context in (True, False))
        means = [sum(values) / len(values) for values in (own, other)]
        halves = [half_interval(values) if len(values) > 1 else float("nan") for values in (own, other)]
        curves = [run["means"] for run in data["runs"] if run["world"] == world and run["context"]]
        curve = ", ".join(f"{sum(values) / len(values):.2f}" for values in zip(*curves))
        cells = [f"{mean:.2f} ± {half:.2f}" for mean, half in zip(means, halves)]
        rows.append([NAMES[world], str(len(own)), curve, *cells])
        targets.append(Target(f"{NAMES[world]}: return above the policy without context", means[0] - means[1], MARGINS[world], unit=""))
        gap = means[0] - halves[0] - means[1] - halves[1]
        targets.append(Target(f"{NAMES[world]}: gap between the 95 % intervals", gap, 0.0, unit=""))
    lines = [
        "Return on held-out tasks, mean over seeds and half of its 95 % interval. Without context: the same policy and env steps, and the",
        "encoder is never given a trajectory, or a trial is a single episode, within which a policy with memory still adapts. The physics",
        "are length, cart mass and force. About half of the motors are reversed, which is all that a policy must know to balance the pole.",
        "",
        *table(["tasks", "seeds", "after 0, 1, 2 episodes", "after 1 episode", "without context"], rows),
    ]
    return Section("Adaptation to held-out tasks", lines, targets)


def main() -> None:
    """Train all, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--worlds", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    options = parser.parse_args()

    def measure(given: dict[str, Any]) -> dict[str, Any]:
        run = {**given, **jobs.run("meta:train", given)}
        print(run, flush=True)
        return run

    wanted = [
        {"world": world, "context": context, "seed": seed}
        for seed in range(options.seeds)
        for world in options.worlds
        for context in (True, False)
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = list(pool.map(measure, wanted))
    if options.seeds >= SEEDS:
        kept = results.load("meta")
        runs += [] if kept is None else [run for run in kept["data"]["runs"] if run["world"] not in options.worlds]
        results.save("meta", {"runs": runs})
    shown = section({"runs": runs})
    print("\n".join([*shown.lines, *(target.row() for target in shown.targets)]))


if __name__ == "__main__":
    main()
