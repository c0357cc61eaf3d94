"""Custom networks in two ways: a network inside `TorchPolicy`, or a class that implements the whole `Policy` protocol.

python examples/custom_network.py [STEPS]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from inchworm import Evaluation, Minibatch, PolicyConfig, PolicySpec, PolicyStep, PPOConfig, PPOTrainer, TorchPolicy
from inchworm.backends.torch.network import Network

CONFIG = PPOConfig(learning_rate=1e-3, gamma=0.98, gae_lambda=0.8, rollout_steps=32, update_epochs=20, minibatch_size=256, ent_coef=0.0)


class ResidualNetwork(Network):
    """The short way: a shared trunk with a skip connection. `TorchPolicy` handles distributions, masks and sampling."""

    def __init__(self, spec: PolicySpec, width: int = 64) -> None:
        super().__init__()
        self.inlet = nn.Linear(spec.observations.size, width)
        self.block = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.actions = nn.Linear(width, spec.actions.num_outputs)
        self.critic = nn.Linear(width, 1)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """[N, 4] -> logits [N, 2] and values [N], from one pass of the trunk."""
        features = self.features(observations)
        return self.actions(features), self.critic(features).squeeze(-1)

    def action_outputs(self, observations: Tensor) -> Tensor:
        """[N, 2]"""
        return self.actions(self.features(observations))

    def values(self, observations: Tensor) -> Tensor:
        """[N]"""
        return self.critic(self.features(observations)).squeeze(-1)

    def features(self, observations: Tensor) -> Tensor:
        """[N, width]"""
        inlet = self.inlet(observations)
        return torch.tanh(inlet + self.block(inlet))


class OwnPolicy(nn.Module):
    """The long way: a `torch.nn.Module` that implements the `Policy` protocol, for vector observations and one discrete action."""

    def __init__(self, observation_size: int, num_actions: int) -> None:
        super().__init__()
        self.policy_version = 0
        self.actor = nn.Sequential(nn.Linear(observation_size, 64), nn.Tanh(), nn.Linear(64, num_actions))
        self.critic = nn.Sequential(nn.Linear(observation_size, 64), nn.Tanh(), nn.Linear(64, 1))

    def initial_state(self, num_lanes: int) -> tuple[()]:
        """Return the empty state: this policy has no memory."""
        return ()

    def act(
        self, observations: Any, state: Any, episode_starts: Any, rng: np.random.Generator, *, deterministic: bool = False
    ) -> PolicyStep:
        """Choose one action per lane. All noise comes from `rng`, so runs with the same seed are identical."""
        with torch.inference_mode():
            log_probs = self.actor(torch.as_tensor(observations)).log_softmax(-1).numpy()  # [B, A]
        noise = 0.0 if deterministic else rng.gumbel(size=log_probs.shape)
        actions = np.argmax(log_probs + noise, -1)  # [B] Gumbel-max trick: samples from the distribution
        chosen = np.take_along_axis(log_probs, actions[:, None], -1)[:, 0]
        return PolicyStep(actions, actions, chosen, ())

    def value(self, observations: Tensor, state: Any = (), episode_starts: Any = ()) -> Tensor:
        """[L, N, 4] -> [L, N]"""
        with torch.no_grad():
            return self.critic(observations).squeeze(-1)

    def evaluate(self, minibatch: Minibatch) -> Evaluation:
        """Evaluate recorded actions under the current weights, with gradients."""
        log_probs = self.actor(minibatch.observations).log_softmax(-1)  # [L, N, A]
        chosen = log_probs.gather(-1, minibatch.actions[..., None]).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return Evaluation(chosen, entropy, self.critic(minibatch.observations).squeeze(-1), torch.ones(()))

    def update_statistics(self, rollout: Any, returns: Any) -> None:
        """Do nothing: this policy has no normalisers."""

    def get_weights(self) -> dict[str, np.ndarray]:
        """Return the complete policy as named arrays."""
        weights = {name: tensor.detach().numpy().copy() for name, tensor in self.state_dict().items()}
        return {**weights, "policy_version": np.array(self.policy_version)}

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Load named arrays as returned by `get_weights`."""
        self.load_state_dict({name: torch.tensor(array) for name, array in weights.items() if name != "policy_version"})
        self.policy_version = int(weights["policy_version"])


def make_policy(observation_space: Any, action_space: Any) -> OwnPolicy:
    """Create the policy, for `inchworm check-policy examples.custom_network:make_policy CartPole-v1`."""
    return OwnPolicy(observation_space.shape[0], int(action_space.n))


def main(steps: int = 20_000) -> list[float]:
    torch.manual_seed(0)  # custom networks initialise their own weights, so seed torch
    env = gym.make("CartPole-v1")
    spec = PolicySpec(env.observation_space, env.action_space, PolicyConfig())
    policies = {"ResidualNetwork": TorchPolicy(spec, network=ResidualNetwork(spec)), "OwnPolicy": OwnPolicy(4, 2)}
    scores = []
    for name, policy in policies.items():
        with PPOTrainer(policy, "CartPole-v1", CONFIG, num_envs=8, seed=0, device="cpu") as trainer:
            trainer.train(total_timesteps=steps)
            result = trainer.evaluate(episodes=20)
        print(f"{name:16} {result}")
        scores.append(result.mean_return)
    return scores


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
