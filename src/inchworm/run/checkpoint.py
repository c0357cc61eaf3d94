"""Checkpoints on disk: written atomically, verified when read, pruned, without pickle.

```
checkpoints/step-000000000150/   state.json   arrays.safetensors   process.json   manifest.json
```
A checkpoint is written under a temporary name, synced, and renamed, so that a crash at any moment leaves the earlier ones intact. The
manifest holds the size and SHA-256 of every file, and its own. `state.json` and `arrays.safetensors` are a function of the run;
`process.json` holds the state of the process that ran it, such as its random generators.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from inchworm.backends.registry import describe_policy, get_backend, imported_backends, read_description, rebuild_policy
from inchworm.core.errors import ConfigError, CorruptFileError, InchwormError
from inchworm.core.protocols import Policy
from inchworm.core.spaces import check_same_form
from inchworm.core.tensor_file import (
    JSON_PIECES,
    TEMPORARY,
    flatten_tree,
    json_pieces,
    make_directory,
    read_bytes,
    read_json,
    read_tensor_file,
    remove_temporaries,
    sync_directory,
    unflatten_tree,
    untrusted,
    write_synced,
    write_tensor_file,
)
from inchworm.core.types import Weights
from inchworm.policy.composite import CompositePolicy, weights_of
from inchworm.run.directory import versions

if TYPE_CHECKING:
    from inchworm.run.policies import PolicyStore

KIND, VERSION = "checkpoint", 1
STATE, ARRAYS, PROCESS = "state.json", "arrays.safetensors", "process.json"
MANIFEST, MANIFEST_VERSION = "manifest.json", 1
NAME = re.compile(r"step-(\d{12})(?:\.(\d+))?")  # the number after the dot distinguishes checkpoints of the same step
_ATTEMPTS = 100  # at reading while another process writes and prunes


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestNote:
    """What a manifest holds besides the description of the files."""

    exact: Sequence[str] = ()
    """What cannot be restored exactly, a sentence each; empty if a run resumed from here is bit-identical to one that never stopped."""
    score: float | None = None
    """The best evaluation score of the run, if this iteration reached it."""
    scored: bool = False
    """Whether the final evaluation was taken after this iteration."""
    converged: Mapping[str, Any] | None = None
    """The iteration, env steps and mean return at which the run converged; None if it has not."""
    rows: Mapping[str, int] | None = None
    """The number of rows in each metrics file when the checkpoint was taken."""
    threads: int | None = None
    """Number of threads used for learning."""
    cpu_capability: str | None = None
    """Vector instructions used by the learning framework; `versions` has those of NumPy."""

    def to_dict(self) -> dict[str, Any]:
        """The entries of the manifest: the fields, and whether the score is the best so far."""
        finite = self.score is not None and math.isfinite(self.score)
        return asdict(self) | {"exact": list(self.exact), "best": self.score is not None, "score": self.score if finite else None}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that has been read and verified."""

    state: dict[str, Any]
    step: int
    path: Path
    manifest: Mapping[str, Any]
    """`step`, `files`, `arrays`, the `versions` of everything that made it, and the entries of `ManifestNote`."""
    process: Mapping[str, Any] = field(default_factory=dict)
    """State of the process that ran the training, such as its random generators."""


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """A policy and the checkpoint that holds it."""

    policy: Policy
    epoch: int
    path: Path
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainerRecord:
    """Progress counters and optimiser state of a training, and the checkpoint that holds them."""

    agent_step: int
    epoch: int
    optimizer_state: Mapping[Any, Any]
    path: Path


def order(path: Path) -> tuple[int, int]:
    """(step, revision) from a checkpoint's name."""
    match = NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def digest(content: bytes) -> dict[str, Any]:
    """Size and checksum of a file."""
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def describe_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Dtype and shape of every array, as the manifest lists them."""
    return {name: {"dtype": array.dtype.name, "shape": list(array.shape)} for name, array in arrays.items()}


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """Canonical text of a manifest; a file that differs from it in any byte is damaged."""
    checksum = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return json.dumps({"manifest": manifest, "sha256": checksum}, indent=1, sort_keys=True) + "\n"


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read a checkpoint's manifest and verify its checksum and version."""
    content = read_bytes(directory / MANIFEST)
    with untrusted(MANIFEST):
        text = content.decode()
        manifest: dict[str, Any] = read_json(text)["manifest"]
        if manifest_text(manifest) != text:
            raise ValueError("it does not match its own checksum")
        if not 1 <= manifest["version"] <= MANIFEST_VERSION:
            raise ValueError(f"it has version {manifest['version']}; this inchworm reads up to version {MANIFEST_VERSION}; update inchworm")
    return manifest


def is_best(path: Path) -> bool:
    """Whether the checkpoint's iteration had the best evaluation of the run when it was written."""
    try:
        with untrusted(str(path)):
            return bool(read_manifest(path).get("best"))
    except (OSError, InchwormError):
        return False


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify the checkpoint in a directory."""
    if not path.is_dir():
        raise FileNotFoundError(f"there is no checkpoint directory {path}")
    damaged = f"the checkpoint {path} is damaged"
    try:
        with untrusted(damaged):
            manifest = read_manifest(path)
            step, contents = manifest["step"], {}
            if order(path)[0] not in (-1, step):
                raise ValueError(f"its manifest.json is of step {step}")
            for name in (ARRAYS, STATE, *((PROCESS,) if PROCESS in manifest["files"] else ())):
                content = read_bytes(path / name)
                if digest(content) != manifest["files"][name]:
                    raise CorruptFileError(f"{name} does not match the manifest")
                if name != ARRAYS:
                    contents[name] = read_json(content.decode())
            del content
            arrays, header = read_tensor_file(path / ARRAYS, kind=KIND, max_version=VERSION)
            if header["step"] != step:
                raise ValueError(f"its manifest.json is of step {step}, but its {ARRAYS} is of step {header['step']}")
            found = describe_arrays(arrays)
            listed = manifest.get("arrays", found)  # manifests of early versions have no list
            if listed != found:
                names = sorted(name for name in {*listed, *found} if listed.get(name) != found.get(name))
                raise CorruptFileError(f"the arrays {', '.join(names[:3])} differ from the manifest's list")
            state = unflatten_tree(arrays, contents[STATE]["state"])
            process = contents[PROCESS]["process"] if PROCESS in contents else {}
            if not isinstance(state, dict) or not isinstance(process, dict):
                raise TypeError("its state is not a mapping")
            return Checkpoint(state, step, path, manifest, process)
    except OSError as error:
        raise CorruptFileError(f"{damaged}: {error}") from None


def load_checkpoint(path: Path) -> Checkpoint:
    """Read the checkpoint in a directory, or the newest undamaged one in a directory of checkpoints."""
    return read_checkpoint(path) if (path / MANIFEST).exists() else TrainingCheckpointer(path).load()


class TrainingCheckpointer:
    """The checkpoints of one run, in one directory. The newest `keep` are kept, and the best by evaluation."""

    def __init__(self, directory: str | Path, keep: int = 2, *, keep_best: bool = True, policy_store: PolicyStore | None = None) -> None:
        """`policy_store` also gets every policy of `save_policy`, as a version that is not deleted with its checkpoint."""
        if keep < 2:
            raise ValueError(f"keep={keep}: at least 2 checkpoints are kept, so that one is left if the other is damaged")
        self.directory = Path(directory)
        self.keep, self.keep_best, self.policy_store = keep, keep_best, policy_store

    def all(self) -> list[Path]:
        """Every complete checkpoint, oldest first. They are verified when they are loaded, not here."""
        try:
            return self._all()
        except FileNotFoundError:
            if self.directory.is_symlink():
                raise InchwormError(f"{self.directory} is a broken symbolic link; fix or remove it") from None
            return []
        except OSError as error:
            raise InchwormError(f"the checkpoints in {self.directory} cannot be read: {error}; make it a readable directory") from error

    def _all(self) -> list[Path]:
        return sorted((self.directory / name for name in os.listdir(self.directory) if NAME.fullmatch(name)), key=order)

    def latest(self) -> Path | None:
        """The newest checkpoint, or None."""
        found = self.all()
        return found[-1] if found else None

    def best(self) -> Path | None:
        """The newest checkpoint of an iteration whose evaluation was the best so far, or None."""
        return next((path for path in reversed(self.all()) if is_best(path)), None)

    def save(
        self, step: int, state: Mapping[str, Any], *, process: Mapping[str, Any] | None = None, note: ManifestNote | None = None
    ) -> Path:
        """Write nested plain data and arrays as the checkpoint of iteration `step`, completely or not at all, then prune.

        Checkpoints of later steps are removed too: they belong to a history that the run has abandoned.
        """
        return self.prepare(step, state, process=process, note=note)()

    def prepare(
        self, step: int, state: Mapping[str, Any], *, process: Mapping[str, Any] | None = None, note: ManifestNote | None = None
    ) -> Callable[[], Path]:
        """Copy a state; the returned function writes it, in this thread or another, and returns the checkpoint's path."""
        if not 0 <= step < 10**12:
            raise ValueError(f"step={step} must be from 0 to 999999999999")
        arrays, structure = flatten_tree(dict(state))
        text = json.dumps({"state": structure}, allow_nan=False)
        if json_pieces(text) > JSON_PIECES:
            raise ValueError(f"the state has more than {JSON_PIECES:,} single values, too many to be read again; keep them in arrays")
        files = {STATE: text.encode()}
        if process is not None:
            files[PROCESS] = json.dumps({"process": process}, allow_nan=False).encode()
        return partial(self.commit, step, {name: array.copy() for name, array in arrays.items()}, files, note or ManifestNote())

    def commit(self, step: int, arrays: Mapping[str, np.ndarray], files: Mapping[str, bytes], note: ManifestNote) -> Path:
        """Write what `prepare` copied. An `OSError` names the checkpoint, and no part of it is left."""
        final = self.directory / f"step-{step:012d}"
        temporary = self.directory / f"{TEMPORARY}{uuid.uuid4().hex}"
        try:
            make_directory(self.directory)
            remove_temporaries(self.directory)
            revisions = [order(path)[1] for path in self._all() if order(path)[0] == step]
            if revisions:
                final = self.directory / f"step-{step:012d}.{max(revisions) + 1}"
            temporary.mkdir()
            write_tensor_file(temporary / ARRAYS, arrays, kind=KIND, version=VERSION, header={"step": step})
            for name, content in files.items():
                write_synced(temporary / name, [content])
            manifest = {
                "version": MANIFEST_VERSION,
                "step": step,
                "versions": versions(),
                "files": {name: digest((temporary / name).read_bytes()) for name in (ARRAYS, *files)},
                "arrays": describe_arrays(arrays),
                **note.to_dict(),
            }
            write_synced(temporary / MANIFEST, [manifest_text(manifest).encode()])
            sync_directory(temporary)
            temporary.rename(final)
            sync_directory(self.directory)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} while saving the checkpoint of iteration {step}", str(final)) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # does not exist after the rename
        self._prune(final)
        return final

    def _prune(self, newest: Path) -> None:
        """Keep the newest, the `keep` - 1 steps before it, and the best. Others are renamed before removal, so none is ever partial."""
        for _ in range(2):  # a second time after a transient error; the next save prunes again anyway
            try:
                older = [path for path in self._all() if order(path) < order(newest)]
                kept = {newest, *[path for path in older if order(path)[0] < order(newest)[0]][-(self.keep - 1) :]}
                if self.keep_best:
                    kept |= set([path for path in (*older, newest) if is_best(path)][-1:])
                for path in self._all():
                    if path not in kept:
                        path.rename(self.directory / f"{TEMPORARY}{uuid.uuid4().hex}")
                remove_temporaries(self.directory)
                return
            except OSError as error:
                problem = error
        warnings.warn(f"old checkpoints in {self.directory} could not be removed: {problem}", stacklevel=3)

    def load(self, path: str | Path | None = None) -> Checkpoint:
        """Read the checkpoint at `path`, by default the newest undamaged one, with a warning for every damaged one skipped."""
        if path is not None:
            return read_checkpoint(Path(path))
        for _ in range(_ATTEMPTS):
            problems: dict[Path, str] = {}
            for candidate in reversed(self.all()):
                try:
                    checkpoint = read_checkpoint(candidate)
                except (CorruptFileError, FileNotFoundError) as error:
                    problems[candidate] = str(error)
                    continue
                for problem in problems.values():
                    warnings.warn(f"{problem}; using {checkpoint.path.name} instead", stacklevel=2)
                return checkpoint
            if all(os.path.lexists(candidate) for candidate in problems):  # else another process has pruned meanwhile: look again
                break
        if not problems:
            raise FileNotFoundError(f"there is no checkpoint in {self.directory}; run.checkpoint_interval sets how often one is written")
        raise CorruptFileError(
            f"every checkpoint is damaged: {'; '.join(problems.values())}. Copy an intact one from a backup into {self.directory}, "
            "or start a new run; to start over under this name, add --overwrite to its inchworm train command"
        )

    def save_policy(self, policy: Policy, epoch: int, metadata: Mapping[str, Any] | None = None) -> PolicyRecord:
        """Save a policy as the checkpoint of `epoch`, together with the trainer state of that epoch if it has been saved."""
        described = describe_policy(policy)
        if described is None:
            raise ConfigError(f"{type(policy).__name__} is not a policy with weights; it needs the methods of inchworm.Policy")
        about = dict(metadata or {})
        path = self.save(epoch, self._saved_state(epoch) | {"spec": described, "weights": policy.get_weights(), "metadata": about})
        if self.policy_store is not None:
            score = about.get("score")
            self.policy_store.save(policy, score if isinstance(score, int | float) else None, {"epoch": epoch, **about})
        return PolicyRecord(policy, epoch, path, about)

    def load_policy(
        self, checkpoint: str | Path | Checkpoint | TrainerRecord | None = None, env: Any = None, *, network: Any = None, policy: Any = None
    ) -> PolicyRecord:
        """Load the policy of a checkpoint, by default the newest; with `env`, check that it fits.

        It acts in NumPy, or in torch if it has convolutions. A network or policy class of your own is passed as to `load_policy`.
        """
        if checkpoint is None:
            found = self._newest_with("weights", "policy")
        else:
            found = self.load(checkpoint.path if isinstance(checkpoint, Checkpoint | TrainerRecord) else checkpoint)
        state = found.state

        def build(described: Mapping[str, Any] | None, weights: Weights) -> Policy:
            with untrusted(f"{found.path} holds no valid policy"):
                description = read_description(described)
                description.check(weights)
            spec = description.spec
            if env is not None and spec is not None:
                vector = isinstance(env, gym.vector.VectorEnv)
                spaces = (env.single_observation_space, env.single_action_space) if vector else (env.observation_space, env.action_space)
                check_same_form(f"the policy in {found.path}", (spec.observation_space, spec.action_space), spaces)
            return rebuild_policy(description, weights, str(found.path), network=network, policy=policy)

        if "weights" not in state:
            raise CorruptFileError(f"{found.path} holds no policy")
        spec, weights = state.get("spec"), state["weights"]
        if spec is not None and "policies" in spec:
            parts = {name: build(part, weights_of(weights, name)) for name, part in spec["policies"].items()}
            composite = CompositePolicy(parts, spec["lane_map"], trainable=spec["trainable"], ppo=spec["ppo"])
            composite.set_weights(weights)
            if "spaces" in spec:  # agents differ, and each part has its own
                composite.restore_spaces(spec["spaces"])
            loaded: Policy = composite
        else:
            loaded = build(spec, weights)
        return PolicyRecord(loaded, found.step, found.path, state.get("metadata", {}))

    def save_trainer_state(
        self, agent_step: int, epoch: int, optimizer_state: Mapping[str, Any], run_dir: str | Path | None = None
    ) -> Path:
        """Save counters and optimiser state as the checkpoint of `epoch`, together with the policy of that epoch if it has been saved.

        `optimizer_state` may hold torch tensors.
        """
        target = self._in(run_dir)
        part = {"agent_step": int(agent_step), "epoch": int(epoch), "optimizer_state": as_arrays(optimizer_state)}
        return target.save(epoch, target._saved_state(epoch) | {"trainer": part})

    def load_trainer_state(self, run_dir: str | Path | None = None) -> TrainerRecord:
        """Load the newest trainer state, also of a `PPOTrainer`'s run; `load_policy` takes it to load the policy of the same checkpoint."""
        checkpoint = self._in(run_dir)._newest_with("trainer", "trainer state")
        state = checkpoint.state
        if "trainer" in state:
            part = state["trainer"]
            return TrainerRecord(part["agent_step"], part["epoch"], from_arrays(part["optimizer_state"]), checkpoint.path)
        return TrainerRecord(state["collector"]["env_steps"], state["state"]["iteration"], state["learner"], checkpoint.path)

    def _in(self, run_dir: str | Path | None) -> TrainingCheckpointer:
        return self if run_dir is None else TrainingCheckpointer(Path(run_dir) / "checkpoints", self.keep, keep_best=self.keep_best)

    def _saved_state(self, epoch: int) -> dict[str, Any]:
        """The state saved for an epoch so far: policy and trainer state of one epoch are one checkpoint."""
        newest = self.latest()
        return self.load(newest).state if newest is not None and order(newest)[0] == epoch else {}

    def _newest_with(self, part: str, what: str) -> Checkpoint:
        newest = self.load()
        for path in reversed([path for path in self.all() if order(path) <= order(newest.path)]):
            checkpoint = newest if path == newest.path else self.load(path)
            if part in checkpoint.state or (part == "trainer" and "learner" in checkpoint.state):
                return checkpoint
        raise FileNotFoundError(f"no checkpoint in {self.directory} holds a {what}")


def as_arrays(tree: Any) -> Any:
    """Convert an optimiser's state to plain data: `{"tensor": array}` for a tensor, `{"keys": …, "values": …}` for a dict."""
    if isinstance(tree, Mapping):
        return {"keys": list(tree), "values": [as_arrays(value) for value in tree.values()]}
    if isinstance(tree, list | tuple):
        return [as_arrays(value) for value in tree]
    arrays = [backend.to_array(tree) for backend in imported_backends().values()]
    return next(({"tensor": array} for array in arrays if array is not None), tree)


def from_arrays(tree: Any) -> Any:
    """Invert `as_arrays`; tensors become torch tensors again."""
    if isinstance(tree, Mapping) and "tensor" in tree:
        return get_backend("torch").from_array(tree["tensor"])
    if isinstance(tree, Mapping):
        return {key: from_arrays(value) for key, value in zip(tree["keys"], tree["values"], strict=True)}
    return [from_arrays(value) for value in tree] if isinstance(tree, list | tuple) else tree
