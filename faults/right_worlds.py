"""Random small policies, configs and rollouts for E2, E3 and E5, and advantages written out as a sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import optree
from gymnasium import spaces

from inchworm.backends.numpy.policy import NumpyPolicy, fresh_weights
from inchworm.config.sections import PolicyConfig, PPOConfig
from inchworm.core.spaces import mask_space, with_mask
from inchworm.env.values import random_mask
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.rollout import Rollout

BACKENDS = ("numpy", "torch")
ACTIONS = ("discrete", "multi_discrete", "box")


@dataclass(frozen=True)
class World:
    """Spaces, a network and a config, with the initial weights of a comparison."""

    kind: str
    spec: Any
    config: Any
    weights: dict[str, np.ndarray]
    seed: int

    @property
    def masked(self) -> bool:
        """Whether observations carry an action mask."""
        return bool(self.spec.observations.has_mask)

    @property
    def choices(self) -> tuple[int, ...]:
        """Number of values of each discrete part of an action; empty for a Box."""
        return tuple(self.spec.actions.group_sizes)

    @property
    def clip(self) -> tuple[float, float]:
        """Bounds of the network's input, which only normalised observations have."""
        bound = self.spec.config.observation_clip if self.spec.config.normalize_observations else np.inf
        return (-bound, bound)

    def describe(self) -> str:
        on = [name for name in ("normalize_observations", "normalize_values", "shared_trunk") if getattr(self.spec.config, name)]
        also = [f"advantages {self.config.normalize_advantages}", *(["clip_vloss"] if self.config.clip_vloss else [])]
        return ", ".join([self.kind, *(["mask"] if self.masked else []), self.spec.config.activation, *on, *also])


def random_world(rng: np.random.Generator, *, seed: int, one_minibatch: bool) -> World:
    """Draw a world; kinds of action and masks take turns. With `one_minibatch` a step uses the whole rollout and an unscaled gradient."""

    def chance(share: float = 0.5) -> bool:
        return bool(rng.random() < share)

    kind = ACTIONS[seed % len(ACTIONS)]
    sizes = rng.integers(2, 4, 2)
    action_space: Any = {
        "discrete": spaces.Discrete(int(rng.integers(2, 6))),
        "multi_discrete": spaces.MultiDiscrete(sizes),
        "box": spaces.Box(-2, 2, (2,)),
    }[kind]
    observation_space: Any = spaces.Box(-np.inf, np.inf, (int(rng.integers(1, 4)),))
    if kind != "box" and seed // len(ACTIONS) % 2 == 0:
        observation_space = with_mask(observation_space, mask_space(action_space))
    network = PolicyConfig(
        hidden_sizes=((3,), (4, 3))[int(chance(0.3))],
        activation="tanh" if one_minibatch else str(rng.choice(["tanh", "relu"])),  # type: ignore[arg-type]
        shared_trunk=chance(0.3),
        normalize_observations=chance(),
        normalize_values=chance(),
    )
    config = PPOConfig(
        learning_rate=0.1 if one_minibatch else 1e-2,  # in one step some values must move further than their clip
        gamma=float(rng.choice([0.9, 0.99, 1.0])),
        gae_lambda=float(rng.choice([0.0, 0.9, 1.0])),
        clip_coef=float(rng.choice([0.1, 0.2])),
        ent_coef=float(rng.choice([0.0, 0.01, 0.1])),
        clip_vloss=chance(),
        normalize_advantages=str(rng.choice(["batch", "off"] if one_minibatch else ["batch", "minibatch", "off"])),  # type: ignore[arg-type]
        max_grad_norm=None if one_minibatch else 0.5,
        num_minibatches=1 if one_minibatch else 4,
        update_epochs=10,
    )
    spec = PolicySpec(observation_space, action_space, network)
    weights = fresh_weights(spec, int(rng.integers(2**31)))
    weights |= {name: (weights[name] + rng.normal(0, 0.3, shape)).astype(np.float32) for name, shape in spec.layers.items()}
    policy = NumpyPolicy(spec, weights)
    fake = create_fake_rollout(spec.observation_space, spec.action_space, 8, 2, seed=1, episode_length=4)
    policy.update_statistics(fake, rng.normal(1, 3, (8, 2)))
    return World(kind, spec, config, policy.get_weights(), seed)


def policy_of(world: World, backend: str, width: str) -> Any:
    """The world's policy on a backend, float32 or float64."""
    parameters = set(world.spec.layers)
    weights = {name: value.astype(width) if name in parameters else value for name, value in world.weights.items()}
    if backend == "numpy":
        from inchworm.backends.numpy.policy import NumpyPolicy

        return NumpyPolicy(world.spec, weights)
    from inchworm.backends.torch.policy import TorchPolicy

    policy = TorchPolicy(world.spec)
    policy = policy.double() if width == "float64" else policy
    policy.set_weights(weights)
    return policy


def learner_of(policy: Any, config: Any, backend: str) -> Any:
    if backend == "numpy":
        from inchworm.backends.numpy.learner import NumpyOptimizer

        return NumpyOptimizer(policy, config, seed=3)
    from inchworm.backends.torch.learner import PPOOptimizer

    return PPOOptimizer(policy, config, seed=3, device="cpu")


def random_rollout(world: World, *, noise: float = 0.25, num_steps: int = 8, num_lanes: int = 3) -> Any:
    """Random observations and masks, the policy's own actions on them, log-probs moved by `noise`, ends of both kinds."""
    rng, spec = np.random.default_rng([7, world.seed]), world.spec
    fake = create_fake_rollout(spec.observation_space, spec.action_space, num_steps, num_lanes, seed=world.seed, episode_length=3)
    shape, observations = (num_steps, num_lanes), fake.observations
    if world.masked:
        masks = np.stack([random_mask(spec.action_space, rng) for _ in range(num_steps * num_lanes)])
        observations = {**observations, "action_mask": masks.reshape(*shape, -1)}
    flat = optree.tree_map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), observations)
    step = policy_of(world, "numpy", "float32").act(flat, (), np.zeros(num_steps * num_lanes, bool), rng)
    moved = step.log_probs.reshape(shape) + rng.normal(0, noise, shape)
    changed = {"observations": observations, "actions": step.actions.reshape(*shape, *step.actions.shape[1:])}
    return Rollout.from_dict(fake.to_dict() | changed | {"log_probs": moved.astype(np.float32)})


def advantage_sum(rows: Any, values: np.ndarray, next_values: np.ndarray, gamma: float, gae_lambda: float) -> np.ndarray:
    """A_t = sum over k of (gamma lambda)^k delta_{t+k} in float64, up to the row that ends the episode. No recursion.

    `rows` has rewards, terminated and truncated [T, B].
    """
    following = np.where(rows.terminated, 0.0, gamma * next_values)
    deltas, ends = rows.rewards.astype(np.float64) + following - values, rows.terminated | rows.truncated
    powers = (gamma * gae_lambda) ** np.arange(len(deltas))  # 0 ** 0 is 1
    result = np.zeros_like(deltas)
    for t, lane in np.ndindex(*deltas.shape):
        later = np.flatnonzero(ends[t:, lane])
        length = int(later[0]) + 1 if len(later) else len(deltas) - t
        result[t, lane] = (powers[:length] * deltas[t : t + length, lane]).sum()
    return result
