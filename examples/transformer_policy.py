"""A policy of your own: a transformer over the last observations. Its memory, a window of them, is kept by the caller.

python examples/transformer_policy.py [STEPS]
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inchworm import Evaluation, Minibatch, PolicyConfig, PolicySpec, PolicyStep, PPOConfig, PPOTrainer, TorchPolicy
from inchworm.backends.numpy.policy import choose
from inchworm.backends.torch.network import Network, encode_observations, flatten_actions, to_tensor, to_tensors
from inchworm.backends.torch.policy import log_prob_and_entropy
from inchworm.worlds.toys import PartialCartPole


class Transformer(Network):
    """Reads windows [M, W, F], of which `known` [M, W] holds observations of the episode, and looks back from the last row."""

    def __init__(self, inputs: int, outputs: int, window: int, width: int) -> None:
        super().__init__()
        self.window, self.embed, self.places = window, nn.Linear(inputs, width), nn.Parameter(0.1 * torch.randn(window, width))
        self.block = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.actor, self.critic = nn.Linear(width, outputs), nn.Linear(width, 1)

    def forward(self, windows: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [M, C + D] and values [M]."""
        features = self.block(self.embed(windows) + self.places, src_key_padding_mask=~known)[:, -1]  # [M, width]
        return self.actor(features), self.critic(features).squeeze(-1)


class TransformerPolicy(TorchPolicy):
    """The state is {"seen": [B, W - 1, F], "known": [B, W - 1]}: the observations before this one, and which of them there are."""

    def __init__(self, spec: PolicySpec, window: int = 8, width: int = 32, seed: int = 0) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            super().__init__(spec, network=Transformer(spec.observations.size, spec.actions.num_outputs, window, width))

    def initial_state(self, num_lanes: int) -> dict[str, np.ndarray]:
        """Nothing is known."""
        before = (num_lanes, self.network.window - 1)
        return {"seen": np.zeros((*before, self.spec.observations.size), np.float32), "known": np.zeros(before, bool)}

    def over(self, observations: Any, state: Any, starts: Any) -> tuple[Tensor, Tensor, Any]:
        """Outputs [L, N, C + D] and values [L, N] of sequences [L, N, *obs], and the state after the last row."""
        rows = encode_observations(self.spec.observations, to_tensors(observations, self.device), 2)  # [L, N, F]
        state = to_tensors(state if isinstance(state, dict) else self.initial_state(rows.shape[1]), self.device)
        starts = torch.zeros(rows.shape[:2]) if isinstance(starts, tuple) else to_tensor(starts, self.device)  # [L, N]
        before, now = state["known"].T, torch.ones(rows.shape[:2], dtype=torch.bool)
        # Time comes first in `columns`, windows are its last axis: [L, N, …, W]. What belongs to an earlier episode is not known.
        columns = (torch.cat([state["seen"].transpose(0, 1), rows]), torch.cat([before, now]), torch.cat([0.0 * before, starts.cumsum(0)]))
        windows, known, episode = (column.unfold(0, self.network.window, 1) for column in columns)
        known = known & (episode == episode[..., -1:])  # [L, N, W]
        windows = windows.transpose(2, 3) * known[..., None]  # [L, N, W, F]
        outputs, values = self.network(windows.flatten(0, 1), known.flatten(0, 1))
        after = {"seen": windows[-1, :, 1:], "known": known[-1, :, 1:]}
        return outputs.reshape(*now.shape, -1), values.reshape(now.shape), after

    def act(self, observations: Any, state: Any, episode_starts: Any, rng: Any, *, deterministic: bool = False) -> PolicyStep:
        """One action per lane, sampled by NumPy as for every policy."""
        with torch.no_grad():
            outputs, _, after = self.over(np.asarray(observations)[None], state, np.asarray(episode_starts)[None])
        kept = {name: tensor.numpy().copy() for name, tensor in after.items()}
        return choose(self.spec, outputs[0].numpy(), self.log_std.detach().numpy(), None, kept, rng, deterministic=deterministic)

    def value(self, observations: Any, state: Any = (), episode_starts: Any = (), *_: Any) -> Tensor:
        """[L, N]"""
        with torch.no_grad():
            return self.over(observations, state, episode_starts)[1]

    def evaluate(self, minibatch: Minibatch) -> Evaluation:
        """Log-probs, entropy and values with gradients."""
        outputs, values, _ = self.over(minibatch.observations, minibatch.policy_state, minibatch.episode_starts)
        flat = flatten_actions(self.spec.actions, minibatch.actions, 2)
        return Evaluation(*log_prob_and_entropy(self.spec.actions, outputs, self.log_std, None, *flat), values, 1.0)


def make_policy(observation_space: Any, action_space: Any) -> TransformerPolicy:
    return TransformerPolicy(PolicySpec(observation_space, action_space, PolicyConfig()))


def main(steps: int = 60_000) -> dict[str, float]:
    config, env, scores = PPOConfig(learning_rate=1e-3, gamma=0.98, rollout_steps=64, update_epochs=6, ent_coef=0.0), PartialCartPole(), {}
    for name, policy in {"mlp": "mlp", "transformer": make_policy(env.observation_space, env.action_space)}.items():
        with PPOTrainer(policy, PartialCartPole, config, num_envs=8, seed=0, backend="torch") as trainer:
            history = trainer.train(total_timesteps=steps)
        scores[name] = float(history["mean_reward"][-1])
        print(f"{name:12} mean return {scores[name]:5.1f}, largest ratio error {max(history['ratio_error']):.1e}")
    return scores


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
