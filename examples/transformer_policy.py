"""A policy of your own: a transformer over the last observations. Its memory, a window of them, is kept by the caller.

python examples/transformer_policy.py [STEPS]
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inchworm import Evaluation, Minibatch, PolicyConfig, PolicySpec, PolicyStep, PPOConfig, PPOTrainer, TorchPolicy, make_vector_env
from inchworm.backends.numpy.policy import choose
from inchworm.backends.torch.distributions import log_prob_and_entropy
from inchworm.backends.torch.network import Network, encode_observations, flatten_actions, to_tensors
from inchworm.worlds.toys import PartialCartPole


class Transformer(Network):
    """Reads windows [M, W, F], of which `known` [M, W] holds observations of the episode, and looks back from the last row."""

    def __init__(self, inputs: int, outputs: int, window: int, width: int) -> None:
        super().__init__()
        self.window, self.embed, self.places = window, nn.Linear(inputs, width), nn.Parameter(0.1 * torch.randn(window, width))
        self.block = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.actor, self.critic = nn.Linear(width, outputs), nn.Linear(width, 1)

    def forward(self, windows: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        features = self.block(self.embed(windows) + self.places, src_key_padding_mask=~known)[:, -1]  # [M, width]
        return self.actor(features), self.critic(features).squeeze(-1)


class TransformerPolicy(TorchPolicy):
    """The state is {"seen": [B, W - 1, F], "known": [B, W - 1]}: the observations before this one, and which of them there are."""

    def __init__(self, spec: PolicySpec, window: int = 8, width: int = 32, seed: int = 0) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            super().__init__(spec, network=Transformer(spec.observations.size, spec.actions.num_outputs, window, width))

    def initial_state(self, num_lanes: int) -> dict[str, np.ndarray]:
        before = (num_lanes, self.network.window - 1)
        return {"seen": np.zeros((*before, self.spec.observations.size), np.float32), "known": np.zeros(before, bool)}

    def windows(self, observations: Any, state: Any, starts: Any) -> tuple[Tensor, Tensor]:
        """Windows [L, N, W, F] of sequences [L, N, *obs] and which of their rows are known, [L, N, W]; none of an earlier episode is."""
        rows = encode_observations(self.spec.observations, to_tensors(observations, self.device), 2)  # [L, N, F]
        state = to_tensors(state if isinstance(state, dict) else self.initial_state(rows.shape[1]), self.device)
        begins = torch.zeros(rows.shape[:2], dtype=torch.long) if isinstance(starts, tuple) else torch.as_tensor(np.array(starts)).long()
        episode = torch.cat([torch.zeros_like(state["known"].T, dtype=torch.long), begins.cumsum(0)]).unfold(0, self.network.window, 1)
        known = torch.cat([state["known"].T, torch.ones(rows.shape[:2], dtype=torch.bool)]).unfold(0, self.network.window, 1)
        windows = torch.cat([state["seen"].transpose(0, 1), rows]).unfold(0, self.network.window, 1).transpose(2, 3)
        return windows, known & (episode == episode[..., -1:])

    def act(self, observations: Any, state: Any, episode_starts: Any, rng: Any, *, deterministic: bool = False) -> PolicyStep:
        with torch.no_grad():
            windows, known = self.windows(np.asarray(observations)[None], state, np.asarray(episode_starts)[None])
            outputs, log_std = self.network(windows[0], known[0])[0].numpy(), self.log_std.numpy()
        after = {"seen": windows[0, :, 1:].numpy().copy(), "known": known[0, :, 1:].numpy().copy()}
        return choose(self.spec, outputs, log_std, None, after, rng, deterministic=deterministic)

    def value(self, observations: Any, state: Any = (), episode_starts: Any = (), *_: Any) -> Tensor:
        with torch.no_grad():
            windows, known = self.windows(observations, state, episode_starts)
            return self.network(windows.flatten(0, 1), known.flatten(0, 1))[1].reshape(known.shape[:2])

    def evaluate(self, minibatch: Minibatch) -> Evaluation:
        windows, known = self.windows(minibatch.observations, minibatch.policy_state, minibatch.episode_starts)
        outputs, values = self.network(windows.flatten(0, 1), known.flatten(0, 1))
        choices, gaussians = flatten_actions(self.spec.actions, minibatch.actions, 2)
        outputs = outputs.reshape(*known.shape[:2], -1)
        terms = log_prob_and_entropy(self.spec.actions, outputs, self.log_std, None, choices, gaussians)
        return Evaluation(*terms, values.reshape(known.shape[:2]), 1.0)


CONFIG = PPOConfig(learning_rate=1e-3, gamma=0.98, gae_lambda=0.9, rollout_steps=64, update_epochs=6, num_minibatches=4, ent_coef=0.0)


def make_policy(observation_space: Any, action_space: Any) -> TransformerPolicy:
    """For `inchworm check-policy examples.transformer_policy:make_policy CartPole-v1`."""
    return TransformerPolicy(PolicySpec(observation_space, action_space, PolicyConfig()))


def main(steps: int = 60_000) -> dict[str, float]:
    env = make_vector_env(PartialCartPole, num_envs=1)
    policies = {"mlp": "mlp", "transformer": make_policy(env.observation_space, env.action_space)}
    env.close()
    scores = {}
    for name, policy in policies.items():
        with PPOTrainer(policy, PartialCartPole, CONFIG, num_envs=8, seed=0, backend="torch") as trainer:
            history = trainer.train(total_timesteps=steps)
            scores[name] = float(history["mean_reward"][-1])
            print(f"{name:12} mean return {scores[name]:5.1f}, largest ratio error {max(history['ratio_error']):.1e}")
    return scores


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
