"""Steps 4 and 8 of 9: a policy that is conditioned on a task, which an encoder reads from earlier trajectories in that task.

The trajectories themselves are recorded in the rollout (`Rollout.context`), not their embedding: learning encodes them again, so that
its gradient reaches the encoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from inchworm.backends.numpy.policy import choose
from inchworm.backends.numpy.policy import encode_legal as encode_legal_numpy
from inchworm.backends.torch.network import ACTIVATIONS, Network, encode_observations, to_tensor, to_tensors
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.core.errors import ConfigError, RolloutError
from inchworm.core.types import Array, Minibatch, PolicyStep, Tree
from inchworm.policy.spec import PolicySpec


class Conditioned(NamedTuple):
    """Observations with the embedding of each one's task, as one tree, so that both are cut and flattened together."""

    observations: Tree
    embedding: Tensor


class TaskEncoder(nn.Module):
    """Encodes trajectories [K, n, L, F] of K tasks as embeddings [K, E]: every step alone, then the mean over the steps that there are.

    The first feature of a step is 1, and 0 in padding. A task without any step has the embedding of a mean of 0, which is learned, too.
    """

    def __init__(self, features: int, width: int, size: int) -> None:
        super().__init__()
        self.step = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, size)

    def forward(self, trajectories: Tensor) -> Tensor:
        """[K, E]"""
        present = trajectories[..., :1]  # [K, n, L, 1]
        total = (self.step(trajectories) * present).sum((1, 2))
        return torch.tanh(self.head(total / present.sum((1, 2)).clamp(min=1.0)))


class FilmStack(nn.Module):
    """Dense layers whose hidden features h become h (1 + scale) + shift, both linear in the embedding (FiLM; Perez et al. 2018)."""

    def __init__(self, inputs: int, hidden: tuple[int, ...], outputs: int, size: int, activation: nn.Module) -> None:
        super().__init__()
        widths = (inputs, *hidden)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in zip(widths, hidden))
        self.films = nn.ModuleList(nn.Linear(size, 2 * width) for width in hidden)
        self.out = nn.Linear(widths[-1], outputs)
        self.activation = activation

    def forward(self, features: Tensor, embedding: Tensor) -> Tensor:
        """[N, outputs]"""
        for layer, film in zip(self.layers, self.films):
            scale, shift = film(embedding).chunk(2, -1)
            features = self.activation(layer(features) * (1 + scale) + shift)
        outputs: Tensor = self.out(features)
        return outputs


class TaskNetwork(Network):
    """Actor and critic, each a `FilmStack`, and the encoder of the task that both are conditioned on."""

    def __init__(self, spec: PolicySpec, features: int, size: int, seed: int) -> None:
        super().__init__()
        self.spec = spec
        config, activation = spec.config, ACTIVATIONS[spec.config.activation]()
        stacks = (tuple(config.hidden_sizes), spec.actions.num_outputs), (tuple(config.hidden_sizes), 1)
        self.encoder = TaskEncoder(features, 64, size)
        self.actor, self.critic = (FilmStack(spec.observations.size, *each, size, activation) for each in stacks)
        self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        """Orthogonal weights with gains sqrt 2, 0.01 (actions) and 1 (value), as in the built-in networks; small ones for FiLM."""
        gains = {"actor.out": 0.01, "critic.out": 1.0}
        with torch.no_grad():
            for name, module in self.named_modules():
                if isinstance(module, nn.Linear):
                    gain = 0.5 if ".films." in name else gains.get(name, math.sqrt(2.0))
                    nn.init.orthogonal_(module.weight, gain, generator=generator)
                    nn.init.zeros_(module.bias)

    def _features(self, seen: Conditioned) -> Tensor:
        return encode_observations(self.spec.observations, seen.observations, 1).to(seen.embedding.dtype)

    def action_outputs(self, observations: Any) -> Tensor:
        """[N, C + D]"""
        outputs: Tensor = self.actor(self._features(observations), observations.embedding)
        return outputs

    def values(self, observations: Any) -> Tensor:
        """[N]"""
        values: Tensor = self.critic(self._features(observations), observations.embedding)
        return values.squeeze(-1)


class TaskPolicy(TorchPolicy):
    """A policy whose actor and critic are conditioned on a task by FiLM. It acts for the tasks that `set_context` tells it.

    Everything that it evaluates is encoded from trajectories: those of `set_context` when it acts, those in the rollout when it learns.
    """

    reads_context = True

    def __init__(self, spec: PolicySpec, features: int, *, embedding_size: int = 16, seed: int = 0) -> None:
        if spec.memory is not None or spec.observations.images:
            raise ConfigError(f"a policy with a task encoder is an mlp, not {spec.config.kind}; set policy.kind=mlp")
        super().__init__(spec, network=TaskNetwork(spec, features, embedding_size, seed))
        self.features = features
        self._trajectories: np.ndarray | None = None  # [K, n, L, F]
        self._index = np.zeros(0, np.int64)  # [B]
        self._encoded: tuple[int, Tensor] | None = None  # the version that encoded them, and the embedding of each lane [B, E]

    @property
    def encoder(self) -> TaskEncoder:
        """The task encoder."""
        network: Any = self.network
        encoder: TaskEncoder = network.encoder
        return encoder

    def set_context(self, trajectories: np.ndarray | None, index: np.ndarray | None = None) -> None:
        """Act as in the tasks of trajectories [K, n, L, F]: lane b in task `index[b]`, by default b; None forgets all tasks."""
        if trajectories is not None and (trajectories.ndim != 4 or trajectories.shape[-1] != self.features):
            raise ConfigError(f"task_trajectories must be [tasks, trajectories, length, {self.features}], not {list(trajectories.shape)}")
        self._trajectories = trajectories
        self._index = np.arange(0 if trajectories is None else len(trajectories)) if index is None else np.asarray(index, np.int64)
        self._encoded = None

    def _lane_embeddings(self, lanes: int) -> Tensor:
        """[B, E] of the lanes that act now."""
        if self._trajectories is None:
            return self._encode((), (lanes,))
        if len(self._index) != lanes:
            raise ConfigError(f"the context has {len(self._index)} lanes, but {lanes} act; call set_context again")
        if self._encoded is None or self._encoded[0] != self.policy_version:
            self._encoded = self.policy_version, self._encode((self._trajectories, self._index), (lanes,))
        return self._encoded[1]

    def _encode(self, context: Tree, shape: tuple[int, ...]) -> Tensor:
        """The embedding [*shape, E] of each row; `()` stands for a task of which nothing is known."""
        if not context:
            empty = torch.zeros((1, 1, 1, self.features), dtype=self.log_std.dtype, device=self.device)
            unknown: Tensor = self.encoder(empty)
            return unknown[0].expand(*shape, -1)
        table, index = (to_tensor(part, self.device) for part in context)
        if table.ndim != 4 or table.shape[-1] != self.features:
            raise RolloutError(f"context: expected trajectories [K, n, L, {self.features}], got {list(table.shape)}")
        embeddings: Tensor = self.encoder(table.to(self.log_std.dtype))[index.long()]
        return embeddings

    def act(
        self, observations: Tree, state: Tree, episode_starts: Array, rng: np.random.Generator, *, deterministic: bool = False
    ) -> PolicyStep:
        """One action per lane, in the tasks of `set_context`."""
        with torch.inference_mode():
            seen = Conditioned(to_tensors(self._seen(observations), self.device), self._lane_embeddings(len(episode_starts)))
            outputs = self.network.action_outputs(seen).cpu().numpy()  # [B, C + D]
            log_std = self._log_std().cpu().numpy()
        return choose(self.spec, outputs, log_std, encode_legal_numpy(self.spec, observations), state, rng, deterministic=deterministic)

    def value(
        self,
        observations: Tree,
        state: Tree = (),
        episode_starts: Array = (),
        global_state: Tree = (),
        valid: Array | None = None,
        *,
        context: Tree = (),
    ) -> Tensor:
        """The values [L, N]; `context` is (table [K, n, L, F], index [L, N]), or `()`."""
        leading = tuple(np.shape(episode_starts))
        with torch.no_grad():
            seen = Conditioned(self._seen(observations), self._encode(context, leading))
        return super().value(seen, state, episode_starts, global_state, valid)

    def _inputs(self, minibatch: Minibatch) -> Tree:
        """The observations with their embeddings, through which the gradient reaches the encoder."""
        return Conditioned(super()._inputs(minibatch), self._encode(minibatch.context, tuple(minibatch.valid.shape)))

    def _seen(self, observations: Tree) -> Tree:
        """Without the mask, which networks do not read."""
        return observations if isinstance(observations, Conditioned) else super()._seen(observations)

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Set all weights; what earlier ones had encoded is encoded again."""
        super().set_weights(weights)
        self._encoded = None
