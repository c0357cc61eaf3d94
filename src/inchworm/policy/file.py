"""The policy file: description, weights and normalisers in one safetensors file; checks of weights; acting on single observations."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import optree

from inchworm.core.errors import BadNumberError, ConfigError, InchwormError
from inchworm.core.protocols import Policy
from inchworm.core.tensor_file import read_tensor_file, untrusted, write_tensor_file
from inchworm.core.types import PolicyStep, Tree, Weights
from inchworm.policy.spec import VERSION, PolicySpec
from inchworm.policy.statistics import PolicyStatistics, popart

FILE_KIND, FILE_VERSION = "policy", 2
"""Version 2 also describes networks of users; built-in policies are still written as version 1."""
VALUE_HEAD = ("critic.head.weight", "critic.head.bias")
_CLASS_PATH = re.compile(r"[\w.]{1,200}:[\w.<>]{1,200}")
_MOST_NAMES = 5  # listed in a message


@dataclass(frozen=True, slots=True)
class PolicyDescription:
    """A policy without its weights, as files and checkpoints record it. Nothing is ever imported from it."""

    spec: PolicySpec | None
    """The architecture; None for a policy class of the user's."""
    own: Literal["network", "policy"] | None = None
    """What the user brings to load it: a network, a whole policy, or nothing for a built-in policy."""
    class_path: str = ""
    """The class of that, as `module:name`."""
    reward_statistics: Mapping[str, float] | None = None
    """Mean, var and count of the discounted returns that its rewards were scaled by, if they were (`ppo.scale_rewards`)."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `from_dict`."""
        data: dict[str, Any] = {} if self.spec is None else {"spec": self.spec.to_dict()}
        if self.own is not None:
            data[self.own] = self.class_path
        return data if self.reward_statistics is None else {**data, "reward_statistics": dict(self.reward_statistics)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PolicyDescription:
        """Restore the description from what `to_dict` returned."""
        own: Literal["network", "policy"] | None = "policy" if "policy" in data else "network" if "network" in data else None
        spec = None if own == "policy" else PolicySpec.from_dict(data["spec"])
        if own is not None and (not isinstance(data[own], str) or not _CLASS_PATH.fullmatch(data[own])):
            raise InchwormError(f"its {own} is not the import path of a class: {data[own]!r:.80}")
        described = cls(spec, own, "" if own is None else data[own])
        return described.with_rewards(data["reward_statistics"]) if "reward_statistics" in data else described

    def with_rewards(self, statistics: Mapping[str, Any]) -> PolicyDescription:
        """The same with mean, var and count of the returns that rewards were scaled by; raise if they cannot be."""
        numbers = {name: (int if name == "count" else float)(statistics[name]) for name in ("mean", "var", "count")}
        if not all(map(math.isfinite, numbers.values())) or numbers["var"] < 0 or numbers["count"] < 0:
            raise InchwormError(f"its reward statistics are {numbers}")
        return dataclasses.replace(self, reward_statistics=numbers)

    def check(self, weights: Mapping[str, np.ndarray]) -> None:
        """Raise if weights are not those of the spec, or cannot be acted with. Those of a user's class are compared when it is known."""
        if self.own is None and self.spec is not None:
            check_weights(self.spec, weights)
        check_numbers(weights, builtin=self.own is None)


def describe(policy: Policy | PolicySpec) -> PolicyDescription:
    """Describe a policy, or the built-in one of a spec."""
    given: Any = policy
    if isinstance(policy, PolicySpec):
        return PolicyDescription(policy)
    if getattr(policy, "builtin", False):
        return PolicyDescription(given.spec)
    if getattr(policy, "lane_map", None) is not None:
        raise ConfigError("several policies have a file each; use save_policy(path, composite.policies[name])")
    if not isinstance(policy, Policy):
        raise ConfigError(f"{type(policy).__name__} is not a policy with weights; it needs the methods of inchworm.Policy")
    network = getattr(policy, "own_network", None)
    if network is not None:
        return PolicyDescription(given.spec, "network", class_path(network))
    return PolicyDescription(None, "policy", class_path(policy))


def class_path(instance: object) -> str:
    """The class of an object, as `module:name`."""
    return f"{type(instance).__module__}:{type(instance).__qualname__}"


def check_weights(spec: PolicySpec, weights: Mapping[str, np.ndarray]) -> None:
    """Raise if the names or shapes of weights are not the spec's."""
    check_shapes(weights, spec.layers, more=True)  # before anything of the spec's sizes is allocated
    check_shapes(weights, weight_shapes(spec))


def weight_shapes(spec: PolicySpec) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a policy's weights: parameters, statistics and version."""
    statistics = {name: value.shape for name, value in PolicyStatistics(spec).to_weights().items()}
    return {**spec.layers, **statistics, VERSION: ()}


def check_shapes(weights: Mapping[str, np.ndarray], expected: Mapping[str, tuple[int, ...]], *, more: bool = False) -> None:
    """Raise if the names or shapes of weights are not the expected ones, and name them; with `more` there may be others."""
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    problems = [f"{what} {listed(names)}" for what, names in (("missing", missing), ("unknown", () if more else unknown)) if names]
    wrong = [name for name, shape in expected.items() if name in weights and np.shape(weights[name]) != tuple(shape)]
    problems += [
        f"the weight {name} has shape {np.shape(weights[name])}; the policy needs {tuple(expected[name])}" for name in wrong[:_MOST_NAMES]
    ]
    if wrong[_MOST_NAMES:]:
        problems.append(f"{len(wrong) - _MOST_NAMES} more have another shape")
    if problems:
        raise InchwormError(f"these weights do not fit the policy: {'; '.join(problems)}")


def listed(names: Sequence[str]) -> str:
    """The first of some names, for a message."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{', '.join(names[:_MOST_NAMES])}{more}"


def set_weights(policy: Policy, weights: Mapping[str, np.ndarray]) -> None:
    """Set the weights of any policy, also of a user's, whose own checks may be none; names and shapes must match."""
    check_shapes(weights, {name: np.shape(own) for name, own in policy.get_weights().items()})
    policy.set_weights(weights)


def check_numbers(weights: Mapping[str, np.ndarray], *, builtin: bool = True) -> None:
    """Raise if weights cannot be acted with: not finite or, for a built-in policy, of a wrong dtype or negative where that is wrong."""
    for name, array in weights.items():
        is_count = name == VERSION or name.endswith(".count")
        if builtin and array.dtype.kind not in ("iu" if is_count else "f"):
            raise InchwormError(f"the weight {name} is of {array.dtype}, not of {'integers' if is_count else 'float32 or float64'}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            first = np.argwhere(~np.isfinite(array))[0].tolist()
            raise BadNumberError(f"the weight {name} is not finite at {first}: {array[tuple(first)]}; such a policy is not saved")
        if builtin and (is_count or name.endswith(".var")) and (array < 0).any():
            raise BadNumberError(f"{name} is negative: {array.min()}")


def match_names(patterns: Sequence[str], names: Iterable[str], setting: str) -> list[str]:
    """The names of weights that glob patterns match, in order. One that matches none is an error that lists names close to it."""
    known = [name for name in names if name.rpartition("/")[2] != VERSION]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            near = difflib.get_close_matches(pattern.replace("*", ""), known, n=3, cutoff=0.3)
            found = f"close to it: {', '.join(near)}" if near else f"there are {listed(known)}"
            raise ConfigError(f"{setting}: no weight of the policy matches {pattern!r:.80}; {found}")
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]


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


def save_policy(
    path: str | Path,
    policy: Policy | PolicySpec,
    weights: Mapping[str, np.ndarray] | None = None,
    *,
    reward_statistics: Mapping[str, Any] | None = None,
) -> Path:
    """Write a policy file, atomically.

    `policy` is any policy, or the spec of a built-in one together with its `weights`. For a network or policy class of the user's, the
    file holds the weights and, as information only, the import path of the class: `load_policy` takes the class from its caller.
    `reward_statistics` are those of a learner with `ppo.scale_rewards`, for a training that begins with this file.
    """
    description = describe(policy)
    if reward_statistics is not None:
        description = description.with_rewards(reward_statistics)
    if weights is None:
        if isinstance(policy, PolicySpec):
            raise ConfigError("a spec has no weights; use save_policy(path, policy) or save_policy(path, spec, weights)")
        weights = policy.get_weights()
    description.check(weights)
    version = 1 if description.own is None else FILE_VERSION
    write_tensor_file(Path(path), weights, kind=FILE_KIND, version=version, header=description.to_dict())
    return Path(path)


def read_policy_file(path: str | Path) -> tuple[PolicyDescription, Weights]:
    """Read the description and the weights of any policy file."""
    weights, header = read_tensor_file(Path(path), kind=FILE_KIND, max_version=FILE_VERSION)
    with untrusted(f"{path} is not a valid policy file"):
        description = PolicyDescription.from_dict(header)
        description.check(weights)
    return description, weights


def read_policy(path: str | Path) -> tuple[PolicySpec, Weights]:
    """Read the spec and weights of the file of a built-in policy."""
    description, weights = read_policy_file(path)
    if description.own is not None or description.spec is None:
        raise ConfigError(f"{path} holds the weights of {description.class_path}, which is not a built-in policy")
    return description.spec, weights


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


class LoadedPolicy(Policy, Protocol):
    """What `load_policy` returns: a policy that also acts on single observations."""

    spec: PolicySpec

    def predict(self, observation: Tree, *, deterministic: bool = True, rng: np.random.Generator | None = None) -> Tree:
        """See `Predicts.predict`."""

    def predict_with_memory(
        self, observation: Tree, state: Tree = None, *, deterministic: bool = True, rng: np.random.Generator | None = None
    ) -> tuple[Tree, Tree]:
        """See `Predicts.predict_with_memory`."""
