"""Step 4 of 9: normalise, think, mask, sample. A policy that acts with NumPy alone.

The fast way to act with a small network, and the reference that other backends are checked against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from inchworm.backends.numpy import distributions
from inchworm.backends.numpy.encoding import encode_mask, encode_observations, flatten_actions
from inchworm.errors import SpaceError
from inchworm.policy.spec import LOG_STD, TANH_LOG_STD_RANGE, PolicySpec, initial_weights
from inchworm.policy.statistics import PolicyStatistics
from inchworm.policy.weights import VERSION, check_weights, rescaled_value_head
from inchworm.rollout.rollout import Rollout
from inchworm.seeding import make_stream
from inchworm.spaces import MASK_KEY
from inchworm.types import Array, Evaluation, Minibatch, PolicyStep, Tree, Weights

ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "leaky_relu": lambda x: np.where(x > 0, x, x * x.dtype.type(0.01)),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


class NumpyPolicy:
    """An MLP policy from its spec and weights; memoryless, so its state is `()`."""

    def __init__(self, spec: PolicySpec, weights: Mapping[str, np.ndarray] | None = None, *, seed: int = 0) -> None:
        if spec.observations.images:
            raise SpaceError('convolutions do not run in NumPy; use the torch backend for policy.kind="cnn"')
        self.spec = spec
        self.policy_version = 0
        self._statistics = PolicyStatistics(spec)
        self._activation = ACTIVATIONS[spec.config.activation]
        self.set_weights(weights if weights is not None else fresh_weights(spec, seed))

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
        """One action per lane; the critic is not asked."""
        outputs = self._network("actor", self._inputs(observations, 1))  # [B, C + D]
        mask = encode_mask(self.spec.actions, observations[MASK_KEY]) if self.spec.observations.has_mask else None
        return choose(self.spec, outputs, self._log_std, mask, state, rng, deterministic=deterministic)

    def predict(self, observation: Tree, *, deterministic: bool = True, rng: np.random.Generator | None = None) -> Tree:
        """The action for one unbatched observation, as the environment takes it."""
        stream = rng if rng is not None else np.random.default_rng()
        step = self.act(self.spec.batch(observation), (), np.ones(1, bool), stream, deterministic=deterministic)
        return self.spec.unbatch(step.env_actions)

    def value(self, observations: Tree, state: Tree = (), episode_starts: Array = ()) -> Array:  # noqa: ARG002
        """The critic on [L, N, *obs]: values [L, N] in reward units."""
        return self._values(self._inputs(observations, 2))

    def evaluate(self, minibatch: Minibatch) -> Evaluation:
        """What the weights say of a minibatch. NumPy has no gradients: this is the reference for the numbers."""
        layout, inputs = self.spec.actions, self._inputs(minibatch.observations, 2)
        outputs = self._network("actor", inputs)
        mask = encode_mask(layout, minibatch.observations[MASK_KEY], 2) if self.spec.observations.has_mask else None
        choices, gaussians = flatten_actions(layout, minibatch.actions, 2)
        return Evaluation(
            distributions.log_prob(layout, outputs, self._log_std, mask, choices, gaussians),
            distributions.entropy(layout, outputs, self._log_std, mask),
            self._values(inputs),
            outputs.dtype.type(self._statistics.value_std),
        )

    def update_statistics(self, rollout: Rollout, returns: Array) -> None:
        """Enter a rollout into the normalisers; values in reward units stay what they were."""
        before = (self._statistics.value_mean, self._statistics.value_std)
        flat = encode_observations(self.spec.observations, rollout.observations, 2)
        self._statistics.update(flat, np.asarray(returns), rollout.valid)
        self._weights |= rescaled_value_head(self._weights, before, (self._statistics.value_mean, self._statistics.value_std))
        self._prepare()

    def get_weights(self) -> Weights:
        """Copies of the parameters and statistics, with the version."""
        copies = {name: np.array(value) for name, value in self._weights.items()}
        return {**copies, **self._statistics.to_weights(), VERSION: np.array(self.policy_version, np.int64)}

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Take parameters, statistics and version; names and shapes must be the spec's."""
        check_weights(self.spec, weights)
        self._weights = {name: np.array(weights[name]) for name in self.spec.layers}
        self._statistics.from_weights(weights)
        self.policy_version = int(weights[VERSION])
        self._prepare()

    def _prepare(self) -> None:
        """Lay the weights out for acting: one (matrix [in, out], bias) per layer, statistics as f32 vectors."""
        self._layers: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        for name in self.spec.layers:
            if name.endswith(".weight"):
                stack = self._layers.setdefault(name.split(".")[0], [])
                stack.append((np.ascontiguousarray(self._weights[name].T), self._weights[name.removesuffix("weight") + "bias"]))
        log_std = self._weights.get(LOG_STD, np.zeros(0, np.float32))
        self._log_std = np.clip(log_std, *TANH_LOG_STD_RANGE) if self.spec.config.action_bounds == "tanh" else log_std
        if self._statistics.observations is not None:
            dtype = self._weights["actor.head.weight"].dtype
            self._center, self._inverse_std = self._statistics.center.astype(dtype), self._statistics.inverse_std.astype(dtype)

    def _inputs(self, observations: Tree, num_leading: int) -> np.ndarray:
        flat = encode_observations(self.spec.observations, observations, num_leading)
        if self._statistics.observations is not None:
            limit = self.spec.config.observation_clip
            flat = np.clip((flat - self._center) * self._inverse_std, -limit, limit)
        for matrix, bias in self._layers.get("trunk", ()):
            flat = self._activation(flat @ matrix + bias)
        return flat

    def _network(self, name: str, inputs: np.ndarray) -> np.ndarray:
        *hidden, (head, head_bias) = self._layers[name]
        for matrix, bias in hidden:
            inputs = self._activation(inputs @ matrix + bias)
        outputs: np.ndarray = inputs @ head + head_bias
        return outputs

    def _values(self, inputs: np.ndarray) -> np.ndarray:
        normalized = self._network("critic", inputs)[..., 0]
        values: np.ndarray = normalized * self._statistics.value_std + self._statistics.value_mean
        return values


def fresh_weights(spec: PolicySpec, seed: int) -> Weights:
    """Initial parameters and statistics, the same for every backend and seed."""
    parameters = initial_weights(spec, make_stream(seed, "weights"))
    return {**parameters, **PolicyStatistics(spec).to_weights(), VERSION: np.array(0, np.int64)}


def choose(
    spec: PolicySpec,
    outputs: np.ndarray,
    log_std: np.ndarray,
    mask: np.ndarray | None,
    state: Tree,
    rng: np.random.Generator,
    *,
    deterministic: bool,
) -> PolicyStep:
    """From a network's outputs [B, C + D] to a `PolicyStep`; every backend's acting ends here."""
    layout = spec.actions
    if deterministic:
        choices, gaussians = distributions.mode(layout, outputs, mask)
    else:
        choices, gaussians = distributions.sample(layout, outputs, log_std, mask, rng)
    log_probs = distributions.log_prob(layout, outputs, log_std, mask, choices, gaussians)
    actions = layout.unflatten(choices, gaussians, sampled=True)
    env_actions = layout.unflatten(choices, distributions.to_env(layout, gaussians)) if layout.num_gaussians else actions
    return PolicyStep(actions, env_actions, log_probs, state)
