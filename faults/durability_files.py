"""A6, A8 and A9: damaged files, files that are replaced while they are read, and files of earlier formats.

`python -m faults.durability_files NAME` (with . and tests on PYTHONPATH) writes a set of golden files in the current formats. A set is a
directory of faults/golden named after its formats; it is written once and never changed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import numpy as np

from faults import runs
from faults.durability_points import policy_of, save_policy_file, state_of
from faults.durability_strace import run_forked
from faults.programme import Outcome, Work, procedure
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.config.sections import PolicyConfig, PPOConfig
from inchworm.core.errors import CorruptFileError
from inchworm.core.tensor_file import read_tensor_file, unflatten_tree
from inchworm.policy.file import FILE_VERSION as POLICY_VERSION
from inchworm.policy.file import read_policy, save_policy
from inchworm.policy.spec import PolicySpec
from inchworm.rollout.fake import create_fake_rollout
from inchworm.rollout.files import VERSION as ROLLOUT_VERSION
from inchworm.rollout.rollout import Rollout
from inchworm.run.checkpoint import TrainingCheckpointer
from inchworm.train.trainer import PPOTrainer

ZEROED = 512
FILE_KINDS = ("bit flip", "truncation", "512 zeroed bytes", "bytes added", "file removed")
KINDS = (*FILE_KINDS, "two files swapped", "part of another step")
"""Kinds of damage; the last two need a second file."""


def damaged(content: bytes, kind: str, rng: random.Random) -> bytes | None:
    """The bytes of a file after damage; None if it is removed."""
    if kind == "file removed":
        return None
    if kind == "truncation":
        return content[: rng.randrange(len(content))]
    if kind == "bytes added":
        return content + rng.randbytes(rng.randint(1, 64))
    changed = bytearray(content)
    while bytes(changed) == content:
        place = rng.randrange(len(content))
        if kind == "bit flip":
            changed[place] ^= 1 << rng.randrange(8)
        else:
            changed[place : place + ZEROED] = bytes(min(ZEROED, len(content) - place))
    return bytes(changed)


def put(path: Path, content: bytes | None) -> None:
    """Write or remove a file."""
    path.unlink(missing_ok=True) if content is None else path.write_bytes(content)


class Checkpoints:
    """Two checkpoints, of which the newer is damaged."""

    name = "checkpoints"

    def __init__(self, directory: Path) -> None:
        self._checkpointer = TrainingCheckpointer(directory)
        for step in (1, 2):
            self._checkpointer.save(step, state_of(step))
        self._before, self._newest = self._checkpointer.all()[-2:]
        self._content = {path.name: path.read_bytes() for path in self._newest.iterdir()}
        self._older = {path.name: path.read_bytes() for path in self._before.iterdir()}
        self._digests = {path: runs.digest(self._checkpointer.load(path).state) for path in (self._before, self._newest)}

    def problem(self, kind: str, rng: random.Random) -> str:
        """Damage, load, repair; what was wrong with the load."""
        name, other = rng.sample(sorted(self._content), 2)
        if kind == "two files swapped":
            changed: dict[str, bytes | None] = {name: self._content[other], other: self._content[name]}
        elif kind == "part of another step":
            names = [name] if rng.random() < 0.7 else [name, other]
            changed = {name: self._older[name] for name in names if self._older[name] != self._content[name]}
        else:
            changed = {name: damaged(self._content[name], kind, rng)}
        for name, content in changed.items():
            put(self._newest / name, content)
        try:
            with warnings.catch_warnings(record=True, action="always") as caught:
                found = self._checkpointer.load()
        finally:
            for name in changed:
                put(self._newest / name, self._content[name])
        if runs.digest(found.state) != self._digests.get(found.path):
            return f"silently wrong: {found.path.name} with another content, {list(changed)} changed"
        if found.path != self._before:
            return f"not noticed in {list(changed)}"
        text = " ".join(str(warning.message) for warning in caught)
        named = self._newest.name in text and any(name in text for name in changed)
        return "" if named else f"the warning does not name {' or '.join(changed)}: {text}"


@dataclass
class SingleFile:
    """A file that is complete by itself, and how it is read and written."""

    name: str
    path: Path
    read: Callable[[Path], Any]
    rewrite: Callable[[Path], Any]
    """Load it and save it to the same path."""
    other: bytes
    """A file of another kind, as if the two had been swapped."""
    sibling: bytes
    """A file of the same kind with other content."""

    def __post_init__(self) -> None:
        self._content = self.path.read_bytes()
        self._expected = runs.digest(self.read(self.path))

    def problem(self, kind: str, rng: random.Random) -> str:
        """Damage, load, repair; what was wrong with the load."""
        if kind == "two files swapped":
            changed: bytes | None = self.other
        elif kind == "part of another step":
            cut = rng.randrange(1, min(len(self._content), len(self.sibling)))
            mixed = self.sibling[:cut] + self._content[cut:]
            changed = mixed if mixed not in (self._content, self.sibling) else damaged(mixed, "bit flip", rng)
        else:
            changed = damaged(self._content, kind, rng)
        put(self.path, changed)
        try:
            found = self.read(self.path)
        except (CorruptFileError, FileNotFoundError) as error:
            return "" if str(self.path) in str(error) else f"the error does not name the file: {error}"
        finally:
            put(self.path, self._content)
        return "not noticed" if runs.digest(found) == self._expected else "silently wrong"


def single_files(scratch: Path) -> list[SingleFile]:
    """A rollout and a policy, each with a sibling."""
    env = gymnasium.make("CartPole-v1")
    spec = PolicySpec(env.observation_space, env.action_space, PolicyConfig(hidden_sizes=(4,), normalize_observations=True))
    weights = NumpyPolicy(spec, seed=0).get_weights()
    policies, rollouts = [], []
    for number in range(2):
        moved = {name: np.asarray(value + number, value.dtype) for name, value in weights.items()}
        policies.append(save_policy(scratch / f"policy-{number}.safetensors", spec, moved))
        rollout = create_fake_rollout(spec.observation_space, spec.action_space, 12, 2, seed=number, episode_length=5)
        rollouts.append(Path(rollout.save(scratch / f"rollout-{number}.safetensors")))
    rollout_bytes, rollout_sibling = (path.read_bytes() for path in rollouts)
    policy_bytes, policy_sibling = (path.read_bytes() for path in policies)
    return [
        SingleFile(
            "rollouts", rollouts[0], lambda path: rollout_tree(Rollout.load(path)), lambda path: Rollout.load(path).save(path),
            policy_bytes, rollout_sibling,
        ),
        SingleFile(
            "policies", policies[0], lambda path: read_policy(path)[1], lambda path: save_policy(path, *read_policy(path)),
            rollout_bytes, policy_sibling,
        ),
    ]  # fmt: skip


def rollout_tree(rollout: Any) -> dict[str, Any]:
    """A rollout as plain data and arrays."""
    episodes = [[episode.seed, episode.episode_return, episode.length] for episode in rollout.episodes]
    return {**rollout.to_dict(), "episodes": episodes}


@procedure("A6", full=10_000, test=20)
def damaged_files(work: Work) -> Outcome:
    """damaged checkpoints, rollouts and policies: bit flips, truncation, zeroed bytes, swapped, mixed, missing and longer files.

    Must: all noticed, the file named, none silently wrong; of checkpoints the previous one is loaded, with a warning.
    `count` files of each kind of damage, for each kind of file.
    """
    outcome, rng, silent = Outcome(), random.Random(work.seed), 0
    with runs.in_memory(work) as here:
        subjects = [Checkpoints(here.scratch / "checkpoints"), *single_files(here.scratch)]
        cases = [(subject, kind) for subject in subjects for kind in KINDS]
        for number in here.each(len(cases) * 10):  # in tenths, to report progress
            subject, kind = cases[number // 10]
            for _ in range(work.count * (number % 10) // 10, work.count * (number % 10 + 1) // 10):
                problem = subject.problem(kind, rng)
                silent += problem.startswith("silently")
                outcome.check(not problem, f"{subject.name}, {kind}: {problem}")
    outcome.figures["silently wrong"] = str(silent)
    outcome.figures["kinds of damage"] = ", ".join(f"{len(KINDS)} to {subject.name}" for subject in subjects)
    outcome.notes.append("the count is per kind of damage and kind of file")
    return outcome


@procedure("A8", full=1000, test=50)
def read_while_written(work: Work) -> Outcome:
    """load, save to the same path, load; and loads while another process saves (policy file, rollout, checkpoints that are pruned).

    Must: bit-identical; no torn read, and no replaced file reported as damaged.
    `count` loads of each kind while a process saves without a pause; in memory, where saves are fast and meet loads often.
    """
    outcome = Outcome()
    with runs.in_memory(work) as here:
        for file in single_files(here.scratch):
            before, content = file.read(file.path), file.path.read_bytes()
            digest = runs.digest(before)
            ended = run_forked(lambda: 0 if file.rewrite(file.path) else 1, here.scratch)  # noqa: B023
            same = file.path.read_bytes() == content and runs.digest(before) == digest == runs.digest(file.read(file.path))
            outcome.check(ended.code == 0 and same, f"{file.name} saved to their own path: code {ended.code} {ended.error[-200:]}")
        checkpointer = TrainingCheckpointer(here.scratch / "over")
        checkpointer.save(1, state_of(1))
        loaded = checkpointer.load()
        again = checkpointer.load(checkpointer.save(1, loaded.state))
        same = runs.digest(again.state) == runs.digest(loaded.state) == runs.digest(state_of(1))
        outcome.check(same, "a checkpoint saved again has another content")
        for kind, (save, load) in REPLACED.items():
            directory = here.scratch / kind
            directory.mkdir()
            save(directory, 1)
            writer = os.fork()
            if writer == 0:
                try:
                    step, until = 1, time.monotonic() + 600
                    while time.monotonic() < until:
                        step += 1
                        save(directory, step)
                finally:
                    os._exit(1)
            seen = set()
            try:
                for number in here.each():
                    problem = ""
                    try:
                        with warnings.catch_warnings(action="error"):
                            seen.add(load(directory))
                    except (CorruptFileError, OSError, UserWarning, ValueError) as error:
                        problem = f"{kind}, load {number}: {type(error).__name__}: {error}"
                    outcome.check(not problem, problem)
            finally:
                os.kill(writer, signal.SIGKILL)
                os.waitpid(writer, 0)
            outcome.figures[f"different {kind} seen"] = str(len(seen))
    return outcome


def _verified(step: int, found: Any, expected: Any) -> int:
    if runs.digest(found) != runs.digest(expected):
        raise ValueError(f"step {step} does not have the content that was saved")
    return step


def _load_policy_file(directory: Path) -> int:
    arrays, header = read_tensor_file(directory / "policy.safetensors", kind="policy", max_version=1)
    return _verified(int(header["step"]), arrays, policy_of(int(header["step"])))


def _save_rollout(directory: Path, step: int) -> None:
    box = gymnasium.spaces.Box(-1, 1, (3,))
    create_fake_rollout(box, gymnasium.spaces.Discrete(2), 40, 4, seed=step % 5).save(directory / "rollout.safetensors")


def _load_checkpoint(directory: Path) -> int:
    found = TrainingCheckpointer(directory).load()
    return _verified(found.step, found.state, state_of(found.step))


REPLACED: dict[str, tuple[Callable[[Path, int], Any], Callable[[Path], int]]] = {
    "policy file": (lambda directory, step: save_policy_file(directory / "policy.safetensors", step), _load_policy_file),
    # The checksum proves the file complete; the seed of its first episode is that of one of the five rollouts.
    "rollout": (_save_rollout, lambda directory: int(Rollout.load(directory / "rollout.safetensors").episodes[0].seed)),
    "checkpoints": (lambda directory, step: TrainingCheckpointer(directory).save(step, state_of(step)), _load_checkpoint),
}
GOLDEN = Path(__file__).parent / "golden"
DIGESTS = "digests.json"
GOLDEN_NAMES = ("checkpoint", "policy", "rollout")


def golden_digest(directory: Path, name: str) -> str:
    """Digest of what a golden file contains, without fields that were added since."""

    def known(now: Any, then: Any) -> Any:
        return {key: known(now[key], value) for key, value in then.items()} if isinstance(then, dict) else now

    if name == "checkpoint":
        return runs.digest(TrainingCheckpointer(directory / "checkpoints").load().state)
    path = directory / f"{name}.safetensors"
    if name == "policy":
        spec, weights = read_policy(path)
        written = read_tensor_file(path, kind="policy", max_version=POLICY_VERSION)[1]["spec"]
        return runs.digest({"weights": weights, "spec": json.dumps(known(spec.to_dict(), written), sort_keys=True)})
    arrays, header = read_tensor_file(path, kind="rollout", max_version=ROLLOUT_VERSION)
    then = unflatten_tree(arrays, header["fields"])
    return runs.digest({name: value for name, value in rollout_tree(Rollout.load(path)).items() if name in then})


@procedure("A9", full=1, test=1)
def golden(work: Work) -> Outcome:
    """golden files: a checkpoint, a policy and a rollout of every format there has been.

    Must: each loads with the content it had, or is refused with its version named.
    Every set once; then a trainer of the same config loads the checkpoint and makes one more update.
    """
    outcome = Outcome()
    sets = sorted(path for path in GOLDEN.iterdir() if path.is_dir())
    for number in work.each(len(sets)):
        path = sets[number]
        copy = work.scratch / path.name  # reading must not need to write next to the files
        shutil.copytree(path, copy)
        expected = json.loads((path / DIGESTS).read_text())
        for name in GOLDEN_NAMES:
            try:
                found = golden_digest(copy, name)
            except CorruptFileError as error:
                outcome.check("version" in str(error), f"the {name} of {path.name}: {error}")
            else:
                outcome.check(found == expected[name], f"the {name} of {path.name} loads with another content")
        with _trainer() as trainer, warnings.catch_warnings(action="ignore"):
            trainer.load_checkpoint(copy / "checkpoints")
            before = trainer.total_timesteps
            trainer.learn(trainer.collect_rollouts())
            continued = trainer.total_timesteps > before > 0
        outcome.check(continued, f"the run of {path.name} does not continue from its checkpoint")
    outcome.figures["sets"] = ", ".join(path.name for path in sets)
    return outcome


def _trainer() -> Any:
    policy = PolicyConfig(hidden_sizes=(4,), normalize_observations=True, normalize_values=True)
    ppo = PPOConfig(rollout_steps=8, num_minibatches=1, update_epochs=1)
    return PPOTrainer(policy, "CartPole-v1", ppo, num_envs=2, backend="numpy")


def write_golden(name: str) -> Path:
    """Write files of the current formats as a new set."""
    directory = GOLDEN / name
    directory.mkdir(parents=True)
    with mock.patch("platform.platform", return_value="Linux"), _trainer() as trainer:
        for _ in range(2):
            rollout = trainer.collect_rollouts()
            trainer.learn(rollout)
        trainer.save_checkpoint(directory / "checkpoints")
        trainer.save_policy(directory / "policy.safetensors")
        rollout.save(directory / "rollout.safetensors")
    (directory / DIGESTS).write_text(json.dumps({name: golden_digest(directory, name) for name in GOLDEN_NAMES}, indent=1) + "\n")
    return directory


if __name__ == "__main__":
    sys.stdout.write(f"{write_golden(sys.argv[1])}\n")
