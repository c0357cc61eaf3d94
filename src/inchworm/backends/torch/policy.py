"""Steps 4 and 8 of 9: a policy in torch. It learns, and acts where NumPy cannot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import optree
import torch
from torch import Tensor, nn

from inchworm.backends.numpy.distributions import HALF_LOG_2PI, MASKED_LOGIT, QUADRATURE_NODES, QUADRATURE_WEIGHTS
from inchworm.backends.numpy.policy import choose, flat_worlds, fresh_weights
from inchworm.backends.numpy.policy import encode_legal as encode_legal_numpy
from inchworm.backends.numpy.policy import encode_observations as encode_observations_numpy
from inchworm.backends.torch.network import (
    Memory,
    Network,
    Past,
    SpecNetwork,
    encode_legal,
    encode_observations,
    flatten_actions,
    merge_leading,
    to_tensor,
    to_tensors,
    unflatten_actions,
    with_world,
)
from inchworm.core.errors import ConfigError
from inchworm.core.spaces import MASK_KEY
from inchworm.core.types import Array, Evaluation, Minibatch, PolicyStep, Tree, Weights
from inchworm.policy.file import Predicts, check_shapes, rescaled_value_head, weight_shapes
from inchworm.policy.layout import ActionLayout
from inchworm.policy.spec import LOG_STD, TANH_LOG_STD_RANGE, VERSION, PolicySpec
from inchworm.policy.statistics import PolicyStatistics
from inchworm.rollout.rollout import Rollout

# Differentiable log-probs and entropies (step 8 of 9), formula for formula as in `backends/numpy/distributions`


def log_prob_and_entropy(
    layout: ActionLayout, outputs: Tensor, log_std: Tensor, mask: Tensor | None, choices: Tensor, gaussians: Tensor
) -> tuple[Tensor, Tensor]:
    """log pi(action) and entropy, each [...], for outputs [..., C + D]; a mask is [..., C], or [..., C + D] if agents lack dimensions."""
    log_probs, entropies = [], []
    logits = outputs[..., : layout.num_logits]
    has = None if mask is None or mask.shape[-1] == layout.num_logits else mask[..., layout.num_logits :]  # [..., D]
    if mask is not None and layout.num_logits:
        logits = torch.where(mask[..., : layout.num_logits], logits, MASKED_LOGIT)
    for index, group in enumerate(layout.groups):
        log_p = torch.log_softmax(logits[..., group], dim=-1)
        # nll_loss gathers the log-prob of each choice; its backward pass is faster than that of `gather`.
        picked = torch.nn.functional.nll_loss(log_p.reshape(-1, log_p.shape[-1]), choices[..., index].reshape(-1), reduction="none")
        log_probs.append(-picked.reshape(choices.shape[:-1]))
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    if layout.num_gaussians:
        means, values = outputs[..., layout.num_logits :], gaussians.to(outputs.dtype)
        standard = (values - means) * torch.exp(-log_std)
        log_prob = _sum_own(-0.5 * standard * standard - log_std - HALF_LOG_2PI, has)
        entropy = _sum_own(log_std + (HALF_LOG_2PI + 0.5), has).expand(log_prob.shape)
        if layout.bounds == "tanh":
            log_prob = log_prob - _sum_own(log_tanh_slope(values), has)
            nodes, weights = (
                torch.as_tensor(array, dtype=means.dtype, device=means.device) for array in (QUADRATURE_NODES, QUADRATURE_WEIGHTS)
            )
            points = means.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * nodes  # [..., D, nodes]
            bent = log_tanh_slope(points) * weights
            entropy = entropy + (bent.sum((-2, -1)) if has is None else _sum_own(bent.sum(-1), has))
        log_probs.append(log_prob)
        entropies.append(entropy)
    return _total(log_probs), _total(entropies)


def sample(
    layout: ActionLayout, outputs: Tensor, log_std: Tensor, mask: Tensor | None, uniforms: Tensor, normals: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Choices [B, G] and Gaussian values [B, D] from outputs [B, C + D] and random numbers [B, G] and [B, D], with log-probs [B]."""
    logits = outputs[:, : layout.num_logits]
    if mask is not None and layout.num_logits:
        logits = torch.where(mask[:, : layout.num_logits], logits, MASKED_LOGIT)
    choices, log_probs = [], []
    for index, group in enumerate(layout.groups):
        log_p = torch.log_softmax(logits[:, group].t(), 0)  # [K, B]: over few choices of many lanes, in a third of the time
        cumulative = log_p.exp().cumsum(0)
        # Inverse of the cumulative distribution: a masked choice adds nothing to it and is never the first one above.
        choice = (cumulative[:-1] <= uniforms[:, index] * cumulative[-1]).sum(0)
        choices.append(choice[:, None])
        log_probs.append(log_p.gather(0, choice[None])[0])
    means = outputs[:, layout.num_logits :]
    gaussians = means
    if layout.num_gaussians:
        gaussians = means + log_std.exp() * normals
        standard = (gaussians - means) * torch.exp(-log_std)
        log_prob = (-0.5 * standard * standard - log_std - HALF_LOG_2PI).sum(-1)
        log_probs.append(log_prob - log_tanh_slope(gaussians).sum(-1) if layout.bounds == "tanh" else log_prob)
    chosen = (
        choices[0] if len(choices) == 1 else torch.cat(choices, -1) if choices else outputs.new_empty((len(outputs), 0), dtype=torch.int64)
    )
    return chosen, gaussians, _total(log_probs)


def to_env(layout: ActionLayout, gaussians: Tensor) -> Tensor:
    """Gaussian values [B, D] as the environment gets them: clipped into the bounds, or squashed into them."""
    low, high = (torch.from_numpy(np.array(bound)).to(gaussians.device) for bound in (layout.low, layout.high))
    if layout.bounds == "tanh":
        gaussians = low + (torch.tanh(gaussians) + 1) * (0.5 * (high - low))
    return torch.minimum(torch.maximum(gaussians, low), high)


def _sum_own(terms: Tensor, has: Tensor | None) -> Tensor:
    """The sum over dimensions [..., D], of those that the agent has."""
    return (terms if has is None else torch.where(has, terms, 0.0)).sum(-1)


def _total(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def log_tanh_slope(x: Tensor) -> Tensor:
    """log(1 - tanh(x)²), exact where tanh has saturated."""
    return 2 * (math.log(2) - x - torch.nn.functional.softplus(-2 * x, threshold=40.0))  # the default threshold is too coarse for float64


VALUE_CHUNK = 16_384
"""Rows that the critic reads at once, so that a rollout does not need the memory of all its activations."""
VALUE_NUMBERS = 2**24
"""The most numbers in those rows: of observations larger than 1,024 numbers, such as images, fewer are read at once."""


class TorchPolicy(Predicts, nn.Module):
    """A trainable policy with the spec's network, or with one that the user brings.

    `TorchPolicy(spec)` builds the spec's network. `TorchPolicy(spec, network=MyNetwork())` takes any `Network` whose
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
        self.spec, self.central_critic = spec, spec.global_state is not None
        self.builtin = network is None
        self.network = network if network is not None else SpecNetwork(spec)
        self.statistics = PolicyStatistics(spec)
        self.policy_version = 0
        self.log_std = nn.Parameter(torch.full((spec.actions.num_gaussians,), float(spec.config.log_std_init)))
        if weights is not None or self.builtin:
            self.set_weights(weights if weights is not None else fresh_weights(spec, seed))

    @property
    def own_network(self) -> Network | None:
        """The user's network, by whose class policy files name it; None for a built-in network and in a subclass, which is named itself."""
        return None if self.builtin or type(self) is not TorchPolicy else self.network

    @property
    def _memory(self) -> Memory | None:
        return self.network.memory if isinstance(self.network, SpecNetwork) else None

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.log_std.device

    def initial_state(self, num_lanes: int) -> Tree:
        """The initial memory: {"hidden": [B, layers, size]}, with "cell" for an LSTM; `()` without memory."""
        if self._memory is None:
            return ()
        return self._memory.layout.empty(num_lanes, np.float64 if self.log_std.dtype == torch.float64 else np.float32)

    def act(
        self, observations: Tree, state: Tree, episode_starts: Array, rng: np.random.Generator, *, deterministic: bool = False
    ) -> PolicyStep:
        """One action per lane; sampling is done in NumPy, as in every backend."""
        outputs, state = self.action_outputs(observations, state, episode_starts)
        with torch.inference_mode():
            log_std = self._log_std().cpu().numpy()
        mask = encode_legal_numpy(self.spec, observations)
        return choose(self.spec, outputs, log_std, mask, state, rng, deterministic=deterministic)

    def action_outputs(self, observations: Tree, state: Tree, episode_starts: Array) -> tuple[np.ndarray, Tree]:
        """What actions are chosen from: logits and means [B, C + D] before masks; and the next memory."""
        self._set_training(False)
        with torch.inference_mode():
            seen = to_tensors(self._seen(observations), self.device)
            if self._memory is None:
                return self.network.action_outputs(seen).cpu().numpy(), state
            if isinstance(state, tuple):
                raise self._memory.layout.refusal(state, len(episode_starts))
            past = self._past(self._memory, state, np.asarray(episode_starts)[None], (1, len(episode_starts)))
            outputs, after = cast(SpecNetwork, self.network).step_outputs(seen, past)
            return outputs.cpu().numpy(), {name: leaf.cpu().numpy() for name, leaf in after.items()}

    def act_on_device(self, observations: Tree, state: Tree, episode_starts: Tensor, uniforms: Tensor, normals: Tensor) -> PolicyStep:
        """One action per lane, as tensors, from random numbers [B, G] and [B, D] instead of a stream."""
        self._set_training(False)
        with torch.inference_mode():
            network, seen, after = cast(SpecNetwork, self.network), self._seen(observations), ()
            if self._memory is None:
                outputs = network.action_outputs(seen)  # [B, C + D]
            else:
                outputs, after = network.step_outputs(seen, self._past(self._memory, state, episode_starts[None], (1, len(episode_starts))))
            legal = encode_legal(self.spec, observations, 1)
            choices, gaussians, log_probs = sample(self.spec.actions, outputs, self._log_std(), legal, uniforms, normals)
            actions = unflatten_actions(self.spec.actions, choices, gaussians)
            env_actions = actions
            if self.spec.actions.num_gaussians:
                env_actions = unflatten_actions(self.spec.actions, choices, to_env(self.spec.actions, gaussians), sampled=False)
            return PolicyStep(actions, env_actions, log_probs, after)

    def value(
        self, observations: Tree, state: Tree = (), episode_starts: Array = (), global_state: Tree = (), valid: Array | None = None
    ) -> Tensor:
        """The values [L, N] of observations [L, N, *obs], in reward units and without gradients; `()` is an empty memory.

        A central critic also reads `global_state` (`lane_states` [L, N, …]), and where `valid` is false nothing else.
        """
        self._set_training(False)
        with torch.no_grad():
            seen: Tree = to_tensors(self._seen(observations), self.device)
            seen = with_world(seen, global_state, valid) if self.central_critic else seen
            leaves = optree.tree_leaves(seen)
            length, width = leaves[0].shape[:2]
            row_size = sum(leaf.shape[2:].numel() for leaf in leaves)
            rows = max(1, min(VALUE_CHUNK, VALUE_NUMBERS // max(1, row_size)))  # at once
            if self._memory is None:
                flat = merge_leading(seen)[0]
                values = [torch.zeros(0, dtype=self.log_std.dtype, device=self.device)]
                for start in range(0, length * width, rows):
                    chunk = optree.tree_map(lambda leaf, part=slice(start, start + rows): leaf[part], flat)
                    values.append(self.network.values(chunk))
                return self._reward_units(torch.cat(values)).reshape(length, width)
            past = self._past(self._memory, state, episode_starts, (length, width))
            values = [torch.zeros((length, 0), dtype=self.log_std.dtype, device=self.device)]
            sequences = max(1, rows // max(1, length))
            for start in range(0, width, sequences):
                part = slice(start, start + sequences)
                own = Past({name: leaf[part] for name, leaf in past.state.items()}, past.starts[:, part])
                chunk = optree.tree_map(lambda leaf, part=part: leaf[:, part].flatten(0, 1), seen)
                values.append(self._reward_units(cast(SpecNetwork, self.network).values(chunk, own)).reshape(own.starts.shape))
            return torch.cat(values, 1)

    def evaluate(self, minibatch: Minibatch) -> Evaluation:
        """Log-probs, entropy and values of a minibatch under the current weights, with gradients."""
        self._set_training(torch.is_grad_enabled())  # without gradients, as it acts
        layout = self.spec.actions
        seen = self._inputs(minibatch)
        flat, leading = merge_leading(with_world(seen, minibatch.global_state, minibatch.valid) if self.central_critic else seen)
        memory = self._memory
        past = [] if memory is None else [self._past(memory, minibatch.policy_state, minibatch.episode_starts, leading)]
        outputs, normalized = self.network(flat, *past)
        outputs = outputs.reshape(*leading, layout.num_outputs)
        mask = encode_legal(self.spec, minibatch.observations, 2)
        choices, gaussians = flatten_actions(layout, minibatch.actions, 2)
        log_probs, entropy = log_prob_and_entropy(layout, outputs, self._log_std(), mask, choices, gaussians)
        values = self._reward_units(normalized).reshape(leading)
        scale = self.network.value_std if self.statistics.values is not None else 1.0
        return Evaluation(log_probs, entropy, values, scale)

    def update_statistics(self, rollout: Rollout, returns: Array) -> None:
        """Add a rollout to the normalisers, keeping values in reward units as they were (PopArt)."""
        if not self.statistics.parts:
            return
        before = self._value_units()
        if isinstance(rollout.rewards, Tensor):
            self._add_on_device(rollout, returns)
            if self.statistics.values is not None:
                self.set_weights({**self.get_weights(), **rescaled_value_head(self.get_weights(), before, self._value_units())})
            self._refresh()
            return
        host = rollout.map(_to_host)
        flat = encode_observations_numpy(self.spec.observations, host.observations, 2) if self.spec.observations.size else np.zeros(0)
        self.statistics.update(flat, np.asarray(_to_host(returns)), np.asarray(host.valid), flat_worlds(self.spec, host))
        if self.statistics.values is not None:
            self.set_weights({**self.get_weights(), **rescaled_value_head(self.get_weights(), before, self._value_units())})
        self._refresh()

    def _add_on_device(self, rollout: Rollout, returns: Tensor) -> None:
        """Add a rollout of tensors, all of whose rows are valid, to the normalisers: only its moments leave the device."""
        if self.statistics.observations is not None:
            flat = encode_observations(self.spec.observations, rollout.observations, 2).flatten(0, 1)
            self.statistics.observations.add_moments(*_moments_on_device(flat))
        if self.statistics.values is not None:
            mean, var, count = _moments_on_device(returns.flatten()[:, None])
            self.statistics.values.add_moments(mean[0], var[0], count)

    def get_weights(self) -> Weights:
        """Copies of the parameters and statistics, with the version."""
        named = {self.public_name(name): parameter.detach().cpu().numpy().copy() for name, parameter in self.named_parameters()}
        if not self.spec.actions.num_gaussians:
            named.pop(LOG_STD)
        named |= {self.public_name(name): buffer.cpu().numpy().copy() for name, buffer in self.named_buffers() if not self.builtin}
        return {**named, **self.statistics.to_weights(), VERSION: np.array(self.policy_version, np.int64)}

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Set parameters, statistics and version; names and shapes must be this policy's."""
        check_shapes(weights, weight_shapes(self.spec) if self.builtin else {name: own.shape for name, own in self.get_weights().items()})
        targets = {**dict(self.named_parameters()), **({} if self.builtin else dict(self.named_buffers()))}
        with torch.no_grad():
            for name, tensor in targets.items():
                if self.public_name(name) in weights:
                    tensor.copy_(torch.from_numpy(np.array(weights[self.public_name(name)])))
        self.statistics.from_weights(weights)
        self.policy_version = int(weights[VERSION])
        self._refresh()

    def public_name(self, name: str) -> str:
        """The spec's name of a parameter; for a user's network the module's name, which may be anything, even `log_std`."""
        return name.removeprefix("network.") if self.builtin else name

    def _refresh(self) -> None:
        """Update the network's copies of the statistics: tensors, so that a change needs no new compiled graph."""
        if isinstance(self.network, SpecNetwork):
            self.network.set_statistics(self.statistics)

    def _apply(self, fn: Any, recurse: bool = True) -> TorchPolicy:
        """Move or cast the module, then write the statistics again in the new dtype."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._refresh()
        return self

    def _set_training(self, training: bool) -> None:
        """Switch layers such as dropout on or off: on only during learning. The built-in networks have none."""
        if not self.builtin and self.network.training is not training:
            self.network.train(training)

    def _past(self, memory: Memory, state: Tree, starts: Array, shape: tuple[int, int]) -> Past:
        """The memory of sequences [L, N] as tensors; an empty tuple as state is an empty memory, as starts no reset."""
        state = memory.layout.empty(shape[1]) if isinstance(state, tuple) and not state else state
        if not memory.layout.fits(state, (shape[1],)):
            raise memory.layout.refusal(state, shape[1])
        starts = np.zeros(shape, np.bool_) if isinstance(starts, tuple) else starts
        return Past({name: to_tensor(state[name], self.device) for name in memory.layout.names}, to_tensor(starts, self.device))

    def _log_std(self) -> Tensor:
        return self.log_std.clamp(*TANH_LOG_STD_RANGE) if self.spec.config.action_bounds == "tanh" else self.log_std

    def _value_units(self) -> tuple[float, float]:
        return self.statistics.value_mean, self.statistics.value_std

    def _reward_units(self, normalized: Tensor) -> Tensor:
        if self.statistics.values is None or not isinstance(self.network, SpecNetwork):
            return normalized
        return normalized * self.network.value_std + self.network.value_mean

    def _inputs(self, minibatch: Minibatch) -> Tree:
        """What the network reads of a minibatch, each leaf [L, N, …]."""
        return self._seen(minibatch.observations)

    def _seen(self, observations: Tree) -> Tree:
        """The observation without its mask, which networks do not read."""
        if not self.spec.observations.has_mask:
            return observations
        return {key: value for key, value in observations.items() if key != MASK_KEY}


def _moments_on_device(samples: Tensor) -> tuple[np.ndarray, np.ndarray, int]:
    """Mean, population variance and number of samples [n, F], in float64."""
    wide = samples.double()
    var, mean = torch.var_mean(wide, 0, correction=0)
    return mean.cpu().numpy(), var.cpu().numpy(), len(samples)


def _to_host(array: Array) -> Array:
    return array.detach().cpu().numpy() if isinstance(array, Tensor) else array
