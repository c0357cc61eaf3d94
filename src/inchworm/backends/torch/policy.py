"""Steps 4 and 8 of 9: a policy in torch, which learns, and acts where NumPy cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor, nn

from inchworm.backends.numpy.policy import choose, encode_observations, flat_worlds, fresh_weights
from inchworm.backends.numpy.policy import encode_mask as encode_mask_numpy
from inchworm.backends.torch.distributions import log_prob_and_entropy
from inchworm.backends.torch.encoding import chunks, encode_mask, flatten_actions, merge_leading, rows_at_once, to_tensors, with_world
from inchworm.backends.torch.memory import Memory, some_sequences
from inchworm.backends.torch.network import Network, SpecNetwork
from inchworm.core.errors import ConfigError
from inchworm.core.spaces import MASK_KEY
from inchworm.core.types import Array, Evaluation, Minibatch, PolicyStep, Tree, Weights
from inchworm.policy.file import VERSION, Predicts, check_alike, check_weights, rescaled_value_head
from inchworm.policy.spec import LOG_STD, TANH_LOG_STD_RANGE, PolicySpec
from inchworm.policy.statistics import PolicyStatistics
from inchworm.rollout.rollout import Rollout


class TorchPolicy(Predicts, nn.Module):
    """A trainable policy: the spec's own network, or one that somebody brings.

    `TorchPolicy(spec)` builds what the spec says. `TorchPolicy(spec, network=MyNetwork())` takes any `Network` whose
    `action_outputs` has `spec.actions.num_outputs` columns; its parameters then are the weights.
    """

    backend = "torch"

    def __init__(
        self, spec: PolicySpec, weights: Mapping[str, np.ndarray] | None = None, *, seed: int = 0, network: Network | None = None
    ) -> None:
        super().__init__()
        if network is not None and (spec.config.normalize_observations or spec.config.normalize_values):
            raise ConfigError(
                "policy.normalize_observations and policy.normalize_values belong to the built-in networks; leave them off here"
            )
        if network is not None and spec.global_state is not None:
            raise ConfigError("policy.central_critic belongs to the built-in networks; leave it off here")
        self.spec = spec
        self.builtin = network is None
        self.network = network if network is not None else SpecNetwork(spec)
        self.statistics = PolicyStatistics(spec)
        self.policy_version = 0
        self.log_std = nn.Parameter(torch.full((spec.actions.num_gaussians,), float(spec.config.log_std_init)))
        if weights is not None or self.builtin:
            self.set_weights(weights if weights is not None else fresh_weights(spec, seed))

    @property
    def _memory(self) -> Memory | None:
        return self.network.memory if isinstance(self.network, SpecNetwork) else None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.log_std.device

    def initial_state(self, num_lanes: int) -> Tree:
        """The memory of lanes that have seen nothing: {"hidden": [B, layers, size]}, with "cell" for an LSTM; `()` without memory."""
        if self._memory is None:
            return ()
        return self._memory.layout.empty(num_lanes, np.float64 if self.log_std.dtype == torch.float64 else np.float32)

    def act(
        self,
        observations: Tree,
        state: Tree,
        episode_starts: Array,
        rng: np.random.Generator,
        *,
        deterministic: bool = False,
    ) -> PolicyStep:
        """One action per lane; the network runs here, the sampling is NumPy's, as in every backend."""
        self._set_training(False)
        with torch.inference_mode():
            seen = to_tensors(self._seen(observations), self.device)
            outputs, state = self._outputs(seen, state, episode_starts)
            log_std = self._log_std().cpu().numpy()
        mask = encode_mask_numpy(self.spec.actions, observations[MASK_KEY]) if self.spec.observations.has_mask else None
        return choose(self.spec, outputs, log_std, mask, state, rng, deterministic=deterministic)

    def value(
        self, observations: Tree, state: Tree = (), episode_starts: Array = (), global_state: Tree = (), valid: Array | None = None
    ) -> Tensor:
        """The critic on [L, N, *obs]: values [L, N] in reward units, without gradients; `()` begins with an empty memory.

        A central critic also reads `global_state` (`lane_states` [L, N, …]), and of an agent that does not live (`valid`) nothing else.
        """
        self._set_training(False)
        with torch.no_grad():
            seen = to_tensors(self._seen(observations), self.device)
            seen = with_world(seen, global_state, valid) if self.central_critic else seen
            if self._memory is not None:
                return self._remembered_values(self._memory, seen, state, episode_starts)
            flat, leading = merge_leading(seen)
            values = [self.network.values(chunk) for chunk in chunks(flat, leading[0] * leading[1])]
            return self._reward_units(torch.cat(values)).reshape(leading) if values else torch.zeros(leading, device=self.device)

    def evaluate(self, minibatch: Minibatch) -> Evaluation:
        """What the current weights say of a minibatch, with gradients."""
        self._set_training(torch.is_grad_enabled())  # without gradients nobody learns: the ratio is measured as it acted
        layout = self.spec.actions
        seen = self._seen(minibatch.observations)
        flat, leading = merge_leading(with_world(seen, minibatch.global_state, minibatch.valid) if self.central_critic else seen)
        memory = self._memory
        past = [] if memory is None else [memory.past(minibatch.policy_state, minibatch.episode_starts, leading, self.device)]
        outputs, normalized = self.network(flat, *past)
        outputs = outputs.reshape(*leading, layout.num_outputs)
        mask = encode_mask(layout, minibatch.observations[MASK_KEY], 2) if self.spec.observations.has_mask else None
        choices, gaussians = flatten_actions(layout, minibatch.actions, 2)
        log_probs, entropy = log_prob_and_entropy(layout, outputs, self._log_std(), mask, choices, gaussians)
        values = self._reward_units(normalized).reshape(leading)
        return Evaluation(log_probs, entropy, values, self._value_scale())

    def update_statistics(self, rollout: Rollout, returns: Array) -> None:
        """Enter a rollout into the normalisers; values in reward units stay what they were (PopArt)."""
        if not self.statistics.wanted:
            return
        before = self._value_units()
        host = rollout.map(_to_host)
        flat = encode_observations(self.spec.observations, host.observations, 2) if self.spec.observations.size else np.zeros(0)
        self.statistics.update(flat, np.asarray(_to_host(returns)), np.asarray(host.valid), flat_worlds(self.spec, host))
        if self.statistics.values is not None:
            self.set_weights({**self.get_weights(), **rescaled_value_head(self.get_weights(), before, self._value_units())})
        self._refresh()

    def get_weights(self) -> Weights:
        """Copies of the parameters and statistics, with the version."""
        named = {self.public_name(name): parameter.detach().cpu().numpy().copy() for name, parameter in self.named_parameters()}
        if not self.spec.actions.num_gaussians:
            named.pop(LOG_STD)
        named |= {self.public_name(name): buffer.cpu().numpy().copy() for name, buffer in self.named_buffers() if not self.builtin}
        return {**named, **self.statistics.to_weights(), VERSION: np.array(self.policy_version, np.int64)}

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Take parameters, statistics and version; names and shapes must be this policy's."""
        if self.builtin:
            check_weights(self.spec, weights)
        else:
            check_alike(weights, self.get_weights())
        targets = {**dict(self.named_parameters()), **({} if self.builtin else dict(self.named_buffers()))}
        with torch.no_grad():
            for name, tensor in targets.items():
                if self.public_name(name) in weights:
                    tensor.copy_(torch.from_numpy(np.array(weights[self.public_name(name)])))
        self.statistics.from_weights(weights)
        self.policy_version = int(weights[VERSION])
        self._refresh()

    def public_name(self, name: str) -> str:
        """The spec's name of a parameter; of a foreign network the module's own, which may be anything, even `log_std`."""
        return name.removeprefix("network.") if self.builtin else name

    def _refresh(self) -> None:
        """Bring the network's copies of the statistics up to date: tensors, so that moving them changes no compiled graph."""
        if isinstance(self.network, SpecNetwork):
            self.network.set_statistics(self.statistics)

    def _apply(self, fn: Any, recurse: bool = True) -> TorchPolicy:
        """Move or cast, as every module does; the statistics are then written anew, in the new dtype."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._refresh()
        return self

    def _set_training(self, training: bool) -> None:
        """Whether layers such as dropout are on: while learning only. The built-in networks have none."""
        if not self.builtin and self.network.training is not training:
            self.network.train(training)

    def _outputs(self, seen: Tree, state: Tree, episode_starts: Array) -> tuple[np.ndarray, Tree]:
        """[B, C + D] and the memory after, as arrays: whoever keeps it knows nothing of torch."""
        if self._memory is None:
            return self.network.action_outputs(seen).cpu().numpy(), state
        assert isinstance(self.network, SpecNetwork)
        if isinstance(state, tuple):
            raise self._memory.layout.refusal(state, len(episode_starts))
        past = self._memory.past(state, np.asarray(episode_starts)[None], (1, len(episode_starts)), self.device)
        outputs, after = self.network.step_outputs(seen, past)
        return outputs.cpu().numpy(), {name: leaf.cpu().numpy() for name, leaf in after.items()}

    def _remembered_values(self, memory: Memory, seen: Tree, state: Tree, episode_starts: Array) -> Tensor:
        """The critic on some whole sequences [L, N] at a time, as many as their rows allow."""
        assert isinstance(self.network, SpecNetwork)
        shape = optree.tree_leaves(seen)[0].shape[:2]
        values = [torch.zeros((shape[0], 0), dtype=self.log_std.dtype, device=self.device)]
        width = max(1, rows_at_once(seen, 2) // max(1, shape[0]))
        for columns, past in some_sequences(seen, memory.past(state, episode_starts, shape, self.device), width):
            normalized = self.network.values(merge_leading(columns)[0], past)
            values.append(self._reward_units(normalized).reshape(past.starts.shape))
        return torch.cat(values, 1)

    def _log_std(self) -> Tensor:
        return self.log_std.clamp(*TANH_LOG_STD_RANGE) if self.spec.config.action_bounds == "tanh" else self.log_std

    def _value_units(self) -> tuple[float, float]:
        return self.statistics.value_mean, self.statistics.value_std

    def _value_scale(self) -> Tensor | float:
        return self.network.value_std if self.statistics.values is not None and isinstance(self.network, SpecNetwork) else 1.0

    def _reward_units(self, normalized: Tensor) -> Tensor:
        if self.statistics.values is None or not isinstance(self.network, SpecNetwork):
            return normalized
        return normalized * self.network.value_std + self.network.value_mean

    def _seen(self, observations: Tree) -> Tree:
        """The observation without its mask, which no network reads."""
        if not self.spec.observations.has_mask:
            return observations
        return {key: value for key, value in observations.items() if key != MASK_KEY}


def _to_host(array: Array) -> Array:
    return array.detach().cpu().numpy() if isinstance(array, Tensor) else array
