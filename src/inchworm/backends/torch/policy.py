"""Steps 4 and 8 of 9: a policy in torch, which learns, and acts where NumPy cannot."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor, nn

from inchworm.backends.numpy.encoding import encode_mask as encode_mask_numpy
from inchworm.backends.numpy.encoding import encode_observations
from inchworm.backends.numpy.policy import choose, fresh_weights
from inchworm.backends.torch.distributions import log_prob_and_entropy
from inchworm.backends.torch.encoding import encode_mask, flatten_actions, to_tensors
from inchworm.backends.torch.network import Network, SpecNetwork
from inchworm.errors import ConfigError, InchwormError
from inchworm.policy.spec import LOG_STD, TANH_LOG_STD_RANGE, PolicySpec
from inchworm.policy.statistics import PolicyStatistics
from inchworm.policy.weights import VERSION, check_weights, rescaled_value_head
from inchworm.rollout.rollout import Rollout
from inchworm.spaces import MASK_KEY
from inchworm.types import Array, Evaluation, Minibatch, PolicyStep, Tree, Weights

VALUE_CHUNK = 16_384
"""Rows that the critic reads at once, so that a rollout does not need the memory of all its activations."""
VALUE_NUMBERS = 2**24
"""And the numbers in those rows: observations of more than 1,024, such as images, are read fewer at once."""


class TorchPolicy(nn.Module):
    """A trainable policy: the spec's own network, or one that somebody brings.

    `TorchPolicy(spec)` builds what the spec says. `TorchPolicy(spec, network=MyNetwork())` takes any `Network` whose
    `action_outputs` has `spec.actions.num_outputs` columns; its parameters then are the weights.
    """

    def __init__(
        self, spec: PolicySpec, weights: Mapping[str, np.ndarray] | None = None, *, seed: int = 0, network: Network | None = None
    ) -> None:
        super().__init__()
        if network is not None and (spec.config.normalize_observations or spec.config.normalize_values):
            raise ConfigError(
                "policy.normalize_observations and policy.normalize_values belong to the built-in networks; leave them off here"
            )
        self.spec = spec
        self.builtin = network is None
        self.network = network if network is not None else SpecNetwork(spec)
        self.statistics = PolicyStatistics(spec)
        self.policy_version = 0
        self.log_std = nn.Parameter(torch.full((spec.actions.num_gaussians,), float(spec.config.log_std_init)))
        if weights is not None or self.builtin:
            self.set_weights(weights if weights is not None else fresh_weights(spec, seed))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.log_std.device

    def initial_state(self, num_lanes: int) -> Tree:  # noqa: ARG002 - the protocol's, for policies with memory
        """No memory."""
        return ()

    def act(
        self,
        observations: Tree,
        state: Tree,
        episode_starts: Array,  # noqa: ARG002 - the protocol's, for policies with memory
        rng: np.random.Generator,
        *,
        deterministic: bool = False,
    ) -> PolicyStep:
        """One action per lane; the network runs here, the sampling is NumPy's, as in every backend."""
        self._set_training(False)
        with torch.inference_mode():
            outputs = self.network.action_outputs(to_tensors(self._seen(observations), self.device)).cpu().numpy()
            log_std = self._log_std().cpu().numpy()
        mask = encode_mask_numpy(self.spec.actions, observations[MASK_KEY]) if self.spec.observations.has_mask else None
        return choose(self.spec, outputs, log_std, mask, state, rng, deterministic=deterministic)

    def predict(self, observation: Tree, *, deterministic: bool = True, rng: np.random.Generator | None = None) -> Tree:
        """The action for one unbatched observation, as the environment takes it."""
        stream = rng if rng is not None else np.random.default_rng()
        step = self.act(self.spec.batch(observation), (), np.ones(1, bool), stream, deterministic=deterministic)
        return self.spec.unbatch(step.env_actions)

    def value(self, observations: Tree, state: Tree = (), episode_starts: Array = ()) -> Tensor:  # noqa: ARG002
        """The critic on [L, N, *obs]: values [L, N] in reward units, without gradients."""
        self._set_training(False)
        with torch.no_grad():
            flat, leading = _merge_leading(to_tensors(self._seen(observations), self.device))
            values = [self.network.values(chunk) for chunk in _chunks(flat, leading[0] * leading[1])]
            return self._reward_units(torch.cat(values)).reshape(leading) if values else torch.zeros(leading, device=self.device)

    def evaluate(self, minibatch: Minibatch) -> Evaluation:
        """What the current weights say of a minibatch, with gradients."""
        self._set_training(torch.is_grad_enabled())  # without gradients nobody learns: the ratio is measured as it acted
        layout = self.spec.actions
        flat, leading = _merge_leading(self._seen(minibatch.observations))
        outputs, normalized = self.network(flat)
        outputs = outputs.reshape(*leading, layout.num_outputs)
        mask = encode_mask(layout, minibatch.observations[MASK_KEY], 2) if self.spec.observations.has_mask else None
        choices, gaussians = flatten_actions(layout, minibatch.actions, 2)
        log_probs, entropy = log_prob_and_entropy(layout, outputs, self._log_std(), mask, choices, gaussians)
        values = self._reward_units(normalized).reshape(leading)
        return Evaluation(log_probs, entropy, values, self._value_scale())

    def update_statistics(self, rollout: Rollout, returns: Array) -> None:
        """Enter a rollout into the normalisers; values in reward units stay what they were (PopArt)."""
        if self.statistics.observations is None and self.statistics.values is None:
            return
        before = self._value_units()
        host = rollout.map(_to_host)
        flat = encode_observations(self.spec.observations, host.observations, 2) if self.spec.observations.size else np.zeros(0)
        self.statistics.update(flat, np.asarray(_to_host(returns)), np.asarray(host.valid))
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
            _check_alike(weights, self.get_weights())
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


def _check_alike(weights: Mapping[str, np.ndarray], own: Weights) -> None:
    """Refuse weights whose names or shapes are not those of a network that somebody brought."""
    differing = sorted(weights.keys() ^ own.keys())
    if differing:
        raise InchwormError(f"these weights do not fit the policy: {differing} are only on one side")
    for name, value in own.items():
        if np.shape(weights[name]) != value.shape:
            raise InchwormError(f"the weight {name} has shape {np.shape(weights[name])}; the policy needs {value.shape}")


def _to_host(array: Array) -> Array:
    return array.detach().cpu().numpy() if isinstance(array, Tensor) else array


def _chunks(tree: Tree, rows: int) -> Iterator[Tree]:
    numbers = sum(leaf.shape[1:].numel() for leaf in optree.tree_leaves(tree))  # of one row
    size = max(1, min(VALUE_CHUNK, VALUE_NUMBERS // max(1, numbers)))
    for start in range(0, rows, size):
        yield optree.tree_map(operator.itemgetter(slice(start, start + size)), tree)


def _merge_leading(tree: Tree) -> tuple[Tree, tuple[int, int]]:
    """[L, N, …] as [L·N, …], which is what a memoryless network reads; and (L, N)."""
    if isinstance(tree, Tensor):
        return tree.flatten(0, 1), (tree.shape[0], tree.shape[1])
    first = optree.tree_leaves(tree)[0]
    return optree.tree_map(lambda leaf: leaf.flatten(0, 1), tree), (first.shape[0], first.shape[1])
