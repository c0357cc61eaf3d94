"""What every conformance case runs on: each backend as one object, and every kind of space as one case."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces

from doubles.learners import torch_policy
from inchworm.backends.jax import gae as jax_gae
from inchworm.backends.jax import loss as jax_loss
from inchworm.backends.jax import network as jax_encoding
from inchworm.backends.jax import policy as jax_distributions
from inchworm.backends.jax.policy import JaxPolicy
from inchworm.backends.numpy import distributions as numpy_distributions
from inchworm.backends.numpy import gae as numpy_gae
from inchworm.backends.numpy import loss as numpy_loss
from inchworm.backends.numpy import policy as numpy_encoding
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.backends.torch import gae as torch_gae
from inchworm.backends.torch import loss as torch_loss
from inchworm.backends.torch import network as torch_encoding
from inchworm.backends.torch import policy as torch_distributions
from inchworm.core.spaces import MASK_KEY, build_tree, leaves, mask_sizes, mask_space, with_mask
from inchworm.core.types import Evaluation, LossCoefficients, Minibatch


@dataclass(frozen=True)
class Backend:
    """One backend: how its arrays are made and read, and its functions under the names that all backends share."""

    name: str
    array: Callable[[Any], Any]
    numpy: Callable[[Any], np.ndarray]
    compute_gae: Callable[..., Any]
    loss: Any
    """ppo_loss, value_errors and normalize."""
    log_prob_and_entropy: Callable[..., tuple[Any, Any]]
    encoding: Any
    """The module with encode_observations, encode_mask and flatten_actions."""
    policy: Callable[..., Any]
    """(spec, weights) -> a policy of this backend with these weights, in their dtype."""

    def tree(self, tree: Any) -> Any:
        return optree.tree_map(self.array, tree)

    def minibatch(self, minibatch: Minibatch) -> Minibatch:
        return replace(minibatch, **{field.name: self.tree(getattr(minibatch, field.name)) for field in fields(minibatch)})

    def evaluation(self, evaluation: Evaluation) -> Evaluation:
        return Evaluation(*[self.array(getattr(evaluation, field.name)) for field in fields(evaluation)])


class _NumpyLoss:
    """The NumPy loss, which reads flat samples and returns gradients too, as the other backends' losses: [L, N] in, terms out."""

    normalize = staticmethod(numpy_loss.normalize)

    @staticmethod
    def ppo_loss(evaluation: Evaluation, minibatch: Minibatch, coefficients: LossCoefficients, count: Any) -> dict[str, float]:
        names = ("log_probs", "advantages", "returns", "values", "valid")
        samples: Any = SimpleNamespace(**{name: getattr(minibatch, name).reshape(-1) for name in names})
        flat = [getattr(evaluation, name).reshape(-1) for name in ("log_probs", "entropy", "values")]
        return numpy_loss.ppo_loss(Evaluation(*flat, evaluation.value_scale), samples, coefficients, int(count))[0]

    @staticmethod
    def value_errors(evaluation: Evaluation, minibatch: Minibatch, coefficients: LossCoefficients) -> np.ndarray:
        return numpy_loss.value_errors(evaluation, minibatch.returns, minibatch.values, coefficients)[0]


# As the backend calls them; operation by operation, each would be compiled.
_jax_gae = jax.jit(jax_gae.compute_gae)


def _jax_log_prob_and_entropy(layout: Any, *given: Any) -> Any:
    return jax.jit(partial(jax_distributions.log_prob_and_entropy, layout))(*given)


def _jax_gae_by_rows(*given: Any) -> Any:
    """The recursion for many lanes."""
    rewards, *others = (jnp.tile(array, (1, jax_gae.MANY_LANES)) for array in given[:5])
    return _jax_gae(rewards, *others, *given[5:])[:, : given[0].shape[1]]


NUMPY = Backend(
    "numpy",
    np.asarray,
    np.asarray,
    numpy_gae.compute_gae,
    _NumpyLoss,
    numpy_distributions.log_prob_and_entropy,
    numpy_encoding,
    NumpyPolicy,
)
TORCH = Backend(
    "torch",
    lambda array: torch.from_numpy(np.array(array)),
    lambda tensor: tensor.detach().numpy(),
    torch_gae.compute_gae,
    torch_loss,
    torch_distributions.log_prob_and_entropy,
    torch_encoding,
    torch_policy,
)
JAX = Backend(
    "jax",
    jnp.asarray,
    np.asarray,
    _jax_gae,
    jax_loss,
    _jax_log_prob_and_entropy,
    jax_encoding,
    JaxPolicy,
)
JAX_BY_ROWS = replace(JAX, name="jax, row by row", compute_gae=_jax_gae_by_rows)
TORCH_ON_DEVICE = replace(TORCH, name="torch on a device", compute_gae=torch_gae.gae_on_device)


@pytest.fixture(params=[NUMPY, TORCH, JAX], ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with jax.enable_x64(True):  # many cases are compared in float64
        yield request.param


@pytest.fixture(params=[NUMPY, TORCH, TORCH_ON_DEVICE, JAX, JAX_BY_ROWS], ids=lambda backend: backend.name)
def gae_backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with jax.enable_x64(True):
        yield request.param


BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 0.5], np.float32))
ACTION_SPACES: dict[str, tuple[spaces.Space, str]] = {
    "discrete": (spaces.Discrete(4), "clip"),
    "discrete_from_3": (spaces.Discrete(3, start=3), "clip"),
    "multi_discrete": (spaces.MultiDiscrete([2, 3, 4]), "clip"),
    "multi_discrete_rank_2": (spaces.MultiDiscrete([[2, 3], [3, 2]], start=[[1, 0], [0, 5]]), "clip"),
    "multi_binary": (spaces.MultiBinary(3), "clip"),
    "box_clip": (BOX, "clip"),
    "box_clip_f64_rank_2": (spaces.Box(-0.1, 0.1, (2, 1), np.float64), "clip"),
    "box_clip_f16": (spaces.Box(-1, 1, (2,), np.float16), "clip"),
    "box_tanh": (BOX, "tanh"),
    "dict_mix": (spaces.Dict({"z": spaces.Discrete(3, start=-1), "a": BOX, "m": spaces.MultiBinary(2)}), "clip"),
    "tuple_mix": (spaces.Tuple([BOX, spaces.MultiDiscrete([2, 2]), spaces.Discrete(5)]), "tanh"),
    "nested": (spaces.Dict({"arm": spaces.Tuple([spaces.Dict({"grip": spaces.Discrete(2), "move": BOX}), spaces.Discrete(3)])}), "tanh"),
}
OBSERVATION_SPACES: dict[str, spaces.Space] = {
    "box_f32": spaces.Box(-np.inf, np.inf, (3,)),
    "box_f64": spaces.Box(-5, 5, (3,), np.float64),
    "image": spaces.Box(0, 255, (8, 9, 3), np.uint8),
    "box_rank_2": spaces.Box(-1, 1, (2, 3)),
    "discrete_from_2": spaces.Discrete(4, start=2),
    "multi_discrete": spaces.MultiDiscrete([3, 2], start=[0, 4]),
    "multi_binary": spaces.MultiBinary((2, 2)),
    "dict_nested": spaces.Dict({"b": spaces.Dict({"y": spaces.Box(-1, 1, (2,)), "x": spaces.Discrete(3)}), "a": spaces.MultiBinary(2)}),
    "tuple": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 255, (2, 2), np.uint8)])]),
}


@dataclass(frozen=True)
class Case:
    """An action space with its way of bounding, and an observation space that may carry its mask."""

    action_space: spaces.Space
    bounds: str
    masked: bool

    def observation_space(self, space: spaces.Space) -> spaces.Space:
        return with_mask(space, mask_space(self.action_space)) if self.masked else space

    def mask(self, rows: tuple[int, ...], rng: np.random.Generator) -> Any:
        """A random mask [*rows, n] for each discrete part, with at least one legal choice in every group."""

        def one(path: Any, space: Any) -> np.ndarray:
            sizes = next(mask_sizes(leaf) for leaf_path, leaf in leaves(self.action_space) if leaf_path == path)
            groups = []
            for size in sizes:
                legal = rng.random((*rows, size)) < 0.5
                np.put_along_axis(legal, rng.integers(0, size, (*rows, 1)), True, -1)
                groups.append(legal)
            return np.concatenate(groups, -1).astype(np.int8)

        return build_tree(mask_space(self.action_space), one)

    def observations(self, space: spaces.Space, rows: tuple[int, ...], rng: np.random.Generator) -> Any:
        """Random observations [*rows, *obs] of `observation_space(space)`."""
        seen = space if not self.masked or isinstance(space, spaces.Dict) else spaces.Dict({"observation": space})
        tree = build_tree(seen, lambda _, leaf: draw(leaf, rows, rng))
        return {**tree, MASK_KEY: self.mask(rows, rng)} if self.masked else tree


def draw(space: spaces.Space, rows: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random values [*rows, *leaf] of a leaf space."""
    if isinstance(space, spaces.Box):
        shape = (*rows, *space.shape)
        values = rng.integers(0, 256, shape) if space.dtype == np.uint8 else rng.standard_normal(shape)
        return np.clip(values, space.low, space.high).astype(space.dtype)
    space.seed(int(rng.integers(2**31)))
    samples = [space.sample() for _ in range(int(np.prod(rows)))]
    return np.stack(samples).reshape(*rows, *space.shape).astype(space.dtype)


CASES = {
    f"{name}{'+mask' if masked else ''}": Case(space, bounds, masked)
    for name, (space, bounds) in ACTION_SPACES.items()
    for masked in (False, True)
    if not masked or any(mask_sizes(leaf) for _, leaf in leaves(space))
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(params=[name for name, case in CASES.items() if case.masked])
def masked_case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(params=list(OBSERVATION_SPACES))
def observation_space(request: pytest.FixtureRequest) -> spaces.Space:
    return OBSERVATION_SPACES[request.param]
