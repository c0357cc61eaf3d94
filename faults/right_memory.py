"""Policies with memory for E4, built in and custom, and an environment whose episodes end where a table says. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import PolicyConfig
from inchworm.core.types import EndedEpisode, EnvStep, Evaluation, PolicyStep
from inchworm.policy.spec import PolicySpec

SIZE, ACTIONS, WIDTH = 2, 3, 4
"""Numbers of an observation, actions, and width of the memory."""


class LstmPolicy(nn.Module):
    """LSTM cells one above the other, an actor and a critic on top; memory is {"h", "c"} [B, layers, width], kept by the caller."""

    def __init__(self, layers: int, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.cells = nn.ModuleList([nn.LSTMCell(SIZE if layer == 0 else WIDTH, WIDTH) for layer in range(layers)])
            self.actor, self.critic = nn.Linear(WIDTH, ACTIONS), nn.Linear(WIDTH, 1)
        self.to(dtype)
        self.dtype, self.policy_version = dtype, 0

    def initial_state(self, num_lanes: int) -> dict[str, np.ndarray]:
        shape = (num_lanes, len(self.cells), WIDTH)
        return {name: np.zeros(shape, np.float64 if self.dtype == torch.float64 else np.float32) for name in ("h", "c")}

    def step(self, observation: Tensor, state: dict[str, Tensor], starts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """One row [N, …]: forget where an episode starts, read, remember."""
        rows, keep = observation.to(self.dtype), (~starts).to(self.dtype)[:, None]
        h, c = [], []
        for layer, cell in enumerate(self.cells):
            rows, cells = cell(rows, (state["h"][:, layer] * keep, state["c"][:, layer] * keep))
            h.append(rows)
            c.append(cells)
        return rows, {"h": torch.stack(h, 1), "c": torch.stack(c, 1)}

    def over(self, observations: Tensor, state: Any, starts: Tensor) -> Tensor:
        """Features [L, N, width] of whole sequences, from the memory before their first row."""
        state = {name: torch.as_tensor(leaf, dtype=self.dtype) for name, leaf in state.items()}
        features = []
        for observation, start in zip(observations, starts):
            row, state = self.step(observation, state, start)
            features.append(row)
        return torch.stack(features)

    @torch.no_grad()
    def act(self, observations: Any, state: Any, episode_starts: Any, rng: Any, *, deterministic: bool = False) -> PolicyStep:
        del deterministic
        tensors = {name: torch.from_numpy(np.array(leaf)) for name, leaf in state.items()}
        features, after = self.step(torch.from_numpy(np.array(observations)), tensors, torch.from_numpy(np.array(episode_starts)))
        logs = self.actor(features).log_softmax(-1).numpy()
        actions = (logs - np.log(-np.log(rng.random(logs.shape)))).argmax(-1)  # Gumbel's way to draw
        chosen = logs[np.arange(len(logs)), actions].astype(np.float32)
        return PolicyStep(actions, actions, chosen, {name: leaf.numpy() for name, leaf in after.items()})

    @torch.no_grad()
    def value(self, observations: Any, state: Any, episode_starts: Any) -> Tensor:
        return self.critic(self.over(torch.as_tensor(observations), state, torch.as_tensor(episode_starts))).squeeze(-1)

    def evaluate(self, minibatch: Any) -> Evaluation:
        features = self.over(minibatch.observations, minibatch.policy_state, minibatch.episode_starts)
        logs = self.actor(features).log_softmax(-1)
        chosen = logs.gather(-1, minibatch.actions.long()[..., None]).squeeze(-1)
        return Evaluation(chosen, -(logs.exp() * logs).sum(-1), self.critic(features).squeeze(-1), torch.ones((), dtype=self.dtype))


class BuiltIn(TorchPolicy):
    """A built-in memory with heads, and `step`: the same weights in torch's cells, one row at a time."""

    def __init__(self, kind: str, layers: int, dtype: torch.dtype, seed: int) -> None:
        config = PolicyConfig.from_dict({"kind": kind, "hidden_sizes": [], "memory_size": WIDTH, "memory_layers": layers})
        super().__init__(PolicySpec(spaces.Box(-np.inf, np.inf, (SIZE,)), spaces.Discrete(ACTIONS), config))
        self.to(dtype)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def actor(self, features: Tensor) -> Tensor:
        return self.network.actor["head"](features)

    def critic(self, features: Tensor) -> Tensor:
        return self.network.critic["head"](features)

    def step(self, observation: Tensor, state: dict[str, Tensor], starts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """One row [N, …]: forget where an episode starts, read, remember."""
        rows, keep = observation.to(self.log_std.dtype), (~starts).to(self.log_std.dtype)[:, None]
        cell = torch.lstm_cell if self.spec.config.kind == "lstm" else torch.gru_cell
        after: dict[str, list[Tensor]] = {name: [] for name in state}
        for layer, parts in enumerate(self.network.memory.values()):
            weights = [parts[part][kind] for kind in ("weight", "bias") for part in ("input", "state")]
            before = {name: leaf[:, layer] * keep for name, leaf in state.items()}
            found = cell(rows, [before["hidden"], before["cell"]] if "cell" in before else before["hidden"], *weights)
            new = dict(zip(("hidden", "cell"), found)) if "cell" in before else {"hidden": found}
            rows = new["hidden"]
            for name, leaf in new.items():
                after[name].append(leaf)
        return rows, {name: torch.stack(leaves, 1) for name, leaves in after.items()}


class ScriptedEnv:
    """Lanes whose observations and ends come from tables: ends [T, B] with 0 (continues), 1 (terminated) or 2 (truncated)."""

    def __init__(self, ends: np.ndarray, seed: int) -> None:
        self.observation_space, self.action_space = spaces.Box(-np.inf, np.inf, (SIZE,)), spaces.Discrete(ACTIONS)
        self.num_lanes = ends.shape[1]
        rng, rows = np.random.default_rng(seed), (len(ends) + 1, self.num_lanes, SIZE)
        self.seen, self.last = (rng.standard_normal(rows).astype(np.float32) for _ in range(2))
        self._ends, self._now = ends, 0

    def reset(self, seeds: Sequence[int] | None = None, indices: Sequence[int] | None = None) -> EnvStep:
        del seeds, indices
        return self._step(np.zeros(self.num_lanes, np.int64), np.ones(self.num_lanes, bool))

    def send(self, actions: Any) -> None:
        del actions
        self._now += 1

    def recv(self) -> EnvStep:
        ends = self._ends[self._now - 1]
        return self._step(ends, ends > 0)

    def _step(self, ends: np.ndarray, starts: np.ndarray) -> EnvStep:
        ended = tuple(EndedEpisode(int(lane), 0, self.last[self._now, lane], {}) for lane in np.flatnonzero(ends))
        rewards, valid = self.seen[self._now, :, 0].copy(), np.ones(self.num_lanes, bool)
        return EnvStep(self.seen[self._now].copy(), rewards, ends == 1, ends == 2, starts, valid, ended)

    def close(self) -> None:
        pass
