"""Saved policies by name: policy files, runs, checkpoints and versions; players of matches; `PolicyStore`, which keeps the versions.

```
policies/   v000001.safetensors   v000001.json   v000002.safetensors   …
```
A version is an ordinary policy file with a JSON file beside it, in memory, in a directory, or in MLflow's registry. Wherever a saved policy
is named, a version may be: `policies@best`, `policies@latest` or `policies@2` in a directory, `models:/NAME@best` or `models:/NAME/2` in
the registry.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import numpy as np

from inchworm.backends.registry import read_description, rebuild_policy
from inchworm.collect.opponents import make_actor
from inchworm.config.reading import check_plain
from inchworm.config.sections import EnvConfig, TrainingConfig
from inchworm.core.errors import ConfigError, CorruptFileError
from inchworm.core.protocols import Actor, Policy, VectorEnv
from inchworm.core.tensor_file import make_directory, read_bytes, read_json, untrusted, write_atomically
from inchworm.core.types import Weights
from inchworm.env.source import env_source
from inchworm.policy.file import LoadedPolicy, PolicyDescription, describe, read_policy_file, save_policy
from inchworm.policy.spec import PolicySpec
from inchworm.run.checkpoint import MANIFEST, TrainingCheckpointer, load_checkpoint
from inchworm.run.directory import CHECKPOINTS, CONFIG, POLICY, Run, open_run
from inchworm.tracking.mlflow import MODEL_URI, Store, downloaded_model

if TYPE_CHECKING:
    from inchworm.backends.torch.network import Network

PolicyT = TypeVar("PolicyT", bound=Policy)
RUNS = Path("runs")
EXPECTED = f"expected a policy file, a run directory (with {POLICY}), a checkpoint directory (with {MANIFEST}) or a version (policies@best)"


@overload
def load_policy(
    path: str | Path, backend: str = ..., *, network: Network | Callable[[PolicySpec], Network] | None = ..., policy: None = ...
) -> LoadedPolicy: ...


@overload
def load_policy(path: str | Path, backend: str = ..., *, network: None = ..., policy: PolicyT) -> PolicyT: ...


@overload
def load_policy(path: str | Path, backend: str = ..., *, network: None = ..., policy: Callable[[], PolicyT]) -> PolicyT: ...


def load_policy(path: str | Path, backend: str = "auto", *, network: Any = None, policy: Any = None) -> Any:
    """Load a policy from a policy file, a run directory (its latest policy), a checkpoint directory, or the name of a run in runs/; or a
    version of a `PolicyStore`, as `policies@best` or `models:/NAME@best`.

    `backend="auto"` acts in NumPy where that is possible, and imports torch only for convolutions and networks of your own. Files never
    import code: for a network of your own pass its class, what makes it from the spec, or an instance as `network`; for a policy class of
    your own an instance, or what makes one without arguments, as `policy`. An instance gets the weights and is returned.
    """
    description, weights, found = read_saved(path)
    if description is None:
        names = sorted({name.partition("/")[0] for name in weights if "/" in name})
        raise ConfigError(
            f"{found} holds several policies ({', '.join(names)}); load one by its file, such as {POLICY.replace('.', f'-{names[0]}.')} of "
            "the run, or all with TrainingCheckpointer.load_policy"
        )
    return rebuild_policy(description, weights, str(found), backend=backend, network=network, policy=policy)


def read_saved(path: str | Path) -> tuple[PolicyDescription | None, Weights, Path]:
    """Read the description and weights of what `load_policy` takes, and return them with the path where they were found.

    Several policies have no single description, and weights named `part/weight`.
    """
    if _is_registered(path):
        with downloaded_model(str(path)) as file:
            return *read_policy_file(file), Path(path)
    if is_versioned(path):
        where, _, version = str(path).rpartition("@")
        return *PolicyStore(where).read(version), Path(path)
    target = next((one for one in (Path(path), RUNS / path) if one.exists()), None)
    if target is None:
        raise FileNotFoundError(f"there is no {path}; {EXPECTED}")
    if target.is_dir() and (target / POLICY).is_file():
        target = target / POLICY
    if not target.is_dir():
        return *read_policy_file(target), target
    checkpoints = target / CHECKPOINTS if (target / CHECKPOINTS).is_dir() else target
    if not (checkpoints / MANIFEST).is_file() and TrainingCheckpointer(checkpoints).latest() is None:
        if is_versioned(f"{target}@latest"):
            raise ConfigError(f"{target} holds versions of a policy; name one: {target}@latest, {target}@best or a number")
        raise ConfigError(f"{target} holds no policy; {EXPECTED}")
    checkpoint = load_checkpoint(checkpoints)
    with untrusted(f"{checkpoint.path} holds no valid policy"):
        described, weights = checkpoint.state.get("spec"), checkpoint.state["weights"]
        if described is not None and "policies" in described:
            return None, weights, checkpoint.path
        description = read_description(described)
        description.check(weights)
        rewards = checkpoint.state["learner"].get("rewards")
        description = description if rewards is None else description.with_rewards(rewards)
    return description, weights, checkpoint.path


def is_built_in(name: str) -> bool:
    """Tell whether the name is of a player that needs no file."""
    return name == "random" or name.partition(":")[0] == "heuristic"


def make_player(name: str, source: Any, env: VectorEnv | None = None) -> tuple[Actor, str]:
    """Make or load the player of that name; return it with its name in results, which is the path of a loaded policy.

    A name is random, heuristic, heuristic:0.5, a policy file or a run. Built-in players are made for `env`, which was made from `source`.
    """
    if is_one_policy(name):
        return load_policy(name), name
    given = None if source is None else env_source(source).given
    config = EnvConfig(id=given) if isinstance(given, str) else given if isinstance(given, EnvConfig) else None
    if not is_built_in(name) or env is None:
        policy, path = load_run_policy(open_player(name, env=None if config is None else config.id))
        return policy, str(path)
    if name == "random":
        return make_actor(name, env.action_space, ""), name
    if config is None:
        raise ConfigError("this environment has no heuristic; give a run, a policy file or random")
    return make_actor(name, env.action_space, config.id, config.kwargs), name


def open_player(name: str, *, env: str | None = None) -> Run:
    """Open the run that a player is named by; the error lists what else a player may be."""
    return open_run(name, env=env, hint="; a player is a run, a policy file, heuristic, heuristic:0.5 or random")


def is_one_policy(name: str) -> bool:
    """Whether a name is a policy by itself: a policy file, or a version in a `PolicyStore` or in MLflow's registry."""
    return Path(name).is_file() or is_versioned(name)


def is_saved_policy(name: str) -> bool:
    """Whether a name is a policy without the config of a run: a policy file, or a directory with a policy, such as a checkpoint."""
    path = Path(name)
    is_run = any((one / CONFIG).is_file() for one in (path, RUNS / path))
    return bool(name) and (path.exists() or is_versioned(name)) and not is_run


def run_of(name: str, *, env: str | None = None) -> Run | None:
    """The run that holds a policy file or checkpoint, which knows the environment; None if none does, or if `env` is another one."""
    directory = Path(name).absolute().parent
    directory = directory.parent if directory.name == CHECKPOINTS else directory
    if not (directory / CONFIG).is_file() or (env is not None and TrainingConfig.from_yaml(directory / CONFIG).env.id != env):
        return None
    return open_run(directory, env=env)


def load_run_policy(run: Run, *, best: bool = False) -> tuple[Policy, Path]:
    """Load a run's latest or best policy; return it with its path. Several policies are loaded from a checkpoint, with their lanes."""
    path = run.policy_path(best=best)
    if path.exists():
        return load_policy(path), path
    checkpoints = TrainingCheckpointer(run.checkpoints)
    checkpoint = checkpoints.best() if best else checkpoints.latest()
    if run.policy_names and checkpoint is not None:
        return checkpoints.load_policy(checkpoint).policy, checkpoint
    hint = "omit --best" if best else f"inchworm resume {run.typed} continues its training"
    raise ConfigError(f"the run {run.path} has no {path.name} yet; {hint}")


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


def _is_registered(name: str | Path) -> bool:
    """Whether a name means a model of the registry, also if it is written wrongly."""
    return str(name).startswith(MODEL_URI.rstrip("/"))


def is_versioned(name: str | Path) -> bool:
    """Whether a name is that of a version, such as `policies@best` or `models:/NAME@best`."""
    if _is_registered(name):
        return True
    where, at, _ = str(name).rpartition("@")
    with suppress(OSError):
        return bool(at) and any(_VERSION.fullmatch(path.name) for path in Path(where).iterdir())
    return False
