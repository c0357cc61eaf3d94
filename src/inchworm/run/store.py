"""`PolicyStore`: policies in numbered versions with scores and metadata, in memory, in a directory, or in MLflow's registry.

```
policies/   v000001.safetensors   v000001.json   v000002.safetensors   …
```
A version is an ordinary policy file with a JSON file beside it. Wherever a saved policy is named, a version may be: `policies@best`,
`policies@latest` or `policies@2` in a directory, `models:/NAME@best` or `models:/NAME/2` in the registry.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from inchworm.backends.registry import rebuild_policy
from inchworm.config.reading import check_plain
from inchworm.core.errors import ConfigError, CorruptFileError
from inchworm.core.protocols import Policy
from inchworm.core.tensor_file import make_directory, read_bytes, read_json, untrusted, write_atomically
from inchworm.core.types import Weights
from inchworm.policy.file import LoadedPolicy, PolicyDescription, describe, read_policy_file, save_policy
from inchworm.tracking.mlflow import MODEL_URI, Store, downloaded_model

_VERSION = re.compile(r"v(\d{6,})\.json")


@dataclass(frozen=True, slots=True)
class StoredPolicy:
    """A version in a store."""

    version: int
    uri: str
    """What `load_policy` takes; empty in memory."""
    score: float | None = None
    """Higher is better."""
    metadata: Mapping[str, Any] = field(default_factory=dict)


class PolicyStore:
    """Saves, loads, lists and compares versions of a policy."""

    def __init__(self, where: str | Path | None = None) -> None:
        """`where` is a directory, `models:/NAME` for MLflow's registry, or None for memory."""
        self.where = Path(where) if where is not None else None
        self._model = str(where).removeprefix(MODEL_URI) if str(where).startswith(MODEL_URI) else None
        self._memory: list[tuple[StoredPolicy, PolicyDescription, Weights]] = []

    def save(self, policy: Policy, score: float | None = None, metadata: Mapping[str, Any] | None = None) -> StoredPolicy:
        """Save a policy as the next version."""
        metadata = dict(metadata or {})
        check_plain(metadata, "metadata")
        if score is not None and not math.isfinite(score):
            raise ConfigError(f"score={score} must be a finite number, or None")
        if self.where is None:
            record = StoredPolicy(len(self._memory) + 1, "", score, metadata)
            description, weights = describe(policy), {name: np.array(array) for name, array in policy.get_weights().items()}
            description.check(weights)
            self._memory.append((record, description, weights))
            return record
        if self._model is not None:
            with tempfile.TemporaryDirectory(prefix="inchworm-model-") as folder:
                file = save_policy(Path(folder) / "policy.safetensors", policy)
                version = Store().register(self._model, [file], score, metadata)
            return StoredPolicy(version, f"{self.where}/{version}", score, metadata)
        make_directory(self.where)
        version = max((record.version for record in self.list()), default=0) + 1
        file = save_policy(self.where / f"v{version:06d}.safetensors", policy)
        about = {"score": score, "metadata": metadata, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        write_atomically(file.with_suffix(".json"), json.dumps(about, indent=1))  # last: a version exists once this does
        return StoredPolicy(version, f"{self.where}@{version}", score, metadata)

    def list(self) -> list[StoredPolicy]:
        """All versions, oldest first."""
        if self.where is None:
            return [record for record, _, _ in self._memory]
        if self._model is not None:
            return [StoredPolicy(version, f"{self.where}/{version}", *about) for version, about in Store().versions(self._model).items()]
        matches = [_VERSION.fullmatch(path.name) for path in self.where.iterdir()] if self.where.is_dir() else []
        return [self._read(version)[0] for version in sorted(int(match[1]) for match in matches if match)]

    def get(self, which: str | int = "latest") -> StoredPolicy:
        """The version of that number, the `latest`, or the `best` by score (of equals the newest)."""
        records = known = self.list()
        if which == "best":
            scored = [(record.score, record.version, record) for record in records if record.score is not None]
            records = [max(scored)[-1]] if scored else []
        elif which != "latest":
            records = [record for record in records if str(record.version) == str(which)]
        if not records:
            newest = ", ".join(str(record.version) for record in known[-5:]) or "none"
            raise ConfigError(f"there is no version {which} in {self.where or 'this store'}; its newest versions: {newest}")
        return records[-1]

    def read(self, which: str | int = "latest") -> tuple[PolicyDescription, Weights]:
        """The description and weights of a version, verified."""
        record = self.get(which)
        if self.where is None:
            _, description, weights = self._memory[record.version - 1]
            return description, weights
        if self._model is not None:
            with downloaded_model(record.uri) as file:
                return read_policy_file(file)
        file = self.where / f"v{record.version:06d}.safetensors"
        if hashlib.sha256(read_bytes(file)).hexdigest() != self._read(record.version)[1]:
            raise CorruptFileError(f"{file} is not the policy that was saved: it has another checksum")
        return read_policy_file(file)

    def load(self, which: str | int = "latest", *, backend: str = "auto", network: Any = None, policy: Any = None) -> LoadedPolicy:
        """Load a version; the other arguments are those of `load_policy`."""
        description, weights = self.read(which)
        name = f"version {which} of {self.where or 'the store'}"
        return cast(LoadedPolicy, rebuild_policy(description, weights, name, backend=backend, network=network, policy=policy))

    def compare(self, first: str | int, second: str | int) -> dict[str, Any]:
        """What differs from one version to another: score, metadata, and the largest change of each weight of the same shape."""
        one, two = self.get(first), self.get(second)
        (_, before), (_, after) = self.read(one.version), self.read(two.version)
        shared = [name for name in sorted(before) if name in after and after[name].shape == before[name].shape]
        moved = {name: float(np.abs(after[name].astype(np.float64) - before[name]).max(initial=0.0)) for name in shared}
        both = {name: (one.metadata.get(name), two.metadata.get(name)) for name in sorted({*one.metadata, *two.metadata})}
        return {
            "versions": (one.version, two.version),
            "score": None if one.score is None or two.score is None else two.score - one.score,
            "metadata": {name: values for name, values in both.items() if values[0] != values[1]},
            "weights": {name: change for name, change in moved.items() if change},
        }

    def _read(self, version: int) -> tuple[StoredPolicy, str]:
        """Read what is known of a version in the directory, and the checksum of its file."""
        path = Path(str(self.where)) / f"v{version:06d}.json"
        with untrusted(f"{path} is damaged"):
            about = read_json(read_bytes(path, limit=10_000_000).decode())
            score = None if about["score"] is None else float(about["score"])
            return StoredPolicy(version, f"{self.where}@{version}", score, dict(about["metadata"])), str(about["sha256"])


def is_versioned(name: str | Path) -> bool:
    """Whether a name is that of a version, such as `policies@best` or `models:/NAME@best`."""
    if str(name).startswith(MODEL_URI):
        return True
    where, at, _ = str(name).rpartition("@")
    with suppress(OSError):
        return bool(at) and any(_VERSION.fullmatch(path.name) for path in Path(where).iterdir())
    return False


def read_version(name: str) -> tuple[PolicyDescription, Weights]:
    """The description and weights of a version by its name, verified."""
    if name.startswith(MODEL_URI):
        with downloaded_model(name) as file:
            return read_policy_file(file)
    where, _, which = name.rpartition("@")
    return PolicyStore(where).read(which)
