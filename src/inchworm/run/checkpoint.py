"""A run's complete state on disk: atomic, verified, without pickle. Serves the training loop and resume.

```
checkpoints/step-000000000150/   state.json   arrays.safetensors   process.json   manifest.json
```
A checkpoint is written beside its final name, synced, and appears by one rename, so that a crash at any moment leaves the ones
before it intact. The manifest holds size and SHA-256 of every file, and its own. `state.json` and `arrays.safetensors` are a function
of the run; `process.json` holds what belongs to the process around it.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from inchworm.core.errors import ConfigError, CorruptFileError, InchwormError
from inchworm.core.protocols import Policy
from inchworm.core.spaces import check_same_form
from inchworm.core.tensor_file import (
    JSON_PIECES,
    TEMPORARY,
    distrusted,
    json_pieces,
    make_directory,
    read_bytes,
    read_json,
    read_tensor_file,
    remove_temporaries,
    sync_directory,
    write_synced,
    write_tensor_file,
)
from inchworm.core.trees import flatten_tree, unflatten_tree
from inchworm.core.types import Weights
from inchworm.policy.composite import CompositePolicy, weights_of
from inchworm.policy.file import check_weights
from inchworm.policy.spec import PolicySpec
from inchworm.run.directory import versions

__all__ = ["Checkpoint", "PolicyRecord", "Prepared", "TrainerRecord", "TrainingCheckpointer", "prepare"]


MANIFEST, MANIFEST_VERSION = "manifest.json", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a manifest says besides what can be read off the files."""

    exact: Sequence[str] = ()
    """What could not be made exact, a sentence each; empty if a run that goes on from here has the bits of one that never stopped."""
    score: float | None = None
    """The best evaluation of the run, if it was of this very iteration."""
    scored: bool = False
    """Whether the evaluation at the end was taken after this very iteration."""
    rows: Mapping[str, int] | None = None
    """How many rows of each file of metrics belong to the past of this checkpoint."""
    threads: int | None = None
    """Threads it was learned with."""
    cpu_capability: str | None = None
    """Vector instructions of the learning framework; `versions` has those of NumPy."""

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the manifest."""
        score = self.score if self.score is not None and math.isfinite(self.score) else None
        return {
            "exact": list(self.exact),
            "best": self.score is not None,
            "score": score,
            "scored": self.scored,
            "rows": None if self.rows is None else dict(self.rows),
            "threads": self.threads,
            "cpu_capability": self.cpu_capability,
        }


def describe(directory: Path, names: Sequence[str], step: int, arrays: Mapping[str, np.ndarray], note: Note) -> dict[str, Any]:
    """The manifest of the files `names` in a directory, which hold `arrays`."""
    files = {name: digest((directory / name).read_bytes()) for name in names}
    shapes = {name: {"dtype": array.dtype.name, "shape": list(array.shape)} for name, array in arrays.items()}
    return {"version": MANIFEST_VERSION, "step": step, "versions": versions(), "files": files, "arrays": shapes, **note.to_dict()}


def digest(content: bytes) -> dict[str, Any]:
    """Size and checksum of a file."""
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """The one way to write a manifest, so that a manifest written any other way is a damaged one."""
    checksum = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return json.dumps({"manifest": manifest, "sha256": checksum}, indent=1, sort_keys=True) + "\n"


def read_manifest(directory: Path) -> dict[str, Any]:
    """A checkpoint's manifest, if it is undamaged and of a version that is known."""
    content = read_bytes(directory / MANIFEST)
    with distrusted(MANIFEST):
        text = content.decode()
        manifest: dict[str, Any] = read_json(text)["manifest"]
        if manifest_text(manifest) != text:
            raise ValueError("it does not match its own checksum")
        if not 1 <= manifest["version"] <= MANIFEST_VERSION:
            raise ValueError(f"it has version {manifest['version']}; this inchworm reads up to version {MANIFEST_VERSION}; update inchworm")
    return manifest


def check_arrays(manifest: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Refuse arrays that are not those that the manifest lists; one from before has no list."""
    listed = manifest.get("arrays")
    found = {name: {"dtype": array.dtype.name, "shape": list(array.shape)} for name, array in arrays.items()}
    if listed is not None and listed != found:
        names = sorted(name for name in {*listed, *found} if listed.get(name) != found.get(name))
        raise CorruptFileError(f"the arrays {', '.join(names[:3])} are not as the manifest lists them")


KIND, VERSION = "checkpoint", 1
STATE, ARRAYS, PROCESS = "state.json", "arrays.safetensors", "process.json"
NAME = re.compile(r"step-(\d{12})(?:\.(\d+))?")  # the number after the dot tells apart checkpoints of one step


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that has been read and verified."""

    state: dict[str, Any]
    step: int
    path: Path
    manifest: Mapping[str, Any]
    """`step`, `files`, `arrays`, `versions` of everything that made it, and what `Note` adds."""
    process: Mapping[str, Any] = field(default_factory=dict)
    """What belonged to the process around the run, such as its generators."""


def order(path: Path) -> tuple[int, int]:
    """(step, revision) from a checkpoint's name."""
    match = NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def is_best(path: Path) -> bool:
    """Whether the manifest says that the iteration had the best evaluation so far."""
    try:
        with distrusted(str(path)):
            return bool(read_manifest(path).get("best"))
    except (OSError, InchwormError):
        return False


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a directory."""
    if not path.is_dir():
        raise FileNotFoundError(f"there is no checkpoint directory {path}")
    try:
        with distrusted(f"the checkpoint {path} is damaged"):
            return _read(path)
    except OSError as error:
        raise CorruptFileError(f"the checkpoint {path} is damaged: {error}") from None


def _read(path: Path) -> Checkpoint:
    manifest = read_manifest(path)
    step, texts = manifest["step"], {}
    if order(path)[0] not in (-1, step):
        raise ValueError(f"its manifest.json is of step {step}")
    for name in (ARRAYS, STATE, *((PROCESS,) if PROCESS in manifest["files"] else ())):
        content = read_bytes(path / name)
        if digest(content) != manifest["files"][name]:
            raise CorruptFileError(f"{name} does not match the manifest")
        texts[name] = content if name != ARRAYS else b""
    arrays, header = read_tensor_file(path / ARRAYS, kind=KIND, max_version=VERSION)
    if header["step"] != step:
        raise ValueError(f"its manifest.json is of step {step}, and its {ARRAYS} of step {header['step']}")
    check_arrays(manifest, arrays)
    state = unflatten_tree(arrays, read_json(texts[STATE].decode())["state"])
    if not isinstance(state, dict):
        raise TypeError("its state is no mapping")
    process = read_json(texts[PROCESS].decode())["process"] if PROCESS in texts else {}
    if not isinstance(process, dict):
        raise TypeError("what it says of its process is no mapping")
    return Checkpoint(state, step, path, manifest, process)


NO_SPEC = "only built-in networks can be saved with their architecture; save a network of your own with its own state_dict"


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """A policy and where it is kept."""

    policy: Policy
    epoch: int
    path: Path
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainerRecord:
    """How far a training had come, and its optimiser."""

    agent_step: int
    epoch: int
    optimizer_state: Mapping[Any, Any]
    path: Path


def policy_part(policy: Policy, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """A policy's share of a checkpoint."""
    from inchworm.backends.registry import is_builtin

    if not is_builtin(policy):
        raise ConfigError(NO_SPEC)
    learned: Any = policy
    return {"spec": learned.spec.to_dict(), "weights": policy.get_weights(), "metadata": dict(metadata or {})}


def policy_of(checkpoint: Checkpoint, env: Any = None) -> PolicyRecord:
    """The policy of a checkpoint: acting in NumPy where that is possible, in torch where it needs convolutions."""
    from inchworm.backends.registry import make_policy

    state = checkpoint.state
    if state.get("spec") is None or "weights" not in state:
        raise CorruptFileError(f"{checkpoint.path} holds no policy with its architecture; {NO_SPEC}")

    def one(described: Mapping[str, Any] | None, weights: Weights) -> Policy:
        if described is None:
            raise CorruptFileError(f"{checkpoint.path} holds a policy without its architecture; {NO_SPEC}")
        spec = PolicySpec.from_dict(described)
        check_weights(spec, weights)
        if env is not None:
            _check_fits(spec, env, checkpoint.path)
        return make_policy(spec, weights=weights, backend="torch" if spec.observations.images else "numpy")

    policy = _composite(state["spec"], state["weights"], one) if "policies" in state["spec"] else one(state["spec"], state["weights"])
    return PolicyRecord(policy, checkpoint.step, checkpoint.path, state.get("metadata", {}))


def _composite(spec: Mapping[str, Any], weights: Weights, one: Callable[[Any, Weights], Policy]) -> CompositePolicy:
    """The composite policy that `CompositePolicy.to_dict` described."""
    parts = {name: one(part, weights_of(weights, name)) for name, part in spec["policies"].items()}
    policy = CompositePolicy(parts, spec["lane_map"], trainable=spec["trainable"], ppo=spec["ppo"])
    policy.set_weights(weights)
    return policy


def trainer_part(agent_step: int, epoch: int, optimizer_state: Mapping[Any, Any]) -> dict[str, Any]:
    """A trainer's share of a checkpoint; `optimizer_state` may hold tensors, as torch's do."""
    from inchworm.run.saver import as_arrays

    return {"trainer": {"agent_step": int(agent_step), "epoch": int(epoch), "optimizer_state": as_arrays(optimizer_state)}}


def trainer_of(checkpoint: Checkpoint) -> TrainerRecord:
    """The trainer's share of a checkpoint, whoever made it."""
    from inchworm.run.saver import from_arrays

    state = checkpoint.state
    if "trainer" in state:
        part = state["trainer"]
        return TrainerRecord(part["agent_step"], part["epoch"], from_arrays(part["optimizer_state"]), checkpoint.path)
    return TrainerRecord(state["collector"]["env_steps"], state["state"]["iteration"], state["learner"], checkpoint.path)


def _check_fits(spec: PolicySpec, env: Any, path: Path) -> None:
    several = isinstance(env, gym.vector.VectorEnv)
    found = (env.single_observation_space, env.single_action_space) if several else (env.observation_space, env.action_space)
    check_same_form(f"the policy in {path}", (spec.observation_space, spec.action_space), found)


_ATTEMPTS = 100  # at reading while another process writes and prunes


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checkpoint that only needs writing: nothing in it is shared with whoever goes on training."""

    step: int
    arrays: Mapping[str, np.ndarray]
    state: bytes
    process: bytes | None
    note: Note


def prepare(step: int, state: Mapping[str, Any], *, process: Mapping[str, Any] | None = None, note: Note | None = None) -> Prepared:
    """Take nested plain data and arrays, as they are now, for the checkpoint of iteration `step`."""
    if not 0 <= step < 10**12:
        raise ValueError(f"step={step} must be from 0 to 999999999999")
    arrays, structure = flatten_tree(dict(state))
    text = json.dumps({"state": structure}, allow_nan=False)
    if json_pieces(text) > JSON_PIECES:
        raise ValueError(f"the state has more than {JSON_PIECES:,} single values, too many to be read again; keep them in arrays")
    beside = None if process is None else json.dumps({"process": process}, allow_nan=False).encode()
    return Prepared(step, {name: array.copy() for name, array in arrays.items()}, text.encode(), beside, note or Note())


class TrainingCheckpointer:
    """The checkpoints of one run, in one directory; the newest `keep` stay, and the best by evaluation."""

    def __init__(self, directory: str | Path, keep: int = 2, *, keep_best: bool = True) -> None:
        if keep < 2:
            raise ValueError(f"keep={keep}: at least 2 checkpoints are kept, so that one is left if the other is damaged")
        self.directory = Path(directory)
        self.keep, self.keep_best = keep, keep_best

    def all(self) -> list[Path]:
        """Every complete checkpoint, oldest first; whether they are undamaged shows when they are loaded."""
        try:
            return self._all()
        except FileNotFoundError:
            if self.directory.is_symlink():
                raise InchwormError(f"{self.directory} is a link to nowhere; mend or remove it") from None
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

    def save(self, step: int, state: Mapping[str, Any], *, process: Mapping[str, Any] | None = None, note: Note | None = None) -> Path:
        """Write nested plain data and arrays as the checkpoint of iteration `step`, whole or not at all; older ones are pruned after.

        A run that went back to an earlier checkpoint leaves later ones behind; they are of another history and go too.
        """
        return self.commit(prepare(step, state, process=process, note=note))

    def commit(self, prepared: Prepared) -> Path:
        """Write what `prepare` made; an `OSError` names the checkpoint, and leaves nothing of it."""
        final = self.directory / f"step-{prepared.step:012d}"
        try:
            make_directory(self.directory)
            remove_temporaries(self.directory)
            final = self._free_name(prepared.step)
            self._write(final, prepared)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} while saving the checkpoint of iteration {prepared.step}", str(final)) from error
        self._tidy(final)
        return final

    def _tidy(self, newest: Path) -> None:
        """Prune, and once more if the disk is in passing trouble: the checkpoint is safe, and the next save prunes again."""
        for _ in range(2):
            try:
                self._prune(newest)
            except OSError as error:
                trouble = error
            else:
                return
        warnings.warn(f"old checkpoints in {self.directory} could not be removed: {trouble}", stacklevel=3)

    def _write(self, final: Path, prepared: Prepared) -> None:
        temporary = self.directory / f"{TEMPORARY}{uuid.uuid4().hex}"
        names = [ARRAYS, STATE]
        try:
            temporary.mkdir()
            write_tensor_file(temporary / ARRAYS, prepared.arrays, kind=KIND, version=VERSION, header={"step": prepared.step})
            write_synced(temporary / STATE, [prepared.state])
            if prepared.process is not None:
                write_synced(temporary / PROCESS, [prepared.process])
                names.append(PROCESS)
            manifest = describe(temporary, names, prepared.step, prepared.arrays, prepared.note)
            write_synced(temporary / MANIFEST, [manifest_text(manifest).encode()])
            sync_directory(temporary)
            temporary.rename(final)
            sync_directory(self.directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # gone after the rename; else an unfinished one

    def _free_name(self, step: int) -> Path:
        revisions = [order(path)[1] for path in self._all() if order(path)[0] == step]
        return self.directory / (f"step-{step:012d}" + (f".{max(revisions) + 1}" if revisions else ""))

    def _prune(self, newest: Path) -> None:
        """Leave the newest, the `keep` - 1 steps before it, and the best. What goes loses its name first: no half of one is ever found."""
        older = [path for path in self._all() if order(path) < order(newest)]
        kept = {newest, *[path for path in older if order(path)[0] < order(newest)[0]][-(self.keep - 1) :]}
        if self.keep_best:
            kept |= set([path for path in (*older, newest) if is_best(path)][-1:])
        for path in self._all():
            if path not in kept:
                path.rename(self.directory / f"{TEMPORARY}{uuid.uuid4().hex}")
        remove_temporaries(self.directory)

    def load(self, path: str | Path | None = None) -> Checkpoint:
        """The checkpoint at `path`; without one the newest that is undamaged, with a warning for every damaged one passed over."""
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
                    warnings.warn(f"{problem}; going on from {checkpoint.path.name} instead", stacklevel=2)
                return checkpoint
            if all(os.path.lexists(candidate) for candidate in problems):  # else a writer has pruned meanwhile: look again
                break
        if not problems:
            raise FileNotFoundError(f"there is no checkpoint in {self.directory}; run.checkpoint_interval says how often one is written")
        raise CorruptFileError("no checkpoint is undamaged: " + "; ".join(problems.values()))

    def save_policy(self, policy: Policy, epoch: int, metadata: Mapping[str, Any] | None = None) -> PolicyRecord:
        """A policy as the checkpoint of `epoch`, together with the trainer state of that epoch if that is saved already."""
        state = self._of_epoch(epoch) | policy_part(policy, metadata)
        return PolicyRecord(policy, epoch, self.save(epoch, state), dict(metadata or {}))

    def load_policy(self, checkpoint: str | Path | Checkpoint | TrainerRecord | None = None, env: Any = None) -> PolicyRecord:
        """The policy of a checkpoint, or the newest one; with `env`, it is made sure that it fits."""
        if checkpoint is not None:
            given = checkpoint.path if isinstance(checkpoint, Checkpoint | TrainerRecord) else checkpoint
            return policy_of(self.load(given), env)
        return policy_of(self._newest_with("weights", "policy"), env)

    def save_trainer_state(
        self, agent_step: int, epoch: int, optimizer_state: Mapping[str, Any], run_dir: str | Path | None = None
    ) -> Path:
        """Counters and optimiser as the checkpoint of `epoch`, together with the policy of that epoch if that is saved already."""
        keeper = self._in(run_dir)
        return keeper.save(epoch, keeper._of_epoch(epoch) | trainer_part(agent_step, epoch, optimizer_state))

    def load_trainer_state(self, run_dir: str | Path | None = None) -> TrainerRecord:
        """The newest trainer state, of a `PPOTrainer`'s run too; give it to `load_policy` for the policy of the same checkpoint."""
        return trainer_of(self._in(run_dir)._newest_with("trainer", "trainer state"))

    def _in(self, run_dir: str | Path | None) -> TrainingCheckpointer:
        return self if run_dir is None else TrainingCheckpointer(Path(run_dir) / "checkpoints", self.keep, keep_best=self.keep_best)

    def _of_epoch(self, epoch: int) -> dict[str, Any]:
        """What is saved of an epoch already: policy and trainer state of one epoch are one checkpoint."""
        newest = self.latest()
        return self.load(newest).state if newest is not None and order(newest)[0] == epoch else {}

    def _newest_with(self, part: str, what: str) -> Checkpoint:
        newest = self.load()
        for path in reversed([path for path in self.all() if order(path) <= order(newest.path)]):
            checkpoint = newest if path == newest.path else self.load(path)
            if part in checkpoint.state or (part == "trainer" and "learner" in checkpoint.state):
                return checkpoint
        raise FileNotFoundError(f"no checkpoint in {self.directory} holds a {what}")
