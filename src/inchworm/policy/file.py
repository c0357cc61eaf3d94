"""The policy file: spec, weights and normalisers in one safetensors file; checks of weights; acting on single observations."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import optree

from inchworm.core.errors import BadNumberError, InchwormError
from inchworm.core.tensor_file import read_tensor_file, untrusted, write_tensor_file
from inchworm.core.types import PolicyStep, Tree
from inchworm.policy.spec import PolicySpec
from inchworm.policy.statistics import PolicyStatistics, popart

if TYPE_CHECKING:
    from inchworm.core.protocols import Policy


VERSION = "policy_version"
FILE_KIND, FILE_VERSION = "policy", 1
VALUE_HEAD = ("critic.head.weight", "critic.head.bias")


def check_weights(spec: PolicySpec, weights: Mapping[str, np.ndarray]) -> None:
    """Raise if the names or shapes of weights are not the spec's."""
    check_shapes(weights, spec.layers, more=True)  # before anything of the spec's sizes is allocated
    check_shapes(weights, weight_shapes(spec))


def weight_shapes(spec: PolicySpec) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a policy's weights: parameters, statistics and version."""
    statistics = {name: value.shape for name, value in PolicyStatistics(spec).to_weights().items()}
    return {**spec.layers, **statistics, VERSION: ()}


def check_shapes(weights: Mapping[str, np.ndarray], expected: Mapping[str, tuple[int, ...]], *, more: bool = False) -> None:
    """Raise if the names or shapes of weights are not the expected ones; with `more` there may be others."""
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or (unknown and not more):
        raise InchwormError(f"these weights do not fit the policy: {f'missing {missing}' if missing else f'unknown {unknown}'}")
    for name, shape in expected.items():
        if np.shape(weights[name]) != tuple(shape):
            raise InchwormError(f"the weight {name} has shape {np.shape(weights[name])}; the policy needs {tuple(shape)}")


def check_numbers(weights: Mapping[str, np.ndarray]) -> None:
    """Raise if weights cannot be acted with: wrong dtype, not finite, a negative variance or count. Such weights are never saved."""
    for name, array in weights.items():
        is_count = name == VERSION or name.endswith(".count")
        if array.dtype.kind not in ("iu" if is_count else "f"):
            raise InchwormError(f"the weight {name} is of {array.dtype}, not of {'integers' if is_count else 'float32 or float64'}")
        if not np.isfinite(array).all():
            first = np.argwhere(~np.isfinite(array))[0].tolist()
            raise BadNumberError(f"the weight {name} is not finite at {first}: {array[tuple(first)]}; such a policy is not saved")
        if (is_count or name.endswith(".var")) and (array < 0).any():
            raise BadNumberError(f"{name} is negative: {array.min()}")


def fingerprint(weights: Mapping[str, np.ndarray]) -> int:
    """A 64-bit hash of the weights; unlike version numbers it also differs between runs."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(weights[name]).tobytes())
    return int.from_bytes(digest.digest(), "little")


def rescaled_value_head(
    weights: Mapping[str, np.ndarray], before: tuple[float, float], after: tuple[float, float]
) -> dict[str, np.ndarray]:
    """The value head after a change of the value statistics (mean, std) that keeps values in reward units (see `popart`)."""
    if before == after:
        return {}
    return dict(zip(VALUE_HEAD, popart(*before, *after, *[weights[name] for name in VALUE_HEAD])))


def save_policy(path: str | Path, spec: PolicySpec, weights: Mapping[str, np.ndarray]) -> Path:
    """Write a policy file, atomically."""
    check_weights(spec, weights)
    check_numbers(weights)
    write_tensor_file(Path(path), weights, kind=FILE_KIND, version=FILE_VERSION, header={"spec": spec.to_dict()})
    return Path(path)


def read_policy(path: str | Path) -> tuple[PolicySpec, dict[str, np.ndarray]]:
    """Read the spec and weights of a policy file."""
    weights, header = read_tensor_file(Path(path), kind=FILE_KIND, max_version=FILE_VERSION)
    with untrusted(f"{path} is not a valid policy file"):
        spec = PolicySpec.from_dict(header["spec"])
        check_weights(spec, weights)
        check_numbers(weights)
    return spec, weights


def load_policy(path: str | Path, backend: str = "auto") -> Policy:
    """Load a policy from its file. `auto` acts in NumPy where that is possible, and imports torch only for convolutions."""
    from inchworm.backends.registry import make_policy  # which backends there are is known above this package

    spec, weights = read_policy(path)
    chosen = ("torch" if spec.observations.images else "numpy") if backend == "auto" else backend
    return make_policy(spec, weights=weights, backend=chosen)


NO_MEMORY_BETWEEN_CALLS = "predict starts with an empty memory at every call; use predict_with_memory(observation, state) to keep it"


class Predicts:
    """What the built-in policies share: acting on single observations."""

    spec: PolicySpec
    initial_state: Callable[[int], Tree]
    act: Callable[..., PolicyStep]
    central_critic: bool
    """Whether `value` reads the global state."""

    def predict(self, observation: Tree, *, deterministic: bool = True, rng: np.random.Generator | None = None) -> Tree:
        """The action for one observation without a batch axis, as the environment takes it; a memory starts empty."""
        if optree.tree_leaves(self.initial_state(1)):
            warnings.warn(NO_MEMORY_BETWEEN_CALLS, stacklevel=2)
        return self.predict_with_memory(observation, deterministic=deterministic, rng=rng)[0]

    def predict_with_memory(
        self, observation: Tree, state: Tree = None, *, deterministic: bool = True, rng: np.random.Generator | None = None
    ) -> tuple[Tree, Tree]:
        """The action for one observation without a batch axis, and the memory for the next call; None starts an episode."""
        stream = rng if rng is not None else np.random.default_rng()
        memory = self.initial_state(1) if state is None else state
        step = self.act(self.spec.batch(observation), memory, np.array([state is None]), stream, deterministic=deterministic)
        return self.spec.unbatch(step.env_actions), step.state
