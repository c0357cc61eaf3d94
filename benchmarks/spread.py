"""Does a team learn? PettingZoo's MPE2 `simple_spread_v3`: three agents that must cover three landmarks and keep out of each other's way.

    python benchmarks/spread.py                       # 3 seeds; kept
    python benchmarks/spread.py --seeds 1 --steps 100000 --keep no

One network for all agents (shared parameters, each agent sees only its own observation), `local_ratio` 0.5, 25 steps an episode. What is
compared is the team's return, the sum over the three agents, of the trained policy (greedy) and of uniformly random actions, over the
same 100 seeded episodes for each training seed. The stated margin is the lower end of the 95 % interval of the difference.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import results
from figures import Section, Target, table
from inchworm import EnvConfig, EvalConfig, PolicyConfig, PolicyEvaluator, PPOConfig, PPOTrainer, RunConfig, TrainingConfig
from inchworm.core.types import PolicyStep
from seeds import half_interval

ENV = EnvConfig(id="mpe2.simple_spread_v3:parallel_env", num_envs=32, kwargs={"N": 3, "local_ratio": 0.5, "max_cycles": 25})
EPISODES = 100
COMPARED = ("trained", "random", "difference")
MARGIN = 20.0
"""By so much the team's return of the trained policy must exceed that of random actions, at the lower end of the interval."""


def config_of(seed: int, steps: int) -> TrainingConfig:
    """The whole run: with the versions of the libraries, all that decides its result."""
    return TrainingConfig(
        env=ENV,
        policy=PolicyConfig(hidden_sizes=(64, 64), normalize_observations=True, normalize_values=True),
        ppo=PPOConfig(
            learning_rate=1e-3,
            learning_rate_schedule="linear",
            gamma=0.95,
            gae_lambda=0.95,
            ent_coef=0.01,
            update_epochs=10,
            rollout_steps=50,
            num_minibatches=4,
        ),
        evaluation=EvalConfig(interval=0, final_episodes=0),
        run=RunConfig(seed=seed, total_timesteps=steps),
    )


class Random:
    """Uniform actions."""

    def initial_state(self, num_lanes: int) -> tuple[()]:
        """No memory."""
        del num_lanes
        return ()

    def act(
        self, observations: Any, state: Any, episode_starts: Any, rng: np.random.Generator, *, deterministic: bool = False
    ) -> PolicyStep:
        """One of the five moves each."""
        del state, episode_starts, deterministic
        actions = rng.integers(0, 5, len(observations))
        return PolicyStep(actions, actions, np.full(len(actions), -np.log(5.0), np.float32), ())


def team_returns(policy: Any, seed: int) -> np.ndarray:
    """The team's returns of the episodes that belong to a training seed."""
    config = EvalConfig(episodes=EPISODES, num_envs=20, seed=20_000 + seed)
    with PolicyEvaluator(ENV, config) as evaluator:
        return np.array(evaluator.evaluate(policy).returns)


def one_seed(seed: int, steps: int) -> dict[str, Any]:
    """Train, and play the same episodes with the trained policy and with random actions."""
    began = time.perf_counter()
    with PPOTrainer("mlp", ENV, config_of(seed, steps)) as trainer:
        trainer.train()
        seconds, taken = time.perf_counter() - began, trainer.total_timesteps
        trained = team_returns(trainer.policy, seed)
    random = team_returns(Random(), seed)
    return {
        "seed": seed,
        "env_steps": taken,
        "seconds": round(seconds, 1),
        "trained": interval(trained),
        "random": interval(random),
        "difference": interval(trained - random),  # of the same episodes
    }


def interval(values: np.ndarray) -> dict[str, float]:
    """Mean and half width of its 95 % interval."""
    return {"mean": round(float(values.mean()), 2), "half_width": round(half_interval(values.tolist()), 2)}


def in_words(entry: dict[str, Any]) -> str:
    """One seed in a line."""
    parts = (f"{name} {entry[name]['mean']:.1f} ± {entry[name]['half_width']:.1f}" for name in COMPARED)
    return f"seed {entry['seed']}: {', '.join(parts)}; {entry['env_steps']} agent steps in {entry['seconds']:.0f} s"


def section(data: dict[str, Any]) -> Section:
    """The page's section."""
    rows = [
        [str(entry["seed"]), f"{entry['env_steps']:,}", f"{entry['seconds'] / 60:.1f}", *(_mean(entry[name]) for name in COMPARED)]
        for entry in data["seeds"]
    ]
    lines = [
        "MPE2's `simple_spread_v3`: three agents with shared parameters cover three landmarks. The team's return (the sum over its agents)",
        f"of the trained policy and of random actions, and their difference over the same {EPISODES} episodes, with 95 % intervals:",
        "",
        *table(["seed", "env steps", "minutes", *COMPARED], rows),
    ]
    least = min(entry["difference"]["mean"] - entry["difference"]["half_width"] for entry in data["seeds"])
    return Section(
        "Many agents: simple_spread", lines, [Target("simple_spread_v3, team's return above random, lower end", least, MARGIN, unit="")]
    )


def _mean(found: dict[str, float]) -> str:
    return f"{found['mean']:.1f} ± {found['half_width']:.1f}"


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600_000)
    parser.add_argument("--keep", choices=("yes", "no"), default="yes")
    options = parser.parse_args()
    entries = []
    for seed in range(options.seeds):
        entries.append(one_seed(seed, options.steps))
        print(in_words(entries[-1]), flush=True)
    least = min(entry["difference"]["mean"] - entry["difference"]["half_width"] for entry in entries)
    print(f"least lower end of the difference: {least:.1f}; stated margin: {MARGIN:.1f}; {'reached' if least >= MARGIN else 'NOT reached'}")
    if options.keep == "yes":
        results.save("spread", {"seeds": entries})


if __name__ == "__main__":
    main()
