"""The policy file: weights, spec and normalisers in one safetensors file, and the rules that weights keep. Serves steps 4 and 9."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from inchworm.errors import CorruptFileError, InchwormError
from inchworm.files import read_tensor_file, write_tensor_file
from inchworm.normalization import popart
from inchworm.policy.spec import PolicySpec
from inchworm.policy.statistics import PolicyStatistics

if TYPE_CHECKING:
    from inchworm.protocols import Policy

VERSION = "policy_version"
FILE_KIND, FILE_VERSION = "policy", 1
VALUE_HEAD = ("critic.head.weight", "critic.head.bias")


def check_weights(spec: PolicySpec, weights: Mapping[str, np.ndarray]) -> None:
    """Refuse weights whose names or shapes are not the spec's."""
    expected = {**spec.layers, **{name: value.shape for name, value in PolicyStatistics(spec).to_weights().items()}, VERSION: ()}
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unknown:
        raise InchwormError(f"these weights do not fit the policy: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}")
    for name, shape in expected.items():
        if np.shape(weights[name]) != tuple(shape):
            raise InchwormError(f"the weight {name} has shape {np.shape(weights[name])}; the policy needs {tuple(shape)}")


def fingerprint(weights: Mapping[str, np.ndarray]) -> int:
    """64 bits that tell two sets of weights apart; version numbers of two runs collide, these do not."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(weights[name]).tobytes())
    return int.from_bytes(digest.digest(), "little")


def rescaled_value_head(
    weights: Mapping[str, np.ndarray], before: tuple[float, float], after: tuple[float, float]
) -> dict[str, np.ndarray]:
    """The value head after the value statistics (mean, std) moved, so that values in reward units stay (PopArt, Hessel et al. 2018)."""
    if before == after:
        return {}
    return dict(zip(VALUE_HEAD, popart(*before, *after, *[weights[name] for name in VALUE_HEAD])))


def save_policy(path: str | Path, spec: PolicySpec, weights: Mapping[str, np.ndarray]) -> Path:
    """Write a policy file, atomically."""
    check_weights(spec, weights)
    write_tensor_file(Path(path), weights, kind=FILE_KIND, version=FILE_VERSION, header={"spec": spec.to_dict()})
    return Path(path)


def read_policy(path: str | Path) -> tuple[PolicySpec, dict[str, np.ndarray]]:
    """The spec and weights of a policy file."""
    weights, header = read_tensor_file(Path(path), kind=FILE_KIND, max_version=FILE_VERSION)
    try:
        spec = PolicySpec.from_dict(header["spec"])
        check_weights(spec, weights)
    except (InchwormError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptFileError(f"{path} holds no valid policy: {error}") from error
    return spec, weights


def load_policy(path: str | Path, backend: Literal["auto", "numpy", "torch"] = "auto") -> Policy:
    """A policy from its file. `auto` acts in NumPy where that is possible and imports torch only for convolutions."""
    spec, weights = read_policy(path)
    if backend == "numpy" or (backend == "auto" and not spec.observations.images):
        from inchworm.backends.numpy.policy import NumpyPolicy

        return NumpyPolicy(spec, weights)
    from inchworm.backends.torch.policy import TorchPolicy

    return TorchPolicy(spec, weights)
