"""Short trainings that are made sick on purpose, one for each rule of the doctor, and healthy ones; on any environment with one agent."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from inchworm.analysis.runs import RunRecord, read_run
from inchworm.config.sections import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.train.trainer import PPOTrainer

PPO = PPOConfig(rollout_steps=64, minibatch_size=64, learning_rate=1e-3, update_epochs=8, ent_coef=0.0, vf_coef=1.0, gamma=0.98)
ITERATIONS = 24
RECURRENT = {"kind": "gru", "memory_size": 8, "normalize_values": True}
LONG = {"sequence_length": 8, "minibatch_size": 128, "update_epochs": 4}
Wrap = Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]


class AllTruncated(gym.Wrapper[Any, Any, Any, Any]):
    """Reports every end as a truncation, as wrappers of the old API do."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, False, terminated or truncated, info


class OneAction(gym.Wrapper[Any, Any, Any, Any]):
    """Masks all actions but the first."""

    def action_masks(self) -> np.ndarray:
        return np.arange(int(self.action_space.n)) == 0  # type: ignore[attr-defined]


class TwoActions(gym.Wrapper[Any, Any, Any, Any]):
    """Masks one action in every third step: a healthy mask."""

    steps = 0

    def action_masks(self) -> np.ndarray:
        self.steps += 1
        return np.arange(int(self.action_space.n)) != (0 if self.steps % 3 == 0 else -1)  # type: ignore[attr-defined]


class Endless(gym.Env[Any, Any]):
    """Never ends; the reward is 1 where the action is the sign that is shown."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.sign = 1.0
        return np.array([self.sign], np.float32), {}

    def step(self, action: Any) -> Any:
        reward = float((self.sign > 0) == bool(action))
        self.sign = float(self.np_random.integers(2) * 2 - 1)
        return np.array([self.sign], np.float32), reward, False, False, {}


class Myopic(gym.Env[Any, Any]):
    """Action 0 earns 1 at once, and all of that is taken back at the end: a learner that looks one step ahead gains nothing by it."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.earned = 0, 0.0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        reward = float(action == 0)
        self.earned += reward
        ended = self.steps == 48
        final = float(self.np_random.normal()) - self.earned if ended else 0.0
        return np.full(1, self.steps / 48, np.float32), reward + final, ended, False, {}


def scaled_reward(factor: float) -> Wrap:
    return lambda env: gym.wrappers.TransformReward(env, lambda reward: factor * float(reward))


def scaled_observation(factor: float) -> Wrap:
    def wrap(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
        space = spaces.Box(-np.inf, np.inf, env.observation_space.shape, np.float32)
        return gym.wrappers.TransformObservation(env, lambda seen: (factor * np.asarray(seen)).astype(np.float32), space)

    return wrap


def limited(steps: int) -> Wrap:
    return lambda env: gym.wrappers.TimeLimit(env, steps)


@dataclass
class Patient:
    """What is done to a training."""

    ppo: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    wrap: Wrap | None = None
    wrap_eval: Wrap | None = None
    world: Callable[[], gym.Env[Any, Any]] | None = None
    """Instead of the environment that is asked for."""
    without_memory: bool = False
    """Whether the weights of the memory are 0."""
    iterations: int = ITERATIONS


SICK: dict[str, list[Patient]] = {
    "learning_rate_zero": [Patient({"learning_rate": 0.0})],
    "endless_episodes": [Patient(world=Endless, iterations=32)],
    "hidden_termination": [Patient(wrap=AllTruncated)],
    "reward_scale": [Patient(wrap=scaled_reward(3_000.0)), Patient(wrap=scaled_reward(1e-5))],
    "observation_scale": [Patient(wrap=scaled_observation(1_000.0)), Patient(wrap=scaled_observation(1e-4))],
    "forced_actions": [Patient(wrap=OneAction)],
    "dead_memory": [
        Patient({**LONG, "sequence_length": 1}, RECURRENT, iterations=8),
        Patient({**LONG, "freeze": ("memory*",)}, RECURRENT, iterations=8, without_memory=True),
    ],
    "no_reward_signal": [Patient(wrap=scaled_reward(0.0))],
    "large_updates": [Patient({"learning_rate": 0.02, "update_epochs": 20, "clip_coef": 50.0})],
    "no_updates": [Patient({"learning_rate": 1e-9})],
    "entropy_collapse": [Patient({"learning_rate": 1e-2, "gamma": 0.3}, world=Myopic)],
    "evaluation_gap": [
        Patient(wrap=scaled_reward(1.0), wrap_eval=lambda env: gym.wrappers.TransformReward(env, lambda reward: float(reward) - 5.0))
    ],
    "value_scale": [Patient({"vf_coef": 0.0}, wrap=scaled_reward(10.0))],
    "useless_critic": [Patient({"vf_coef": 0.0})],
    "clipped_gradients": [Patient({"vf_coef": 2_000.0})],
}
HEALTHY: dict[str, Patient] = {
    "plain": Patient(),
    "normalised": Patient({"scale_rewards": True}, {"normalize_observations": True}),
    "popart": Patient(policy={"normalize_values": True}),
    "masked": Patient(wrap=TwoActions),
    "memory": Patient(LONG, RECURRENT, iterations=8),
    "decayed": Patient({"learning_rate_schedule": "linear", "clip_schedule": "linear"}),
}


def train_patient(patient: Patient, directory: Path, env: str = "CartPole-v1", seed: int = 0) -> RunRecord:
    """Train in `directory` and read the run."""

    def make(wrap: Wrap | None) -> Callable[[], gym.Env[Any, Any]]:
        def made() -> gym.Env[Any, Any]:
            world = gym.make(env) if patient.world is None else patient.world()
            return world if wrap is None else wrap(world)

        return made

    ppo, endless = PPO.replace(**patient.ppo), patient.world is not None
    config = TrainingConfig(
        env=EnvConfig(id=env, num_envs=8, num_workers=0),
        policy=PolicyConfig(hidden_sizes=(32,), **patient.policy),
        ppo=ppo,
        evaluation=EvalConfig(interval=0, final_episodes=0 if endless else 16),
        run=RunConfig(
            total_timesteps=patient.iterations * 8 * ppo.rollout_steps, seed=seed, checkpoint_interval=0, checkpoint_seconds=None
        ),
    )
    evaluated = {} if endless else {"eval_env": make(patient.wrap_eval or patient.wrap)}
    with PPOTrainer(config.policy, make(patient.wrap), config, run_dir=directory, **evaluated) as trainer:
        if patient.without_memory:
            weights = trainer.policy.get_weights()
            trainer.policy.set_weights({name: 0 * value if name.startswith("memory") else value for name, value in weights.items()})
        trainer.train()
    return read_run(directory)
