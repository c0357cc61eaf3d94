"""Trainings that one process and several ranks must end with the same weights; run by each rank as `python -m doubles.ranks DIRECTORY`."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from inchworm import EnvConfig, PolicyConfig, PPOConfig, PPOTrainer, RunConfig, TrainingConfig
from inchworm.cli.main import main
from inchworm.core.errors import BadNumberError

PPO = PPOConfig(rollout_steps=12, num_minibatches=3, update_epochs=2, learning_rate=3e-3)
SKIRMISH = {"max_steps": 20, "reward_kill": 2.0}


def entropy_bonus(entropy: Any) -> Any:
    """A custom loss."""
    return -0.1 * entropy.mean()


def make_config(env: str, policy: PolicyConfig, ppo: PPOConfig, num_envs: int, **env_options: Any) -> TrainingConfig:
    run = RunConfig(seed=5, backend="torch", total_timesteps=10_000, rank_timeout=60)
    return TrainingConfig(env=EnvConfig(id=env, num_envs=num_envs, **env_options), policy=policy, ppo=ppo, run=run)


MIXED = PolicyConfig(kind="lstm", hidden_sizes=(8,), memory_size=8, normalize_observations=True, normalize_values=True)
NORMALIZED = PolicyConfig(hidden_sizes=(16,), normalize_observations=True, normalize_values=True)
CASES: dict[str, tuple[TrainingConfig, int, tuple[Callable[..., Any], ...]]] = {
    "uneven lanes": (make_config("CartPole-v1", PolicyConfig(hidden_sizes=(16,)), PPO, 5), 1, ()),
    "normalisers": (make_config("CartPole-v1", NORMALIZED, replace(PPO, normalize_advantages="minibatch", scale_rewards=True), 6), 3, ()),
    "memory, masks, hybrid actions": (
        make_config(
            "inchworm.worlds.toys:MixedMemoryCorridor",
            MIXED,
            replace(PPO, sequence_length=4, gradient_accumulation=2),
            4,
            kwargs={"length": 3},
        ),
        2,
        (entropy_bonus,),
    ),
    "agents that die, central critic": (
        make_config("Skirmish-v0", replace(NORMALIZED, central_critic=True), replace(PPO, rollout_steps=24), 2, kwargs=SKIRMISH),
        2,
        (),
    ),
    "more minibatches than sequences": (
        make_config("CartPole-v1", PolicyConfig(kind="gru", memory_size=8), replace(PPO, sequence_length=12, num_minibatches=4), 4),
        1,
        (),
    ),
    "stopped by the KL, SGD": (
        make_config(
            "CartPole-v1",
            PolicyConfig(hidden_sizes=(8,)),
            replace(PPO, target_kl=1e-4, update_epochs=9, optimizer="sgd", learning_rate=2.0, learning_rate_schedule="linear"),
            4,
        ),
        2,
        (),
    ),
}
"""A config, the number of updates, and custom losses."""


def run_case(name: str) -> tuple[dict[str, np.ndarray], dict[str, float], PPOTrainer]:
    """Train; return the weights, the metrics of the last iteration, and the trainer."""
    config, updates, losses = CASES[name]
    config = config.replace(run=config.run.replace(max_iterations=updates))
    with PPOTrainer(config.policy, config.env, config) as trainer:
        history = trainer.train(custom_loss_fns=losses)
    metrics = {key: values[-1] for key, values in history.items() if values and not key.startswith("timing/")}
    return trainer.policy.get_weights(), metrics, trainer


def resumed_weights(directory: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The weights of a run of four iterations, and of one that is stopped after two and resumed."""
    config = CASES["normalisers"][0]
    found = []
    for name, stops in (("straight", [4]), ("resumed", [2, 4])):
        for stop in stops:
            own = config.replace(run=config.run.replace(max_iterations=stop))
            with PPOTrainer(own.policy, own.env, own, run_dir=directory / name) as trainer:
                if stop != stops[0]:
                    trainer.load_checkpoint()
                trainer.train()
        found.append(trainer.policy.get_weights())
    return found[0], found[1]


def poisoned(values: Any) -> Any:
    """A custom loss that is not a number on the last rank alone."""
    return values.mean() * (float("nan") if os.environ["RANK"] == "1" else 1.0)


def bad_number() -> str:
    """The error of a loss that is not finite on one rank."""
    config = CASES["uneven lanes"][0]
    with PPOTrainer(config.policy, config.env, config) as trainer:
        try:
            trainer.learn(trainer.collect_rollouts(), [poisoned])
        except BadNumberError as error:
            return str(error)
    return ""


def record(directory: Path) -> None:
    """What a rank does in the test."""
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {}
    for name in CASES:
        weights, metrics, trainer = run_case(name)
        np.savez(directory / f"{name} {rank}.npz", **weights)
        found[name] = {"metrics": metrics, "is_main": trainer.is_main, "lanes": trainer.env.num_lanes, "steps": trainer.total_timesteps}
    straight, resumed = resumed_weights(directory)
    found["resumed"] = all(np.array_equal(straight[name], resumed[name]) for name in straight)
    found["bad_number"] = bad_number()
    small = [
        "--run.directory",
        str(directory / "runs"),
        "--run.name",
        "typed",
        "--total-timesteps",
        "1024",
        "--evaluation.final-episodes",
        "1",
    ]
    found["exit_code"] = main(["train", "CartPole-v1", *small, "--run.report", "false", "--quiet"])
    found["refused"] = main(["train", "CartPole-v1", "--backend", "numpy", *small, "--run.name", "refused"])
    die_after_two_updates(directory)  # the run that has stopped before
    (directory / f"found {rank}.json").write_text(json.dumps(found))


def die_after_two_updates(directory: Path) -> None:
    """Train in `directory/killed`; rank 1 ends, as if killed, when it begins its third update, unless the run is resumed."""
    config = CASES["uneven lanes"][0]
    config = config.replace(run=config.run.replace(max_iterations=4, checkpoint_interval=1))
    with PPOTrainer(config.policy, config.env, config, run_dir=directory / "killed") as trainer:
        if (directory / "killed" / "checkpoints").exists():
            trainer.load_checkpoint()
        elif not trainer.is_main:
            update, calls = trainer.learner.update, []

            def dying(*arguments: Any) -> Any:
                calls.append(1)
                if len(calls) == 3:
                    os._exit(9)
                return update(*arguments)

            trainer.learner.update = dying  # type: ignore[method-assign]
        trainer.train()


if __name__ == "__main__":
    {"record": record, "die": die_after_two_updates}[sys.argv[1]](Path(sys.argv[2]))
