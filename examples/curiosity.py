"""Curiosity: intrinsic rewards from a model that learns by a custom loss, in a corridor that undirected exploration does not get through.

    python examples/curiosity.py [STEPS] [rnd|forward|off]

`RandomNetworkDistillation` (Burda et al. 2019) and `ForwardModel` (as in Pathak et al. 2017, with features that are not learned) are custom
losses with parameters of their own: their optimiser's steps are taken with PPO's, and checkpoints hold both. `Curiosity` adds what the
model cannot predict yet to the rewards.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from inchworm import PPOConfig, PPOTrainer, Rollout
from inchworm.train.callbacks import BaseCallback


class DoorCorridor(gym.Env[np.ndarray, int]):
    """One of four doors leads from a cell to the next, the others one cell back; only the last cell gives a reward."""

    def __init__(self, length: int = 16) -> None:
        self.observation_space, self.action_space = spaces.Box(0.0, 1.0, (length,), np.float32), spaces.Discrete(4)
        self.doors, self.cell = np.random.default_rng(length).integers(0, 4, length), 0  # the same in every copy

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin in the first cell."""
        super().reset(seed=seed)
        self.cell = 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Go through a door."""
        self.cell = self.cell + 1 if action == self.doors[self.cell] else max(0, self.cell - 1)
        arrived = self.cell == len(self.doors) - 1
        return self._observation(), float(arrived), arrived, False, {"is_success": arrived}

    def _observation(self) -> np.ndarray:
        return np.eye(len(self.doors), dtype=np.float32)[self.cell]


def make_env(length: int = 16) -> gym.Env[Any, Any]:
    return gym.wrappers.TimeLimit(DoorCorridor(length), max_episode_steps=4 * length)


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, outputs))


def known(terminated: Tensor, valid: Tensor) -> Tensor:
    """The weights of a mean over the rows [L, N] that have a successor."""
    rows = (valid & ~terminated).float()
    return rows / rows.sum().clamp(min=1)


class RandomNetworkDistillation(nn.Module):
    """Predicts the features that a random network, which is never trained, has at the next observation."""

    def __init__(self, size: int, num_actions: int, features: int = 32) -> None:
        super().__init__()
        self.target, self.predictor = network(size, features).requires_grad_(False), network(size, features)

    def forward(self, next_observations: Tensor, terminated: Tensor, valid: Tensor) -> Tensor:
        """The loss."""
        return (self.surprise(next_observations, next_observations, None) * known(terminated, valid)).sum()

    def surprise(self, observations: Tensor, next_observations: Tensor, actions: Tensor | None) -> Tensor:
        """[..., size] -> [...]"""
        return (self.predictor(next_observations) - self.target(next_observations)).square().mean(-1)


class ForwardModel(nn.Module):
    """Predicts the features of the next observation from the observation and the action; they are those of a random network."""

    def __init__(self, size: int, num_actions: int, features: int = 32) -> None:
        super().__init__()
        self.encode, self.num_actions = network(size, features).requires_grad_(False), num_actions
        self.predict = network(size + num_actions, features)

    def forward(self, observations: Tensor, next_observations: Tensor, actions: Tensor, terminated: Tensor, valid: Tensor) -> Tensor:
        """The loss."""
        return (self.surprise(observations, next_observations, actions) * known(terminated, valid)).sum()

    def surprise(self, observations: Tensor, next_observations: Tensor, actions: Tensor) -> Tensor:
        """[..., size] -> [...]"""
        taken = nn.functional.one_hot(actions.long(), self.num_actions).to(observations.dtype)
        return (self.predict(torch.cat([observations, taken], -1)) - self.encode(next_observations)).square().mean(-1)


class Curiosity(BaseCallback):
    """Adds a model's surprise at each step, in units of its running root mean square, to the rewards that are learned from."""

    def __init__(self, model: Any, scale: float = 0.02) -> None:
        self.model, self.scale, self.square = model, scale, 0.0

    def on_rollout(self, state: Any, rollout: Rollout) -> Rollout:
        """Learn from other rewards; `rollout.episodes` keep the environment's."""
        seen, after, actions = (
            torch.as_tensor(np.array(part)) for part in (rollout.observations, rollout.next_observations, rollout.actions)
        )
        with torch.no_grad():
            surprise = self.model.surprise(seen, after, actions).numpy() * ~rollout.terminated  # [T, B]
        mean = float(np.square(surprise).mean())
        self.square = mean if not self.square else 0.99 * self.square + 0.01 * mean
        return replace(
            rollout, rewards=rollout.rewards + np.float32(self.scale) * (surprise / (self.square**0.5 + 1e-8)).astype(np.float32)
        )

    def state_dict(self) -> dict[str, float]:
        """Checkpoints hold it."""
        return {"square": self.square}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore it."""
        self.square = state["square"]


CONFIG = PPOConfig(learning_rate=1e-3, gamma=0.98, rollout_steps=128, update_epochs=4, num_minibatches=4, ent_coef=0.01)


def make_curiosity(kind: str, length: int, seed: int) -> Any:
    """The model of a kind, or None; with the same weights for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kinds = {"rnd": RandomNetworkDistillation, "forward": ForwardModel}
        return None if kind == "off" else kinds[kind](length, 4)


def main(steps: int = 100_000, kind: str = "rnd", seed: int = 0, length: int = 16) -> float:
    model = make_curiosity(kind, length, seed)
    callbacks, losses = ([], []) if model is None else ([Curiosity(model)], [model])
    with PPOTrainer("mlp", lambda: make_env(length), CONFIG, num_envs=8, seed=seed, backend="torch", callbacks=callbacks) as trainer:
        history = trainer.train(total_timesteps=steps, custom_loss_fns=losses)
        success = trainer.evaluate(episodes=50).mean_return  # the only reward is that of the last cell
    reached = [step for step, score in zip(history["timesteps"], history["mean_reward"]) if score > 0]
    print(f"{kind}, seed {seed}: success {success:.2f}; the goal was first reached {f'by step {reached[0]:,.0f}' if reached else 'never'}")
    return success


if __name__ == "__main__":
    main(*[int(argument) if argument.isdigit() else argument for argument in sys.argv[1:3]])
