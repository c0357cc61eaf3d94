"""Small policies and learners of each backend, and rollouts in which a policy acted. Imports torch and jax."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optree
import torch
from gymnasium import spaces
from jax.experimental import io_callback

from inchworm.backends.jax.learner import JaxOptimizer
from inchworm.backends.jax.policy import JaxPolicy
from inchworm.backends.numpy.learner import NumpyOptimizer
from inchworm.backends.numpy.policy import NumpyPolicy, encode_observations, fresh_weights
from inchworm.backends.torch.learner import PPOOptimizer
from inchworm.backends.torch.network import to_tensor
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import PolicyConfig, PPOConfig
from inchworm.core.spaces import MASK_KEY
from inchworm.policy.file import fingerprint
from inchworm.policy.layout import observation_layout
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.rollout import Rollout

BOX = spaces.Box(-2, 2, (3,))
CONFIG = PPOConfig(learning_rate=1e-2, update_epochs=2, num_minibatches=4)


@dataclass(frozen=True)
class Side:
    """One backend's policy and learner, and how a custom loss answers there."""

    name: str
    policy_of: Callable[[PolicySpec, Any], Any]
    """(spec, weights) -> a policy with these weights, in their dtype."""
    learner_of: Callable[..., Any]
    answer: Callable[[float, Any, Any], Any]
    """(value, what multiplies the values' gradient, the current values) -> what a loss on the values returns."""
    record: Callable[[list[Any], Any], None]
    """(into, tree): append a tree of what a loss was given, as NumPy arrays, at every call; a compiled loss is called in Python once."""
    next_number: Callable[[Callable[[], int]], Any]
    """(count): what `count` returns, at every call of a loss; where that is compiled, a traced number."""

    def policy(self, observation_space=None, action_space=None, seed=0, *, dtype=np.float32, **options):
        config = PolicyConfig(**{"hidden_sizes": (8,), **options})
        spec = PolicySpec(observation_space or BOX, action_space or spaces.Discrete(3), config)
        weights = fresh_weights(spec, seed)
        return self.policy_of(spec, weights | {name: weights[name].astype(dtype) for name in spec.layers})

    def learner(self, policy, config=CONFIG, **options):
        return self.learner_of(policy, config, **options)


def torch_policy(spec: PolicySpec, weights: Any) -> TorchPolicy:
    policy = TorchPolicy(spec).double() if weights["actor.head.weight"].dtype == np.float64 else TorchPolicy(spec)
    policy.set_weights(weights)
    return policy


def _torch_answer(value, slope, values):
    # value + slope · (V - V), whose gradient by V is the slope
    return torch.as_tensor(float(value), dtype=values.dtype) + slope * (values - values.detach()).sum()


def _jax_answer(value, slope, values):
    return jnp.asarray(value, values.dtype) + slope * (values - jax.lax.stop_gradient(values)).sum()


def _append(into: list[Any], tree: Any) -> None:
    into.append(optree.tree_map(lambda leaf: torch.as_tensor(leaf).detach().numpy().copy(), tree))


def _jax_record(into: list[Any], tree: Any) -> None:
    jax.debug.callback(lambda tree: into.append(jax.tree.map(np.array, tree)), tree, ordered=True)


def _jax_number(count: Callable[[], int]) -> Any:
    return io_callback(lambda: np.int32(count()), jax.ShapeDtypeStruct((), np.int32), ordered=True)


NUMPY = Side(
    "numpy",
    NumpyPolicy,
    NumpyOptimizer,
    lambda value, slope, values: (value, {"values": slope * np.ones_like(values)}),
    _append,
    lambda count: count(),
)
TORCH = Side(
    "torch",
    torch_policy,
    lambda *given, **options: PPOOptimizer(*given, **{"device": "cpu", **options}),
    _torch_answer,
    _append,
    lambda count: count(),
)
JAX = Side("jax", JaxPolicy, JaxOptimizer, _jax_answer, _jax_record, _jax_number)
SIDES = [NUMPY, TORCH, JAX]


def telling_weights(spec: PolicySpec, dtype: Any = np.float32, seed: int = 3) -> dict[str, np.ndarray]:
    """Fresh weights with heads large enough that every number depends on the observation, and statistics that are not trivial."""
    rng, weights = np.random.default_rng(seed), dict(fresh_weights(spec, seed))
    for name in weights:
        if name in spec.layers:
            if "head" in name or name.endswith("bias") or name == "log_std":
                weights[name] = rng.uniform(-0.7, 0.7, weights[name].shape)
            weights[name] = weights[name].astype(dtype)
        elif "_normalizer." in name:
            weights[name] = np.asarray({"mean": 0.3, "var": 4.0, "count": 10}[name.split(".")[-1]] + 0 * weights[name], weights[name].dtype)
    return weights


ACTIVATION_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "tanh": np.tanh,
    "relu": lambda x: x * (x > 0),
    "elu": lambda x: np.where(x > 0, x, np.exp(x) - 1),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


def plain_outputs(spec: PolicySpec, weights: Any, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Action outputs [n, C] and values [n] of an MLP, layer by layer."""
    f, found = ACTIVATION_FUNCTIONS[spec.config.activation], {}
    for name in ("actor", "critic"):
        hidden = inputs
        for index in range(len(spec.config.hidden_sizes)):
            layer = f"{'trunk' if spec.config.shared_trunk else name}.{index}"
            hidden = f(hidden @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"])
        found[name] = hidden @ weights[f"{name}.head.weight"].T + weights[f"{name}.head.bias"]
    return found["actor"], found["critic"][:, 0]


def parameters(policy: Any) -> np.ndarray:
    """All parameters of a policy as one vector."""
    weights = policy.get_weights()
    return np.concatenate([weights[name].reshape(-1) for name in policy.spec.layers])


def collect(policy: Any, num_steps=12, num_lanes=3, *, seed=0, episode_length=5, observations=None) -> Rollout:
    """Random observations and masks (or these), the policy's actions and log-probs on them, and rewards that depend on both."""
    spec, rng = policy.spec, np.random.default_rng(seed)
    fake = create_fake_rollout(spec.observation_space, spec.action_space, num_steps, num_lanes, seed=seed, episode_length=episode_length)
    if observations is None:
        observations = fake.observations
        if spec.observations.has_mask:
            observations = {**observations, MASK_KEY: optree.tree_map(lambda leaf: some_legal(leaf, rng), observations[MASK_KEY])}
    rows = optree.tree_map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), observations)
    step = policy.act(rows, (), np.zeros(num_steps * num_lanes, bool), rng)
    unflat = lambda leaf: np.array(leaf).reshape(num_steps, num_lanes, *leaf.shape[1:])  # noqa: E731
    actions = optree.tree_map(unflat, step.actions)
    seen = encode_observations(observation_layout(spec.observation_space), observations, 2)[..., 0]
    first = optree.tree_leaves(actions)[0].reshape(num_steps, num_lanes, -1)[..., 0]
    return replace(
        fake,
        observations=observations,
        actions=actions,
        log_probs=unflat(step.log_probs).astype(np.float32),
        rewards=(seen * first + rng.normal(0, 0.1, first.shape)).astype(np.float32),
        policy_version=np.full(num_lanes, policy.policy_version, np.int32),
        weights_fingerprint=np.full(num_lanes, fingerprint(policy.get_weights()), np.uint64),
    )


def of_unknown_weights(rollout: Rollout) -> Rollout:
    """The rollout without a record of which weights acted, so that it counts as neither stale nor foreign."""
    return replace(rollout, weights_fingerprint=np.zeros_like(rollout.weights_fingerprint))


def some_legal(mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Every second choice stays legal, so that each group of two or more keeps one; of the others about half are."""
    legal = rng.random(mask.shape) < 0.5
    legal[..., ::2] = True
    return legal.astype(mask.dtype)


def tensors(rollout: Rollout) -> Rollout:
    """The rollout with torch tensors for arrays."""
    return rollout.map(lambda array: to_tensor(array, "cpu"))
